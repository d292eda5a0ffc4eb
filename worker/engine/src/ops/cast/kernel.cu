// y = x between element types, rounding to nearest even. Grid-stride loops.

extern "C" __global__ void cast_f32_bf16(const float* x, bf16* y, i64 len) {
    pdl_wait_and_launch();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x)
        store(y, i, x[i]);
}

extern "C" __global__ void cast_bf16_f32(const bf16* x, float* y, i64 len) {
    pdl_wait_and_launch();
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x)
        y[i] = load(x, i);
}
