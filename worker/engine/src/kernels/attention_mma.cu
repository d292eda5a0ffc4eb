// Causal attention on matrix units: the fast path of attention.cu, with the same kernels, layouts and results.
//
// Operands are bf16 or tf32, sums float (compute capability 8.0 and later). Compiled behind the header of the element type,
// mma_bf16.cuh or mma_tf32.cuh, which has products and the order of tiles in shared memory; per head width, -DWIDTH=D;
// with tile sizes of the caller. A block is 4 warps; a warp owns M rows of 16. Scores stay in registers: the layout of a
// product's result is that of the next product's left operand. Tiles travel by cp.async into shared memory, two deep.
// Dao, FlashAttention-2, 2023. Of short sequences a block keeps a whole head, and goes through it backward in one launch.
//
// Sums are formed in one order: same bits every run. dk and dv are one block's own, so nothing is added by two.

#define WARPS 4
#define THREADS (WARPS * 32)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NEVER __int_as_float(0xff800000)

// Elements that are copied at once: 16 bytes.
constexpr int PIECE = 16 / sizeof(ACT), PIECES = WIDTH / PIECE;

__device__ inline int piece_at(int row, int piece) { return at(row, piece * PIECE / 8) + piece * PIECE % 8; }

// Begins to copy ROWS rows, `stride` elements apart, from row `first`. Rows beyond seq become zero.
template <int ROWS>
__device__ inline void fetch(ACT* tile, const ACT* rows, i64 stride, i64 first, i64 seq) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) {
        int r = i / PIECES, c = i % PIECES;
        bool real = first + r < seq;
        const ACT* from = rows + (real ? first + r : 0) * stride + c * PIECE;
        u32 to = (u32)__cvta_generic_to_shared(tile + piece_at(r, c));
        asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"(to), "l"(from), "r"(real ? 16 : 0));
    }
}

__device__ inline void fetched() { asm volatile("cp.async.commit_group;"); }

// Makes operands of what this thread has copied of a tile, for which it need not wait for others. Two tiles in a row may be
// taken as one, if each gives all threads as many pieces.
template <int ROWS>
__device__ inline void prepare(ACT* tile) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * PIECES; i += THREADS) prepare_piece(tile + piece_at(i / PIECES, i % PIECES));
}

// Waits for all but the LATER newest groups of copies: two tiles of COLS rows and, with the first of them, HELD rows that
// the block keeps. They are operands then.
template <int LATER, int HELD, int COLS>
__device__ inline void wait_for_tiles(bool first, ACT* held, ACT* a, ACT* b) {
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
    if (first) prepare<HELD>(held);
    prepare<COLS>(a);
    prepare<COLS>(b);
    __syncthreads();
}

// Waits for tile `tile` of keys and values in its stage of k and v, while the next one travels to the other. With the first
// come the HELD rows that the block keeps.
template <int HELD, int COLS>
__device__ inline void await_keys(ACT* held, ACT* k, ACT* v, const ACT* keys, const ACT* values, i64 stride, int tile,
                                  int tiles, i64 seq) {
    i64 key = (i64)tile * COLS;
    int stage = tile % 2 * COLS * WIDTH, next = (tile + 1) % 2 * COLS * WIDTH;
    if (tile + 1 < tiles) {
        fetch<COLS>(k + next, keys, stride, key + COLS, seq);
        fetch<COLS>(v + next, values, stride, key + COLS, seq);
        fetched();
        wait_for_tiles<1, HELD, COLS>(tile == 0, held, k + stage, v + stage);
    } else {
        wait_for_tiles<0, HELD, COLS>(tile == 0, held, k + stage, v + stage);
    }
}

__device__ inline float exp2_fast(float x) {
    float y;
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
    return y;
}

template <int M, int N>
__device__ inline void clear(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0.0f;
}

// c[rows of this warp][N * 8 rows of b] = a b^T over the head's width.
template <int M, int N>
__device__ inline void scores(float (&c)[M][N][4], const ACT* a, const ACT* b, int warp_row) {
    clear(c);
    accumulate_rows(c, a, b, warp_row);
}

// Row (of the warp's) and column of element i of result (m, n) in this thread.
__device__ inline int row_of(int m, int i) { return 16 * m + threadIdx.x % 32 / 4 + i / 2 * 8; }
__device__ inline int column_of(int n, int i) { return 8 * n + threadIdx.x % 4 * 2 + i % 2; }

// Over the 4 threads of a row.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Writes the rows of this warp that are below seq, scaled per row half by `scale`.
template <int M>
__device__ inline void write_rows(ACT* to, i64 stride, i64 first, i64 seq, const float (&c)[M][WIDTH / 8][4],
                                  const float (&scale)[M][2]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 row = first + row_of(m, 2 * half);
            if (row >= seq) continue;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++)
                *(Two*)(to + row * stride + column_of(n, 0)) =
                    pack(c[m][n][2 * half] * scale[m][half], c[m][n][2 * half + 1] * scale[m][half]);
        }
}

// Lets the warp's queries, at `row` of q and `ahead` of the first key, see N * 8 keys: softmax so far into o, with each
// row's largest score and sum of exponentials. Both are kept to the base 2.
template <int M, int N>
__device__ inline void see_keys(float (&o)[M][WIDTH / 8][4], float (&largest)[M][2], float (&total)[M][2], const ACT* q,
                                const ACT* k, const ACT* v, int row, int ahead, float scale_2) {
    // Rows that come before every key see none of them.
    if (ahead + 16 * M <= 0) return;
    float s[M][N][4];
    scores(s, q, k, row);
    bool diagonal = 8 * N - 1 > ahead;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = ahead + row_of(m, 2 * half);
            float top = NEVER;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    if (diagonal && column_of(n, i) > query) s[m][n][i] = NEVER;
                    top = fmaxf(top, s[m][n][i]);
                }
            // The first keys hold key 0, which every row sees: the largest is finite from there on.
            top = fmaxf(largest[m][half], quad_max(top) * scale_2);
            float shrink = exp2_fast(largest[m][half] - top), sum = 0.0f;
            largest[m][half] = top;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = exp2_fast(s[m][n][i] * scale_2 - top);
                    sum += s[m][n][i];
                }
            total[m][half] = total[m][half] * shrink + sum;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++) o[m][n][2 * half] *= shrink, o[m][n][2 * half + 1] *= shrink;
        }
    accumulate(o, s, v);
}

// What see_keys came to: the warp's rows of out, from row `first`, and their lse.
template <int M>
__device__ inline void write_seen(ACT* out, i64 stride, float* lse, i64 first, i64 seq, const float (&o)[M][WIDTH / 8][4],
                                  const float (&largest)[M][2], const float (&total)[M][2]) {
    float shares[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 query = first + row_of(m, 2 * half);
            float sum = quad_sum(total[m][half]);
            shares[m][half] = 1.0f / sum;
            if (threadIdx.x % 4 == 0 && query < seq) lse[query] = (largest[m][half] + log2f(sum)) * LN2;
        }
    write_rows(out, stride, first, seq, o, shares);
}

// Adds to dq of the warp's queries, at `row` of q and o (dout) and `ahead` of the first key, what N * 8 keys give.
// row_lse is to the base 2. dq lacks the scale.
template <int M, int N>
__device__ inline void query_gradients(float (&dq)[M][WIDTH / 8][4], const ACT* q, const ACT* o, const ACT* k,
                                       const ACT* v, const float (&row_lse)[M][2], const float (&row_delta)[M][2],
                                       int row, int ahead, float scale_2) {
    if (ahead + 16 * M <= 0) return;
    float s[M][N][4], dp[M][N][4];
    scores(s, q, k, row);
    scores(dp, o, v, row);
    bool diagonal = 8 * N - 1 > ahead;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int query = ahead + row_of(m, i);
#pragma unroll
            for (int n = 0; n < N; n++) {
                bool seen = !diagonal || column_of(n, i) <= query;
                float p = seen ? exp2_fast(s[m][n][i] * scale_2 - row_lse[m][i / 2]) : 0.0f;
                s[m][n][i] = p * (dp[m][n][i] - row_delta[m][i / 2]);
            }
        }
    accumulate(dq, s, k);
}

// Adds to dk and dv of the warp's keys, at `row` of k and v and `behind` the first query, what N * 8 queries give: those of
// q and o (dout), with their lse (to the base 2) and delta. Rows of the scores are keys here, columns queries. dk lacks the
// scale.
template <int M, int N>
__device__ inline void key_gradients(float (&dk)[M][WIDTH / 8][4], float (&dv)[M][WIDTH / 8][4], const ACT* k,
                                     const ACT* v, const ACT* q, const ACT* o, const float* lse, const float* delta,
                                     int row, int behind, float scale_2) {
    // Keys that come after every query are seen by none.
    if (behind >= 8 * N) return;
    float s[M][N][4], dp[M][N][4];
    scores(s, k, q, row);
    scores(dp, v, o, row);
    bool diagonal = behind + 16 * M - 1 > 0;
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 column_lse = *(const float2*)(lse + column_of(n, 0));
        float2 column_delta = *(const float2*)(delta + column_of(n, 0));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                bool seen = !diagonal || behind + row_of(m, i) <= column_of(n, i);
                float p = exp2_fast(s[m][n][i] * scale_2 - (i % 2 ? column_lse.y : column_lse.x));
                p = seen ? p : 0.0f;
                s[m][n][i] = p;
                dp[m][n][i] = p * (dp[m][n][i] - (i % 2 ? column_delta.y : column_delta.x));
            }
    }
    accumulate(dv, s, o);
    accumulate(dk, dp, q);
}

// Grid: (tiles of queries, H, B). Shared: 1 tile of queries, 4 of keys.
extern "C" __global__ void __launch_bounds__(THREADS) attention_fwd(const ACT* qkv, ACT* out, float* lse, i64 seq,
                                                                    i64 heads, i64 kv_heads, float scale) {
    after_the_kernel_before();
    constexpr int ROWS = FWD_ROWS, COLS = FWD_COLS, M = ROWS / 16 / WARPS, N = COLS / 8;
    extern __shared__ float4 memory[];
    ACT* q = (ACT*)memory;
    ACT *k = q + ROWS * WIDTH, *v = k + 2 * COLS * WIDTH;
    Place place = {seq, heads, kv_heads};
    // Long rows first: their blocks take the most tiles.
    i64 first = (gridDim.x - 1 - blockIdx.x) * (i64)ROWS, head = blockIdx.y, row = place.row();
    int warp_row = threadIdx.x / 32 * 16 * M;
    qkv += blockIdx.z * seq * row;
    const ACT *keys = qkv + place.k_at(head), *values = qkv + place.v_at(head);
    i64 end = first + ROWS < seq ? first + ROWS : seq;
    int tiles = (int)((end + COLS - 1) / COLS);

    fetch<ROWS>(q, qkv + place.q_at(head), row, first, seq);
    fetch<COLS>(k, keys, row, 0, seq);
    fetch<COLS>(v, values, row, 0, seq);
    fetched();
    float o[M][WIDTH / 8][4], largest[M][2], total[M][2];
    clear(o);
#pragma unroll
    for (int m = 0; m < M; m++) largest[m][0] = largest[m][1] = NEVER, total[m][0] = total[m][1] = 0.0f;
    float scale_2 = scale * LOG2E;

    for (int tile = 0; tile < tiles; tile++) {
        i64 key = (i64)tile * COLS;
        int stage = tile % 2 * COLS * WIDTH;
        await_keys<ROWS, COLS>(q, k, v, keys, values, row, tile, tiles, seq);
        see_keys<M, N>(o, largest, total, q, k + stage, v + stage, warp_row, (int)(first - key) + warp_row, scale_2);
        __syncthreads();
    }
    out += (blockIdx.z * seq * heads + head) * WIDTH;
    write_seen(out, heads * WIDTH, lse + (blockIdx.z * heads + head) * seq, first + warp_row, seq, o, largest, total);
}

// Product of eight neighbours.
__device__ inline float dot8(const ACT* a, const ACT* b) {
    Eight x = unpack(fetch8(a)), y = unpack(fetch8(b));
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x.x[i] * y.x[i];
    return sum;
}

// delta[b,h,t] = dout . out. WIDTH / 8 threads per row of a head, rounded up to a power of two; grid: rows / 4.
extern "C" __global__ void attention_bwd_delta(const ACT* out, const ACT* dout, float* delta, i64 batch, i64 seq,
                                               i64 heads) {
    after_the_kernel_before();
    constexpr int CHUNKS = WIDTH / 8, LANES = CHUNKS <= 2 ? 2 : CHUNKS <= 4 ? 4 : CHUNKS <= 8 ? 8 : CHUNKS <= 16 ? 16 : 32;
    i64 row = (blockIdx.x * (i64)blockDim.x + threadIdx.x) / LANES;
    int chunk = threadIdx.x % LANES;
    bool real = row < batch * seq * heads;
    float sum = 0.0f;
    if (real && chunk < CHUNKS) sum = dot8(out + row * WIDTH + chunk * 8, dout + row * WIDTH + chunk * 8);
#pragma unroll
    for (int lane = LANES / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lane);
    i64 head = row % heads, t = row / heads % seq, b = row / heads / seq;
    if (real && chunk == 0) delta[(b * heads + head) * seq + t] = sum;
}

// Grid: (tiles of queries, H, B). Shared: 2 tiles of queries, 4 of keys.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_queries(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv, i64 seq,
                          i64 heads, i64 kv_heads, float scale) {
    after_the_kernel_before();
    constexpr int ROWS = BWD_Q_ROWS, COLS = BWD_Q_COLS, M = ROWS / 16 / WARPS, N = COLS / 8;
    extern __shared__ float4 memory[];
    ACT* q = (ACT*)memory;
    ACT *o = q + ROWS * WIDTH, *k = o + ROWS * WIDTH, *v = k + 2 * COLS * WIDTH;
    Place place = {seq, heads, kv_heads};
    i64 first = (gridDim.x - 1 - blockIdx.x) * (i64)ROWS, head = blockIdx.y, row = place.row();
    int warp_row = threadIdx.x / 32 * 16 * M;
    qkv += blockIdx.z * seq * row;
    dqkv += blockIdx.z * seq * row;
    const ACT *keys = qkv + place.k_at(head), *values = qkv + place.v_at(head);
    i64 end = first + ROWS < seq ? first + ROWS : seq;
    int tiles = (int)((end + COLS - 1) / COLS);

    fetch<ROWS>(q, qkv + place.q_at(head), row, first, seq);
    fetch<ROWS>(o, dout + (blockIdx.z * seq * heads + head) * WIDTH, heads * WIDTH, first, seq);
    fetch<COLS>(k, keys, row, 0, seq);
    fetch<COLS>(v, values, row, 0, seq);
    fetched();
    float dq[M][WIDTH / 8][4], row_lse[M][2], row_delta[M][2];
    clear(dq);
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 query = first + warp_row + row_of(m, 2 * half), stat = (blockIdx.z * heads + head) * seq + query;
            row_lse[m][half] = query < seq ? lse[stat] * LOG2E : 0.0f;
            row_delta[m][half] = query < seq ? delta[stat] : 0.0f;
        }
    float scale_2 = scale * LOG2E;

    for (int tile = 0; tile < tiles; tile++) {
        i64 key = (i64)tile * COLS;
        int stage = tile % 2 * COLS * WIDTH;
        await_keys<2 * ROWS, COLS>(q, k, v, keys, values, row, tile, tiles, seq);
        query_gradients<M, N>(dq, q, o, k + stage, v + stage, row_lse, row_delta, warp_row, (int)(first - key) + warp_row,
                              scale_2);
        __syncthreads();
    }
    float scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) scales[m][0] = scales[m][1] = scale;
    write_rows(dqkv + place.q_at(head), row, first + warp_row, seq, dq, scales);
}

// Grid: (tiles of keys, Hkv, B): all query heads of a key head in turn. Shared: 2 tiles of keys, 4 of queries, and
// twice lse and delta of a tile of queries.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_keys(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv, i64 seq,
                       i64 heads, i64 kv_heads, float scale) {
    after_the_kernel_before();
    constexpr int ROWS = BWD_K_ROWS, COLS = BWD_K_COLS, M = ROWS / 16 / WARPS, N = COLS / 8;
    extern __shared__ float4 memory[];
    ACT* k = (ACT*)memory;
    ACT *v = k + ROWS * WIDTH, *q = v + ROWS * WIDTH, *o = q + 2 * COLS * WIDTH;
    float* stats = (float*)(o + 2 * COLS * WIDTH);
    Place place = {seq, heads, kv_heads};
    // Early keys first: most queries see them.
    i64 first = blockIdx.x * (i64)ROWS, group = heads / kv_heads, row = place.row(), some_head = blockIdx.y * group;
    int warp_row = threadIdx.x / 32 * 16 * M;
    qkv += blockIdx.z * seq * row;
    dqkv += blockIdx.z * seq * row;
    dout += blockIdx.z * seq * heads * WIDTH;
    lse += blockIdx.z * heads * seq;
    delta += blockIdx.z * heads * seq;
    int start = (int)(first / COLS), per_head = (int)((seq + COLS - 1) / COLS) - start, tiles = per_head * (int)group;

    // Tile `tile` of the queries of all heads in turn, into its stage.
    auto begin = [&](int tile) {
        i64 head = some_head + tile / per_head, query = (i64)(start + tile % per_head) * COLS;
        int stage = tile % 2 * COLS;
        fetch<COLS>(q + stage * WIDTH, qkv + place.q_at(head), row, query, seq);
        fetch<COLS>(o + stage * WIDTH, dout + head * WIDTH, heads * WIDTH, query, seq);
        fetched();
        for (int i = threadIdx.x; i < COLS; i += THREADS) {
            bool real = query + i < seq;
            stats[2 * stage + i] = real ? lse[head * seq + query + i] * LOG2E : 0.0f;
            stats[2 * stage + COLS + i] = real ? delta[head * seq + query + i] : 0.0f;
        }
    };
    fetch<ROWS>(k, qkv + place.k_at(some_head), row, first, seq);
    fetch<ROWS>(v, qkv + place.v_at(some_head), row, first, seq);
    begin(0);
    float dk[M][WIDTH / 8][4], dv[M][WIDTH / 8][4];
    clear(dk);
    clear(dv);
    float scale_2 = scale * LOG2E;

    for (int tile = 0; tile < tiles; tile++) {
        i64 query = (i64)(start + tile % per_head) * COLS;
        int stage = tile % 2 * COLS;
        if (tile + 1 < tiles) {
            begin(tile + 1);
            wait_for_tiles<1, 2 * ROWS, COLS>(tile == 0, k, q + stage * WIDTH, o + stage * WIDTH);
        } else {
            wait_for_tiles<0, 2 * ROWS, COLS>(tile == 0, k, q + stage * WIDTH, o + stage * WIDTH);
        }
        key_gradients<M, N>(dk, dv, k, v, q + stage * WIDTH, o + stage * WIDTH, stats + 2 * stage,
                            stats + 2 * stage + COLS, warp_row, (int)(first - query) + warp_row, scale_2);
        __syncthreads();
    }
    float ones[M][2], scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) ones[m][0] = ones[m][1] = 1.0f, scales[m][0] = scales[m][1] = scale;
    write_rows(dqkv + place.k_at(some_head), row, first + warp_row, seq, dk, scales);
    write_rows(dqkv + place.v_at(some_head), row, first + warp_row, seq, dv, ones);
}

#ifdef WHOLE
// The tile of rows that a warp takes in this round: from both ends in turn, which gives all warps the same work.
__device__ inline int tile_of(int round) {
    int warp = threadIdx.x / 32;
    return round * WARPS + (round % 2 ? WARPS - 1 - warp : warp);
}

// Turns a head's queries or keys in shared memory by their positions, if there is a table (as in rope.cu).
__device__ inline void turn(ACT* x, const float* table, i64 seq) {
    constexpr int CHUNKS = WIDTH / 16;
    if (!table) return;
    for (int i = threadIdx.x; i < seq * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS;
        const float* angles = table + r * WIDTH + c * 8;
        ACT *low = x + at(r, c), *high = x + at(r, c + CHUNKS);
        Eight cosine = unpack(fetch8(angles)), sine = unpack(fetch8(angles + WIDTH / 2));
        Eight a = unpack(fetch8(low)), b = unpack(fetch8(high)), turned_a, turned_b;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            turned_a.x[j] = a.x[j] * cosine.x[j] - b.x[j] * sine.x[j];
            turned_b.x[j] = b.x[j] * cosine.x[j] + a.x[j] * sine.x[j];
        }
        store8(low, turned_a);
        store8(high, turned_b);
    }
}

// Turns gradients of this warp's rows, from row `first`, back. Both of a pair are in one thread.
template <int M>
__device__ inline void turn_back(float (&c)[M][WIDTH / 8][4], const float* table, int first, i64 seq) {
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

// Forward for sequences of at most WHOLE tokens, with as many key heads as query heads. Grid: (H, B). Shared: a head's q, k
// and v.
extern "C" __global__ void __launch_bounds__(THREADS, 4)
    attention_fwd_whole(const ACT* qkv, const float* table, ACT* out, float* lse, i64 seq, i64 heads, float scale) {
    after_the_kernel_before();
    constexpr int M = 2, N = WHOLE_FWD_COLS / 8, ROWS = 16 * M;
    extern __shared__ float4 memory[];
    ACT *q = (ACT*)memory, *k = q + WHOLE * WIDTH, *v = k + WHOLE * WIDTH;
    Place place = {seq, heads, heads};
    i64 head = blockIdx.x, row = place.row(), width = heads * WIDTH;
    qkv += blockIdx.y * seq * row;
    out += blockIdx.y * seq * width + head * WIDTH;
    lse += (blockIdx.y * heads + head) * seq;
    fetch<WHOLE>(q, qkv + place.q_at(head), row, 0, seq);
    fetch<WHOLE>(k, qkv + place.k_at(head), row, 0, seq);
    fetch<WHOLE>(v, qkv + place.v_at(head), row, 0, seq);
    fetched();
    wait_for_tiles<0, WHOLE, WHOLE>(true, q, k, v);
    turn(q, table, seq);
    turn(k, table, seq);
    __syncthreads();
    int tiles = ((int)seq + ROWS - 1) / ROWS;
    float scale_2 = scale * LOG2E;
    for (int round = 0; round * WARPS < tiles; round++) {
        int tile = tile_of(round), first = tile * ROWS;
        if (tile >= tiles) continue;
        float o[M][WIDTH / 8][4], largest[M][2], total[M][2];
        clear(o);
#pragma unroll
        for (int m = 0; m < M; m++) largest[m][0] = largest[m][1] = NEVER, total[m][0] = total[m][1] = 0.0f;
        for (int key = 0; key < first + ROWS; key += WHOLE_FWD_COLS)
            see_keys<M, N>(o, largest, total, q, k + key * WIDTH, v + key * WIDTH, first, first - key, scale_2);
        write_seen(out, width, lse, first, seq, o, largest, total);
    }
}

// All of backward for sequences of at most WHOLE tokens, with as many key heads as query heads. Grid: (H, B). Shared: a
// head's q, k, v and dout, lse and delta. Scores are formed twice, once by owners of keys and once by owners of queries, so
// that nothing is added by two.
extern "C" __global__ void __launch_bounds__(THREADS, 3)
    attention_bwd_whole(const ACT* qkv, const float* table, const ACT* out, const ACT* dout, const float* lse,
                        ACT* dqkv, i64 seq, i64 heads, float scale) {
    after_the_kernel_before();
    constexpr int M = 2, N = WHOLE_BWD_COLS / 8, ROWS = 16 * M, CHUNKS = WIDTH / 8;
    extern __shared__ float4 memory[];
    ACT* q = (ACT*)memory;
    ACT *k = q + WHOLE * WIDTH, *v = k + WHOLE * WIDTH, *o = v + WHOLE * WIDTH;
    float *lses = (float*)(o + WHOLE * WIDTH), *deltas = lses + WHOLE;
    Place place = {seq, heads, heads};
    i64 head = blockIdx.x, row = place.row(), width = heads * WIDTH;
    qkv += blockIdx.y * seq * row;
    dqkv += blockIdx.y * seq * row;
    out += blockIdx.y * seq * width + head * WIDTH;
    dout += blockIdx.y * seq * width + head * WIDTH;
    lse += (blockIdx.y * heads + head) * seq;

    fetch<WHOLE>(q, qkv + place.q_at(head), row, 0, seq);
    fetch<WHOLE>(k, qkv + place.k_at(head), row, 0, seq);
    fetch<WHOLE>(v, qkv + place.v_at(head), row, 0, seq);
    fetch<WHOLE>(o, dout, width, 0, seq);
    fetched();
    for (int i = threadIdx.x; i < WHOLE; i += THREADS) lses[i] = i < seq ? lse[i] * LOG2E : 0.0f;
    wait_for_tiles<0, 2 * WHOLE, WHOLE>(true, q, v, o);
    turn(q, table, seq);
    turn(k, table, seq);
    // delta = dout . out, CHUNKS threads a row.
#pragma unroll
    for (int i = threadIdx.x; i < WHOLE * CHUNKS; i += THREADS) {
        int r = i / CHUNKS, c = i % CHUNKS;
        float sum = r < seq ? dot8(out + r * width + c * 8, o + at(r, c)) : 0.0f;
#pragma unroll
        for (int lane = CHUNKS / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lane);
        if (c == 0) deltas[r] = sum;
    }
    __syncthreads();

    int tiles = ((int)seq + ROWS - 1) / ROWS;
    float scale_2 = scale * LOG2E, ones[M][2], scales[M][2];
#pragma unroll
    for (int m = 0; m < M; m++) ones[m][0] = ones[m][1] = 1.0f, scales[m][0] = scales[m][1] = scale;
    for (int round = 0; round * WARPS < tiles; round++) {
        int tile = tile_of(round), first = tile * ROWS;
        if (tile >= tiles) continue;
        float dk[M][WIDTH / 8][4], dv[M][WIDTH / 8][4];
        clear(dk);
        clear(dv);
        for (int query = first / WHOLE_BWD_COLS * WHOLE_BWD_COLS; query < seq; query += WHOLE_BWD_COLS)
            key_gradients<M, N>(dk, dv, k, v, q + query * WIDTH, o + query * WIDTH, lses + query, deltas + query, first,
                                first - query, scale_2);
        turn_back(dk, table, first, seq);
        write_rows(dqkv + place.k_at(head), row, first, seq, dk, scales);
        write_rows(dqkv + place.v_at(head), row, first, seq, dv, ones);
    }
    for (int round = 0; round * WARPS < tiles; round++) {
        int tile = tile_of(round), first = tile * ROWS;
        if (tile >= tiles) continue;
        float dq[M][WIDTH / 8][4], row_lse[M][2], row_delta[M][2];
        clear(dq);
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int half = 0; half < 2; half++) {
                int query = first + row_of(m, 2 * half);
                row_lse[m][half] = lses[query];
                row_delta[m][half] = deltas[query];
            }
        for (int key = 0; key < first + ROWS; key += WHOLE_BWD_COLS)
            query_gradients<M, N>(dq, q, o, k + key * WIDTH, v + key * WIDTH, row_lse, row_delta, first, first - key,
                                  scale_2);
        turn_back(dq, table, first, seq);
        write_rows(dqkv + place.q_at(head), row, first, seq, dq, scales);
    }
}
#endif
