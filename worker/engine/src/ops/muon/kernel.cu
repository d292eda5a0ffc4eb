// The parts of a Muon step that are not products of matrices. All of them are for steps that the AdamW kernel applies
// afterwards: see adamw/kernel.cu.

__device__ inline bool is_applied(const float* grad_norm_sq, const float* loss, const float* skipped,
                                  float skip_limit) {
    return isfinite(grad_norm_sq[0]) && isfinite(loss[0]) && *skipped < skip_limit;
}

// m = momentum m + (1 - momentum) g, update = (1 - momentum) g + momentum m, where the flag of the elements is
// MUON_FLAG. Grid-stride loop, eight elements per thread and iteration.
extern "C" __global__ void muon_momentum(const void* __restrict__ grads, bool grads_bf16, float* __restrict__ m,
                                         ACT* __restrict__ update, const u8* __restrict__ flags,
                                         const float* grad_norm_sq, const float* loss, const float* skipped, i64 len,
                                         float momentum, float max_norm, float skip_limit) {
    pdl_wait_and_launch();
    if (!is_applied(grad_norm_sq, loss, skipped, skip_limit)) return;
    float norm = sqrtf(grad_norm_sq[0]);
    float clip = max_norm > 0.0f && norm > max_norm ? max_norm / norm : 1.0f;
    bool wide = is_wide(m, len) && is_wide((const bf16*)grads, len) && is_wide(update, len);
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        // All eight elements share a flag: DECAY_CHUNK is a multiple of 8.
        if (flags[i / DECAY_CHUNK] != MUON_FLAG) continue;
        Vec8 g = grads_bf16 ? load8((const bf16*)grads, i, len, wide) : load8((const float*)grads, i, len, wide);
        Vec8 a = load8(m, i, len, wide), u;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float x = g.x[j] * clip;
            a.x[j] = momentum * a.x[j] + (1.0f - momentum) * x;
            u.x[j] = (1.0f - momentum) * x + momentum * a.x[j];
        }
        store8(m, i, len, wide, a);
        store8(update, i, len, wide, u);
    }
}

// out = x / (margin sqrt(norm_sq) + eps)
extern "C" __global__ void muon_scale(const ACT* __restrict__ x, ACT* __restrict__ out, const float* norm_sq, i64 len,
                                      float margin, float eps) {
    pdl_wait_and_launch();
    float factor = 1.0f / (margin * sqrtf(norm_sq[0]) + eps);
    bool wide = is_wide(x, len) && is_wide(out, len);
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        Vec8 v = load8(x, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) v.x[j] *= factor;
        store8(out, i, len, wide, v);
    }
}

// squared = a I + b gram + c squared, for (n, n) matrices.
extern "C" __global__ void muon_polynomial(const ACT* __restrict__ gram, ACT* __restrict__ squared, i64 n, float a,
                                           float b, float c) {
    pdl_wait_and_launch();
    i64 len = n * n;
    bool wide = is_wide(gram, len) && is_wide(squared, len);
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        Vec8 g = load8(gram, i, len, wide), s = load8(squared, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            bool diagonal = (i + j) / n == (i + j) % n;
            s.x[j] = b * g.x[j] + c * s.x[j] + (diagonal ? a : 0.0f);
        }
        store8(squared, i, len, wide, s);
    }
}

// params -= rate (factor update + weight_decay params). With `cautious`, weights decay only if the update has their
// sign. work (len,) or null.
extern "C" __global__ void muon_update(const ACT* __restrict__ update, float* __restrict__ params,
                                       bf16* __restrict__ work, const float* scalars, const float* grad_norm_sq,
                                       const float* loss, const float* skipped, i64 len, float factor,
                                       float weight_decay, bool cautious, float skip_limit) {
    pdl_wait_and_launch();
    if (!is_applied(grad_norm_sq, loss, skipped, skip_limit)) return;
    float rate = scalars[MUON_RATE];
    bool wide = is_wide(params, len) && is_wide(update, len) && is_wide(work, len);
    for (i64 i = (blockIdx.x * (i64)blockDim.x + threadIdx.x) * 8; i < len; i += gridDim.x * (i64)blockDim.x * 8) {
        Vec8 u = load8(update, i, len, wide), p = load8(params, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float decay = !cautious || u.x[j] * p.x[j] >= 0.0f ? weight_decay : 0.0f;
            p.x[j] -= rate * (factor * u.x[j] + decay * p.x[j]);
        }
        store8(params, i, len, wide, p);
        if (work) store8(work, i, len, wide, p);
    }
}
