// Backward of attention on compute capability 9.0: dk and dv, and with SUMS also dq. Compiled after hopper.cuh,
// hopper_tiles.cuh and attention/hopper.cuh, and before hopper_bwd_narrow.cu (heads up to 128) or hopper_bwd_wide.cu.
//
// A block has KEYS keys of a key head and visits the queries that see them, in tiles of QUERIES, of all query heads
// that share the key head. Rows of the scores are keys, so that p^T and ds^T are left operands in registers. dk and dv
// are summed in registers.
//
// SUMS 1: ds^T also goes through shared memory, for dq = ds k, which is added to fp32 sums in device memory, in any
//         order.
// SUMS 0: hopper_bwd_queries.cu computes dq.

struct Shared {
    char k[KEYS / 64][SLICES][SQUARE], v[KEYS / 64][SLICES][SQUARE];
    char q[STAGES][QUERIES / 64][SLICES][SQUARE], dout[STAGES][QUERIES / 64][SLICES][SQUARE];
#if SUMS
    // ds^T: for each 64 queries, rows of keys.
    char ds[2][QUERIES / 64][KEYS / 64 * SQUARE];
#endif
#if SLICES > 2
    // p^T of a thread times the derivative of the score, which the thread of the other warpgroup reads.
    uint4 p[QUERIES / 16][128];
#endif
    // For each query, lse in base 2 and delta.
    float2 stats[STAGES][QUERIES];
    Barrier k_full, v_full;
    Barrier q_full[STAGES], q_empty[STAGES], dout_full[STAGES], dout_empty[STAGES];
};

struct Shape {
    int seq, heads, kv_heads;
    // Number of positions that a query sees, its own and those before it.
    int window;
    // (B, T): the last query of each key's document; or null.
    const int* last_queries;

    __device__ int query_tiles() const { return (seq + QUERIES - 1) / QUERIES; }
    // The last query that sees a key. It never decreases from key to key.
    __device__ int last_query(int batch, int key) const {
        key = min(key, seq - 1);
        return min(key + window, last_queries ? last_queries[(i64)batch * seq + key] + 1 : seq) - 1;
    }
};

// A tile of keys, and the tiles of queries that see it, for each of `group` query heads.
struct Tile {
    int batch, kv_head, key, head, group, first, last;
};

// The tile of this block. The longest tiles, the first of each head, come first.
__device__ inline Tile find_tile(const Shape& s, const Sections& sections) {
    int rank, head;
    sections.locate(blockIdx.x, rank, head);
    Tile tile;
    tile.key = rank * KEYS;
    tile.batch = head / s.kv_heads, tile.kv_head = head % s.kv_heads;
    tile.group = s.heads / s.kv_heads, tile.head = tile.kv_head * tile.group;
    tile.first = tile.key / QUERIES;
    tile.last = s.last_query(tile.batch, tile.key + KEYS - 1) / QUERIES;
    return tile;
}

__device__ inline void load_tiles(Shared& s, const TensorMap& qkv, const TensorMap& dout, const float2* stats,
                                  const Shape& shape, const Tile& tile) {
    int k_col = (shape.heads + tile.kv_head) * WIDTH, v_col = k_col + shape.kv_heads * WIDTH;
    barrier_arrive_and_expect(&s.k_full, sizeof s.k);
    for (int i = 0; i < KEYS / 64; i++)
        load_rows(s.k[i][0], SQUARE, qkv, &s.k_full, k_col, tile.key + 64 * i, tile.batch);
    Ring<STAGES> ring;
#pragma unroll 1
    for (int head = tile.head; head < tile.head + tile.group; head++)
#pragma unroll 1
        for (int j = tile.first; j <= tile.last; j++, ring.advance()) {
            int stage = ring.stage, col = head * WIDTH, row = j * QUERIES;
            Barrier* full = &s.q_full[stage];
            barrier_wait(&s.q_empty[stage], ring.parity ^ 1);
            barrier_arrive_and_expect(full, sizeof s.q[0] + sizeof s.stats[0]);
            for (int i = 0; i < QUERIES / 64; i++)
                load_rows(s.q[stage][i][0], SQUARE, qkv, full, col, row + 64 * i, tile.batch);
            i64 stats_row = ((i64)tile.batch * shape.heads + head) * shape.query_tiles() + j;
            copy_bytes(s.stats[stage], stats + stats_row * QUERIES, sizeof s.stats[0], full);
            if (head == tile.head && j == tile.first) {
                barrier_arrive_and_expect(&s.v_full, sizeof s.v);
                for (int i = 0; i < KEYS / 64; i++)
                    load_rows(s.v[i][0], SQUARE, qkv, &s.v_full, v_col, tile.key + 64 * i, tile.batch);
            }
            full = &s.dout_full[stage];
            barrier_wait(&s.dout_empty[stage], ring.parity ^ 1);
            barrier_arrive_and_expect(full, sizeof s.dout[0]);
            for (int i = 0; i < QUERIES / 64; i++)
                load_rows(s.dout[stage][i][0], SQUARE, dout, full, col, row + 64 * i, tile.batch);
        }
}

// s (64 keys, QUERIES) = a b^T over the width of the head. Only starts the multiplication, like the others.
__device__ inline void multiply_heads(float (&s)[QUERIES / 2], const char* a, const char* b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < WIDTH / 16; i++)
        wgmma<false, false>(s, a + i / 4 * SQUARE + i % 4 * 32, b + i / 4 * (QUERIES / 64 * SQUARE) + i % 4 * 32,
                            i > 0);
    wgmma_commit();
}

// d (64 keys, WIDTH) += a b over QUERIES.
__device__ inline void multiply_queries(float (&d)[WIDTH / 2], const u32 (&a)[QUERIES / 16][4], const char* b) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < QUERIES / 16; i++) wgmma<true>(d, a[i], b + i / 4 * SLICES * SQUARE + i % 4 * 2048, true);
    wgmma_commit();
}

// dq (64, 64) = ds k, with ds^T (KEYS, 64 queries) and 64 columns of k.
__device__ inline void multiply_keys(float (&dq)[32], const char* ds, const char* k) {
    wgmma_fence();
#pragma unroll
    for (int i = 0; i < KEYS / 16; i++)
        wgmma<true, true>(dq, ds + i * 2048, k + i / 4 * SLICES * SQUARE + i % 4 * 2048, i > 0);
    wgmma_commit();
}

// p^T = exp2(scale_log2 s - lse) in place; the thread's keys are `key` and `key + 8`, and queries begin at `query`.
template <bool MASKED>
__device__ inline void probabilities(float (&s)[QUERIES / 2], const float2* stats, int key, int query,
                                     const int (&last_query)[2], float scale_log2) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++) {
        float4 stat = *(const float4*)(stats + 8 * j + column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            float p = exp2_approx(s[4 * j + i] * scale_log2 - (i % 2 ? stat.z : stat.x));
            int at = query + 8 * j + column + i % 2;
            bool visible = !MASKED || (key + i / 2 * 8 <= at && at <= last_query[i / 2]);
            s[4 * j + i] = visible ? p : 0.0f;
        }
    }
}

// ds^T = p (dp - delta), in place of dp. The fp32 probabilities would not fit into the registers.
__device__ inline void score_gradients(float (&dp)[QUERIES / 2], const u32 (&p)[QUERIES / 16][4], const float2* stats) {
    int column = threadIdx.x % 4 * 2;
#pragma unroll
    for (int j = 0; j < QUERIES / 8; j++) {
        float4 stat = *(const float4*)(stats + 8 * j + column);
#pragma unroll
        for (int i = 0; i < 4; i++) {
            u32 pair = p[j / 2][j % 2 * 2 + i / 2];
            float value = __uint_as_float(i % 2 ? pair & 0xffff0000u : pair << 16);
            dp[4 * j + i] = value * (dp[4 * j + i] - (i % 2 ? stat.w : stat.y));
        }
    }
}

// Writes the rows of a warp, which begin at `row` of ds^T.
__device__ inline void store_scores(char* ds, const u32 (&a)[QUERIES / 16][4], int row) {
    int lane = threadIdx.x % WARP;
    ds += (row + lane / 4) * 128 + lane % 4 * 4;
#pragma unroll
    for (int i = 0; i < QUERIES / 16; i++)
#pragma unroll
        for (int word = 0; word < 4; word++) {
            int chunk = i % 4 * 2 + word / 2;
            *(u32*)(ds + i / 4 * (KEYS / 64 * SQUARE) + word % 2 * 1024 + (chunk ^ lane / 4) * 16) = a[i][word];
        }
}

// Says that this warp no longer needs a tile.
__device__ inline void release(Barrier* empty) {
    __syncwarp();
    if (threadIdx.x % WARP == 0) barrier_arrive(empty);
}

// Adds 64 x 64 elements of dq to part `part` of tile `j` of a head's sums.
__device__ inline void add_part(float* dq_sums, const float (&dq)[32], const Shape& shape, int batch, int head, int j,
                                int part) {
    i64 tile = ((i64)batch * shape.heads + head) * shape.query_tiles() + j;
    float* to = dq_sums + (tile * PARTS + part) * PART + threadIdx.x % 128 * 4;
#pragma unroll
    for (int n = 0; n < 32; n += 4) add4_async(to + n * 128, dq[n], dq[n + 1], dq[n + 2], dq[n + 3]);
}

// Writes dk or dv of a warp's 16 keys, from key `row` on. `first`: its first column in dqkv.
__device__ inline void write_keys(bf16* dqkv, const float (&d)[WIDTH / 2], const Shape& shape, int batch, int row,
                                  int first, float factor) {
    i64 stride = (shape.heads + 2ll * shape.kv_heads) * WIDTH;
    write_rows(dqkv + batch * stride * shape.seq + first, stride, row, shape.seq, WIDTH, d, factor, factor);
}

// The work of the two warpgroups.
__device__ inline void differentiate(Shared& s, float* dq_sums, bf16* dqkv, const Shape& shape, const Tile& tile,
                                     Scale scale);

// dk, dv and the sums of dq. Grid: a block for each tile of keys. `section`: see Sections, with key heads.
extern "C" __global__ void __launch_bounds__(384, 1)
    attention_bwd_hopper(const __grid_constant__ TensorMap qkv_map, const __grid_constant__ TensorMap dout_map,
                         const float2* stats, float* dq_sums, bf16* dqkv, const int* last_queries, i64 window,
                         i64 batch, i64 seq, i64 heads, i64 kv_heads, i64 section, float scale, float cap) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    Shape shape = {(int)seq, (int)heads, (int)kv_heads, (int)window, last_queries};
    Sections sections = {(int)((seq + KEYS - 1) / KEYS), (int)(batch * kv_heads), (int)section};
    if (threadIdx.x == 0) {
        barrier_init(&s.k_full, 1);
        barrier_init(&s.v_full, 1);
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.q_full[i], 1);
            barrier_init(&s.dout_full[i], 1);
            barrier_init(&s.q_empty[i], 8);
            barrier_init(&s.dout_empty[i], 8);
        }
        fence_barriers();
    }
    __syncthreads();
    Tile tile = find_tile(shape, sections);
    if (threadIdx.x < 128) {
        lower_registers<PRODUCER>();
        if (threadIdx.x == 0) load_tiles(s, qkv_map, dout_map, stats, shape, tile);
    } else {
        raise_registers<CONSUMER>();
        differentiate(s, dq_sums, dqkv, shape, tile, {scale, cap});
    }
}
