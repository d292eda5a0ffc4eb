// Backward of attention on compute capability 9.0 for heads up to 128: compiled after hopper_bwd.cu.
//
// Two warpgroups have 64 keys each. Of dq, each computes one half of the tile: its queries, or its columns if a head
// has two squares.

static_assert(KEYS == 128 && SLICES * QUERIES == 128, "each warpgroup adds 64 x 64 sums of a tile of queries");
static_assert(!CAPPED, "the derivatives of scores would not fit into the registers");

__device__ inline void differentiate(Shared& s, float* dq_sums, bf16* dqkv, const Shape& shape,
                                     const Tile& tile, Scale scale) {
    int group = threadIdx.x / 128 - 1, warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
    int own_keys = tile.key + 64 * group, key = own_keys + 16 * warp + lane / 4;
    int last_query[2] = {shape.last_query(tile.batch, key), shape.last_query(tile.batch, key + 8)};
    int edge = shape.last_query(tile.batch, own_keys);
    float dk[WIDTH / 2], dv[WIDTH / 2], scores[QUERIES / 2], dp[QUERIES / 2], dq[32];
    u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) dk[i] = dv[i] = 0.0f;
    const char *k = s.k[group][0], *v = s.v[group][0];
    const char* k_columns = s.k[0][SLICES == 2 ? group : 0];
    Ring<STAGES> ring;

    barrier_wait(&s.k_full, 0);
    barrier_wait(&s.v_full, 0);
    int per_head = tile.last - tile.first + 1, count = per_head * tile.group, head = tile.head, j = tile.first;
#pragma unroll 1
    for (int i = 0; i < count; i++) {
        int stage = ring.stage, query = j * QUERIES;
        const char *q = s.q[stage][0][0], *dout = s.dout[stage][0][0];
        const float2* stats = s.stats[stage];
        barrier_wait(&s.q_full[stage], ring.parity);
        multiply_heads(scores, k, q);
        barrier_wait(&s.dout_full[stage], ring.parity);
        multiply_heads(dp, v, dout);
        wgmma_wait<1>();
        wgmma_results(scores);
        if (query < own_keys + 63 || query + QUERIES - 1 > edge)
            probabilities<true>(scores, stats, key, query, last_query, scale.factor() * LOG2E);
        else probabilities<false>(scores, stats, key, query, last_query, scale.factor() * LOG2E);
        pack(scores, p);
        multiply_queries(dv, p, dout);
        wgmma_wait<1>();
        wgmma_results(dp);
        score_gradients(dp, p, stats);
        pack(dp, ds);
#if SUMS
        store_scores(s.ds[i % 2][0], ds, 64 * group + 16 * warp);
        fence_async();
        group_wait<256>(1);
        multiply_keys(dq, s.ds[i % 2][SLICES == 2 ? 0 : group], k_columns);
#endif
        multiply_queries(dk, ds, q);
        wgmma_wait<1>();
        release(&s.dout_empty[stage]);
#if SUMS
        wgmma_results(dq);
        add_part(dq_sums, dq, shape, tile.batch, head, j, group);
#endif
        wgmma_wait<0>();
        release(&s.q_empty[stage]);
        ring.advance();
        if (++j > tile.last) j = tile.first, head++;
    }
    wgmma_results(dk);
    wgmma_results(dv);
    int row = own_keys + 16 * warp, first = (shape.heads + tile.kv_head) * WIDTH;
    write_keys(dqkv, dk, shape, tile.batch, row, first, scale.scale);
    write_keys(dqkv, dv, shape, tile.batch, row, first + shape.kv_heads * WIDTH, 1.0f);
}
