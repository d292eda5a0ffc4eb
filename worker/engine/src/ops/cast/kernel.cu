// y = x between element types, rounding to nearest even. Grid-stride loops.

template <typename From, typename To>
__device__ inline void cast(const From* x, To* y, i64 len) {
    bool wide = is_wide(x, len) && is_wide(y, len);
    FOR_EIGHT(i, len, blockIdx.x, gridDim.x) store8(y, i, len, wide, load8(x, i, len, wide));
}

extern "C" __global__ void cast_f32_bf16(const float* x, bf16* y, i64 len) {
    pdl_wait_and_launch();
    cast(x, y, len);
}

extern "C" __global__ void cast_bf16_f32(const bf16* x, float* y, i64 len) {
    pdl_wait_and_launch();
    cast(x, y, len);
}
