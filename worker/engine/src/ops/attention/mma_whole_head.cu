// Causal attention on tensor cores, one block per head, for short sequences and narrow heads whose q, k and v fit into
// shared memory. Rotary embedding is fused: queries and keys are rotated in shared memory. Compiled after
// mma_common.cuh.

// The tile of rows that a warp processes in this round. The order reverses every round, which balances the causal
// triangle.
__device__ inline int warp_tile(int round) {
    int warp = threadIdx.x / WARP;
    return round * WARPS + (round % 2 ? WARPS - 1 - warp : warp);
}

// Rotary embedding of a head's queries or keys in shared memory, if there is a table (layout as in rope/kernel.cu).
__device__ inline void rotate(ACT* x, const float* table, i64 seq) {
    constexpr int CHUNKS = WIDTH / 16;
    if (!table) return;
    for (int i = threadIdx.x; i < seq * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS;
        const float* angles = table + r * WIDTH + c * 8;
        ACT *low = x + swizzle(r, c), *high = x + swizzle(r, c + CHUNKS);
        Vec8 cosine = unpack(fetch8(angles)), sine = unpack(fetch8(angles + WIDTH / 2));
        Vec8 a = unpack(fetch8(low)), b = unpack(fetch8(high)), rotated_a, rotated_b;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            rotated_a.x[j] = a.x[j] * cosine.x[j] - b.x[j] * sine.x[j];
            rotated_b.x[j] = b.x[j] * cosine.x[j] + a.x[j] * sine.x[j];
        }
        store8(low, rotated_a);
        store8(high, rotated_b);
    }
}

// Rotates the gradients of this warp's rows, from row `first`, back. Both elements of a pair are in the same thread.
template <int M>
__device__ inline void rotate_back(float (&c)[M][WIDTH / 8][4], const float* table, int first, i64 seq) {
    if (!table) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int row = first + row_of(m, i);
            if (row >= seq) continue;
#pragma unroll
            for (int n = 0; n < WIDTH / 16; n++) {
                const float* angle = table + row * WIDTH + column_of(n, i);
                float cosine = angle[0], sine = angle[WIDTH / 2], a = c[m][n][i], b = c[m][n + WIDTH / 16][i];
                c[m][n][i] = a * cosine + b * sine;
                c[m][n + WIDTH / 16][i] = b * cosine - a * sine;
            }
        }
}

// Forward for sequences of at most MAX_SEQ tokens with Hkv = H. Grid: (H, B). Shared: q, k and v of a head.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    attention_fwd_whole(const ACT* qkv, const float* table, ACT* out, float* lse, i64 seq, i64 heads, float scale) {
    pdl_wait_and_launch();
    constexpr int M = 2, N = WHOLE_FWD_COLS / 8, ROWS = 16 * M;
    extern __shared__ float4 memory[];
    ACT *q = (ACT*)memory, *k = q + MAX_SEQ * WIDTH, *v = k + MAX_SEQ * WIDTH;
    QkvLayout layout = {seq, heads, heads};
    i64 head = blockIdx.x, row = layout.row(), width = heads * WIDTH;
    qkv += blockIdx.y * seq * row;
    out += blockIdx.y * seq * width + head * WIDTH;
    lse += (blockIdx.y * heads + head) * seq;
    copy_rows<MAX_SEQ>(q, qkv + layout.q_at(head), row, 0, seq);
    copy_rows<MAX_SEQ>(k, qkv + layout.k_at(head), row, 0, seq);
    copy_rows<MAX_SEQ>(v, qkv + layout.v_at(head), row, 0, seq);
    commit_copies();
    wait_for_tiles<0, MAX_SEQ, MAX_SEQ>(true, q, k, v);
    rotate(q, table, seq);
    rotate(k, table, seq);
    __syncthreads();
    int tiles = ((int)seq + ROWS - 1) / ROWS;
    Scores factors(scale, 0.0f);
    // Rows are one document each.
    Bounds<M> bounds(nullptr, 0, seq);
    for (int round = 0; round * WARPS < tiles; round++) {
        int tile = warp_tile(round), first = tile * ROWS;
        if (tile >= tiles) continue;
        float o[M][WIDTH / 8][4], row_max[M][2], row_sum[M][2];
        zero(o);
#pragma unroll
        for (int m = 0; m < M; m++) row_max[m][0] = row_max[m][1] = NEG_INF, row_sum[m][0] = row_sum[m][1] = 0.0f;
        for (int key = 0; key < first + ROWS; key += WHOLE_FWD_COLS)
            online_softmax<M, N>(o, row_max, row_sum, q, k + key * WIDTH, v + key * WIDTH, first, first - key,
                                 factors, bounds, 0);
        write_output(out, width, lse, first, seq, o, row_max, row_sum);
    }
}

// The whole backward for sequences of at most MAX_SEQ tokens with Hkv = H, in one launch. Grid: (H, B). Shared: q, k, v
// and dout of a head, its lse and delta. Scores are computed twice, once by the warps that own keys and once by those
// that own queries, so that no gradient has two writers and the order of sums is fixed.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_bwd_whole(const ACT* qkv, const float* table, const ACT* out, const ACT* dout, const float* lse,
                        ACT* dqkv, i64 seq, i64 heads, float scale) {
    pdl_wait_and_launch();
    constexpr int M = 2, N = WHOLE_BWD_COLS / 8, ROWS = 16 * M, CHUNKS = WIDTH / 8;
    extern __shared__ float4 memory[];
    ACT* q = (ACT*)memory;
    ACT *k = q + MAX_SEQ * WIDTH, *v = k + MAX_SEQ * WIDTH, *o = v + MAX_SEQ * WIDTH;
    float *head_lse = (float*)(o + MAX_SEQ * WIDTH), *head_delta = head_lse + MAX_SEQ;
    QkvLayout layout = {seq, heads, heads};
    i64 head = blockIdx.x, row = layout.row(), width = heads * WIDTH;
    qkv += blockIdx.y * seq * row;
    dqkv += blockIdx.y * seq * row;
    out += blockIdx.y * seq * width + head * WIDTH;
    dout += blockIdx.y * seq * width + head * WIDTH;
    lse += (blockIdx.y * heads + head) * seq;

    copy_rows<MAX_SEQ>(q, qkv + layout.q_at(head), row, 0, seq);
    copy_rows<MAX_SEQ>(k, qkv + layout.k_at(head), row, 0, seq);
    copy_rows<MAX_SEQ>(v, qkv + layout.v_at(head), row, 0, seq);
    copy_rows<MAX_SEQ>(o, dout, width, 0, seq);
    commit_copies();
    for (int i = threadIdx.x; i < MAX_SEQ; i += THREADS) head_lse[i] = i < seq ? lse[i] * LOG2E : 0.0f;
    wait_for_tiles<0, 2 * MAX_SEQ, MAX_SEQ>(true, q, v, o);
    rotate(q, table, seq);
    rotate(k, table, seq);
    // delta = dout . out, with CHUNKS threads per row.
#pragma unroll
    for (int i = threadIdx.x; i < MAX_SEQ * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS;
        float sum = r < seq ? dot8(out + r * width + c * 8, o + swizzle(r, c)) : 0.0f;
#pragma unroll
        for (int lane = CHUNKS / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lane);
        if (c == 0) head_delta[r] = sum;
    }
    __syncthreads();

    int tiles = ((int)seq + ROWS - 1) / ROWS;
    Scores factors(scale, 0.0f);
    // Rows are one document each.
    Bounds<M> bounds(nullptr, 0, seq);
    float ones[M][2], scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) ones[m][0] = ones[m][1] = 1.0f, scales[m][0] = scales[m][1] = scale;
    for (int round = 0; round * WARPS < tiles; round++) {
        int tile = warp_tile(round), first = tile * ROWS;
        if (tile >= tiles) continue;
        float dk[M][WIDTH / 8][4], dv[M][WIDTH / 8][4];
        zero(dk);
        zero(dv);
        for (int query = first / WHOLE_BWD_COLS * WHOLE_BWD_COLS; query < seq; query += WHOLE_BWD_COLS)
            key_gradients<true, true, M, N>(dk, dv, k, v, q + query * WIDTH, o + query * WIDTH, head_lse + query,
                                            head_delta + query, first, first - query, factors, bounds, 0);
        rotate_back(dk, table, first, seq);
        write_rows(dqkv + layout.k_at(head), row, first, seq, dk, scales);
        write_rows(dqkv + layout.v_at(head), row, first, seq, dv, ones);
    }
    for (int round = 0; round * WARPS < tiles; round++) {
        int tile = warp_tile(round), first = tile * ROWS;
        if (tile >= tiles) continue;
        float dq[M][WIDTH / 8][4], row_lse[M][2], row_delta[M][2];
        zero(dq);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int query = first + row_of(m, 2 * half);
                row_lse[m][half] = head_lse[query];
                row_delta[m][half] = head_delta[query];
            }
        for (int key = 0; key < first + ROWS; key += WHOLE_BWD_COLS)
            query_gradients<M, N>(dq, q, o, k + key * WIDTH, v + key * WIDTH, row_lse, row_delta, first, first - key,
                                  factors, bounds, 0);
        rotate_back(dq, table, first, seq);
        write_rows(dqkv + layout.q_at(head), row, first, seq, dq, scales);
    }
}
