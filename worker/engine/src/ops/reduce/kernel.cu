// Reductions in two stages with a fixed grid and order, so that the same input gives the same bits.

// partials[block] = sum of x over the elements of that block.
extern "C" __global__ void sum_partials(const float* x, float* partials, i64 len) {
    pdl_wait_and_launch();
    float sum = 0.0f;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Vectors that a thread fetches at once.
#define SQUARE_VECS 4

template <typename T>
__device__ inline float squared_norm(const T* __restrict__ x, i64 len) {
    bool wide = is_wide(x, len);
    i64 step = gridDim.x * (i64)blockDim.x * 8;
    float sum = 0.0f;
    for (i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; first < len; first += SQUARE_VECS * step) {
        Packed<T> p[SQUARE_VECS] = {};
#pragma unroll
        for (int k = 0; k < SQUARE_VECS; k++)
            if (first + k * step < len) p[k] = fetch8(x, first + k * step, len, wide);
#pragma unroll
        for (int k = 0; k < SQUARE_VECS; k++) {
            Vec8 e = unpack(p[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += e.x[j] * e.x[j];
        }
    }
    return sum;
}

// partials[block] = sum of x^2 over the elements of that block.
extern "C" __global__ void squared_norm_partials(const void* x, bool x_bf16, float* partials, i64 len) {
    pdl_wait_and_launch();
    float sum = x_bf16 ? squared_norm((const bf16*)x, len) : squared_norm((const float*)x, len);
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out[0] (+)= scale * sum(partials), with the factor in `memory` if there is one. One block.
extern "C" __global__ void sum_final(const float* partials, i64 count, float constant, const float* memory, float* out,
                                     bool add) {
    pdl_wait_and_launch();
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum) * (memory ? *memory : constant);
    if (threadIdx.x == 0) out[0] = add ? out[0] + sum : sum;
}

// Rows that a thread fetches at once.
#define COLUMN_SUM_ROWS 4

// Column sums of dy (N, C), the gradient of a bias: partials (gridDim.y, C) = sum of dy over the rows of each grid row.
//
// Grid: (C / (8 COLUMN_BLOCK_X), any number); rows are taken round-robin. Block: (COLUMN_BLOCK_X, COLUMN_BLOCK_Y)
// threads of 8 columns each.
extern "C" __global__ void column_sum_partials(const ACT* __restrict__ dy, float* __restrict__ partials, i64 rows,
                                               i64 cols) {
    pdl_wait_and_launch();
    i64 c = (blockIdx.x * (i64)COLUMN_BLOCK_X + threadIdx.x) * 8, step = gridDim.y * COLUMN_BLOCK_Y;
    i64 end = c < cols ? rows : 0;
    bool wide = is_wide(dy, cols);
    Vec8 sum = {};
    for (i64 first = blockIdx.y * COLUMN_BLOCK_Y + threadIdx.y; first < end; first += COLUMN_SUM_ROWS * step) {
        Packed<ACT> dys[COLUMN_SUM_ROWS] = {};
#pragma unroll
        for (int i = 0; i < COLUMN_SUM_ROWS; i++)
            if (first + i * step < end) dys[i] = fetch8(dy + (first + i * step) * cols, c, cols, wide);
#pragma unroll
        for (int i = 0; i < COLUMN_SUM_ROWS; i++) {
            Vec8 d = unpack(dys[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
        }
    }
    store_column_sums(sum, partials + blockIdx.y * cols, c, cols);
}

// out[c] (+)= sum of partials[.., c], for up to three outputs with consecutive partials (count, C) each.
//
// Grid: (C / FINAL_TILE, outputs); block (FINAL_TILE, FINAL_TILE), where FINAL_TILE divides the warp size.
extern "C" __global__ void column_sum_final(const float* __restrict__ partials, i64 count, i64 cols, void* first,
                                            void* second, void* third, bool out_bf16, bool add) {
    pdl_wait_and_launch();
    __shared__ float sums[FINAL_TILE][FINAL_TILE + 1];
    void* out = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    i64 c = blockIdx.x * (i64)FINAL_TILE + threadIdx.x;
    partials += blockIdx.y * count * cols;
    float sum = 0.0f;
    if (c < cols)
#pragma unroll 4
        for (i64 i = threadIdx.y; i < count; i += FINAL_TILE) sum += partials[i * cols + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // Transposed through shared memory, so that neighbouring threads reduce one column.
    sum = sums[threadIdx.x][threadIdx.y];
    for (int lane = FINAL_TILE / 2; lane > 0; lane /= 2) sum += __shfl_xor_sync(FULL_WARP, sum, lane);
    c = blockIdx.x * (i64)FINAL_TILE + threadIdx.y;
    if (threadIdx.x == 0 && c < cols) store_grad(out, out_bf16, c, add ? load_grad(out, out_bf16, c) + sum : sum);
}
