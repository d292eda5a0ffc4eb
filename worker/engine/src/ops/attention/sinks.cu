// Attention sinks, see sinks.rs. out and dout (B, T, H D), lse (B, H, T), sinks (H,). `lanes` neighbouring threads have
// a row of a head, eight elements each: D / 8 rounded up to a power of two, of which the rest are idle.

// lse' = log(exp(lse) + exp(sink)), out' = exp(lse - lse') out, in place. Grid: `lanes` threads for each of the B T H
// rows.
extern "C" __global__ void attention_sinks_fwd(const ACT* __restrict__ sinks, ACT* __restrict__ out, float* lse,
                                               i64 rows, i64 seq, i64 heads, i64 width, i64 lanes) {
    pdl_wait_and_launch();
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x, row = i / lanes, col = i % lanes * 8;
    i64 token = row / heads, head = row % heads;
    bool in_range = row < rows;
    lse += (token / seq * heads + head) * seq + token % seq;
    float sink = load(sinks, head), before = in_range ? *lse : 0.0f;
    // One of the threads that have read it overwrites it.
    __syncwarp();
    if (!in_range) return;
    float excess = sink - before;
    if (col == 0) *lse = fmaxf(before, sink) + log1pf(expf(-fabsf(excess)));
    if (col >= width) return;
    float factor = 1.0f / (1.0f + expf(excess));
    Vec8 x = unpack(fetch8(out + row * width + col));
#pragma unroll
    for (int j = 0; j < 8; j++) x.x[j] *= factor;
    store8(out + row * width + col, x);
}

// partials[block][h] = -sum of exp(sink - lse) dout . out over the block's tokens. Grid: (any number, H); tokens are
// taken round-robin.
extern "C" __global__ void attention_sinks_bwd(const ACT* __restrict__ sinks, const ACT* __restrict__ out,
                                               const ACT* __restrict__ dout, const float* __restrict__ lse,
                                               float* __restrict__ partials, i64 tokens, i64 seq, i64 heads, i64 width,
                                               i64 lanes) {
    pdl_wait_and_launch();
    i64 head = blockIdx.y, col = threadIdx.x % lanes * 8, at_once = blockDim.x / lanes;
    float sink = load(sinks, head), sum = 0.0f;
    if (col < width)
        for (i64 token = blockIdx.x * at_once + threadIdx.x / lanes; token < tokens; token += gridDim.x * at_once) {
            i64 at = (token * heads + head) * width + col;
            Vec8 x = unpack(fetch8(out + at)), y = unpack(fetch8(dout + at));
            float part = 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) part += x.x[j] * y.x[j];
            sum -= expf(sink - lse[(token / seq * heads + head) * seq + token % seq]) * part;
        }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.x * heads + head] = sum;
}
