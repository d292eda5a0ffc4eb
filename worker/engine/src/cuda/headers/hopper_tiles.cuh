// Common parts of our GEMMs for compute capability 9.0: tiles in shared memory and results in registers.
//
// A warpgroup multiplies 64 rows. Its results are in the registers defined by wgmma: of 8 columns, each thread has two
// neighbouring ones in row lane / 4 of its warp's 16 rows, and the same two in the row 8 below.

#define TILE_M 128
#define TILE_K 64
// Bytes of a tile of 64 x 64 elements.
#define SQUARE 8192

// Among each four lanes, lane i has word i of four groups of four words; afterwards it has the four words of group i.
__device__ inline void transpose(u32 (&w)[4]) {
    bool odd = threadIdx.x & 1, high = threadIdx.x & 2;
    u32 x = __shfl_xor_sync(FULL_WARP, odd ? w[0] : w[1], 1), y = __shfl_xor_sync(FULL_WARP, odd ? w[2] : w[3], 1);
    if (odd) w[0] = x, w[2] = y;
    else w[1] = x, w[3] = y;
    x = __shfl_xor_sync(FULL_WARP, high ? w[0] : w[2], 2), y = __shfl_xor_sync(FULL_WARP, high ? w[1] : w[3], 2);
    if (high) w[0] = x, w[1] = y;
    else w[2] = x, w[3] = y;
}

// Pairs of elements of 32 columns, as a thread has them in its registers.
struct Pairs {
    u32 upper[4], lower[4];
};

// Writes rows `row` to `row + 16` of 32 columns, 16 bytes per thread. `cols` is a multiple of 8.
__device__ inline void write(bf16* c, i64 stride, int row, int rows, int col, int cols, Pairs& x) {
    transpose(x.upper);
    transpose(x.lower);
    int lane = threadIdx.x % WARP;
    row += lane / 4, col += lane % 4 * 8;
    if (col >= cols) return;
    bf16* to = c + row * stride + col;
    if (row < rows) *(uint4*)to = make_uint4(x.upper[0], x.upper[1], x.upper[2], x.upper[3]);
    if (row + 8 < rows) *(uint4*)(to + 8 * stride) = make_uint4(x.lower[0], x.lower[1], x.lower[2], x.lower[3]);
}

// Writes rows `row` to `row + 16` of a warpgroup's results, as bf16, from column `col` on. `cols` is a multiple of 8.
template <int LENGTH>
__device__ inline void write_tile(const float (&d)[LENGTH], bf16* c, int row, int rows, int col, int cols) {
#pragma unroll
    for (int n = 0; n < 2 * LENGTH; n += 32) {
        Pairs x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* e = d + n / 2 + 4 * j;
            x.upper[j] = bf16_pair(e[0], e[1]), x.lower[j] = bf16_pair(e[2], e[3]);
        }
        write(c, cols, row, rows, col + n, cols, x);
    }
}
