// Causal attention on tensor cores, one block per tile of rows, for any sequence length. Compiled after mma_common.cuh.

// out and lse. Grid: (tiles of queries, H, B). Shared: 1 tile of queries, 4 of keys and values.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_fwd(const ACT* qkv, ACT* out, float* lse, const int* first_keys, i64 seq, i64 heads, i64 kv_heads,
                  float scale, i64 window, float softcap) {
    pdl_wait_and_launch();
    constexpr int ROWS = FWD_ROWS, COLS = FWD_COLS, M = ROWS / 16 / WARPS, N = COLS / 8;
    extern __shared__ float4 memory[];
    ACT* q = (ACT*)memory;
    ACT *k = q + ROWS * WIDTH, *v = k + 2 * COLS * WIDTH;
    QkvLayout layout = {seq, heads, kv_heads};
    // Longest rows first: their blocks visit the most tiles, so starting them early balances the load.
    i64 first = (gridDim.x - 1 - blockIdx.x) * (i64)ROWS, head = blockIdx.y, row = layout.row();
    int warp_row = threadIdx.x / WARP * 16 * M;
    qkv += blockIdx.z * seq * row;
    const ACT *keys = qkv + layout.k_at(head), *values = qkv + layout.v_at(head);
    i64 end = first + ROWS < seq ? first + ROWS : seq;
    if (DOCUMENTS) first_keys += blockIdx.z * seq;
    int begin = (int)(first_key(first, window, first_keys, seq) / COLS), tiles = (int)((end + COLS - 1) / COLS);

    copy_rows<ROWS>(q, qkv + layout.q_at(head), row, first, seq);
    copy_rows<COLS>(k + begin % 2 * COLS * WIDTH, keys, row, (i64)begin * COLS, seq);
    copy_rows<COLS>(v + begin % 2 * COLS * WIDTH, values, row, (i64)begin * COLS, seq);
    commit_copies();
    float o[M][WIDTH / 8][4], row_max[M][2], row_sum[M][2];
    zero(o);
#pragma unroll
    for (int m = 0; m < M; m++) row_max[m][0] = row_max[m][1] = NEG_INF, row_sum[m][0] = row_sum[m][1] = 0.0f;
    Scores factors(scale, softcap);
    Bounds<M> bounds(first_keys, first + warp_row, seq);

    for (int tile = begin; tile < tiles; tile++) {
        i64 key = (i64)tile * COLS;
        int stage = tile % 2 * COLS * WIDTH;
        wait_for_kv_tile<ROWS, COLS>(q, k, v, keys, values, row, tile, begin, tiles, seq);
        online_softmax<M, N>(o, row_max, row_sum, q, k + stage, v + stage, warp_row, (int)(first - key) + warp_row,
                             factors, bounds, (int)window);
        __syncthreads();
    }
    out += (blockIdx.z * seq * heads + head) * WIDTH;
    lse += (blockIdx.z * heads + head) * seq;
    write_output(out, heads * WIDTH, lse, first + warp_row, seq, o, row_max, row_sum);
}

// delta[b,h,t] = dout . out. DELTA_LANES threads per row of a head: WIDTH / 8 rounded up to a power of two, so that
// shuffles stay within a row.
extern "C" __global__ void attention_bwd_delta(const ACT* out, const ACT* dout, float* delta, i64 batch, i64 seq,
                                               i64 heads) {
    pdl_wait_and_launch();
    constexpr int CHUNKS = WIDTH / 8, LANES = DELTA_LANES;
    i64 row = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / LANES;
    int chunk = threadIdx.x % LANES;
    bool in_range = row < batch * seq * heads;
    float sum = 0.0f;
    if (in_range && chunk < CHUNKS) {
        i64 at = row * WIDTH + chunk * 8;
        sum = dot8(fetch8(out + at), fetch8(dout + at));
    }
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lane);
    i64 head = row % heads, t = row / heads % seq, b = row / heads / seq;
    if (in_range && chunk == 0) delta[(b * heads + head) * seq + t] = sum;
}

// dq. Grid: (tiles of queries, H, B). Shared: 2 tiles of queries, 4 of keys and values.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_queries(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv,
                          const int* first_keys, i64 seq, i64 heads, i64 kv_heads, float scale, i64 window,
                          float softcap) {
    pdl_wait_and_launch();
    constexpr int ROWS = BWD_Q_ROWS, COLS = BWD_Q_COLS, M = ROWS / 16 / WARPS, N = COLS / 8;
    extern __shared__ float4 memory[];
    ACT* q = (ACT*)memory;
    ACT *o = q + ROWS * WIDTH, *k = o + ROWS * WIDTH, *v = k + 2 * COLS * WIDTH;
    QkvLayout layout = {seq, heads, kv_heads};
    i64 first = (gridDim.x - 1 - blockIdx.x) * (i64)ROWS, head = blockIdx.y, row = layout.row();
    int warp_row = threadIdx.x / WARP * 16 * M;
    qkv += blockIdx.z * seq * row;
    dqkv += blockIdx.z * seq * row;
    const ACT *keys = qkv + layout.k_at(head), *values = qkv + layout.v_at(head);
    i64 end = first + ROWS < seq ? first + ROWS : seq;
    if (DOCUMENTS) first_keys += blockIdx.z * seq;
    int begin = (int)(first_key(first, window, first_keys, seq) / COLS), tiles = (int)((end + COLS - 1) / COLS);

    copy_rows<ROWS>(q, qkv + layout.q_at(head), row, first, seq);
    copy_rows<ROWS>(o, dout + (blockIdx.z * seq * heads + head) * WIDTH, heads * WIDTH, first, seq);
    copy_rows<COLS>(k + begin % 2 * COLS * WIDTH, keys, row, (i64)begin * COLS, seq);
    copy_rows<COLS>(v + begin % 2 * COLS * WIDTH, values, row, (i64)begin * COLS, seq);
    commit_copies();
    float dq[M][WIDTH / 8][4], row_lse[M][2], row_delta[M][2];
    zero(dq);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 query = first + warp_row + row_of(m, 2 * half), stat = (blockIdx.z * heads + head) * seq + query;
            row_lse[m][half] = query < seq ? lse[stat] * LOG2E : 0.0f;
            row_delta[m][half] = query < seq ? delta[stat] : 0.0f;
        }
    Scores factors(scale, softcap);
    Bounds<M> bounds(first_keys, first + warp_row, seq);

    for (int tile = begin; tile < tiles; tile++) {
        i64 key = (i64)tile * COLS;
        int stage = tile % 2 * COLS * WIDTH;
        wait_for_kv_tile<2 * ROWS, COLS>(q, k, v, keys, values, row, tile, begin, tiles, seq);
        query_gradients<M, N>(dq, q, o, k + stage, v + stage, row_lse, row_delta, warp_row,
                              (int)(first - key) + warp_row, factors, bounds, (int)window);
        __syncthreads();
    }
    float scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) scales[m][0] = scales[m][1] = scale;
    write_rows(dqkv + layout.q_at(head), row, first + warp_row, seq, dq, scales);
}

// dk and dv, or one of them: for heads wider than 128 the accumulators of both exceed a thread's registers. A block
// visits all query heads of its key head, so that no two blocks add to the same gradient.
template <bool DK, bool DV>
__device__ inline void bwd_keys(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv,
                                const int* last_queries, i64 seq, i64 heads, i64 kv_heads, float scale, i64 window,
                                float softcap) {
    // Only dk needs the values.
    constexpr int ROWS = BWD_K_ROWS, COLS = BWD_K_COLS, M = ROWS / 16 / WARPS, N = COLS / 8,
                  RESIDENT = DK ? 2 * ROWS : ROWS;
    extern __shared__ float4 memory[];
    ACT* k = (ACT*)memory;
    ACT *v = k + ROWS * WIDTH, *q = v + ROWS * WIDTH, *o = q + 2 * COLS * WIDTH;
    float* stats = (float*)(o + 2 * COLS * WIDTH);
    QkvLayout layout = {seq, heads, kv_heads};
    // Early keys first: they are seen by the most queries, so starting their blocks early balances the load.
    i64 first = blockIdx.x * (i64)ROWS, group = heads / kv_heads, row = layout.row(), first_head = blockIdx.y * group;
    int warp_row = threadIdx.x / WARP * 16 * M;
    qkv += blockIdx.z * seq * row;
    dqkv += blockIdx.z * seq * row;
    dout += blockIdx.z * seq * heads * WIDTH;
    lse += blockIdx.z * heads * seq;
    delta += blockIdx.z * heads * seq;
    if (DOCUMENTS) last_queries += blockIdx.z * seq;
    i64 end = query_end(first + ROWS, window, last_queries, seq);
    int start = (int)(first / COLS), per_head = (int)((end + COLS - 1) / COLS) - start, tiles = per_head * (int)group;

    // Starts the copy of tile `tile`, counted over the queries of all heads, into its stage.
    auto start_copy = [&](int tile) {
        i64 head = first_head + tile / per_head, query = (i64)(start + tile % per_head) * COLS;
        int stage = tile % 2 * COLS;
        copy_rows<COLS>(q + stage * WIDTH, qkv + layout.q_at(head), row, query, seq);
        copy_rows<COLS>(o + stage * WIDTH, dout + head * WIDTH, heads * WIDTH, query, seq);
        commit_copies();
        for (int i = threadIdx.x; i < COLS; i += THREADS) {
            bool in_range = query + i < seq;
            stats[2 * stage + i] = in_range ? lse[head * seq + query + i] * LOG2E : 0.0f;
            stats[2 * stage + COLS + i] = in_range ? delta[head * seq + query + i] : 0.0f;
        }
    };
    copy_rows<ROWS>(k, qkv + layout.k_at(first_head), row, first, seq);
    if constexpr (DK) copy_rows<ROWS>(v, qkv + layout.v_at(first_head), row, first, seq);
    start_copy(0);
    float dk[M][WIDTH / 8][4], dv[M][WIDTH / 8][4];
    zero(dk);
    zero(dv);
    Scores factors(scale, softcap);
    Bounds<M> bounds(last_queries, first + warp_row, seq);

    for (int tile = 0; tile < tiles; tile++) {
        i64 query = (i64)(start + tile % per_head) * COLS;
        int stage = tile % 2 * COLS;
        if (tile + 1 < tiles) {
            start_copy(tile + 1);
            wait_for_tiles<1, RESIDENT, COLS>(tile == 0, k, q + stage * WIDTH, o + stage * WIDTH);
        } else {
            wait_for_tiles<0, RESIDENT, COLS>(tile == 0, k, q + stage * WIDTH, o + stage * WIDTH);
        }
        key_gradients<DK, DV, M, N>(dk, dv, k, v, q + stage * WIDTH, o + stage * WIDTH, stats + 2 * stage,
                                    stats + 2 * stage + COLS, warp_row, (int)(first - query) + warp_row, factors,
                                    bounds, (int)window);
        __syncthreads();
    }
    float ones[M][2], scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) ones[m][0] = ones[m][1] = 1.0f, scales[m][0] = scales[m][1] = scale;
    if constexpr (DK) write_rows(dqkv + layout.k_at(first_head), row, first + warp_row, seq, dk, scales);
    if constexpr (DV) write_rows(dqkv + layout.v_at(first_head), row, first + warp_row, seq, dv, ones);
}

// dk, and dv unless attention_bwd_values computes it. Grid: (tiles of keys, Hkv, B). Shared: 2 tiles of keys and
// values, 4 of queries and dout, and lse and delta of two tiles of queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_keys(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv,
                       const int* last_queries, i64 seq, i64 heads, i64 kv_heads, float scale, i64 window,
                       float softcap) {
    pdl_wait_and_launch();
    bwd_keys<true, !SEPARATE_VALUES>(qkv, dout, lse, delta, dqkv, last_queries, seq, heads, kv_heads, scale, window,
                                     softcap);
}
