// Backward of attention on compute capability 9.0: statistics of rows for the other kernels, and dq from its sums.
// Compiled after hopper.cuh, hopper_tiles.cuh and attention/hopper.cuh.

// Threads per row, a power of two: each has 8 columns, or none.
#define LANES (SLICES == 3 ? 32 : 8 * SLICES)

// Statistics: lse in base 2 and delta = dout . out. Sets the sums to zero.
extern "C" __global__ void attention_bwd_hopper_prepare(const bf16* out, const bf16* dout, const float* lse,
                                                        float2* stats, float* dq_sums, i64 batch, i64 seq, i64 heads) {
    pdl_wait_and_launch();
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x, padded = (seq + QUERIES - 1) / QUERIES * QUERIES;
    i64 row = i / LANES, query = row % padded, head = row / padded % heads, b = row / padded / heads;
    if (row >= batch * heads * padded) return;
    float delta = 0.0f;
    int col = i % LANES * 8;
    if (query < seq && col < WIDTH) {
        i64 at = ((b * seq + query) * heads + head) * WIDTH + col;
        Vec8 x = unpack(fetch8(out + at)), y = unpack(fetch8(dout + at));
#pragma unroll
        for (int j = 0; j < 8; j++) delta += x.x[j] * y.x[j];
    }
#pragma unroll
    for (int lanes = LANES / 2; lanes > 0; lanes /= 2) delta += __shfl_xor_sync(FULL_WARP, delta, lanes);
    // Queries past the end get probabilities of zero.
    if (i % LANES == 0)
        stats[row] = make_float2(query < seq ? lse[(b * heads + head) * seq + query] * LOG2E : INF, delta);
#if SUMS
    if (col >= 64 * SLICES) return;
    float4* sums = (float4*)(dq_sums + row * 64 * SLICES + col);
    sums[0] = sums[1] = make_float4(0.0f, 0.0f, 0.0f, 0.0f);
#endif
}

// dq from its sums. Grid: a block for each tile of queries, with 128 threads for each part.
extern "C" __global__ void __launch_bounds__(128 * PARTS)
    attention_bwd_hopper_finish(const float* dq_sums, bf16* dqkv, i64 seq, i64 heads, i64 kv_heads, float scale) {
    pdl_wait_and_launch();
    i64 tiles = (seq + QUERIES - 1) / QUERIES, tile = blockIdx.x % tiles, head = blockIdx.x / tiles % heads;
    i64 b = blockIdx.x / tiles / heads, stride = (heads + 2 * kv_heads) * WIDTH;
    int part = threadIdx.x / 128, warp = threadIdx.x / WARP % 4;
    const float* from = dq_sums + (blockIdx.x * (i64)PARTS + part) * PART + threadIdx.x % 128 * 4;
    float dq[32];
#pragma unroll
    for (int n = 0; n < 32; n += 4) {
        float4 x = *(const float4*)(from + n * 128);
        dq[n] = x.x, dq[n + 1] = x.y, dq[n + 2] = x.z, dq[n + 3] = x.w;
    }
    int row = tile * QUERIES + 16 * warp + (SLICES == 1 ? part * 64 : 0), col = SLICES == 1 ? 0 : part * 64;
    bf16* to = dqkv + b * seq * stride + head * WIDTH + col;
    write_rows(to, stride, row, seq, WIDTH - col, dq, scale, scale);
}
