// Causal attention in tiles on the FP32 units, for any head width and element type: the T x T matrix of scores is never
// materialised. mma_tiled.cu is the variant for tensor cores.
//
// Compiled per head width, -DWIDTH=D, with or without a sliding window, -DWINDOWED, a soft cap, -DCAPPED, and documents
// in rows, -DDOCUMENTS. A block has 16 x 16 threads (THREADS) and works on TILE rows (of queries, or of keys for dk and
// dv) of one head; thread (ty, tx) owns rows ty*R.. of the block's tile, columns tx + 16 j of a tile of scores, and
// columns tx + 16 j of the head's width.
//
// qkv (B, T, (H + 2 Hkv) D), out (B, T, H D), lse and delta (B, H, T). Rows past T read as zero and are never written.
//
// s = scale q k^T, capped: s = softcap tanh(scale q k^T / softcap), p = softmax(s), out = p v, lse_i = log sum_j
// exp(s_ij). Backward recomputes p_ij = exp(s_ij - lse_i); with delta_i = dout_i . out_i: dv = p^T dout, ds = p (dout
// v^T - delta) ds', dq = scale ds k, dk = scale ds^T q, where ds' is 1, capped: 1 - (s / softcap)^2.

#define R (TILE / 16)
// Row strides in shared memory: multiples of 4 floats for vector loads; the padding avoids bank conflicts.
#define LD (WIDTH + ROW_PADDING)
#define SLD (TILE + ROW_PADDING)
// Columns of the head's width that one thread owns.
#define WC ((WIDTH + 15) / 16)

// TILE rows of WIDTH elements, `stride` apart, from row `first`, into shared memory.
__device__ inline void load_tile(float* tile, const ACT* rows, i64 stride, i64 first, i64 seq) {
    for (int i = threadIdx.x; i < TILE * WIDTH; i += THREADS) {
        int r = i / WIDTH, c = i % WIDTH;
        tile[r * LD + c] = first + r < seq ? load(rows, (first + r) * stride + c) : 0.0f;
    }
}

// s[i][j] = a[ty*R+i] . b[tx+16j]
__device__ inline void scores(float (&s)[R][R], const float* a, const float* b, int ty, int tx) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) s[i][j] = 0.0f;
#pragma unroll 4
    for (int d = 0; d < WIDTH; d += 4) {
        float4 x[R], y[R];
#pragma unroll
        for (int i = 0; i < R; i++) x[i] = *(const float4*)(a + (ty * R + i) * LD + d);
#pragma unroll
        for (int j = 0; j < R; j++) y[j] = *(const float4*)(b + (tx + 16 * j) * LD + d);
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < R; j++)
                s[i][j] += x[i].x * y[j].x + x[i].y * y[j].y + x[i].z * y[j].z + x[i].w * y[j].w;
    }
}

// The score of a product of a query and a key.
__device__ inline float score(float product, float scale, float softcap) {
    return CAPPED ? softcap * tanhf(product * (scale / softcap)) : product * scale;
}

// Factor of the gradient of a capped score.
__device__ inline float cap_slope(float score, float softcap) {
    float tanh = score / softcap;
    return 1.0f - tanh * tanh;
}

// Whether a query sees a key at or before it.
__device__ inline bool in_window(i64 query, i64 key, i64 window) { return !WINDOWED || query - key < window; }

// Stores this thread's part of a tile of scores. It is read by the 16 threads with the same ty, half a warp, so a warp
// barrier is enough.
__device__ inline void put_scores(float* tile, const float (&s)[R][R], int ty, int tx) {
#pragma unroll
    for (int i = 0; i < R; i++)
#pragma unroll
        for (int j = 0; j < R; j++) tile[(ty * R + i) * SLD + tx + 16 * j] = s[i][j];
    __syncwarp();
}

// o[i][j] += sum over c of s[ty*R+i][c] b[c][tx+16j]
__device__ inline void accumulate(float (&o)[R][WC], const float* s, const float* b, int ty, int tx) {
    for (int c = 0; c < TILE; c += 4) {
        float4 x[R];
#pragma unroll
        for (int i = 0; i < R; i++) x[i] = *(const float4*)(s + (ty * R + i) * SLD + c);
#pragma unroll
        for (int j = 0; j < WC; j++) {
            int d = tx + 16 * j;
            if (WIDTH % 16 && d >= WIDTH) continue;
            float y0 = b[c * LD + d], y1 = b[(c + 1) * LD + d], y2 = b[(c + 2) * LD + d], y3 = b[(c + 3) * LD + d];
#pragma unroll
            for (int i = 0; i < R; i++) o[i][j] += x[i].x * y0 + x[i].y * y1 + x[i].z * y2 + x[i].w * y3;
        }
    }
}

// Reductions over the 16 threads of a row.
__device__ inline float row_sum(float x) {
    for (int lane = 8; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

__device__ inline float row_max(float x) {
    for (int lane = 8; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

// Online softmax over tiles of keys. Grid: (tiles of queries, H, B). Shared: 3 tiles of width, 1 of scores.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_fwd(const ACT* qkv, ACT* out, float* lse, const int* first_keys, i64 seq, i64 heads, i64 kv_heads,
                  float scale, i64 window, float softcap) {
    pdl_wait_and_launch();
    extern __shared__ float4 memory[];
    float* q = (float*)memory;
    float *k = q + TILE * LD, *v = k + TILE * LD, *p = v + TILE * LD;
    QkvLayout layout = {seq, heads, kv_heads};
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    // Longest rows first: their blocks visit the most tiles, so starting them early balances the load.
    i64 first = (gridDim.x - 1 - blockIdx.x) * (i64)TILE, head = blockIdx.y, row = layout.row();
    qkv += blockIdx.z * seq * row;
    load_tile(q, qkv + layout.q_at(head), row, first, seq);

    if (DOCUMENTS) first_keys += blockIdx.z * seq;
    i64 row_first[R] = {};
#pragma unroll
    for (int i = 0; DOCUMENTS && i < R; i++) row_first[i] = bound_of(first_keys, first + ty * R + i, seq);
    float o[R][WC] = {}, running_max[R], running_sum[R] = {};
#pragma unroll
    for (int i = 0; i < R; i++) running_max[i] = __int_as_float(0xff800000);
    for (i64 key = first_key(first, window, first_keys, seq) / TILE * TILE; key <= first; key += TILE) {
        __syncthreads();
        load_tile(k, qkv + layout.k_at(head), row, key, seq);
        load_tile(v, qkv + layout.v_at(head), row, key, seq);
        __syncthreads();
        float s[R][R];
        scores(s, q, k, ty, tx);
#pragma unroll
        for (int i = 0; i < R; i++) {
            i64 query = first + ty * R + i;
            float top = running_max[i];
#pragma unroll
            for (int j = 0; j < R; j++) {
                // The causal mask also hides keys past T: they come after every query that is written.
                i64 column = key + tx + 16 * j;
                bool visible = column <= query && in_window(query, column, window) && column >= row_first[i];
                s[i][j] = visible ? score(s[i][j], scale, softcap) : __int_as_float(0xff800000);
                top = fmaxf(top, s[i][j]);
            }
            // Without a window and documents, the first tile holds key 0, which every row sees: the maximum is finite.
            top = row_max(top);
            float shift = (WINDOWED || DOCUMENTS) && top == __int_as_float(0xff800000) ? 0.0f : top;
            // Rescales the sums accumulated under the previous maximum.
            float rescale = expf(running_max[i] - shift), sum = 0.0f;
            running_max[i] = top;
#pragma unroll
            for (int j = 0; j < R; j++) {
                s[i][j] = expf(s[i][j] - shift);
                sum += s[i][j];
            }
            running_sum[i] = running_sum[i] * rescale + row_sum(sum);
#pragma unroll
            for (int j = 0; j < WC; j++) o[i][j] *= rescale;
        }
        put_scores(p, s, ty, tx);
        accumulate(o, p, v, ty, tx);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        i64 query = first + ty * R + i;
        if (query >= seq) continue;
        ACT* to = out + ((blockIdx.z * seq + query) * heads + head) * WIDTH;
#pragma unroll
        for (int j = 0; j < WC; j++)
            if (tx + 16 * j < WIDTH) store(to, tx + 16 * j, o[i][j] / running_sum[i]);
        if (tx == 0) lse[(blockIdx.z * heads + head) * seq + query] = running_max[i] + logf(running_sum[i]);
    }
}

// delta[b,h,t] = dout . out, with DELTA_LANES threads per row of a head.
extern "C" __global__ void attention_bwd_delta(const ACT* out, const ACT* dout, float* delta, i64 batch, i64 seq,
                                               i64 heads) {
    pdl_wait_and_launch();
    constexpr int LANES = DELTA_LANES;
    i64 i = blockIdx.x * (i64)(THREADS / LANES) + threadIdx.x / LANES;
    int lane = threadIdx.x % LANES;
    bool in_range = i < batch * seq * heads;
    float sum = 0.0f;
    for (int d = lane; in_range && d < WIDTH; d += LANES) sum += load(out, i * WIDTH + d) * load(dout, i * WIDTH + d);
#pragma unroll
    for (int other = LANES / 2; other > 0; other /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, other);
    i64 head = i % heads, t = i / heads % seq, b = i / heads / seq;
    if (in_range && lane == 0) delta[(b * heads + head) * seq + t] = sum;
}

// dq. Grid: (tiles of queries, H, B). Shared: 4 tiles of width, 1 of scores.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_queries(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv,
                          const int* first_keys, i64 seq, i64 heads, i64 kv_heads, float scale, i64 window,
                          float softcap) {
    pdl_wait_and_launch();
    extern __shared__ float4 memory[];
    float* q = (float*)memory;
    float *o = q + TILE * LD, *k = o + TILE * LD, *v = k + TILE * LD, *ds = v + TILE * LD;
    QkvLayout layout = {seq, heads, kv_heads};
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    i64 first = (gridDim.x - 1 - blockIdx.x) * (i64)TILE, head = blockIdx.y, row = layout.row();
    qkv += blockIdx.z * seq * row;
    dqkv += blockIdx.z * seq * row;
    load_tile(q, qkv + layout.q_at(head), row, first, seq);
    load_tile(o, dout + (blockIdx.z * seq * heads + head) * WIDTH, heads * WIDTH, first, seq);
    if (DOCUMENTS) first_keys += blockIdx.z * seq;
    i64 row_first[R] = {};
    float row_lse[R], row_delta[R], dq[R][WC] = {};
#pragma unroll
    for (int i = 0; i < R; i++) {
        i64 query = first + ty * R + i, stat = (blockIdx.z * heads + head) * seq + query;
        row_lse[i] = query < seq ? lse[stat] : 0.0f;
        row_delta[i] = query < seq ? delta[stat] : 0.0f;
        if (DOCUMENTS) row_first[i] = bound_of(first_keys, query, seq);
    }
    for (i64 key = first_key(first, window, first_keys, seq) / TILE * TILE; key <= first; key += TILE) {
        __syncthreads();
        load_tile(k, qkv + layout.k_at(head), row, key, seq);
        load_tile(v, qkv + layout.v_at(head), row, key, seq);
        __syncthreads();
        float s[R][R], dp[R][R];
        scores(s, q, k, ty, tx);
        scores(dp, o, v, ty, tx);
#pragma unroll
        for (int i = 0; i < R; i++)
#pragma unroll
            for (int j = 0; j < R; j++) {
                i64 column = key + tx + 16 * j, query = first + ty * R + i;
                bool visible = column <= query && in_window(query, column, window) && column >= row_first[i];
                float x = score(s[i][j], scale, softcap);
                s[i][j] = visible ? expf(x - row_lse[i]) * (dp[i][j] - row_delta[i]) : 0.0f;
                if (CAPPED) s[i][j] *= cap_slope(x, softcap);
            }
        put_scores(ds, s, ty, tx);
        accumulate(dq, ds, k, ty, tx);
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        i64 query = first + ty * R + i;
        if (query >= seq) continue;
#pragma unroll
        for (int j = 0; j < WC; j++)
            if (tx + 16 * j < WIDTH) store(dqkv + query * row + layout.q_at(head), tx + 16 * j, dq[i][j] * scale);
    }
}

// dk and dv. Grid: (tiles of keys, Hkv, B): a block visits all query heads of its key head, so that no two blocks add
// to the same gradient. Shared: 4 tiles of width, 1 of scores. Here, rows of the scores are keys and columns are
// queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_keys(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv,
                       const int* last_queries, i64 seq, i64 heads, i64 kv_heads, float scale, i64 window,
                       float softcap) {
    pdl_wait_and_launch();
    extern __shared__ float4 memory[];
    float* k = (float*)memory;
    float *v = k + TILE * LD, *q = v + TILE * LD, *o = q + TILE * LD, *s_tile = o + TILE * LD;
    QkvLayout layout = {seq, heads, kv_heads};
    int ty = threadIdx.x / 16, tx = threadIdx.x % 16;
    i64 first = blockIdx.x * (i64)TILE, group = heads / kv_heads, row = layout.row();
    i64 first_head = blockIdx.y * group;
    qkv += blockIdx.z * seq * row;
    dqkv += blockIdx.z * seq * row;
    load_tile(k, qkv + layout.k_at(first_head), row, first, seq);
    load_tile(v, qkv + layout.v_at(first_head), row, first, seq);
    float dk[R][WC] = {}, dv[R][WC] = {};
    if (DOCUMENTS) last_queries += blockIdx.z * seq;
    i64 row_last[R];
#pragma unroll
    for (int i = 0; i < R; i++) row_last[i] = DOCUMENTS ? bound_of(last_queries, first + ty * R + i, seq) : seq;
    i64 end = query_end(first + TILE, window, last_queries, seq);
    for (i64 head = first_head; head < first_head + group; head++) {
        for (i64 query = first; query < end; query += TILE) {
            __syncthreads();
            load_tile(q, qkv + layout.q_at(head), row, query, seq);
            load_tile(o, dout + (blockIdx.z * seq * heads + head) * WIDTH, heads * WIDTH, query, seq);
            __syncthreads();
            float s[R][R], dp[R][R];
            scores(s, k, q, ty, tx);
            scores(dp, v, o, ty, tx);
#pragma unroll
            for (int j = 0; j < R; j++) {
                i64 column = query + tx + 16 * j, stat = (blockIdx.z * heads + head) * seq + column;
                bool in_range = column < seq;
                float column_lse = in_range ? lse[stat] : 0.0f, column_delta = in_range ? delta[stat] : 0.0f;
#pragma unroll
                for (int i = 0; i < R; i++) {
                    i64 key = first + ty * R + i;
                    bool visible = in_range && key <= column && in_window(column, key, window) && column <= row_last[i];
                    float x = score(s[i][j], scale, softcap), p = visible ? expf(x - column_lse) : 0.0f;
                    s[i][j] = p;
                    dp[i][j] = p * (dp[i][j] - column_delta);
                    if (CAPPED) dp[i][j] *= cap_slope(x, softcap);
                }
            }
            put_scores(s_tile, s, ty, tx);
            accumulate(dv, s_tile, o, ty, tx);
            __syncwarp();
            put_scores(s_tile, dp, ty, tx);
            accumulate(dk, s_tile, q, ty, tx);
        }
    }
#pragma unroll
    for (int i = 0; i < R; i++) {
        i64 key = first + ty * R + i;
        if (key >= seq) continue;
#pragma unroll
        for (int j = 0; j < WC; j++) {
            if (tx + 16 * j >= WIDTH) continue;
            store(dqkv + key * row + layout.k_at(first_head), tx + 16 * j, dk[i][j] * scale);
            store(dqkv + key * row + layout.v_at(first_head), tx + 16 * j, dv[i][j]);
        }
    }
}
