// Softmax cross entropy, fused with its gradient, which replaces the logits: one block per row. A row that fits into
// shared memory (`cached`) is read from the logits once, a longer one three times.
//
// loss = log(sum exp(l - max)) + max - l[target]; dl = (softmax(l) - onehot(target)) grad_scale, 0 in the padding.

#define NEG_INF __int_as_float(0xff800000)
// Vectors that a thread fetches at once.
#define CLASSIFIER_VECS 5

// logits (N, Vp), targets (N,), losses (N,). Grid: N blocks. Two blocks per multiprocessor in bf16: rows of GPT-2's
// vocabulary are small enough for both to fit into shared memory.
extern "C" __global__ void __launch_bounds__(CLASSIFIER_THREADS, sizeof(ACT) == 2 ? 2 : 1)
    classifier(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 vocab, i64 padded,
               bool with_grad, float grad_scale, bool cached) {
    pdl_wait_and_launch();
    extern __shared__ uint4 memory[];
    // In reverse order: the GEMM before this kernel wrote the last rows last, so they are still in the L2 cache.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    int target = targets[row];
    float target_logit = load(l, target);
    bool wide = is_wide(l, padded);
    // Logits in the padding are meaningless: they become -inf, so that their exponentials are 0.
    auto masked = [&](Packed<ACT> p, i64 i) {
        if (i + 8 <= vocab) return p;
        Vec8 e = unpack(p);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (i + j >= vocab) e.x[j] = NEG_INF;
        pack(e, p);
        return p;
    };
    // Each thread reads back only the vectors that it wrote itself, so no barrier is needed.
    auto reload = [&](i64 i) {
        if (cached) return unpack(((Packed<ACT>*)memory)[(unsigned)i / 8]);
        return unpack(masked(fetch8((const ACT*)l, i, padded, wide), i));
    };

    i64 first = threadIdx.x * 8ll, step = blockDim.x * 8ll;
    float row_max = NEG_INF;
    for (i64 start = first; start < padded; start += CLASSIFIER_VECS * step) {
        Packed<ACT> p[CLASSIFIER_VECS];
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++)
            if (start + k * step < padded) p[k] = fetch8((const ACT*)l, start + k * step, padded, wide);
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            i64 i = start + k * step;
            if (i >= padded) break;
            p[k] = masked(p[k], i);
            if (cached) ((Packed<ACT>*)memory)[(unsigned)i / 8] = p[k];
            Vec8 e = unpack(p[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) row_max = fmaxf(row_max, e.x[j]);
        }
    }
    row_max = block_max(row_max);
    float sum = 0.0f;
#pragma unroll 2
    for (i64 i = first; i < padded; i += step) {
        Vec8 e = reload(i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e.x[j] - row_max);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[row] = logf(sum) + row_max - target_logit;
    if (!with_grad) return;
    float factor = grad_scale / sum;
#pragma unroll 2
    for (i64 i = first; i < padded; i += step) {
        Vec8 e = reload(i);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] = exp_for<ACT>(e.x[j] - row_max) * factor;
        store8(l, i, padded, wide, e);
    }
    // Every thread has read the target's logit before the barriers of block_max. Its gradient is written last.
    __syncthreads();
    if (threadIdx.x == 0) store(l, target, exp_for<ACT>(target_logit - row_max) * factor - grad_scale);
}
