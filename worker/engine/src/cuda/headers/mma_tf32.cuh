// Tile GEMMs of the attention kernels for float: mma.sync m16n8k8 on operands rounded to tf32. Head widths are
// multiples of 8.
//
// Thread t of each four supplies columns t and t + 4 of a left operand's row and receives columns 2 t and 2 t + 1 of an
// accumulator's row. The order of a contraction is free as long as both operands agree: here column t means 2 t, and t
// + 4 means 2 t + 1. So an accumulator can be used as a left operand without a shuffle, and rows are read two elements
// at a time.

// Offset of a chunk of 8 elements of a tile in shared memory. For WIDTH a multiple of 32 neither read pattern has bank
// conflicts: two elements of each of rows 0 to 3 or 4 to 7, or 8 elements of each even or each odd row.
__device__ inline int swizzle(int row, int chunk) {
#if WIDTH % 32 == 0
    return row * WIDTH + chunk / 4 * 32 + (chunk % 4 ^ (row >> 1 ^ row << 1) & 3) * 8;
#elif WIDTH % 16 == 0
    return row * WIDTH + (chunk ^ (row >> 1 & 1)) * 8;
#else
    return row * WIDTH + chunk * 8;
#endif
}

// c += a b: 16 x 8 by 8 x 8.
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) { mma_tf32(c, a, b0, b1); }

// Rounds to the nearest 10-bit mantissa: (x + 2^13 x) - 2^13 x, where the sum keeps only the upper bits of x. This is a
// pair of instructions; cvt.rna.tf32 compiles to more. NaN stays NaN; if 2^13 x overflows, the result is NaN.
__device__ inline u32 to_tf32(float x) { return __float_as_uint(fmaf(x, -8192.0f, x * 8193.0f)); }

// Rounds elements to operands once, in place, in the thread that copied them.
__device__ inline void prepare_copy(float* piece) {
    float4 x = *(float4*)piece;
    *(uint4*)piece = make_uint4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w));
}

typedef float2 Pair;
__device__ inline Pair pack(float first, float second) { return make_float2(first, second); }

// c[rows of this warp][N * 8 rows of b] += a b^T over the head width.
template <int M, int N>
__device__ inline void accumulate_rows(float (&c)[M][N][4], const float* a, const float* b, int warp_row) {
    int group = threadIdx.x % WARP / 4, column = threadIdx.x % 4 * 2;
    a += warp_row * WIDTH;
#pragma unroll
    for (int k = 0; k < WIDTH / 8; k++) {
        // The swizzle repeats every eight rows.
        int offset = swizzle(group, k) + column;
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            uint2 upper = *(const uint2*)(a + 16 * m * WIDTH + offset);
            uint2 lower = *(const uint2*)(a + (16 * m + 8) * WIDTH + offset);
            x[m][0] = upper.x, x[m][1] = lower.x, x[m][2] = upper.y, x[m][3] = lower.y;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint2 y = *(const uint2*)(b + 8 * n * WIDTH + offset);
#pragma unroll
            for (int m = 0; m < M; m++) mma(c[m][n], x[m], y.x, y.y);
        }
    }
}

// c[rows of this warp][WIDTH] += s b, where s are scores in registers with N * 8 columns, and b has N * 8 rows.
template <int M, int N>
__device__ inline void accumulate(float (&c)[M][WIDTH / 8][4], const float (&s)[M][N][4], const float* b) {
    int group = threadIdx.x % WARP / 4, row = threadIdx.x % 4 * 2;
#pragma unroll
    for (int k = 0; k < N; k++) {
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            x[m][0] = to_tf32(s[m][k][0]), x[m][1] = to_tf32(s[m][k][2]);
            x[m][2] = to_tf32(s[m][k][1]), x[m][3] = to_tf32(s[m][k][3]);
        }
#pragma unroll
        for (int n = 0; n < WIDTH / 8; n++) {
            const u32* eight = (const u32*)b + 8 * k * WIDTH + group;
            u32 y0 = eight[swizzle(row, n)], y1 = eight[swizzle(row + 1, n)];
#pragma unroll
            for (int m = 0; m < M; m++) mma(c[m][n], x[m], y0, y1);
        }
    }
}
