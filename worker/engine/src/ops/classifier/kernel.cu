// Softmax cross entropy, fused with its gradient, which replaces the logits.
//
// loss = log(sum exp(l - max)) + max - l[target]; dl = (softmax(l) - onehot(target)) grad_scale, 0 in the padding. With
// a cap, cap t takes the place of l, where t = tanh(l / cap), and dl is multiplied by 1 - t^2. Rows whose target is
// negative are ignored: loss and dl are 0, and the row is not read. With weights, dl is multiplied by that of its row.
//
// A block reads its row twice: for the maximum and the sum of exponentials, then for the gradient. The rows of all
// running blocks fit into the L2 cache, which serves the second read. Keeping the rows in shared memory instead would
// leave room for too few loads in flight.

#define NEG_INF __int_as_float(0xff800000)

// Vectors that a thread fetches at once.
constexpr int CLASSIFIER_VECS = sizeof(ACT) == 2 ? 4 : 2;

// exp(x - reference). In bf16: one multiplication, one addition, and one approximation.
__device__ inline float exp_relative(float x, float reference) {
    const float log2e = 1.4426950408889634f;
    return sizeof(ACT) == 2 ? exp2_approx(x * log2e - reference * log2e) : expf(x - reference);
}

// Bound of the logits' magnitude, if any.
template <bool CAPPED>
struct Cap {
    // The cap and its reciprocal.
    float cap, inverse;

    // Padding stays -inf.
    __device__ float operator()(float logit) const {
        return CAPPED && logit != NEG_INF ? cap * tanh_for<ACT>(logit * inverse) : logit;
    }

    // The derivative.
    __device__ float slope(float logit) const {
        float t = CAPPED ? tanh_for<ACT>(logit * inverse) : 0.0f;
        return 1.0f - t * t;
    }
};

// A part of a row: the vectors of one thread, a block's width apart. With WIDE, rows can be accessed as vectors.
template <bool WIDE>
struct Part {
    Packed<ACT> vectors[CLASSIFIER_VECS];

    // Fetches from column `start` on. Logits in the padding are meaningless: they become -inf, so that their
    // exponentials are 0, and so do elements past the row's end.
    __device__ void fetch(const ACT* row, int start, int step, int vocab, int padded) {
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            int i = start + k * step;
            vectors[k] = {};
            if (i < padded) vectors[k] = fetch8(row, i, padded, WIDE);
        }
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            int i = start + k * step;
            if (i + 8 <= vocab) continue;
            Vec8 e = unpack(vectors[k]);
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (i + j >= vocab) e.x[j] = NEG_INF;
            pack(e, vectors[k]);
        }
    }
};

// The maximum of the elements that a thread has read of a row, and the sum of exponentials relative to it.
struct Softmax {
    float max = NEG_INF, sum = 0.0f;

    template <bool WIDE, bool CAPPED>
    __device__ void add(const Part<WIDE>& part, Cap<CAPPED> capped) {
        float new_max = NEG_INF;
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            Vec8 e = unpack(part.vectors[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) new_max = fmaxf(new_max, e.x[j]);
        }
        // The cap does not change the order.
        new_max = fmaxf(max, capped(new_max));
        // If the maximum is still -inf, only padding or NaN has been read.
        float reference = new_max == NEG_INF ? 0.0f : new_max;
        sum *= exp_relative(max, reference);
        max = new_max;
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            Vec8 e = unpack(part.vectors[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exp_relative(capped(e.x[j]), reference);
        }
    }
};

template <bool WIDE>
__device__ inline void ignore(ACT* l, float* loss, int padded, bool with_grad) {
    if (threadIdx.x == 0) *loss = 0.0f;
    for (int i = threadIdx.x * 8; with_grad && i < padded; i += blockDim.x * 8) store8(l, i, padded, WIDE, Vec8{});
}

template <bool WIDE, bool CAPPED>
__device__ inline void classify(ACT* l, int target, float* loss, int vocab, int padded, const float* grad_scale_at,
                                const float* weight, Cap<CAPPED> capped) {
    if (target < 0) return ignore<WIDE>(l, loss, padded, grad_scale_at);
    float target_logit = capped(load(l, target));
    int first = threadIdx.x * 8, step = blockDim.x * 8;
    Part<WIDE> part;
    Softmax softmax;
    for (int start = first; start < padded; start += CLASSIFIER_VECS * step) {
        part.fetch(l, start, step, vocab, padded);
        softmax.add(part, capped);
    }
    float row_max = block_max(softmax.max);
    float sum = block_sum(softmax.sum * exp_relative(softmax.max, row_max));
    if (threadIdx.x == 0) *loss = logf(sum) + row_max - target_logit;
    if (!grad_scale_at) return;
    float grad_scale = *grad_scale_at * (weight ? *weight : 1.0f);
    // Every thread has read the target's logit before the barriers of block_max.
    float factor = grad_scale / sum;
    for (int start = first; start < padded; start += CLASSIFIER_VECS * step) {
        part.fetch(l, start, step, vocab, padded);
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            int i = start + k * step;
            if (i >= padded) break;
            Vec8 e = unpack(part.vectors[k]), slopes;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                slopes.x[j] = capped.slope(e.x[j]);
                e.x[j] = exp_relative(capped(e.x[j]), row_max) * factor;
            }
            if ((unsigned)(target - i) < 8)
#pragma unroll
                for (int j = 0; j < 8; j++)
                    if (i + j == target) e.x[j] -= grad_scale;
#pragma unroll
            for (int j = 0; j < 8; j++) e.x[j] *= slopes.x[j];
            store8(l, i, padded, WIDE, e);
        }
    }
}

// logits (N, Vp), targets (N,), losses (N,), grad_scale (1,) or null, weights (N,) or null. Grid: one block per row.
template <bool CAPPED>
__device__ inline void classify_row(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses,
                                    i64 vocab, i64 padded, const float* grad_scale, const float* weights,
                                    Cap<CAPPED> capped) {
    // Rows are taken in reverse order: the GEMM before this kernel wrote the last rows last, so they are still in the
    // L2 cache.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    // Columns are counted in 32 bits, because comparing them is a large part of the arithmetic.
    const float* weight = weights ? weights + row : nullptr;
    if (is_wide(l, padded)) classify<true>(l, targets[row], losses + row, vocab, padded, grad_scale, weight, capped);
    else classify<false>(l, targets[row], losses + row, vocab, padded, grad_scale, weight, capped);
}

extern "C" __global__ void __launch_bounds__(CLASSIFIER_THREADS, 1)
    classifier(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 vocab, i64 padded,
               const float* grad_scale, const float* weights) {
    pdl_wait_and_launch();
    classify_row(logits, targets, losses, vocab, padded, grad_scale, weights, Cap<false>{});
}

extern "C" __global__ void __launch_bounds__(CLASSIFIER_THREADS, 1)
    classifier_capped(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 vocab, i64 padded,
                      const float* grad_scale, const float* weights, float cap) {
    pdl_wait_and_launch();
    classify_row(logits, targets, losses, vocab, padded, grad_scale, weights, Cap<true>{cap, 1.0f / cap});
}
