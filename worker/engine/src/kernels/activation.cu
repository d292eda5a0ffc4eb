// GELU (tanh form) and the gated SiLU of llama, eight elements at a time.

#define GELU_SCALE 0.7978845608f
#define GELU_CUBE 0.044715f

extern "C" __global__ void gelu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a, i64 len) {
    bool wide = is_wide(h, len) && is_wide(a, len);
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        Eight e = load8(h, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float x = e.x[j];
            e.x[j] = 0.5f * x * (1.0f + tanh_for<ACT>(GELU_SCALE * (x + GELU_CUBE * x * x * x)));
        }
        store8(a, i, len, wide, e);
    }
}

extern "C" __global__ void gelu_bwd(const ACT* __restrict__ h, const ACT* __restrict__ da, ACT* __restrict__ dh, i64 len) {
    bool wide = is_wide(h, len) && is_wide(da, len) && is_wide(dh, len);
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        Eight e = load8(h, i, len, wide), d = load8(da, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float x = e.x[j], t = tanh_for<ACT>(GELU_SCALE * (x + GELU_CUBE * x * x * x));
            float slope = GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
            d.x[j] *= 0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope;
        }
        store8(dh, i, len, wide, d);
    }
}

// Grid: one block per row; h [N,2F] holds g and u side by side.
extern "C" __global__ void swiglu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a, i64 ffn) {
    const ACT *g = h + blockIdx.x * 2ll * ffn, *u = g + ffn;
    a += blockIdx.x * ffn;
    bool wide = is_wide(g, ffn) && is_wide(a, ffn);
    for (i64 i = threadIdx.x * 8ll; i < ffn; i += blockDim.x * 8ll) {
        Eight x = load8(g, i, ffn, wide), y = load8(u, i, ffn, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) y.x[j] *= x.x[j] * sigmoid_for<ACT>(x.x[j]);
        store8(a, i, ffn, wide, y);
    }
}

extern "C" __global__ void swiglu_bwd(const ACT* __restrict__ h, const ACT* __restrict__ da, ACT* __restrict__ dh, i64 ffn) {
    const ACT *g = h + blockIdx.x * 2ll * ffn, *u = g + ffn;
    ACT *dg = dh + blockIdx.x * 2ll * ffn, *du = dg + ffn;
    da += blockIdx.x * ffn;
    bool wide = is_wide(g, ffn) && is_wide(dg, ffn) && is_wide(da, ffn);
    for (i64 i = threadIdx.x * 8ll; i < ffn; i += blockDim.x * 8ll) {
        Eight x = load8(g, i, ffn, wide), y = load8(u, i, ffn, wide), d = load8(da, i, ffn, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float gate = sigmoid_for<ACT>(x.x[j]), up = y.x[j];
            y.x[j] = d.x[j] * x.x[j] * gate;
            d.x[j] *= up * gate * (1.0f + x.x[j] * (1.0f - gate));
        }
        store8(du, i, ffn, wide, y);
        store8(dg, i, ffn, wide, d);
    }
}
