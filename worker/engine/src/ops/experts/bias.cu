// bias += rate sign(mean load - load), in steps that the AdamW kernel applies afterwards. Loads and biases are (L, E).
// Grid: one thread per bias, which adds up the loads of its layer itself: exactly, as they are whole numbers.
extern "C" __global__ void router_bias(const float* __restrict__ loads, float* __restrict__ bias,
                                       const float* grad_norm_sq, const float* loss, const float* skipped, i64 len,
                                       i64 experts, float rate, float skip_limit) {
    pdl_wait_and_launch();
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i >= len || !is_applied(grad_norm_sq, loss, skipped, skip_limit)) return;
    const float* layer = loads + i / experts * experts;
    double total = 0.0;
    for (i64 e = 0; e < experts; e++) total += layer[e];
    double missing = total - loads[i] * (double)experts;
    bias[i] += rate * (float)((missing > 0.0) - (missing < 0.0));
}
