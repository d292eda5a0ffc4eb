// Products of attention_mma.cu on matrix units for float: mma.sync m16n8k8 of operands rounded to tf32. Head widths are
// multiples of 8.
//
// Thread t of four feeds an instruction columns t and t + 4 of a left operand's row, and gets columns 2 t and 2 t + 1 of a
// result's. The order of a contraction is free, though, as long as both operands keep to it: here t stands for 2 t, and
// t + 4 for 2 t + 1. So a result is a left operand as it is, and rows are read by twos.

// Place of 8 elements of a tile in shared memory, so that neither of the products' reads meets a bank twice (where WIDTH is
// a multiple of 32): two elements of each of rows 0 to 3 or 4 to 7, or 8 elements of each even or each odd row.
__device__ inline int at(int row, int chunk) {
#if WIDTH % 32 == 0
    return row * WIDTH + chunk / 4 * 32 + (chunk % 4 ^ (row >> 1 ^ row << 1) & 3) * 8;
#elif WIDTH % 16 == 0
    return row * WIDTH + (chunk ^ (row >> 1 & 1)) * 8;
#else
    return row * WIDTH + chunk * 8;
#endif
}

// c += a b for 16 rows, 8 columns, 8 products each.
__device__ inline void mma(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
}

// To the nearest of 10 bits of mantissa: x and 2^13 x lie so far apart that their sum keeps no more of x. (cvt.rna.tf32 is
// more instructions.) NaN stays NaN; what 2^13 x overflows for becomes NaN.
__device__ inline u32 to_tf32(float x) { return __float_as_uint(fmaf(x, -8192.0f, x * 8193.0f)); }

// Elements become operands once, in place.
__device__ inline void prepare_piece(float* piece) {
    float4 x = *(float4*)piece;
    *(uint4*)piece = make_uint4(to_tf32(x.x), to_tf32(x.y), to_tf32(x.z), to_tf32(x.w));
}

typedef float2 Two;
__device__ inline Two pack(float first, float second) { return make_float2(first, second); }

// c[rows of this warp][N * 8 rows of b] += a b^T over the head's width.
template <int M, int N>
__device__ inline void accumulate_rows(float (&c)[M][N][4], const float* a, const float* b, int warp_row) {
    int group = threadIdx.x % 32 / 4, column = threadIdx.x % 4 * 2;
    a += warp_row * WIDTH;
#pragma unroll
    for (int k = 0; k < WIDTH / 8; k++) {
        // The same in every eight rows.
        int place = at(group, k) + column;
        u32 x[M][4];
#pragma unroll
        for (int m = 0; m < M; m++) {
            uint2 upper = *(const uint2*)(a + 16 * m * WIDTH + place);
            uint2 lower = *(const uint2*)(a + (16 * m + 8) * WIDTH + place);
            x[m][0] = upper.x, x[m][1] = lower.x, x[m][2] = upper.y, x[m][3] = lower.y;
        }
#pragma unroll
        for (int n = 0; n < N; n++) {
            uint2 y = *(const uint2*)(b + 8 * n * WIDTH + place);
#pragma unroll
            for (int m = 0; m < M; m++) mma(c[m][n], x[m], y.x, y.y);
        }
    }
}

// c[rows of this warp][WIDTH] += s b, where s are scores in registers, N * 8 columns, and b has as many rows.
template <int M, int N>
__device__ inline void accumulate(float (&c)[M][WIDTH / 8][4], const float (&s)[M][N][4], const float* b) {
    int group = threadIdx.x % 32 / 4, row = threadIdx.x % 4 * 2;
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
            u32 y0 = eight[at(row, n)], y1 = eight[at(row + 1, n)];
#pragma unroll
            for (int m = 0; m < M; m++) mma(c[m][n], x[m], y0, y1);
        }
    }
}
