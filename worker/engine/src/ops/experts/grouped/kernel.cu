// Linear layers of experts over rows that are sorted by expert: see mod.rs. A block computes a tile of GROUP_TILE x
// GROUP_TILE elements of one expert, with mma.sync in bf16 and on FP32 units otherwise.
//
// An operand is along the sum (its rows in memory are the tile's rows, as x and w in forward) or across it (its rows in
// memory are summed over, as w in the input's gradient, and both operands in the weights' gradient). Tiles are copied
// by cp.async through a ring of GROUP_STAGES stages.

#define THREADS BLOCK_THREADS
// Elements of a tile along the sum, of a copy of 16 bytes, and of the padding of its rows.
#define DEPTH (GROUP_DEPTH_BYTES / (int)sizeof(ACT))
#define PER_COPY (16 / (int)sizeof(ACT))
#define ALONG_PITCH (DEPTH + PER_COPY)
#define ACROSS_PITCH (GROUP_TILE + PER_COPY)
#define TILE_ELEMENTS (GROUP_TILE * ALONG_PITCH)

// The part of a matrix from which a block reads tiles: `extent` rows of the tile are inside the matrix.
struct Operand {
    const ACT* p;
    i64 stride;
    int extent;
    bool wide;
};

// Copies ROWS x COLS elements, of which `rows` x `cols` exist; the others become zero. `wide`: rows can be copied as
// vectors.
template <int ROWS, int COLS>
__device__ inline void copy_tile(ACT* tile, const ACT* from, i64 stride, int rows, int cols, bool wide) {
    constexpr int COPIES = COLS / PER_COPY, PITCH = COLS + PER_COPY;
#pragma unroll
    for (int i = threadIdx.x; i < ROWS * COPIES; i += THREADS) {
        int r = i / COPIES, c = i % COPIES * PER_COPY;
        ACT* to = tile + r * PITCH + c;
        if (wide) {
            bool exists = r < rows && c < cols;
            copy_async_16(to, exists ? from + r * stride + c : from, exists ? 16 : 0);
        } else {
            for (int j = 0; j < PER_COPY; j++)
                store(to, j, r < rows && c + j < cols ? load(from + r * stride, c + j) : 0.0f);
        }
    }
}

template <bool ACROSS>
__device__ inline void copy_stage(ACT* tile, const Operand& x, int begin, int depth) {
    if constexpr (ACROSS)
        copy_tile<DEPTH, GROUP_TILE>(tile, x.p + begin * x.stride, x.stride, depth - begin, x.extent, x.wide);
    else copy_tile<GROUP_TILE, DEPTH>(tile, x.p + begin, x.stride, x.extent, depth - begin, x.wide);
}

// The sums of a thread, and the products of a stage. Sums are written in pairs of neighbouring columns.
template <typename T>
struct Sums;

// Eight warps in two rows; each has 64 x 32 elements.
template <>
struct Sums<bf16> {
    float c[4][4][4];

    template <bool ACROSS>
    static __device__ const bf16* at(const bf16* tile, int row, int k) {
        return tile + (ACROSS ? k * ACROSS_PITCH + row : row * ALONG_PITCH + k);
    }

    template <bool A_ACROSS, bool B_ACROSS>
    __device__ void add(const bf16* a, const bf16* b) {
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP, row = warp / 4 * 64, col = warp % 4 * 32;
        int low = lane % 8, second = lane / 8 % 2 * 8, third = lane / 16 * 8;
#pragma unroll
        for (int k = 0; k < DEPTH; k += 16) {
            u32 x[4][4], y[2][4];
#pragma unroll
            for (int m = 0; m < 4; m++) {
                // The second of the four matrices has the next eight rows, the third the next eight products.
                const bf16* p = at<A_ACROSS>(a, row + 16 * m + second, k + third);
                if constexpr (A_ACROSS) ldmatrix_x4_transposed(x[m], p + low * ACROSS_PITCH);
                else ldmatrix_x4(x[m], p + low * ALONG_PITCH);
            }
#pragma unroll
            for (int n = 0; n < 2; n++) {
                // Here it is the other way round.
                const bf16* p = at<B_ACROSS>(b, col + 16 * n + third, k + second);
                if constexpr (B_ACROSS) ldmatrix_x4_transposed(y[n], p + low * ACROSS_PITCH);
                else ldmatrix_x4(y[n], p + low * ALONG_PITCH);
            }
#pragma unroll
            for (int m = 0; m < 4; m++)
#pragma unroll
                for (int n = 0; n < 4; n++) mma_bf16(c[m][n], x[m], y[n / 2][n % 2 * 2], y[n / 2][n % 2 * 2 + 1]);
        }
    }

    // Calls f(row, column, sum, next column's sum).
    template <typename F>
    __device__ void each(F f) const {
        int lane = threadIdx.x % WARP, warp = threadIdx.x / WARP;
        int row = warp / 4 * 64 + lane / 4, col = warp % 4 * 32 + lane % 4 * 2;
#pragma unroll
        for (int m = 0; m < 4; m++)
#pragma unroll
            for (int n = 0; n < 4; n++) {
                f(row + 16 * m, col + 8 * n, c[m][n][0], c[m][n][1]);
                f(row + 16 * m + 8, col + 8 * n, c[m][n][2], c[m][n][3]);
            }
    }
};

// 16 x 16 threads; each has eight rows and four pairs of columns.
template <>
struct Sums<float> {
    float c[8][8];

    template <bool ACROSS>
    static __device__ float at(const float* tile, int row, int k) {
        return tile[ACROSS ? k * ACROSS_PITCH + row : row * ALONG_PITCH + k];
    }

    static __device__ int row(int i) { return threadIdx.x / 16 + 16 * i; }
    static __device__ int col(int i) { return threadIdx.x % 16 * 2 + 32 * (i / 2) + i % 2; }

    template <bool A_ACROSS, bool B_ACROSS>
    __device__ void add(const float* a, const float* b) {
#pragma unroll 4
        for (int k = 0; k < DEPTH; k++) {
            float x[8], y[8];
#pragma unroll
            for (int i = 0; i < 8; i++) x[i] = at<A_ACROSS>(a, row(i), k), y[i] = at<B_ACROSS>(b, col(i), k);
#pragma unroll
            for (int i = 0; i < 8; i++)
#pragma unroll
                for (int j = 0; j < 8; j++) c[i][j] += x[i] * y[j];
        }
    }

    template <typename F>
    __device__ void each(F f) const {
#pragma unroll
        for (int i = 0; i < 8; i++)
#pragma unroll
            for (int j = 0; j < 8; j += 2) f(row(i), col(j), c[i][j], c[i][j + 1]);
    }
};

// The sums over `depth` products of a tile.
template <bool A_ACROSS, bool B_ACROSS>
__device__ inline Sums<ACT> multiply(const Operand& a, const Operand& b, int depth) {
    extern __shared__ uint4 bytes[];
    ACT* tiles = (ACT*)bytes;
    auto copy = [&](int step) {
        ACT* tile = tiles + step % GROUP_STAGES * 2 * TILE_ELEMENTS;
        if (step * DEPTH < depth) {
            copy_stage<A_ACROSS>(tile, a, step * DEPTH, depth);
            copy_stage<B_ACROSS>(tile + TILE_ELEMENTS, b, step * DEPTH, depth);
        }
        // Even without copies, so that the number of groups is the number of steps.
        commit_copies();
    };
    Sums<ACT> sums = {};
    for (int step = 0; step < GROUP_STAGES - 1; step++) copy(step);
    for (int step = 0; step * DEPTH < depth; step++) {
        wait_copies<GROUP_STAGES - 2>();
        // All threads have copied this stage, and read the one before it, which is overwritten next.
        __syncthreads();
        copy(step + GROUP_STAGES - 1);
        const ACT* tile = tiles + step % GROUP_STAGES * 2 * TILE_ELEMENTS;
        sums.template add<A_ACROSS, B_ACROSS>(tile, tile + TILE_ELEMENTS);
    }
    return sums;
}

// Rows of one expert that are in a tile.
struct Group {
    int expert, first, rows;
};

// Looks up the rows of row tile `tile`; there are none past the last tile. Tiles do not cross from one expert to the
// next.
__device__ inline Group find_group(const int* offsets, int experts, int tile) {
    __shared__ Group group;
    if (threadIdx.x == 0) group = {0, 0, 0};
    __syncthreads();
    int before = 0;
    for (int first = 0; first < experts; first += THREADS) {
        int e = first + threadIdx.x, start = 0, end = 0;
        if (e < experts) start = offsets[e], end = offsets[e + 1];
        int tiles = (end - start + GROUP_TILE - 1) / GROUP_TILE;
        int at = tile - block_prefix_sum<THREADS / WARP>(tiles, before);
        if (at >= 0 && at < tiles) group = {e, start + at * GROUP_TILE, min(end - start - at * GROUP_TILE, GROUP_TILE)};
    }
    __syncthreads();
    return group;
}

// Stores two neighbouring elements of a row of `cols`, the first of which is at col.
__device__ inline void store_pair(float* row, int col, int cols, bool, float x, float y) {
    if (col < cols) row[col] = x;
    if (col + 1 < cols) row[col + 1] = y;
}

__device__ inline void store_pair(bf16* row, int col, int cols, bool wide, float x, float y) {
    if (wide) {
        if (col < cols) *(u32*)(row + col) = bf16_pair(x, y);
        return;
    }
    if (col < cols) store(row, col, x);
    if (col + 1 < cols) store(row, col + 1, y);
}

__device__ inline void write_rows(ACT* to, i64 cols, int col, const Group& group, bool wide, const Sums<ACT>& sums) {
    sums.each([&](int r, int c, float x, float y) {
        if (r < group.rows) store_pair(to + (group.first + r) * cols, col + c, (int)cols, wide, x, y);
    });
}

// y (M, O) from x (M, I) and w (E, O, I). Grid: tiles of columns, of all row tiles.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    grouped_fwd(const int* __restrict__ offsets, const ACT* __restrict__ x, const ACT* __restrict__ w,
                ACT* __restrict__ y, i64 experts, i64 inputs, i64 outputs, bool wide) {
    pdl_wait_and_launch();
    int across = (int)(outputs + GROUP_TILE - 1) / GROUP_TILE, col = blockIdx.x % across * GROUP_TILE;
    Group group = find_group(offsets, (int)experts, blockIdx.x / across);
    if (group.rows == 0) return;
    Operand a = {x + group.first * inputs, inputs, group.rows, wide};
    Operand b = {w + (group.expert * outputs + col) * inputs, inputs, (int)outputs - col, wide};
    write_rows(y, outputs, col, group, wide, multiply<false, false>(a, b, (int)inputs));
}

// dx (M, I) from dy (M, O) and w (E, O, I). Grid: as of grouped_fwd.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    grouped_bwd_input(const int* __restrict__ offsets, const ACT* __restrict__ dy, const ACT* __restrict__ w,
                      ACT* __restrict__ dx, i64 experts, i64 inputs, i64 outputs, bool wide) {
    pdl_wait_and_launch();
    int across = (int)(inputs + GROUP_TILE - 1) / GROUP_TILE, col = blockIdx.x % across * GROUP_TILE;
    Group group = find_group(offsets, (int)experts, blockIdx.x / across);
    if (group.rows == 0) return;
    Operand a = {dy + group.first * outputs, outputs, group.rows, wide};
    Operand b = {w + group.expert * outputs * inputs + col, inputs, (int)inputs - col, wide};
    write_rows(dx, inputs, col, group, wide, multiply<false, true>(a, b, (int)outputs));
}

// dw (E, O, I) from dy (M, O) and x (M, I). Grid: all tiles of all experts.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    grouped_bwd_weight(const int* __restrict__ offsets, const ACT* __restrict__ dy, const ACT* __restrict__ x,
                       void* dw, bool dw_bf16, bool add, i64 inputs, i64 outputs, bool wide) {
    pdl_wait_and_launch();
    int across = (int)(inputs + GROUP_TILE - 1) / GROUP_TILE, down = (int)(outputs + GROUP_TILE - 1) / GROUP_TILE;
    int expert = blockIdx.x / (across * down), tile = blockIdx.x % (across * down);
    int row = tile / across * GROUP_TILE, col = tile % across * GROUP_TILE;
    i64 first = offsets[expert];
    int depth = offsets[expert + 1] - (int)first;
    Operand a = {dy + first * outputs + row, outputs, (int)outputs - row, wide};
    Operand b = {x + first * inputs + col, inputs, (int)inputs - col, wide};
    Sums<ACT> sums = multiply<true, true>(a, b, depth);
    bool pairs = dw_bf16 && inputs % 2 == 0 && (unsigned long long)dw % 4 == 0;
    sums.each([&](int r, int c, float u, float v) {
        if (row + r >= outputs) return;
        i64 at = (expert * outputs + row + r) * inputs;
        if (add && col + c < inputs) u += load_grad(dw, dw_bf16, at + col + c);
        if (add && col + c + 1 < inputs) v += load_grad(dw, dw_bf16, at + col + c + 1);
        if (dw_bf16) store_pair((bf16*)dw + at, col + c, (int)inputs, pairs, u, v);
        else store_pair((float*)dw + at, col + c, (int)inputs, pairs, u, v);
    });
}
