// Cross entropy with its gradient in place of the logits: one block per row. A row that fits into shared memory
// (`kept`) is read from the logits once; a longer one three times.

#define NEVER __int_as_float(0xff800000)
// Eights that a thread fetches at once.
#define EIGHTS 5

extern "C" __global__ void __launch_bounds__(512, sizeof(ACT) == 2 ? 2 : 1)
    classifier(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 vocab, i64 padded,
               bool with_grad, float grad_scale, bool kept) {
    after_the_kernel_before();
    extern __shared__ uint4 memory[];
    // The matrix product has just written the last rows: they are in cache, so they go first.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    int target = targets[row];
    float chosen = load(l, target);
    bool wide = is_wide(l, padded);
    // Beyond the vocabulary lies padding, which nobody wrote with a meaning: its exponentials are to be 0.
    auto masked = [&](Packed<ACT> p, i64 i) {
        if (i + 8 <= vocab) return p;
        Eight e = unpack(p);
#pragma unroll
        for (int j = 0; j < 8; j++)
            if (i + j >= vocab) e.x[j] = NEVER;
        pack(e, p);
        return p;
    };
    // Each thread comes back to the eights that it wrote, and to no others.
    auto again = [&](i64 i) {
        if (kept) return unpack(((Packed<ACT>*)memory)[(unsigned)i / 8]);
        return unpack(masked(fetch8((const ACT*)l, i, padded, wide), i));
    };

    i64 first = threadIdx.x * 8ll, step = blockDim.x * 8ll;
    float top = NEVER;
    for (i64 start = first; start < padded; start += EIGHTS * step) {
        Packed<ACT> p[EIGHTS];
#pragma unroll
        for (int k = 0; k < EIGHTS; k++)
            if (start + k * step < padded) p[k] = fetch8((const ACT*)l, start + k * step, padded, wide);
#pragma unroll
        for (int k = 0; k < EIGHTS; k++) {
            i64 i = start + k * step;
            if (i >= padded) break;
            p[k] = masked(p[k], i);
            if (kept) ((Packed<ACT>*)memory)[(unsigned)i / 8] = p[k];
            Eight e = unpack(p[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) top = fmaxf(top, e.x[j]);
        }
    }
    top = block_max(top);
    float sum = 0.0f;
#pragma unroll 2
    for (i64 i = first; i < padded; i += step) {
        Eight e = again(i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e.x[j] - top);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[row] = logf(sum) + top - chosen;
    if (!with_grad) return;
    float factor = grad_scale / sum;
#pragma unroll 2
    for (i64 i = first; i < padded; i += step) {
        Eight e = again(i);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] = exp_for<ACT>(e.x[j] - top) * factor;
        store8(l, i, padded, wide, e);
    }
    // Every thread read the target's logit before the barriers of block_max; here its gradient is written last.
    __syncthreads();
    if (threadIdx.x == 0) store(l, target, exp_for<ACT>(chosen - top) * factor - grad_scale);
}
