// Causal attention on tensor cores: device functions shared by mma_tiled.cu and mma_whole_head.cu. Layouts, results and
// formulas are those of kernel.cu; the algorithm follows FlashAttention-2 (Dao, 2023).
//
// Operands are bf16 or tf32, accumulators are float (compute capability 8.0 and later). Compiled after the header of
// the element type, mma_bf16.cuh or mma_tf32.cuh, which defines the mma and the swizzle of tiles in shared memory; per
// head width, -DWIDTH=D; with tile sizes chosen by the caller. A warp owns M x 16 rows. Scores stay in registers: the
// result of one mma has the layout of the next mma's left operand. Tiles are copied to shared memory by cp.async,
// double-buffered.
//
// Every sum has a fixed order, and each dk and dv belongs to one block, so that every run gives the same bits.
// Exponentials and lse are in base 2 inside the kernels, which saves a multiplication per score.

#define WARPS (THREADS / WARP)
#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define NEG_INF __int_as_float(0xff800000)

// Factors of the scores. A product of a query and a key becomes the score `product log2_factor` in base 2; with a cap,
// the product is replaced by tanh(product inner) first.
struct Scores {
    float log2_factor, inner;

    __device__ Scores(float scale, float softcap)
        : log2_factor((CAPPED ? softcap : scale) * LOG2E), inner(CAPPED ? scale / softcap : 1.0f) {}
};

// Elements of one 16-byte copy.
constexpr int COPY_ELEMENTS = 16 / sizeof(ACT), ROW_COPIES = WIDTH / COPY_ELEMENTS;

__device__ inline int copy_at(int row, int copy) {
    return swizzle(row, copy * COPY_ELEMENTS / 8) + copy * COPY_ELEMENTS % 8;
}

// Starts to copy ROWS rows, `stride` elements apart, from row `first`. Rows past seq become zero (cp.async with 0
// bytes).
template <int ROWS>
__device__ inline void copy_rows(ACT* tile, const ACT* rows, i64 stride, i64 first, i64 seq) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * ROW_COPIES; i += THREADS) {
        int r = i / ROW_COPIES, c = i % ROW_COPIES;
        bool in_range = first + r < seq;
        const ACT* from = rows + (in_range ? first + r : 0) * stride + c * COPY_ELEMENTS;
        copy_async_16(tile + copy_at(r, c), from, in_range ? 16 : 0);
    }
}

// Converts the part of a tile that this thread itself has copied to operands; a thread's own copies are visible to it
// without a barrier. Adjacent tiles may be treated as one if each gives every thread the same number of copies.
template <int ROWS>
__device__ inline void prepare(ACT* tile) {
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * ROW_COPIES; i += THREADS)
        prepare_copy(tile + copy_at(i / ROW_COPIES, i % ROW_COPIES));
}

// Waits for all but the LATER newest groups of copies: two tiles of COLS rows and, with the first of them, the RESIDENT
// rows that stay in shared memory. Afterwards they are operands.
template <int LATER, int RESIDENT, int COLS>
__device__ inline void wait_for_tiles(bool first, ACT* resident, ACT* a, ACT* b) {
    wait_copies<LATER>();
    if (first) prepare<RESIDENT>(resident);
    prepare<COLS>(a);
    prepare<COLS>(b);
    __syncthreads();
}

// Starts the copy of the next tile of keys and values into the other stage, then waits for tile `tile` of begin..end.
// The RESIDENT rows arrive with the first of them.
template <int RESIDENT, int COLS>
__device__ inline void wait_for_kv_tile(ACT* resident, ACT* k, ACT* v, const ACT* keys, const ACT* values, i64 stride,
                                        int tile, int begin, int end, i64 seq) {
    i64 key = (i64)tile * COLS;
    int stage = tile % 2 * COLS * WIDTH, next = (tile + 1) % 2 * COLS * WIDTH;
    if (tile + 1 < end) {
        copy_rows<COLS>(k + next, keys, stride, key + COLS, seq);
        copy_rows<COLS>(v + next, values, stride, key + COLS, seq);
        commit_copies();
        wait_for_tiles<1, RESIDENT, COLS>(tile == begin, resident, k + stage, v + stage);
    } else {
        wait_for_tiles<0, RESIDENT, COLS>(tile == begin, resident, k + stage, v + stage);
    }
}

template <int M, int N>
__device__ inline void zero(float (&c)[M][N][4]) {
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int n = 0; n < N; n++)
#pragma unroll
            for (int i = 0; i < 4; i++) c[m][n][i] = 0.0f;
}

// c[rows of this warp][N * 8 rows of b] = a b^T over the head width.
template <int M, int N>
__device__ inline void scores(float (&c)[M][N][4], const ACT* a, const ACT* b, int warp_row) {
    zero(c);
    accumulate_rows(c, a, b, warp_row);
}

// Replaces products by their tanh, with a cap.
template <int M, int N>
__device__ inline void cap(float (&c)[M][N][4], const Scores& scores) {
    if constexpr (CAPPED) {
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 0; i < 4; i++) c[m][n][i] = tanh_for<bf16>(c[m][n][i] * scores.inner);
    }
}

// Factor of the gradient of a capped score.
__device__ inline float cap_slope(float tanh) { return 1.0f - tanh * tanh; }

// Row (within the warp) and column of element i of accumulator (m, n) in this thread.
__device__ inline int row_of(int m, int i) { return 16 * m + threadIdx.x % WARP / 4 + i / 2 * 8; }
__device__ inline int column_of(int n, int i) { return 8 * n + threadIdx.x % 4 * 2 + i % 2; }

// Reductions over the 4 threads of a row.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}

__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Writes the rows of this warp that are below seq; rows r and r + 8 of each 16 have their own scale.
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
                *(Pair*)(to + row * stride + column_of(n, 0)) =
                    pack(c[m][n][2 * half] * scale[m][half], c[m][n][2 * half + 1] * scale[m][half]);
        }
}

// Bounds of a warp's 16 M rows in their documents, see qkv.cuh, relative to the first row: those of the first and the
// last row, and of this thread's. The latter are read when needed, to save registers.
template <int M>
struct Bounds {
    int first, last, row, count;
    const int* bounds;

    // `row` is the warp's first row.
    __device__ Bounds(const int* all, i64 row, i64 seq) : row((int)row), count((int)(seq - row)) {
        if constexpr (DOCUMENTS) {
            bounds = all + row;
            first = of(0), last = of(16 * M - 1);
        }
    }

    // Rows past the sequence have the last one's bound.
    __device__ int of(int i) const { return bounds[i < count ? i : count - 1] - row; }
};

// Whether a query sees a key of the same document, at positions relative to the same one.
__device__ inline bool is_visible(int query, int key, int window) {
    return WINDOWED ? (u32)(query - key) < (u32)window : key <= query;
}

// Whether any of 16 M queries sees any of 8 N keys. `offset` is the first query's position minus the first key's.
template <int M, int N>
__device__ inline bool any_visible(int offset, int window) {
    return offset + 16 * M > 0 && !(WINDOWED && offset - window >= 8 * N - 1);
}

// One step of the online softmax: the warp's queries, at `row` of q, attend to N * 8 keys. `offset` is the first
// query's position minus the first key's. o accumulates exp2(s - max) v; the running maximum and sum are kept per row.
template <int M, int N>
__device__ inline void online_softmax(float (&o)[M][WIDTH / 8][4], float (&row_max)[M][2], float (&row_sum)[M][2],
                                      const ACT* q, const ACT* k, const ACT* v, int row, int offset,
                                      const Scores& factors, const Bounds<M>& first_keys, int window) {
    if (!any_visible<M, N>(offset, window) || DOCUMENTS && first_keys.first + offset >= 8 * N) return;
    float s[M][N][4];
    scores(s, q, k, row);
    cap(s, factors);
    bool masked = 8 * N - 1 > offset || WINDOWED && offset + 16 * M > window;
    if (DOCUMENTS) masked = masked || first_keys.last + offset > 0;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            int query = offset + row_of(m, 2 * half);
            int first_key = DOCUMENTS && masked ? first_keys.of(row_of(m, 2 * half)) + offset : 0;
            float new_max = NEG_INF;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    int key = column_of(n, i);
                    if (masked && (!is_visible(query, key, window) || key < first_key)) s[m][n][i] = NEG_INF;
                    new_max = fmaxf(new_max, s[m][n][i]);
                }
            // Without a window and documents, the first step includes key 0, which every row sees, so the maximum is
            // finite from then on.
            new_max = fmaxf(row_max[m][half], quad_max(new_max) * factors.log2_factor);
            float shift = (WINDOWED || DOCUMENTS) && new_max == NEG_INF ? 0.0f : new_max;
            float rescale = exp2_approx(row_max[m][half] - shift), sum = 0.0f;
            row_max[m][half] = new_max;
#pragma unroll
            for (int n = 0; n < N; n++)
#pragma unroll
                for (int i = 2 * half; i < 2 * half + 2; i++) {
                    s[m][n][i] = exp2_approx(s[m][n][i] * factors.log2_factor - shift);
                    sum += s[m][n][i];
                }
            row_sum[m][half] = row_sum[m][half] * rescale + sum;
#pragma unroll
            for (int n = 0; n < WIDTH / 8; n++) o[m][n][2 * half] *= rescale, o[m][n][2 * half + 1] *= rescale;
        }
    accumulate(o, s, v);
}

// out = o / sum and lse = (max + log2(sum)) ln 2 for the warp's rows, from row `first`.
template <int M>
__device__ inline void write_output(ACT* out, i64 stride, float* lse, i64 first, i64 seq,
                                    const float (&o)[M][WIDTH / 8][4], const float (&row_max)[M][2],
                                    const float (&row_sum)[M][2]) {
    float inv_sum[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++) {
            i64 query = first + row_of(m, 2 * half);
            float sum = quad_sum(row_sum[m][half]);
            inv_sum[m][half] = 1.0f / sum;
            if (threadIdx.x % 4 == 0 && query < seq) lse[query] = (row_max[m][half] + log2f(sum)) * LN2;
        }
    write_rows(out, stride, first, seq, o, inv_sum);
}

// dq += ds k for the warp's queries, at `row` of q and o (dout), over N * 8 keys; the scale is applied when dq is
// written. ds = p (dp - delta), times the slope of the cap, with p = exp2(s - lse) and dp = dout v^T. row_lse is in
// base 2; `offset` as above.
template <int M, int N>
__device__ inline void query_gradients(float (&dq)[M][WIDTH / 8][4], const ACT* q, const ACT* o, const ACT* k,
                                       const ACT* v, const float (&row_lse)[M][2], const float (&row_delta)[M][2],
                                       int row, int offset, const Scores& factors, const Bounds<M>& first_keys,
                                       int window) {
    if (!any_visible<M, N>(offset, window) || DOCUMENTS && first_keys.first + offset >= 8 * N) return;
    float s[M][N][4], dp[M][N][4];
    scores(s, q, k, row);
    cap(s, factors);
    scores(dp, o, v, row);
    bool masked = 8 * N - 1 > offset || WINDOWED && offset + 16 * M > window;
    if (DOCUMENTS) masked = masked || first_keys.last + offset > 0;
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int i = 0; i < 4; i++) {
            int query = offset + row_of(m, i);
            int first_key = DOCUMENTS && masked ? first_keys.of(row_of(m, i)) + offset : 0;
#pragma unroll
            for (int n = 0; n < N; n++) {
                int key = column_of(n, i);
                bool visible = !masked || is_visible(query, key, window) && key >= first_key;
                float p = visible ? exp2_approx(s[m][n][i] * factors.log2_factor - row_lse[m][i / 2]) : 0.0f;
                float slope = CAPPED ? cap_slope(s[m][n][i]) : 1.0f;
                s[m][n][i] = p * (dp[m][n][i] - row_delta[m][i / 2]) * slope;
            }
        }
    accumulate(dq, s, k);
}

// dv += p^T dout and dk += ds^T q for the warp's keys, at `row` of k and v, over N * 8 queries with their o (dout), lse
// (base 2) and delta; DK and DV select which of the two are computed. `offset` is the first key's position minus the
// first query's. Here, rows of the scores are keys and columns are queries. The scale is applied when dk is written.
template <bool DK, bool DV, int M, int N>
__device__ inline void key_gradients(float (&dk)[M][WIDTH / 8][4], float (&dv)[M][WIDTH / 8][4], const ACT* k,
                                     const ACT* v, const ACT* q, const ACT* o, const float* lse, const float* delta,
                                     int row, int offset, const Scores& factors, const Bounds<M>& last_queries,
                                     int window) {
    // All keys are after the last query, or before the first one's window or document, so nothing is visible.
    if (offset >= 8 * N || WINDOWED && offset + 16 * M - 1 <= -window) return;
    if (DOCUMENTS && last_queries.last + offset < 0) return;
    float s[M][N][4], dp[M][N][4];
    scores(s, k, q, row);
    cap(s, factors);
    if constexpr (DK) scores(dp, v, o, row);
    bool masked = offset + 16 * M - 1 > 0 || WINDOWED && 8 * N - 1 - offset >= window;
    if (DOCUMENTS) masked = masked || last_queries.first + offset < 8 * N - 1;
    int last_query[M][2];
#pragma unroll
    for (int m = 0; m < M; m++)
#pragma unroll
        for (int half = 0; half < 2; half++)
            last_query[m][half] = DOCUMENTS && masked ? last_queries.of(row_of(m, 2 * half)) + offset : 8 * N;
#pragma unroll
    for (int n = 0; n < N; n++) {
        float2 column_lse = *(const float2*)(lse + column_of(n, 0));
        float2 column_delta = *(const float2*)(delta + column_of(n, 0));
#pragma unroll
        for (int m = 0; m < M; m++)
#pragma unroll
            for (int i = 0; i < 4; i++) {
                int query = column_of(n, i);
                bool visible =
                    !masked || is_visible(query, offset + row_of(m, i), window) && query <= last_query[m][i / 2];
                float p = exp2_approx(s[m][n][i] * factors.log2_factor - (i % 2 ? column_lse.y : column_lse.x));
                p = visible ? p : 0.0f;
                float slope = CAPPED ? cap_slope(s[m][n][i]) : 1.0f;
                s[m][n][i] = p;
                if constexpr (DK) dp[m][n][i] = p * (dp[m][n][i] - (i % 2 ? column_delta.y : column_delta.x)) * slope;
            }
    }
    if constexpr (DV) accumulate(dv, s, o);
    if constexpr (DK) accumulate(dk, dp, q);
}

__device__ inline float dot8(const Packed<ACT>& a, const Packed<ACT>& b) {
    Vec8 x = unpack(a), y = unpack(b);
    float sum = 0.0f;
#pragma unroll
    for (int i = 0; i < 8; i++) sum += x.x[i] * y.x[i];
    return sum;
}
