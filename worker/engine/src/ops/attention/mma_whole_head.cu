// Causal attention on tensor cores, one block per head, for short sequences and narrow heads whose q, k and v fit into
// shared memory. Rotary embedding is fused: queries and keys are rotated in shared memory. Compiled after
// mma_common.cuh.

// The tile of rows that a warp processes in this round. The order reverses every round, which balances the causal
// triangle.
__device__ inline int warp_tile(int round) {
    int warp = threadIdx.x / WARP;
    return round * WARPS + (round % 2 ? WARPS - 1 - warp : warp);
}

// Vectors of eight elements in a row, and those that rotary embedding pairs with others.
constexpr int CHUNKS = WIDTH / 8, PAIRS = CHUNKS / 2;

// This thread's part of the table of the rotary embedding (layout as in rope/kernel.cu), fetched while q and k are
// copied.
struct Angles {
    static constexpr int ITEMS = MAX_SEQ * PAIRS / THREADS;
    Packed<float> cosine[ITEMS], sine[ITEMS];

    __device__ Angles(const float* table, i64 seq) {
        if (!table) return;
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int item = threadIdx.x + i * THREADS;
            const float* angles = table + item / PAIRS * WIDTH + item % PAIRS * 8;
            if (item / PAIRS >= seq) break;
            cosine[i] = fetch8(angles);
            sine[i] = fetch8(angles + WIDTH / 2);
        }
    }

    // Rotates a head's queries or keys in shared memory.
    __device__ void rotate(ACT* x, i64 seq) const {
#pragma unroll
        for (int i = 0; i < ITEMS; i++) {
            int item = threadIdx.x + i * THREADS, r = item / PAIRS, c = item % PAIRS;
            if (r >= seq) break;
            ACT *low = x + swizzle(r, c), *high = x + swizzle(r, c + PAIRS);
            Vec8 a = unpack(fetch8(low)), b = unpack(fetch8(high)), rotated_a, rotated_b;
            Vec8 cos = unpack(cosine[i]), sin = unpack(sine[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                rotated_a.x[j] = a.x[j] * cos.x[j] - b.x[j] * sin.x[j];
                rotated_b.x[j] = b.x[j] * cos.x[j] + a.x[j] * sin.x[j];
            }
            store8(low, rotated_a);
            store8(high, rotated_b);
        }
    }
};

// Rotates the gradients of this warp's rows, from row `first`, back. Both elements of a pair are in the same thread.
template <int M>
__device__ inline void rotate_back(float (&c)[M][WIDTH / 8][4], const float* table, int first, i64 seq) {
    if (!table) return;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int row = first + row_of(m, 2 * half);
            if (row >= seq) continue;
#pragma unroll
            for (int n = 0; n < WIDTH / 16; n++) {
                const float* angles = table + row * WIDTH + column_of(n, 0);
                float2 cosine = *(const float2*)angles, sine = *(const float2*)(angles + WIDTH / 2);
#pragma unroll
                for (int i = 0; i < 2; i++) {
                    float &low = c[m][n][2 * half + i], &high = c[m][n + WIDTH / 16][2 * half + i], a = low, b = high;
                    float cos = i ? cosine.y : cosine.x, sin = i ? sine.y : sine.x;
                    low = a * cos + b * sin;
                    high = b * cos - a * sin;
                }
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
    Angles angles(table, seq);
    wait_copies<0>();
    __syncthreads();
    if (table) {
        angles.rotate(q, seq);
        angles.rotate(k, seq);
    }
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
    constexpr int M = 2, N = WHOLE_BWD_COLS / 8, ROWS = 16 * M;
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
    // Fetches out meanwhile. CHUNKS threads per row compute delta = dout . out below.
    constexpr int VECTORS = MAX_SEQ * CHUNKS / THREADS;
    Packed<ACT> outs[VECTORS];
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int vector = threadIdx.x + i * THREADS, r = vector / CHUNKS, c = vector % CHUNKS;
        if (r < seq) outs[i] = fetch8(out + r * width + c * 8);
    }
    Angles angles(table, seq);
    for (int i = threadIdx.x; i < MAX_SEQ; i += THREADS) head_lse[i] = i < seq ? lse[i] * LOG2E : 0.0f;
    wait_copies<0>();
    __syncthreads();
    if (table) {
        angles.rotate(q, seq);
        angles.rotate(k, seq);
    }
#pragma unroll
    for (int i = 0; i < VECTORS; i++) {
        int vector = threadIdx.x + i * THREADS, r = vector / CHUNKS, c = vector % CHUNKS;
        float sum = r < seq ? dot8(outs[i], fetch8(o + swizzle(r, c))) : 0.0f;
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
