// Backward of attention on compute capability 9.0: dq, in a fixed order. Compiled after hopper.cuh, hopper_tiles.cuh
// and attention/hopper.cuh.
//
// A block has 64 GROUPS queries of a head, 64 for each of GROUPS warpgroups, and visits the keys in tiles of KEYS, from
// the diagonal to the first. While a warpgroup computes ds of one tile, it multiplies that of the previous tile and the
// keys.

#define ROWS (64 * GROUPS)
static_assert(SLICES == 1 || KEYS == 64, "keys are right operands in both directions");

struct Shared {
    char q[GROUPS][SLICES][SQUARE], dout[GROUPS][SLICES][SQUARE];
    char k[STAGES][KEYS / 64][SLICES][SQUARE], v[STAGES][KEYS / 64][SLICES][SQUARE];
    Barrier q_full, k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
};

struct Shape {
    int seq, heads, kv_heads;
    // Number of positions that a query sees, its own and those before it.
    int window;
    // (B, T): the first key of each query's document; or null.
    const int* first_keys;

    // The first key that a query sees. It never decreases from query to query.
    __device__ int first_key(int batch, int query) const {
        query = min(query, seq - 1);
        return max(query - window + 1, first_keys ? first_keys[(i64)batch * seq + query] : 0);
    }
};

// A tile of queries, and the tiles of keys that it visits.
struct Tile {
    int batch, head, query, first, last;
};

// The tile of this block. The longest tiles, the last of each head, come first.
__device__ inline Tile find_tile(const Shape& s, const Sections& sections) {
    int rank, head;
    sections.locate(blockIdx.x, rank, head);
    Tile tile;
    tile.query = (sections.tiles - 1 - rank) * ROWS;
    tile.batch = head / s.heads, tile.head = head % s.heads;
    tile.last = (min(tile.query + ROWS, s.seq) - 1) / KEYS;
    tile.first = s.first_key(tile.batch, tile.query) / KEYS;
    return tile;
}

__device__ inline void load_tiles(Shared& s, const TensorMap& qkv, const TensorMap& dout, const Shape& shape,
                                  const Tile& tile) {
    int kv_head = tile.head / (shape.heads / shape.kv_heads);
    int q_col = tile.head * WIDTH, k_col = (shape.heads + kv_head) * WIDTH, v_col = k_col + shape.kv_heads * WIDTH;
    barrier_arrive_and_expect(&s.q_full, sizeof s.q + sizeof s.dout);
    for (int i = 0; i < GROUPS; i++) {
        load_rows(s.q[i][0], SQUARE, qkv, &s.q_full, q_col, tile.query + 64 * i, tile.batch);
        load_rows(s.dout[i][0], SQUARE, dout, &s.q_full, q_col, tile.query + 64 * i, tile.batch);
    }
    Ring<STAGES> ring;
#pragma unroll 1
    for (int j = tile.last; j >= tile.first; j--, ring.advance()) {
        int stage = ring.stage;
        barrier_wait(&s.k_empty[stage], ring.parity ^ 1);
        barrier_arrive_and_expect(&s.k_full[stage], sizeof s.k[0]);
#pragma unroll
        for (int i = 0; i < KEYS / 64; i++)
            load_rows(s.k[stage][i][0], SQUARE, qkv, &s.k_full[stage], k_col, j * KEYS + 64 * i, tile.batch);
        barrier_wait(&s.v_empty[stage], ring.parity ^ 1);
        barrier_arrive_and_expect(&s.v_full[stage], sizeof s.v[0]);
#pragma unroll
        for (int i = 0; i < KEYS / 64; i++)
            load_rows(s.v[stage][i][0], SQUARE, qkv, &s.v_full[stage], v_col, j * KEYS + 64 * i, tile.batch);
    }
}

// s (64 queries, KEYS) = a b^T over the width of the head. Only starts the multiplication.
__device__ inline void multiply_heads(float (&s)[KEYS / 2], const char* a, const char* b) {
    if (SLICES > 2) a = computed_here(a);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
        wgmma<false, false>(s, a + i / 4 * SQUARE + i % 4 * 32, b + i / 4 * (KEYS / 64 * SQUARE) + i % 4 * 32, i > 0);
    wgmma_commit();
}

// dq += ds k, or dq = ds k. Only starts the multiplication.
__device__ inline void multiply_keys(float (&dq)[WIDTH / 2], const u32 (&ds)[KEYS / 16][4], const char* k, bool add) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma<true>(dq, ds[i], k + i / 4 * SLICES * SQUARE + i % 4 * 2048, i > 0 || add);
    wgmma_commit();
}

// Two rows of a thread.
struct Rows {
    int query[2], first_key[2];
    // lse in base 2, and delta.
    float2 stats[2];
    Scale scale;

    // p = exp2(factor LOG2E s - lse) in place, times the derivative of the score.
    template <bool MASKED>
    __device__ void probabilities(float (&s)[KEYS / 2], int key) const {
        int column = key + threadIdx.x % 4 * 2;
        float scale_log2 = scale.factor() * LOG2E;
        scale.apply(s);
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++) {
            int half = j / 2 % 2, at = column + j / 4 * 8 + j % 2;
            float p = exp2_approx(s[j] * scale_log2 - stats[half].x) * Scale::slope(s[j]);
            s[j] = MASKED && (at > query[half] || at < first_key[half]) ? 0.0f : p;
        }
    }

    // ds = p (dp - delta), in place of dp.
    __device__ void score_gradients(float (&dp)[KEYS / 2], const float (&p)[KEYS / 2]) const {
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++) dp[j] = p[j] * (dp[j] - stats[j / 2 % 2].y);
    }
};

__device__ inline void differentiate(Shared& s, const float2* stats, bf16* dqkv, const Shape& shape, const Tile& tile,
                                     Scale scale) {
    int group = threadIdx.x / 128 - 1, warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
    auto release = [&](Barrier* empty) {
        if (lane == 0) barrier_arrive(empty);
    };
    int row = tile.query + 64 * group, mine = min((row + 63) / KEYS, tile.last);
    int edge = shape.first_key(tile.batch, row + 63);
    stats += ((i64)tile.batch * shape.heads + tile.head) * ((shape.seq + QUERIES - 1) / QUERIES * QUERIES);
    Rows rows = {{}, {0, 0}, {}, scale};
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = rows.query[half] = row + 16 * warp + lane / 4 + 8 * half;
        rows.stats[half] = query < shape.seq ? stats[query] : make_float2(INF, 0.0f);
        rows.first_key[half] = shape.first_key(tile.batch, query);
    }
    const char *q = s.q[group][0], *dout = s.dout[group][0];
    float p[KEYS / 2], dp[KEYS / 2], dq[WIDTH / 2];
    u32 ds[KEYS / 16][4];
    // The tile of which scores are computed, and the one whose part of dq is computed.
    Ring<STAGES> ring, previous;
    barrier_wait(&s.q_full, 0);
    // Keys after all queries of this warpgroup.
    int j = tile.last;
#pragma unroll 1
    for (; j > mine; j--, ring.advance(), previous.advance()) {
        barrier_wait(&s.k_full[ring.stage], ring.parity);
        release(&s.k_empty[ring.stage]);
        barrier_wait(&s.v_full[ring.stage], ring.parity);
        release(&s.v_empty[ring.stage]);
    }
    barrier_wait(&s.k_full[ring.stage], ring.parity);
    multiply_heads(p, q, s.k[ring.stage][0][0]);
    barrier_wait(&s.v_full[ring.stage], ring.parity);
    multiply_heads(dp, dout, s.v[ring.stage][0][0]);
    wgmma_wait<1>();
    wgmma_results(p);
    rows.probabilities<true>(p, j * KEYS);
    wgmma_wait<0>();
    wgmma_results(dp);
    release(&s.v_empty[ring.stage]);
    ring.advance();
    rows.score_gradients(dp, p);
    pack(dp, ds);
    bool add = false;
#pragma unroll 1
    for (j--; j >= tile.first; j--, ring.advance(), previous.advance(), add = true) {
        barrier_wait(&s.k_full[ring.stage], ring.parity);
        multiply_heads(p, q, s.k[ring.stage][0][0]);
        barrier_wait(&s.v_full[ring.stage], ring.parity);
        multiply_heads(dp, dout, s.v[ring.stage][0][0]);
        multiply_keys(dq, ds, s.k[previous.stage][0][0], add);
        wgmma_wait<2>();
        wgmma_results(p);
        if (j * KEYS < edge) rows.probabilities<true>(p, j * KEYS);
        else rows.probabilities<false>(p, j * KEYS);
        wgmma_wait<1>();
        wgmma_results(dp);
        release(&s.v_empty[ring.stage]);
        rows.score_gradients(dp, p);
        wgmma_wait<0>();
        wgmma_results(dq);
        release(&s.k_empty[previous.stage]);
        pack(dp, ds);
    }
    multiply_keys(dq, ds, s.k[previous.stage][0][0], add);
    wgmma_wait<0>();
    wgmma_results(dq);
    i64 stride = (shape.heads + 2ll * shape.kv_heads) * WIDTH;
    bf16* to = dqkv + tile.batch * stride * shape.seq + tile.head * WIDTH;
    write_rows(to, stride, row + 16 * warp, shape.seq, WIDTH, dq, scale.scale, scale.scale);
}

// dq. Grid: a block for each tile of queries. `section`: see Sections.
extern "C" __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    attention_bwd_hopper_queries(const __grid_constant__ TensorMap qkv_map, const __grid_constant__ TensorMap dout_map,
                                 const float2* stats, bf16* dqkv, const int* first_keys, i64 window, i64 batch,
                                 i64 seq, i64 heads, i64 kv_heads, i64 section, float scale, float cap) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    Shape shape = {(int)seq, (int)heads, (int)kv_heads, (int)window, first_keys};
    Sections sections = {(int)((seq + ROWS - 1) / ROWS), (int)(batch * heads), (int)section};
    if (threadIdx.x == 0) {
        barrier_init(&s.q_full, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.k_full[i], 1);
            barrier_init(&s.v_full[i], 1);
            barrier_init(&s.k_empty[i], 4 * GROUPS);
            barrier_init(&s.v_empty[i], 4 * GROUPS);
        }
        fence_barriers();
    }
    __syncthreads();
    Tile tile = find_tile(shape, sections);
    if (threadIdx.x < 128) {
        lower_registers<PRODUCER>();
        if (threadIdx.x == 0) load_tiles(s, qkv_map, dout_map, shape, tile);
    } else {
        raise_registers<CONSUMER>();
        differentiate(s, stats, dqkv, shape, tile, {scale, cap});
    }
}
