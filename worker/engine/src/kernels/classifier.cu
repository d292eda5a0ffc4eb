// Cross entropy with its gradient in place of the logits: one block per row, which is read twice and written once.

extern "C" __global__ void classifier(ACT* logits, const int* targets, float* losses, i64 vocab, i64 padded,
                                      bool with_grad, float grad_scale) {
    // The matrix product has just written the last rows: they are in cache, so they go first.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    int target = targets[row];
    // Sum of exponentials relative to the largest logit so far, per thread; then over the block.
    float largest = __int_as_float(0xff800000), sum = 0.0f;
    for (i64 i = threadIdx.x; i < vocab; i += blockDim.x) {
        float x = load(l, i);
        if (x > largest) {
            sum *= expf(largest - x);
            largest = x;
        }
        sum += expf(x - largest);
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
    for (i64 i = threadIdx.x; i < padded; i += blockDim.x) {
        float d = i < vocab ? expf(load(l, i) - top) * factor : 0.0f;
        store(l, i, i == target ? d - grad_scale : d);
    }
}
