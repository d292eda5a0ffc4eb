// Forward of attention on compute capability 9.0. Compiled after hopper.cuh, hopper_tiles.cuh and attention/hopper.cuh.
//
// One block per SM goes through tiles of 64 GROUPS queries of a head. Each of GROUPS warpgroups has 64 of the queries
// and visits the keys in tiles of KEYS, from the diagonal to the first. While a warpgroup computes the exponentials of
// one tile, it multiplies the probabilities of the previous tile and the values. Warpgroups start multiplications in
// turn, so that one multiplies while another one computes exponentials.

#define ROWS (64 * GROUPS)

struct Shared {
    char q[GROUPS][SLICES][SQUARE];
    char k[STAGES][SLICES][KEYS / 64][SQUARE];
    char v[STAGES][KEYS / 64][SLICES][SQUARE];
    Barrier q_full, q_empty;
    Barrier k_full[STAGES], k_empty[STAGES], v_full[STAGES], v_empty[STAGES];
    // Number of the tile of q; as large as the number of tiles at the end. Ordered by the barriers of q.
    volatile int tile;
};

struct Shape {
    int seq, heads, kv_heads;
    Sections sections;
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

// Tile number `i`. The longest tiles, the last of each head, come first.
__device__ inline bool find_tile(const Shape& s, int i, Tile& tile) {
    if (i >= s.sections.count()) return false;
    int rank, head;
    s.sections.locate(i, rank, head);
    tile.query = (s.sections.tiles - 1 - rank) * ROWS;
    tile.batch = head / s.heads, tile.head = head % s.heads;
    tile.last = (min(tile.query + ROWS, s.seq) - 1) / KEYS;
    tile.first = s.first_key(tile.batch, tile.query) / KEYS;
    return true;
}

// Numbers of tiles that blocks have taken after their first one, and of blocks that found no more. The last block sets
// both to zero again.
__device__ u32 taken, done;

__device__ inline int take_tile(int tiles) {
    int tile = atomicAdd(&taken, 1u) + gridDim.x;
    if (tile >= tiles && atomicAdd(&done, 1u) == gridDim.x - 1) {
        atomicAdd(&taken, 0u - tiles);
        atomicAdd(&done, 0u - gridDim.x);
    }
    return tile;
}

__device__ inline void load_tiles(Shared& s, const TensorMap& qkv, const Shape& shape) {
    Ring<STAGES> ring;
    Tile tile;
    u32 parity = 1;
    int number = blockIdx.x;
#pragma unroll 1
    for (; find_tile(shape, number, tile); parity ^= 1) {
        int kv_head = tile.head / (shape.heads / shape.kv_heads);
        int q_col = tile.head * WIDTH, k_col = (shape.heads + kv_head) * WIDTH, v_col = k_col + shape.kv_heads * WIDTH;
#pragma unroll 1
        for (int j = tile.last; j >= tile.first; j--, ring.advance()) {
            int stage = ring.stage;
            barrier_wait(&s.k_empty[stage], ring.parity ^ 1);
            barrier_arrive_and_expect(&s.k_full[stage], sizeof s.k[0]);
#pragma unroll
            for (int i = 0; i < KEYS / 64; i++)
                load_rows(s.k[stage][0][i], KEYS / 64 * SQUARE, qkv, &s.k_full[stage], k_col, j * KEYS + 64 * i,
                          tile.batch);
            if (j == tile.last) {
                barrier_wait(&s.q_empty, parity);
                s.tile = number;
                barrier_arrive_and_expect(&s.q_full, sizeof s.q);
#pragma unroll
                for (int i = 0; i < GROUPS; i++)
                    load_rows(s.q[i][0], SQUARE, qkv, &s.q_full, q_col, tile.query + 64 * i, tile.batch);
                number = take_tile(shape.sections.count());
            }
            barrier_wait(&s.v_empty[stage], ring.parity ^ 1);
            barrier_arrive_and_expect(&s.v_full[stage], sizeof s.v[0]);
#pragma unroll
            for (int i = 0; i < KEYS / 64; i++)
                load_rows(s.v[stage][i][0], SQUARE, qkv, &s.v_full[stage], v_col, j * KEYS + 64 * i, tile.batch);
        }
    }
    barrier_wait(&s.q_empty, parity);
    s.tile = number;
    barrier_arrive(&s.q_full);
}

// Running maximum and sum of two rows of a thread. The scores and their maximum are not scaled yet.
struct Softmax {
    float max[2], sum[2];

    // Turns scores into exp2(scale_log2 (s - max)); `rescale` is the factor of previous results.
    __device__ void step(float (&s)[KEYS / 2], float scale_log2, float (&rescale)[2]) {
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float largest = max[half];
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++)
                if (j / 2 % 2 == half) largest = fmaxf(largest, s[j]);
            // The first tile includes the query's own key, so the maximum is finite.
            largest = quad_max(largest);
            rescale[half] = exp2_approx((max[half] - largest) * scale_log2);
            max[half] = largest;
            float shift = largest * scale_log2, total = 0.0f;
#pragma unroll
            for (int j = 0; j < KEYS / 2; j++) {
                if (j / 2 % 2 != half) continue;
                s[j] = exp2_approx(s[j] * scale_log2 - shift);
                total += s[j];
            }
            sum[half] = sum[half] * rescale[half] + total;
        }
    }
};

// Hides scores of keys, from `key` on, that the queries from `row` on of the warp do not see.
__device__ inline void mask(float (&s)[KEYS / 2], int row, int key, const Shape& shape, int batch) {
    int lane = threadIdx.x % WARP, column = key + lane % 4 * 2;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        int query = row + lane / 4 + 8 * half, first_key = shape.first_key(batch, query);
#pragma unroll
        for (int j = 0; j < KEYS / 2; j++) {
            int at = column + j / 4 * 8 + j % 2;
            if (j / 2 % 2 == half && (at > query || at < first_key)) s[j] = -INF;
        }
    }
}

// s = q k^T. Only starts the multiplication.
__device__ inline void multiply_keys(float (&s)[KEYS / 2], const char* q, const char* k) {
    if (SLICES > 2) q = computed_here(q);
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
        wgmma<false, false>(s, q + i / 4 * SQUARE + i % 4 * 32, k + i / 4 * (KEYS / 64 * SQUARE) + i % 4 * 32, i > 0);
    wgmma_commit();
}

// o += p v, or o = p v. Only starts the multiplication.
__device__ inline void multiply_values(float (&o)[WIDTH / 2], const u32 (&p)[KEYS / 16][4], const char* v, bool add) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma<true>(o, p[i], v + i / 4 * SLICES * SQUARE + i % 4 * 2048, i > 0 || add);
    wgmma_commit();
}

__device__ inline void wait_turn(int group) {
    group_wait<256>(1 + group);
}
__device__ inline void pass_turn(int group) {
    group_arrive<256>(1 + (group + 1) % GROUPS);
}

__device__ inline void attend(Shared& s, bf16* out, float* lse, const Shape& shape, Scale scale) {
    int group = threadIdx.x / 128 - 1, warp = threadIdx.x / WARP % 4, lane = threadIdx.x % WARP;
    auto release = [&](Barrier* empty) {
        if (lane == 0) barrier_arrive(empty);
    };
    if (group == GROUPS - 1) pass_turn(group);
    Ring<STAGES> k_ring, v_ring;
    Tile tile;
    float scores[KEYS / 2], o[WIDTH / 2], rescale[2], scale_log2 = scale.factor() * LOG2E;
    u32 p[KEYS / 16][4];
    for (u32 parity = 0;; parity ^= 1) {
        barrier_wait(&s.q_full, parity);
        int number = s.tile;
        if (!find_tile(shape, number, tile)) break;
        int row = tile.query + 64 * group, mine = min((row + 63) / KEYS, tile.last), first = tile.first;
        int batch = tile.batch, edge = shape.first_key(batch, row + 63);
        Softmax softmax = {{-INF, -INF}, {0.0f, 0.0f}};
        // Keys after all queries of this warpgroup.
        int j = tile.last;
#pragma unroll 1
        for (; j > mine; j--, k_ring.advance(), v_ring.advance()) {
            barrier_wait(&s.k_full[k_ring.stage], k_ring.parity);
            release(&s.k_empty[k_ring.stage]);
            wait_turn(group);
            pass_turn(group);
            barrier_wait(&s.v_full[v_ring.stage], v_ring.parity);
            release(&s.v_empty[v_ring.stage]);
        }
        barrier_wait(&s.k_full[k_ring.stage], k_ring.parity);
        wait_turn(group);
        multiply_keys(scores, s.q[group][0], s.k[k_ring.stage][0][0]);
        pass_turn(group);
        wgmma_wait<0>();
        wgmma_results(scores);
        release(&s.k_empty[k_ring.stage]);
        k_ring.advance();
        scale.apply(scores);
        mask(scores, row + 16 * warp, j * KEYS, shape, batch);
        softmax.step(scores, scale_log2, rescale);
        pack(scores, p);
        bool add = false;
#pragma unroll 1
        for (j--; j >= first; j--) {
            barrier_wait(&s.k_full[k_ring.stage], k_ring.parity);
            wait_turn(group);
            multiply_keys(scores, s.q[group][0], s.k[k_ring.stage][0][0]);
            barrier_wait(&s.v_full[v_ring.stage], v_ring.parity);
            multiply_values(o, p, s.v[v_ring.stage][0][0], add);
            pass_turn(group);
            wgmma_wait<1>();
            wgmma_results(scores);
            release(&s.k_empty[k_ring.stage]);
            k_ring.advance();
            scale.apply(scores);
            if (j * KEYS < edge) mask(scores, row + 16 * warp, j * KEYS, shape, batch);
            softmax.step(scores, scale_log2, rescale);
            wgmma_wait<0>();
            wgmma_results(o);
            release(&s.v_empty[v_ring.stage]);
            v_ring.advance();
            pack(scores, p);
#pragma unroll
            for (int i = 0; i < WIDTH / 2; i++) o[i] *= rescale[i / 2 % 2];
            add = true;
        }
        release(&s.q_empty);
        barrier_wait(&s.v_full[v_ring.stage], v_ring.parity);
        multiply_values(o, p, s.v[v_ring.stage][0][0], add);
        wgmma_wait<0>();
        wgmma_results(o);
        release(&s.v_empty[v_ring.stage]);
        v_ring.advance();

        // Not kept in registers above.
        find_tile(shape, number, tile);
        row = tile.query + 64 * group + 16 * warp;
        float inv_sum[2], *lse_rows = lse + ((i64)tile.batch * shape.heads + tile.head) * shape.seq;
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float sum = quad_sum(softmax.sum[half]);
            inv_sum[half] = 1.0f / sum;
            int query = row + lane / 4 + 8 * half;
            float logarithm = softmax.max[half] * scale.factor() + log2f(sum) * LN2;
            if (lane % 4 == 0 && query < shape.seq) lse_rows[query] = logarithm;
        }
        bf16* to = out + ((i64)tile.batch * shape.seq * shape.heads + tile.head) * WIDTH;
        write_rows(to, (i64)shape.heads * WIDTH, row, shape.seq, WIDTH, o, inv_sum[0], inv_sum[1]);
    }
}

// out (B, T, H D) and lse (B, H, T). `section`: see Sections.
extern "C" __global__ void __launch_bounds__(128 * GROUPS + 128, 1)
    attention_fwd_hopper(const __grid_constant__ TensorMap qkv_map, bf16* out, float* lse, const int* first_keys,
                         i64 window, i64 batch, i64 seq, i64 heads, i64 kv_heads, i64 section, float scale,
                         float cap) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    Sections sections = {(int)((seq + ROWS - 1) / ROWS), (int)(batch * heads), (int)section};
    Shape shape = {(int)seq, (int)heads, (int)kv_heads, sections, (int)window, first_keys};
    if (threadIdx.x == 0) {
        barrier_init(&s.q_full, 1);
        barrier_init(&s.q_empty, 4 * GROUPS);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.k_full[i], 1);
            barrier_init(&s.v_full[i], 1);
            barrier_init(&s.k_empty[i], 4 * GROUPS);
            barrier_init(&s.v_empty[i], 4 * GROUPS);
        }
        fence_barriers();
    }
    __syncthreads();
    if (threadIdx.x < 128) {
        lower_registers<PRODUCER>();
        if (threadIdx.x == 0) load_tiles(s, qkv_map, shape);
    } else {
        raise_registers<CONSUMER>();
        attend(s, out, lse, shape, {scale, cap});
    }
}
