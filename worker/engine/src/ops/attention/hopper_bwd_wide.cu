// Backward of attention on compute capability 9.0 for heads above 128, whose dk and dv do not fit into the registers of
// the same threads: compiled after hopper_bwd.cu.
//
// Two warpgroups share 64 keys. The first one computes p and dv, the second one dp, ds and dk. Threads with the same
// number in their warpgroups have the same elements of the scores, so p goes from one to the other without a layout.
// Of dq, the warpgroups compute 64 columns in turn.

static_assert(KEYS == 64 && QUERIES == 64, "both warpgroups have the same scores");

// Numbers of barriers: p is in shared memory; so is ds, and p has been read.
#define P_WRITTEN 1
#define DS_WRITTEN 2

// Goes through the tiles of queries. `work` gets the stage and its number, the head and the tile.
template <typename Work>
__device__ inline void for_each_tile(const Tile& tile, Work work) {
    Ring<STAGES> ring;
    int per_head = tile.last - tile.first + 1, count = per_head * tile.group, head = tile.head, j = tile.first;
#pragma unroll 1
    for (int i = 0; i < count; i++, ring.advance()) {
        work(ring, i, head, j);
        if (++j > tile.last) j = tile.first, head++;
    }
}

// Adds the columns of dq that this warpgroup computes.
__device__ inline void add_queries(Shared& s, float* dq_sums, const Shape& shape, const Tile& tile, int i, int head,
                                   int j, int group) {
#if SUMS
#pragma unroll
    for (int slice = 0; slice < SLICES; slice += 2) {
        if (slice + group >= SLICES) continue;
        float dq[32];
        multiply_keys(dq, s.ds[i % 2][0], s.k[0][slice + group]);
        wgmma_wait<0>();
        wgmma_results(dq);
        add_part(dq_sums, dq, shape, tile.batch, head, j, slice + group);
    }
#endif
}

__device__ inline void differentiate_values(Shared& s, float* dq_sums, bf16* dqkv, const Shape& shape,
                                            const Tile& tile, Scale scale) {
    int thread = threadIdx.x % 128, warp = thread / WARP, lane = threadIdx.x % WARP, row = tile.key + 16 * warp;
    int key = row + lane / 4, edge = shape.last_query(tile.batch, tile.key);
    int last_query[2] = {shape.last_query(tile.batch, key), shape.last_query(tile.batch, key + 8)};
    float dv[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) dv[i] = 0.0f;
    barrier_wait(&s.k_full, 0);
    for_each_tile(tile, [&](const Ring<STAGES>& ring, int i, int head, int j) {
        int stage = ring.stage, query = j * QUERIES;
        float scores[QUERIES / 2];
        u32 p[QUERIES / 16][4], slope[QUERIES / 16][4];
        barrier_wait(&s.q_full[stage], ring.parity);
        multiply_heads(scores, s.k[0][0], s.q[stage][0][0]);
        wgmma_wait<0>();
        wgmma_results(scores);
        scale.apply(scores);
        float slopes[QUERIES / 2];
#pragma unroll
        for (int n = 0; n < QUERIES / 2; n++) slopes[n] = Scale::slope(scores[n]);
        if (query < tile.key + 63 || query + QUERIES - 1 > edge)
            probabilities<true>(scores, s.stats[stage], key, query, last_query, scale.factor() * LOG2E);
        else probabilities<false>(scores, s.stats[stage], key, query, last_query, scale.factor() * LOG2E);
        release(&s.q_empty[stage]);
        pack(scores, p);
#pragma unroll
        for (int n = 0; n < QUERIES / 2; n++) slopes[n] *= scores[n];
        pack(slopes, slope);
#pragma unroll
        for (int part = 0; part < QUERIES / 16; part++)
            s.p[part][thread] = make_uint4(slope[part][0], slope[part][1], slope[part][2], slope[part][3]);
        group_arrive<256>(P_WRITTEN);
        barrier_wait(&s.dout_full[stage], ring.parity);
        multiply_queries(dv, p, s.dout[stage][0][0]);
        group_wait<256>(DS_WRITTEN);
        wgmma_wait<0>();
        wgmma_results(dv);
        release(&s.dout_empty[stage]);
        add_queries(s, dq_sums, shape, tile, i, head, j, 0);
    });
    int first = (shape.heads + shape.kv_heads + tile.kv_head) * WIDTH;
    write_keys(dqkv, dv, shape, tile.batch, row, first, 1.0f);
}

__device__ inline void differentiate_keys(Shared& s, float* dq_sums, bf16* dqkv, const Shape& shape, const Tile& tile,
                                          Scale scale) {
    int thread = threadIdx.x % 128, warp = thread / WARP;
    float dk[WIDTH / 2];
#pragma unroll
    for (int i = 0; i < WIDTH / 2; i++) dk[i] = 0.0f;
    barrier_wait(&s.k_full, 0);
    barrier_wait(&s.v_full, 0);
    for_each_tile(tile, [&](const Ring<STAGES>& ring, int i, int head, int j) {
        int stage = ring.stage;
        float dp[QUERIES / 2];
        u32 p[QUERIES / 16][4], ds[QUERIES / 16][4];
        barrier_wait(&s.dout_full[stage], ring.parity);
        multiply_heads(dp, s.v[0][0], s.dout[stage][0][0]);
        barrier_wait(&s.q_full[stage], ring.parity);
        wgmma_wait<0>();
        wgmma_results(dp);
        release(&s.dout_empty[stage]);
        group_wait<256>(P_WRITTEN);
#pragma unroll
        for (int part = 0; part < QUERIES / 16; part++) {
            uint4 x = s.p[part][thread];
            p[part][0] = x.x, p[part][1] = x.y, p[part][2] = x.z, p[part][3] = x.w;
        }
        score_gradients(dp, p, s.stats[stage]);
        pack(dp, ds);
#if SUMS
        store_scores(s.ds[i % 2][0], ds, 16 * warp);
        fence_async();
#endif
        group_wait<256>(DS_WRITTEN);
        multiply_queries(dk, ds, s.q[stage][0][0]);
        add_queries(s, dq_sums, shape, tile, i, head, j, 1);
        wgmma_wait<0>();
        wgmma_results(dk);
        release(&s.q_empty[stage]);
    });
    write_keys(dqkv, dk, shape, tile.batch, tile.key + 16 * warp, (shape.heads + tile.kv_head) * WIDTH, scale.scale);
}

__device__ inline void differentiate(Shared& s, float* dq_sums, bf16* dqkv, const Shape& shape, const Tile& tile,
                                     Scale scale) {
    if (threadIdx.x < 256) differentiate_values(s, dq_sums, dqkv, shape, tile, scale);
    else differentiate_keys(s, dq_sums, dqkv, shape, tile, scale);
}
