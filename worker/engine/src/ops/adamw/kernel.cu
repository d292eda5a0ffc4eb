// One AdamW step over the flat arena (Loshchilov and Hutter, 2019). Learning rates and decays of groups of parameters,
// and the bias corrections c1, c2, are read from device memory, so that a captured step can be replayed with other
// values.
//
// A step whose loss or squared norm is not finite changes only `skipped`. Once `skipped` has reached skip_limit, no
// later step changes anything. One thread writes `skipped` while others read it; the order does not matter. If the step
// is not finite, all threads return, whichever value they read; otherwise the count is below the limit both before and
// after.
//
// Grid-stride loop, eight elements per thread and iteration. groups (len / GROUP_CHUNK,); work (len,) or null.
extern "C" __global__ void adamw(float* __restrict__ params, const void* __restrict__ grads, bool grads_bf16,
                                 float* __restrict__ m, float* __restrict__ v, bf16* __restrict__ work,
                                 const u8* __restrict__ groups, const float* scalars, const float* grad_norm_sq,
                                 const float* loss, volatile float* skipped, i64 len, float beta1, float beta2,
                                 float eps, float max_norm, float skip_limit) {
    pdl_wait_and_launch();
    float norm = sqrtf(grad_norm_sq[0]), skips = *skipped;
    bool finite = isfinite(grad_norm_sq[0]) && isfinite(loss[0]);
    if (finite && skips >= skip_limit) return;
    if (blockIdx.x == 0 && threadIdx.x == 0) *skipped = finite ? 0.0f : fminf(skips + 1.0f, skip_limit);
    if (!finite) return;
    // clip = min(1, max_norm / |g|)
    float clip = max_norm > 0.0f && norm > max_norm ? max_norm / norm : 1.0f;
    float c1 = scalars[CORRECTION1], c2 = scalars[CORRECTION2];
    bool wide = is_wide(params, len) && is_wide(m, len) && is_wide(v, len) && is_wide((const bf16*)grads, len) &&
                is_wide(work, len);
    FOR_EIGHT(i, len, blockIdx.x, gridDim.x) {
        // All eight elements share a group: GROUP_CHUNK is a multiple of 8.
        u8 group = groups[i / GROUP_CHUNK];
        if (group == MUON_GROUP) continue;
        float rate = scalars[LEARNING_RATES + group], decay = scalars[DECAYS + group];
        Vec8 g = grads_bf16 ? load8((const bf16*)grads, i, len, wide) : load8((const float*)grads, i, len, wide);
        Vec8 p = load8(params, i, len, wide), a = load8(m, i, len, wide), b = load8(v, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // g = clip g; m = beta1 m + (1 - beta1) g; v = beta2 v + (1 - beta2) g^2
            float x = g.x[j] * clip;
            a.x[j] = beta1 * a.x[j] + (1.0f - beta1) * x;
            b.x[j] = beta2 * b.x[j] + (1.0f - beta2) * x * x;
            // p -= rate (c1 m) / (sqrt(c2 v) + eps) + decay p
            p.x[j] -= rate * (a.x[j] * c1) / (sqrtf(b.x[j] * c2) + eps) + decay * p.x[j];
        }
        store8(m, i, len, wide, a);
        store8(v, i, len, wide, b);
        store8(params, i, len, wide, p);
        if (work) store8(work, i, len, wide, p);
    }
}
