// Cross entropy with its gradient in place of the logits: one block per row, which is read twice and written once.

extern "C" __global__ void classifier(ACT* logits, const int* targets, float* losses, i64 vocab, i64 padded,
                                      bool with_grad, float grad_scale) {
    // The matrix product has just written the last rows: they are in cache, so they go first.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    int target = targets[row];
    bool wide = is_wide(l, padded);
    const float never = __int_as_float(0xff800000);
    // Sum of exponentials relative to the largest logit so far, per thread; then over the block.
    float largest = never, sum = 0.0f;
    for (i64 i = threadIdx.x * 8ll; i < vocab; i += blockDim.x * 8ll) {
        Eight e = load8(l, i, padded, wide, never);
        float top = largest;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // Beyond the vocabulary lies padding, which nobody wrote with a meaning.
            if (i + j >= vocab) e.x[j] = never;
            top = fmaxf(top, e.x[j]);
        }
        sum *= exp_for<ACT>(largest - top);
        largest = top;
#pragma unroll
        for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e.x[j] - top);
    }
    float top = block_max(largest);
    // A thread without elements has sum 0 and a largest of -inf, whose factor is 0.
    sum = block_sum(sum * expf(largest - top));
    // Every thread reads the target's logit before any overwrites it: the barriers of block_sum are not enough.
    float chosen = load(l, target);
    __syncthreads();
    if (threadIdx.x == 0) losses[row] = logf(sum) + top - chosen;
    if (!with_grad) return;
    float factor = grad_scale / sum;
    for (i64 i = threadIdx.x * 8ll; i < padded; i += blockDim.x * 8ll) {
        Eight e = load8(l, i, padded, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float d = i + j < vocab ? exp_for<ACT>(e.x[j] - top) * factor : 0.0f;
            e.x[j] = i + j == target ? d - grad_scale : d;
        }
        store8(l, i, padded, wide, e);
    }
}
