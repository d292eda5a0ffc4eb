// out = x + factor y, where x may be null; out may be x or y. Grid: one thread per ADD_SCALED_VECS vectors, which are a
// block's width apart.
extern "C" __global__ void add_scaled(const ACT* x, const ACT* y, ACT* out, i64 len, float factor) {
    pdl_wait_and_launch();
    bool wide = is_wide(x, len) && is_wide(y, len) && is_wide(out, len);
    i64 first = (blockIdx.x * (i64)blockDim.x * ADD_SCALED_VECS + threadIdx.x) * 8, step = blockDim.x * 8;
    Packed<ACT> xs[ADD_SCALED_VECS] = {}, ys[ADD_SCALED_VECS];
#pragma unroll
    for (int k = 0; k < ADD_SCALED_VECS; k++) {
        if (first + k * step >= len) break;
        ys[k] = fetch8(y, first + k * step, len, wide);
        if (x) xs[k] = fetch8(x, first + k * step, len, wide);
    }
#pragma unroll
    for (int k = 0; k < ADD_SCALED_VECS; k++) {
        if (first + k * step >= len) return;
        Vec8 a = unpack(xs[k]), b = unpack(ys[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) a.x[j] += factor * b.x[j];
        store8(out, first + k * step, len, wide, a);
    }
}

// y += x in float. Grid-stride loops.
template <typename T>
__device__ inline void add_to(const T* x, float* y, i64 len) {
    bool wide = is_wide(x, len) && is_wide(y, len);
    FOR_EIGHT(i, len, blockIdx.x, gridDim.x) {
        Vec8 a = load8(x, i, len, wide), sum = load8(y, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += a.x[j];
        store8(y, i, len, wide, sum);
    }
}

extern "C" __global__ void add_f32(const float* x, float* y, i64 len) {
    pdl_wait_and_launch();
    add_to(x, y, len);
}

extern "C" __global__ void add_bf16(const bf16* x, float* y, i64 len) {
    pdl_wait_and_launch();
    add_to(x, y, len);
}
