// Sums in two stages of fixed shape, so that the same input gives the same bits.

// partials[block] = sum of x, or of its squares, over the elements of that block.
extern "C" __global__ void sum_partials(const float* x, float* partials, i64 len) {
    after_the_kernel_before();
    float sum = 0.0f;
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) sum += x[i];
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// Eights of a thread at once.
#define EIGHTS 4

template <typename T>
__device__ inline float square_sum(const T* __restrict__ x, i64 len) {
    bool wide = is_wide(x, len);
    i64 step = gridDim.x * (i64)blockDim.x * 8;
    float sum = 0.0f;
    for (i64 first = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; first < len; first += EIGHTS * step) {
        Packed<T> p[EIGHTS] = {};
#pragma unroll
        for (int k = 0; k < EIGHTS; k++)
            if (first + k * step < len) p[k] = fetch8(x, first + k * step, len, wide);
#pragma unroll
        for (int k = 0; k < EIGHTS; k++) {
            Eight e = unpack(p[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += e.x[j] * e.x[j];
        }
    }
    return sum;
}

extern "C" __global__ void square_sum_partials(const void* x, bool x_bf16, float* partials, i64 len) {
    after_the_kernel_before();
    float sum = x_bf16 ? square_sum((const bf16*)x, len) : square_sum((const float*)x, len);
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x] = sum;
}

// out[0] (+)= scale * sum of count partials. One block.
extern "C" __global__ void sum_final(const float* partials, i64 count, float scale, float* out, bool add) {
    after_the_kernel_before();
    float sum = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) sum += partials[i];
    sum = block_sum(sum) * scale;
    if (threadIdx.x == 0) out[0] = add ? out[0] + sum : sum;
}

// Rows of a thread at once.
#define ROWS 4

// Column sums of dy, for a bias: partials [rows of blocks, cols], each row of blocks over its rows of dy.
//
// Grid: (cols / 256, any number of rows of blocks, which take rows in turn); block (32 times 8 columns, 8 rows).
extern "C" __global__ void column_sum_partials(const ACT* __restrict__ dy, float* __restrict__ partials, i64 rows,
                                               i64 cols) {
    after_the_kernel_before();
    i64 c = (blockIdx.x * 32ll + threadIdx.x) * 8, step = gridDim.y * 8, end = c < cols ? rows : 0;
    bool wide = is_wide(dy, cols);
    Eight sum = {};
    for (i64 first = blockIdx.y * 8 + threadIdx.y; first < end; first += ROWS * step) {
        Packed<ACT> dys[ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++)
            if (first + i * step < end) dys[i] = fetch8(dy + (first + i * step) * cols, c, cols, wide);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Eight d = unpack(dys[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
        }
    }
    sum_of_rows(sum, partials + blockIdx.y * cols, c, cols);
}

// out[c] (+)= sum of partials[.., c], for up to three outputs whose partials [count, cols] lie behind each other.
//
// Grid: (cols / 32, outputs); block (32, 32).
extern "C" __global__ void column_sum_final(const float* __restrict__ partials, i64 count, i64 cols, void* first,
                                            void* second, void* third, bool out_bf16, bool add) {
    after_the_kernel_before();
    __shared__ float sums[32][33];
    void* out = blockIdx.y == 0 ? first : blockIdx.y == 1 ? second : third;
    i64 c = blockIdx.x * 32ll + threadIdx.x;
    partials += blockIdx.y * count * cols;
    float sum = 0.0f;
    if (c < cols)
#pragma unroll 4
        for (i64 i = threadIdx.y; i < count; i += 32) sum += partials[i * cols + c];
    sums[threadIdx.y][threadIdx.x] = sum;
    __syncthreads();
    // One column a warp.
    sum = warp_sum(sums[threadIdx.x][threadIdx.y]);
    c = blockIdx.x * 32ll + threadIdx.y;
    if (threadIdx.x == 0 && c < cols) store_grad(out, out_bf16, c, add ? load_grad(out, out_bf16, c) + sum : sum);
}
