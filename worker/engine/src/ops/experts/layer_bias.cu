// Biases of the layers of experts, see layer_bias.rs. The rows of expert e are those from offsets[e] to offsets[e + 1].

// y[i] += bias[e]. Grid: blocks of blockDim.y rows.
extern "C" __global__ void expert_bias_fwd(const int* __restrict__ offsets, const ACT* __restrict__ bias,
                                           ACT* __restrict__ y, i64 experts, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)blockDim.y + threadIdx.y;
    if (row >= rows || row >= offsets[experts]) return;
    // offsets[low] <= row < offsets[high]
    int low = 0, high = experts;
    while (high - low > 1) {
        int middle = (low + high) / 2;
        if (offsets[middle] <= row) low = middle;
        else high = middle;
    }
    bool wide = is_wide(bias, cols) && is_wide(y, cols);
    y += row * cols, bias += low * cols;
    for (i64 c = threadIdx.x * 8ll; c < cols; c += blockDim.x * 8ll) {
        Vec8 sum = load8(y, c, cols, wide), b = load8(bias, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += b.x[j];
        store8(y, c, cols, wide, sum);
    }
}

// sums[e] = sum of dy over the rows of expert e. Grid: (C / (8 COLUMN_BLOCK_X), E), block (COLUMN_BLOCK_X,
// COLUMN_BLOCK_Y).
extern "C" __global__ void expert_bias_bwd(const int* __restrict__ offsets, const ACT* __restrict__ dy,
                                           float* __restrict__ sums, i64 cols) {
    pdl_wait_and_launch();
    i64 expert = blockIdx.y, c = (blockIdx.x * (i64)COLUMN_BLOCK_X + threadIdx.x) * 8;
    i64 end = c < cols ? offsets[expert + 1] : 0;
    bool wide = is_wide(dy, cols);
    Vec8 sum = {};
    for (i64 row = offsets[expert] + threadIdx.y; row < end; row += COLUMN_BLOCK_Y) {
        Vec8 d = load8(dy + row * cols, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
    }
    store_column_sums(sum, sums + expert * cols, c, cols);
}

// logits[n, e] += bias[e], of len logits. Grid: one thread per logit.
extern "C" __global__ void router_logit_bias(const ACT* __restrict__ bias, float* __restrict__ logits, i64 len,
                                             i64 experts) {
    pdl_wait_and_launch();
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i < len) logits[i] += load(bias, i % experts);
}
