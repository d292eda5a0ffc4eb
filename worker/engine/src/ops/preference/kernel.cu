// The loss of pairs of documents by Direct Preference Optimisation.

// last (B, T), losses (B, T), reference (B, T), weights (B, T), sums (3, B). Grid: one block per row.
extern "C" __global__ void __launch_bounds__(PREFERENCE_THREADS)
    preference(const int* __restrict__ last, const float* __restrict__ losses, const float* __restrict__ reference,
               float* __restrict__ weights, float* __restrict__ sums, i64 seq, float beta) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x;
    last += row * seq, losses += row * seq, reference += row * seq, weights += row * seq;
    float loss = 0.0f, preferred = 0.0f, margins = 0.0f;
    for (int start = 0, end; start < seq; start = end) {
        int middle = max(last[start], start) + 1;
        bool is_pair = middle < seq;
        end = is_pair ? max(last[middle], middle) + 1 : seq;
        float gain = 0.0f;
        for (int t = start + threadIdx.x; t < end; t += blockDim.x) {
            float token = reference[t] - losses[t];
            gain += t < middle ? token : -token;
        }
        float margin = beta * block_sum(gain);
        float slope = is_pair ? beta / (1.0f + expf(margin)) : 0.0f;
        for (int t = start + threadIdx.x; t < end; t += blockDim.x) weights[t] = t < middle ? slope : -slope;
        if (!is_pair) continue;
        loss += fmaxf(-margin, 0.0f) + log1pf(expf(-fabsf(margin)));
        preferred += margin > 0.0f ? 1.0f : 0.0f;
        margins += margin;
    }
    if (threadIdx.x > 0) return;
    sums[row] = loss;
    sums[gridDim.x + row] = preferred;
    sums[2 * gridDim.x + row] = margins;
}
