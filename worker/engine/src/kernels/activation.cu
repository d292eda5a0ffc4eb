// GELU (tanh form) and the gated SiLU of llama, element by element.

#define GELU_SCALE 0.7978845608f
#define GELU_CUBE 0.044715f

extern "C" __global__ void gelu_fwd(const ACT* h, ACT* a, i64 len) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) {
        float x = load(h, i);
        store(a, i, 0.5f * x * (1.0f + tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x))));
    }
}

extern "C" __global__ void gelu_bwd(const ACT* h, const ACT* da, ACT* dh, i64 len) {
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) {
        float x = load(h, i), t = tanhf(GELU_SCALE * (x + GELU_CUBE * x * x * x));
        float slope = GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
        store(dh, i, load(da, i) * (0.5f * (1.0f + t) + 0.5f * x * (1.0f - t * t) * slope));
    }
}

__device__ inline float sigmoid(float x) { return 1.0f / (1.0f + expf(-x)); }

// Grid: one block per row; h [N,2F] holds g and u side by side.
extern "C" __global__ void swiglu_fwd(const ACT* h, ACT* a, i64 ffn) {
    const ACT* g = h + blockIdx.x * 2ll * ffn;
    for (i64 i = threadIdx.x; i < ffn; i += blockDim.x) {
        float x = load(g, i);
        store(a + blockIdx.x * ffn, i, x * sigmoid(x) * load(g, ffn + i));
    }
}

extern "C" __global__ void swiglu_bwd(const ACT* h, const ACT* da, ACT* dh, i64 ffn) {
    const ACT* g = h + blockIdx.x * 2ll * ffn;
    ACT* dg = dh + blockIdx.x * 2ll * ffn;
    for (i64 i = threadIdx.x; i < ffn; i += blockDim.x) {
        float x = load(g, i), u = load(g, ffn + i), d = load(da + blockIdx.x * ffn, i), gate = sigmoid(x);
        store(dg, ffn + i, d * x * gate);
        store(dg, i, d * u * gate * (1.0f + x * (1.0f - gate)));
    }
}
