// x = cap tanh(x / cap), in place. Grid: one thread per SOFTCAP_VECS vectors, which are a block's width apart.

template <typename T>
__device__ inline void softcap(T* x, i64 len, float cap) {
    bool wide = is_wide(x, len);
    i64 first = (blockIdx.x * (i64)blockDim.x * SOFTCAP_VECS + threadIdx.x) * 8, step = blockDim.x * 8;
    Packed<T> xs[SOFTCAP_VECS];
#pragma unroll
    for (int k = 0; k < SOFTCAP_VECS; k++)
        if (first + k * step < len) xs[k] = fetch8(x, first + k * step, len, wide);
#pragma unroll
    for (int k = 0; k < SOFTCAP_VECS; k++) {
        if (first + k * step >= len) return;
        Vec8 e = unpack(xs[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] = cap * tanh_for<T>(e.x[j] / cap);
        store8(x, first + k * step, len, wide, e);
    }
}

extern "C" __global__ void softcap_f32(float* x, i64 len, float cap) {
    pdl_wait_and_launch();
    softcap(x, len, cap);
}

extern "C" __global__ void softcap_bf16(bf16* x, i64 len, float cap) {
    pdl_wait_and_launch();
    softcap(x, len, cap);
}
