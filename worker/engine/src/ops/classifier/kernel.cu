// Softmax cross entropy, fused with its gradient, which replaces the logits.
//
// loss = log(sum exp(l - max)) + max - l[target]; dl = (softmax(l) - onehot(target)) grad_scale, 0 in the padding.
//
// A block reads its row twice: for the maximum and the sum of exponentials, then for the gradient. The rows of all
// blocks that run at a time fit into the L2 cache, from where they come the second time. Keeping them in shared memory
// instead leaves room for too few loads in flight.

#define NEG_INF __int_as_float(0xff800000)

// Vectors that a thread fetches at once.
constexpr int CLASSIFIER_VECS = sizeof(ACT) == 2 ? 4 : 2;

// The vector at column i of a row. Logits in the padding are meaningless: they become -inf, so that their exponentials
// are 0.
__device__ inline Packed<ACT> masked(Packed<ACT> p, i64 i, i64 vocab) {
    if (i + 8 <= vocab) return p;
    Vec8 e = unpack(p);
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (i + j >= vocab) e.x[j] = NEG_INF;
    pack(e, p);
    return p;
}

// The maximum of what a thread has read of a row, and the sum of exponentials relative to it.
struct Softmax {
    float max = NEG_INF, sum = 0.0f;

    __device__ void add(const Packed<ACT> (&packed)[CLASSIFIER_VECS]) {
        float new_max = max;
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            Vec8 e = unpack(packed[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) new_max = fmaxf(new_max, e.x[j]);
        }
        // Nothing but padding, or NaN, has been read where the maximum is still -inf.
        float reference = new_max == NEG_INF ? 0.0f : new_max;
        sum *= exp_for<ACT>(max - reference);
        max = new_max;
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            Vec8 e = unpack(packed[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e.x[j] - reference);
        }
    }
};

// logits (N, Vp), targets (N,), losses (N,). Grid: one block per row.
extern "C" __global__ void __launch_bounds__(CLASSIFIER_THREADS, 1)
    classifier(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 vocab, i64 padded,
               bool with_grad, float grad_scale) {
    pdl_wait_and_launch();
    // In reverse order: the GEMM before this kernel wrote the last rows last, so they are still in the L2 cache.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    int target = targets[row];
    float target_logit = load(l, target);
    bool wide = is_wide(l, padded);
    i64 first = threadIdx.x * 8ll, step = blockDim.x * 8ll;
    // Vectors from column `start` on; what is past the row's end is -inf.
    auto fetch = [&](Packed<ACT>(&p)[CLASSIFIER_VECS], i64 start) {
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            i64 i = start + k * step;
            p[k] = {};
            if (i < padded) p[k] = fetch8((const ACT*)l, i, padded, wide);
        }
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) p[k] = masked(p[k], start + k * step, vocab);
    };

    Softmax softmax;
    for (i64 start = first; start < padded; start += CLASSIFIER_VECS * step) {
        Packed<ACT> p[CLASSIFIER_VECS];
        fetch(p, start);
        softmax.add(p);
    }
    float row_max = block_max(softmax.max);
    float sum = block_sum(softmax.sum * exp_for<ACT>(softmax.max - row_max));
    if (threadIdx.x == 0) losses[row] = logf(sum) + row_max - target_logit;
    if (!with_grad) return;
    // Every thread has read the target's logit before the barriers of block_max.
    float factor = grad_scale / sum;
    for (i64 start = first; start < padded; start += CLASSIFIER_VECS * step) {
        Packed<ACT> p[CLASSIFIER_VECS];
        fetch(p, start);
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            i64 i = start + k * step;
            if (i >= padded) break;
            Vec8 e = unpack(p[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                e.x[j] = exp_for<ACT>(e.x[j] - row_max) * factor;
                if (i + j == target) e.x[j] -= grad_scale;
            }
            store8(l, i, padded, wide, e);
        }
    }
}
