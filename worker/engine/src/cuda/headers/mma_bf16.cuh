// Tile GEMMs of the attention kernels for bf16: mma.sync m16n8k16 on operands loaded by ldmatrix. Head widths are
// multiples of 16.
//
// Thread t of each four holds columns 2 t and 2 t + 1 of an accumulator's row; two accumulators of 8 columns form a
// left operand of 16 columns.

// Offset of a chunk of 8 elements of a tile in shared memory. The XOR puts the same chunk of eight rows, which ldmatrix
// reads together, into distinct banks.
__device__ inline int swizzle(int row, int chunk) {
#if WIDTH % 64 == 0
    return row * WIDTH + (chunk ^ (row & 7)) * 8;
#elif WIDTH % 32 == 0
    return row * WIDTH + (chunk ^ (row >> 1 & 3)) * 8;
#else
    return row * WIDTH + chunk * 8;
#endif
}

// bf16 elements are operands without conversion.
__device__ inline void prepare_copy(bf16*) {}

// c += a b: 16 x 16 by 16 x 8.
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_bf16(c, a, b0, b1); }

typedef u32 Pair;
__device__ inline Pair pack(float low, float high) { return bf16_pair(low, high); }

// c[rows of this warp][N * 8 rows of b] += a b^T over the head width.
template <int M, int N>
__device__ inline void accumulate_rows(float (&c)[M][N][4], const bf16* a, const bf16* b, int warp_row) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < WIDTH / 16; k++) {
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) ldmatrix_x4(x[m], a + swizzle(warp_row + 16 * m + lane % 16, 2 * k + lane / 16));
#pragma unroll
        for (int n = 0; n < N; n += 2) {
            u32 y[4];
            ldmatrix_x4(y, b + swizzle(8 * n + lane / 16 * 8 + lane % 8, 2 * k + lane / 8 % 2));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(c[m][n], x[m], y[0], y[1]);
                mma(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}

// c[rows of this warp][WIDTH] += s b, where s are scores in registers with N * 8 columns, and b has N * 8 rows.
template <int M, int N>
__device__ inline void accumulate(float (&c)[M][WIDTH / 8][4], const float (&s)[M][N][4], const bf16* b) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int k = 0; k < N / 2; k++) {
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            x[m][0] = pack(s[m][2 * k][0], s[m][2 * k][1]);
            x[m][1] = pack(s[m][2 * k][2], s[m][2 * k][3]);
            x[m][2] = pack(s[m][2 * k + 1][0], s[m][2 * k + 1][1]);
            x[m][3] = pack(s[m][2 * k + 1][2], s[m][2 * k + 1][3]);
        }
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n += 2) {
            u32 y[4];
            ldmatrix_x4_transposed(y, b + swizzle(16 * k + lane % 16, n + lane / 16));
#pragma unroll
            for (int m = 0; m < M; m++) {
                mma(c[m][n], x[m], y[0], y[1]);
                mma(c[m][n + 1], x[m], y[2], y[3]);
            }
        }
    }
}
