// The gradient of values for heads wider than 128. Compiled after mma_tiled.cu.

// dv. Grid and shared memory are those of attention_bwd_keys.
extern "C" __global__ void __launch_bounds__(THREADS)
    attention_bwd_values(const ACT* qkv, const ACT* dout, const float* lse, const float* delta, ACT* dqkv,
                         const int* last_queries, i64 seq, i64 heads, i64 kv_heads, float scale, i64 window,
                         float softcap) {
    pdl_wait_and_launch();
    bwd_keys<false, true>(qkv, dout, lse, delta, dqkv, last_queries, seq, heads, kv_heads, scale, window, softcap);
}
