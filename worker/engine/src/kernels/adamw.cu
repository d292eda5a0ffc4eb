// One AdamW step over the flat arena; the formula is with the CPU twin. Scalars come from device memory, so that a
// captured step can be replayed with others.

#define DECAY_CHUNK 64
#define LEARNING_RATE 0
#define CORRECTION1 1
#define CORRECTION2 2

extern "C" __global__ void adamw(float* params, const void* grads, bool grads_bf16, float* m, float* v, bf16* work,
                                 const u8* decay, const float* scalars, const float* square_sum, i64 len, float beta1,
                                 float beta2, float eps, float weight_decay, float max_norm) {
    float norm = sqrtf(square_sum[0]);
    float clip = max_norm > 0.0f && norm > max_norm ? max_norm / norm : 1.0f;
    float rate = scalars[LEARNING_RATE], c1 = scalars[CORRECTION1], c2 = scalars[CORRECTION2];
    for (i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x; i < len; i += gridDim.x * (i64)blockDim.x) {
        float g = load_grad(grads, grads_bf16, i) * clip, p = params[i];
        float m_new = beta1 * m[i] + (1.0f - beta1) * g;
        float v_new = beta2 * v[i] + (1.0f - beta2) * g * g;
        float shrink = decay[i / DECAY_CHUNK] == 1 ? rate * weight_decay : 0.0f;
        p -= rate * (m_new * c1) / (sqrtf(v_new * c2) + eps) + shrink * p;
        m[i] = m_new;
        v[i] = v_new;
        params[i] = p;
        if (work) store(work, i, p);
    }
}
