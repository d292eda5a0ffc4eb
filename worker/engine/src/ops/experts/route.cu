// The router: chooses experts, and derives the logits. Formulas are in route.rs. One warp per token: lane l has the
// experts l, l + WARP, and so on.

#define PER_LANE (MAX_EXPERTS / WARP)
#define NEG_INF __int_as_float(0xff800000)

// The logits z of a token, and what a softmax over them needs. Experts past the last one have the logit -inf.
struct Logits {
    float z[PER_LANE], largest, sum;

    __device__ Logits(const float* logits, int experts) {
        int lane = threadIdx.x % WARP;
        largest = NEG_INF;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++) {
            int e = i * WARP + lane;
            z[i] = e < experts ? logits[e] : NEG_INF;
            largest = fmaxf(largest, z[i]);
        }
        largest = warp_max(largest);
        sum = 0.0f;
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i * WARP < experts) sum += expf(z[i] - largest);
        sum = warp_sum(sum);
    }

    __device__ float probability(float logit) const { return expf(logit - largest) / sum; }
    __device__ float score(float logit, bool sigmoid) const {
        return sigmoid ? sigmoid_for<float>(logit) : probability(logit);
    }
};

// The expert with the highest key among those that are not taken; of equal ones, the first. NaN comes last.
__device__ inline int next_expert(const float (&keys)[PER_LANE], u32 taken, int experts) {
    int lane = threadIdx.x % WARP, at = MAX_EXPERTS;
    float best = NEG_INF;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * WARP + lane;
        if (e >= experts || taken >> i & 1) continue;
        float z = keys[i] == keys[i] ? keys[i] : NEG_INF;
        if (z > best || z == best && e < at) best = z, at = e;
    }
    for (int distance = WARP / 2; distance > 0; distance /= 2) {
        float z = __shfl_xor_sync(FULL_WARP, best, distance);
        int e = __shfl_xor_sync(FULL_WARP, at, distance);
        if (z > best || z == best && e < at) best = z, at = e;
    }
    return at;
}

// logits (N, E), bias (E,) or none, chosen_experts (N, k), weights (N, k). Lane j keeps choice j until all are known.
extern "C" __global__ void route_fwd(const float* __restrict__ all_logits, const float* __restrict__ bias,
                                     int* chosen_experts, float* weights, i64 rows, i64 experts, i64 chosen,
                                     bool sigmoid, bool normalise, float scale) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)(blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    int lane = threadIdx.x % WARP, mine = 0;
    const float* row_logits = all_logits + row * experts;
    Logits logits(row_logits, (int)experts);
    float keys[PER_LANE];
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * WARP + lane;
        keys[i] = bias && e < experts ? logits.score(logits.z[i], sigmoid) + bias[e] : logits.z[i];
    }
    u32 taken = 0;
    float weight = 0.0f, total = ROUTE_EPS;
    for (int j = 0; j < chosen; j++) {
        int e = next_expert(keys, taken, (int)experts);
        if (e % WARP == lane) taken |= 1u << e / WARP;
        // The second term is NaN if any logit is, so that a NaN does not go unnoticed.
        float score = logits.score(row_logits[e], sigmoid) + 0.0f * logits.sum;
        if (j == lane) mine = e, weight = score;
        total += score;
    }
    if (lane >= chosen) return;
    chosen_experts[row * chosen + lane] = mine;
    weights[row * chosen + lane] = (normalise ? weight / total : weight) * scale;
}

// dlogits (N, E) and losses (N,), from dweights (N, k) and loads (E,).
extern "C" __global__ void route_bwd(const float* __restrict__ all_logits, const int* __restrict__ chosen_experts,
                                     const float* __restrict__ dweights, const float* __restrict__ loads,
                                     ACT* __restrict__ dlogits, float* __restrict__ losses, i64 rows, i64 experts,
                                     i64 chosen, bool sigmoid, bool normalise, float scale, float share,
                                     float balance, float z) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)(blockDim.x / WARP) + threadIdx.x / WARP;
    if (row >= rows) return;
    int lane = threadIdx.x % WARP;
    const float* row_logits = all_logits + row * experts;
    Logits logits(row_logits, (int)experts);
    // Lane j has choice j.
    int mine = lane < chosen ? chosen_experts[row * chosen + lane] : 0;
    float dweight = lane < chosen ? scale * dweights[row * chosen + lane] : 0.0f;
    float weight = lane < chosen ? logits.score(row_logits[mine], sigmoid) : 0.0f;
    float total = warp_sum(weight) + ROUTE_EPS, inner = warp_sum(dweight * weight / total);
    float dscore = normalise ? (dweight - inner) / total : dweight;
    float gradient[PER_LANE] = {};
    for (int j = 0; j < chosen; j++) {
        int e = __shfl_sync(FULL_WARP, mine, j);
        float x = __shfl_sync(FULL_WARP, dscore, j);
#pragma unroll
        for (int i = 0; i < PER_LANE; i++)
            if (i * WARP + lane == e) gradient[i] = x;
    }
    float all = 0.0f, loss = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * WARP + lane;
        if (e >= experts) continue;
        float score = logits.score(logits.z[i], sigmoid);
        all += score, loss += loads[e] * share * score;
    }
    all = sigmoid ? warp_sum(all) + ROUTE_EPS : 1.0f, loss = warp_sum(loss) / all;
    float mean = 0.0f;
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * WARP + lane;
        if (e >= experts) continue;
        gradient[i] += balance * (loads[e] * share - loss) / all;
        mean += gradient[i] * logits.probability(logits.z[i]);
    }
    mean = warp_sum(mean);
    float lse = logits.largest + logf(logits.sum);
#pragma unroll
    for (int i = 0; i < PER_LANE; i++) {
        int e = i * WARP + lane;
        if (e >= experts) continue;
        float p = logits.probability(logits.z[i]), score = logits.score(logits.z[i], sigmoid);
        float slope = sigmoid ? score * (1.0f - score) * gradient[i] : p * (gradient[i] - mean);
        store(dlogits, row * experts + e, slope + 2.0f * z * lse * p);
    }
    if (lane == 0) losses[row] = loss * experts;
}
