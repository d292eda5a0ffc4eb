// Linear layers with a few rows: y (N, O) = f(x (N, I) w (O, I)^T + bias), where f is the identity or an activation
// function, selected by its number; y is bf16 or float.
//
// Weights are read once, with 16-byte loads. The sum of an output has the same order for every number of rows.

__device__ inline float gemv_finish(float x, const ACT* bias, i64 output, i64 activation) {
    if (bias) x += load(bias, output);
    switch (activation) {
        case SILU: return x * gate<SILU>(x);
        case GELU: return x * gate<GELU>(x);
        case GELU_TANH: return x * gate<GELU_TANH>(x);
        case RELU2: return x * gate<RELU2>(x);
        case QUICK_GELU: return x * gate<QUICK_GELU>(x);
        default: return x;
    }
}

// Rows whose sums a warp of gemv_fma keeps at a time.
#define FMA_ROWS 8

// On FP32 units, for any element type and any I. Grid: one warp per output.
extern "C" __global__ void gemv_fma(const ACT* __restrict__ x, const ACT* __restrict__ w, const ACT* __restrict__ bias,
                                    void* __restrict__ y, bool y_bf16, i64 activation, i64 rows, i64 inputs,
                                    i64 outputs) {
    pdl_wait_and_launch();
    i64 output = blockIdx.x * (i64)(blockDim.x / WARP) + threadIdx.x / WARP;
    if (output >= outputs) return;
    int lane = threadIdx.x % WARP;
    w += output * inputs;
    bool wide = is_wide(w, inputs) && is_wide(x, inputs);
    for (i64 first = 0; first < rows; first += FMA_ROWS) {
        float sums[FMA_ROWS] = {};
#pragma unroll 2
        for (i64 i = lane * 8; i < inputs; i += WARP * 8) {
            Vec8 weights = load8(w, i, inputs, wide);
#pragma unroll
            for (int r = 0; r < FMA_ROWS; r++) {
                if (first + r >= rows) continue;
                Vec8 values = load8(x + (first + r) * inputs, i, inputs, wide);
#pragma unroll
                for (int j = 0; j < 8; j++) sums[r] += weights.x[j] * values.x[j];
            }
        }
#pragma unroll
        for (int r = 0; r < FMA_ROWS; r++) {
            if (first + r >= rows) continue;
            float sum = warp_sum(sums[r]);
            if (lane > 0) continue;
            store_grad(y, y_bf16, (first + r) * outputs + output, gemv_finish(sum, bias, output, activation));
        }
    }
}

// bf16 on tensor cores: a block computes 16 outputs of up to 8 TILES rows; its warps split the inputs, 32 at a time.
//
// The order of the inputs within a multiplication is free as long as it is the same in both operands: each thread takes
// eight neighbouring inputs of its rows, which are one 16-byte load, as its parts of two multiplications.
template <int TILES>
__device__ inline void gemv_tiles(const ACT* x, const ACT* w, const ACT* bias, void* y, bool y_bf16, i64 activation,
                                  i64 rows, i64 inputs, i64 outputs) {
    __shared__ float partials[GEMV_WARPS][8 * TILES][17];
    int warp = threadIdx.x / WARP, warps = blockDim.x / WARP, group = threadIdx.x % WARP / 4, part = threadIdx.x % 4;
    i64 first = blockIdx.x * 16ll, low = first + group, high = low + 8;
    float sums[TILES][4] = {};
    const uint4 zero = make_uint4(0, 0, 0, 0);
#pragma unroll 4
    for (i64 i = warp * 32 + part * 8; i < inputs; i += warps * 32) {
        uint4 a = low < outputs ? *(const uint4*)(w + low * inputs + i) : zero;
        uint4 b = high < outputs ? *(const uint4*)(w + high * inputs + i) : zero;
#pragma unroll
        for (int t = 0; t < TILES; t++) {
            i64 row = t * 8 + group;
            uint4 c = row < rows ? *(const uint4*)(x + row * inputs + i) : zero;
            mma_bf16(sums[t], {a.x, b.x, a.y, b.y}, c.x, c.y);
            mma_bf16(sums[t], {a.z, b.z, a.w, b.w}, c.z, c.w);
        }
    }
#pragma unroll
    for (int t = 0; t < TILES; t++) {
        int row = t * 8 + part * 2;
        partials[warp][row][group] = sums[t][0];
        partials[warp][row + 1][group] = sums[t][1];
        partials[warp][row][group + 8] = sums[t][2];
        partials[warp][row + 1][group + 8] = sums[t][3];
    }
    __syncthreads();
    for (int i = threadIdx.x; i < 16 * rows; i += blockDim.x) {
        int row = i / 16, column = i % 16;
        i64 output = first + column;
        if (output >= outputs) continue;
        float sum = 0.0f;
        for (int other = 0; other < warps; other++) sum += partials[other][row][column];
        store_grad(y, y_bf16, row * outputs + output, gemv_finish(sum, bias, output, activation));
    }
}

// Grid of all three: one block per 16 outputs, with at most GEMV_WARPS warps. I is a multiple of 32.
extern "C" __global__ void gemv_mma_8(const ACT* __restrict__ x, const ACT* __restrict__ w,
                                      const ACT* __restrict__ bias, void* __restrict__ y, bool y_bf16, i64 activation,
                                      i64 rows, i64 inputs, i64 outputs) {
    pdl_wait_and_launch();
    gemv_tiles<1>(x, w, bias, y, y_bf16, activation, rows, inputs, outputs);
}

extern "C" __global__ void gemv_mma_16(const ACT* __restrict__ x, const ACT* __restrict__ w,
                                       const ACT* __restrict__ bias, void* __restrict__ y, bool y_bf16, i64 activation,
                                       i64 rows, i64 inputs, i64 outputs) {
    pdl_wait_and_launch();
    gemv_tiles<2>(x, w, bias, y, y_bf16, activation, rows, inputs, outputs);
}

extern "C" __global__ void gemv_mma_32(const ACT* __restrict__ x, const ACT* __restrict__ w,
                                       const ACT* __restrict__ bias, void* __restrict__ y, bool y_bf16, i64 activation,
                                       i64 rows, i64 inputs, i64 outputs) {
    pdl_wait_and_launch();
    gemv_tiles<4>(x, w, bias, y, y_bf16, activation, rows, inputs, outputs);
}
