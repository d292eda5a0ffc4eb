// Sums in two stages of fixed shape, so that the same input gives the same bits.

// partials[block] = sum of x, or of its squares, over the elements of that block.
extern "C" __global__ void sum_partials(const float* x, float* partials, i64 len) {
    float sum = 0.0f;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

template <typename T>
__device__ inline float square_sum(const T* x, i64 len) {
    bool wide = is_wide(x, len);
    float sum = 0.0f;
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        Eight e = load8(x, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += e.x[j] * e.x[j];
    }
    return sum;
}

extern "C" __global__ void square_sum_partials(const void* x, bool x_bf16, float* partials, i64 len) {
    float sum = x_bf16 ? square_sum((const bf16*)x, len) : square_sum((const float*)x, len);
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out[0] (+)= scale * sum of count partials. One block.
extern "C" __global__ void sum_final(const float* partials, i64 count, float scale, float* out, bool add) {
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum) * scale;
    if (threadIdx.x == 0) out[0] = add ? out[0] + sum : sum;
}

// Column sums of ROWS rows of dy, for a bias: partials [blocks of rows, cols]. Grid and block as norm_bwd_params.
#define ROWS 128
extern "C" __global__ void column_sum_partials(const ACT* __restrict__ dy, float* __restrict__ partials, i64 rows,
                                               i64 cols) {
    i64 c = (blockIdx.x * 32ll + threadIdx.x) * 8;
    i64 first = blockIdx.y * (i64)ROWS, last = min(first + ROWS, rows);
    bool wide = is_wide(dy, cols);
    Eight sum = {};
    if (c < cols) {
#pragma unroll 4
        for (i64 row = first + threadIdx.y; row < last; row += 8) {
            Eight d = load8(dy + row * cols, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
        }
    }
    sum_of_rows(sum, partials + blockIdx.y * cols, c, cols);
}

// out[c] (+)= sum of partials[.., c]. Grid: C / 32; block (32, 8).
extern "C" __global__ void column_sum_final(const float* partials, i64 count, i64 cols, void* out, bool out_bf16,
                                            bool add) {
    __shared__ float sums[8][33];
    i64 c = blockIdx.x * 32ll + threadIdx.x;
    float sum = 0.0f;
    if (c < cols)
        for (i64 i = threadIdx.y; i < count; i += 8) sum += partials[i * cols + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    if (threadIdx.y > 0 || c >= cols) return;
    for (int i = 1; i < 8; i++) sum += sums[i][threadIdx.x];
    store_grad(out, out_bf16, c, add ? load_grad(out, out_bf16, c) + sum : sum);
}
