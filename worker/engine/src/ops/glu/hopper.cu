// Linear layers with gated activations on compute capability 9.0: products of (rows, k) and (k, cols) in bf16, summed
// in fp32 in the order of k. The function f, -DACTIVATION, or its derivative is applied before they are written.
//
// One block per SM goes through the tiles of the product, TILE_M x TILE_N each. One thread requests tiles of a and b,
// TILE_K deep, into a ring of STAGES buffers in shared memory. Two warpgroups multiply them:
// TURNS 0: each warpgroup multiplies 64 rows of each tile, with TILE_N columns in registers;
// TURNS 1: the warpgroups take tiles in turn. One writes its results while the other one multiplies, for small k.
//
// GRADIENT 0: (g, u) = x w^T, h (rows, 2 cols) = g and u side by side, c (rows, cols) = f(g) u. x is (rows, k), w is
//             (2, cols, k). A tile has as many columns of g as of u.
// GRADIENT 1: da = dy w, c (rows, 2 cols) = dg and du (see kernel.cu) side by side, like g and u in h. dy is (rows, k),
//             w is (k, cols): "across" in hopper.cuh. Tiles of h are fetched while dy and w are multiplied.
//
// Boxes of the maps are 64 elements wide, swizzled: a (64, TILE_M, 1) of (k, rows, 1); b (64, TILE_N / 2, 1) of (k,
// cols, 2), or (64, 64, 1) of (cols, k, 1) for gradients; h (64, 1, 16) of (cols, 2, rows). k and cols are multiples of
// 8, and addresses of 16 bytes.

// Columns of c that a tile covers.
#define TILE_COLS (GRADIENT ? TILE_N : TILE_N / 2)
// Number of parts of 64 rows that a warpgroup has of a tile.
#define PARTS (TURNS ? 2 : 1)
#define MULTIPLIERS 8

// Bytes of 64 columns of g and u in the 16 rows of a warp.
#define H_BYTES 4096
// Number of pieces of 64 columns of h that are fetched ahead.
#define H_AHEAD 2

struct Shared {
    char a[STAGES][TILE_M * TILE_K * 2];
    char b[STAGES][TILE_N * TILE_K * 2];
#if GRADIENT
    char h[MULTIPLIERS][H_AHEAD][H_BYTES];
#endif
    // Per stage: its tiles have arrived; its tiles are no longer needed.
    Barrier full[STAGES], empty[STAGES];
    Barrier h_full[MULTIPLIERS][H_AHEAD];
    // The other warpgroup has finished multiplying its tile.
    Barrier turn[2];
};

// Tiles in the order in which blocks take them: column by column within `group` rows of tiles, so that the data that
// the blocks work on at a time fits into the L2 cache.
struct Tiles {
    int m, n, group;

    __device__ int count() const { return m * n; }
    __device__ void locate(int i, int& row, int& col) const {
        int first = i / (group * n) * group, height = min(group, m - first), rest = i - first * n;
        row = (first + rest % height) * TILE_M;
        col = rest / height * TILE_COLS;
    }
};

__device__ inline void load_tiles(Shared& s, const TensorMap& a_map, const TensorMap& b_map, const Tiles& tiles,
                                  int k_tiles) {
    int at = 0;
    for (int i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
        int row, col;
        tiles.locate(i, row, col);
        for (int k = 0; k < k_tiles * TILE_K; k += TILE_K, at++) {
            int stage = at % STAGES;
            barrier_wait(&s.empty[stage], at / STAGES % 2 ^ 1);
            char *a = s.a[stage], *b = s.b[stage];
            Barrier* full = &s.full[stage];
            barrier_arrive_and_expect(full, sizeof s.a[0] + sizeof s.b[0]);
            copy_box(a, &a_map, full, k, row, 0);
            if (GRADIENT) {
                for (int j = 0; j < TILE_N / 64; j++) copy_box(b + j * SQUARE, &b_map, full, col + 64 * j, k, 0);
            } else {
                copy_box(b, &b_map, full, k, col, 0);
                copy_box(b + sizeof s.b[0] / 2, &b_map, full, k, col, 1);
            }
        }
    }
}

__device__ inline float low_half(u32 pair) { return __uint_as_float(pair << 16); }
__device__ inline float high_half(u32 pair) { return __uint_as_float(pair & 0xffff0000u); }

#if !GRADIENT
// Computed from g and u as they are written, so that the same result follows from h later.
__device__ inline u32 glu(u32 g, u32 u) {
    float g0 = low_half(g), g1 = high_half(g);
    return bf16_pair(low_half(u) * (g0 * gate<ACTIVATION>(g0)), high_half(u) * (g1 * gate<ACTIVATION>(g1)));
}

__device__ inline void write_results(const float* d, bf16* c, bf16* h, int row, int rows, int col, int cols) {
#pragma unroll
    for (int n = 0; n < TILE_COLS; n += 32) {
        Pairs g, u, x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float *left = d + n / 2 + 4 * j, *up = left + TILE_COLS / 2;
            g.upper[j] = bf16_pair(left[0], left[1]), g.lower[j] = bf16_pair(left[2], left[3]);
            u.upper[j] = bf16_pair(up[0], up[1]), u.lower[j] = bf16_pair(up[2], up[3]);
            x.upper[j] = glu(g.upper[j], u.upper[j]), x.lower[j] = glu(g.lower[j], u.lower[j]);
        }
        write(h, 2ll * cols, row, rows, col + n, cols, g);
        write(h + cols, 2ll * cols, row, rows, col + n, cols, u);
        write(c, cols, row, rows, col + n, cols, x);
    }
}
#else
// dg and du from da, g and u.
__device__ inline void glu_gradient(const float* da, u32 gates, u32 ups, u32& dg, u32& du) {
    float g[2] = {low_half(gates), high_half(gates)}, u[2] = {low_half(ups), high_half(ups)}, x[2], y[2];
#pragma unroll
    for (int i = 0; i < 2; i++) {
        float s = gate<ACTIVATION>(g[i]);
        x[i] = times_derivative<ACTIVATION>(da[i] * u[i], g[i], s);
        y[i] = da[i] * g[i] * s;
    }
    dg = bf16_pair(x[0], x[1]), du = bf16_pair(y[0], y[1]);
}

// Writes 64 columns; `h` has g and u of these columns and of the 16 rows of this warp, swizzled.
__device__ inline void write_gradients(const float* d, bf16* c, const char* h, int row, int rows, int col, int cols) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < 64; n += 32) {
        Pairs dg, du;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* da = d + n / 2 + 4 * j;
            const char *g = h + lane / 4 * 128 + ((n / 8 + j ^ lane / 4) * 16 + lane % 4 * 4), *u = g + H_BYTES / 2;
            glu_gradient(da, *(const u32*)g, *(const u32*)u, dg.upper[j], du.upper[j]);
            glu_gradient(da + 2, *(const u32*)(g + 1024), *(const u32*)(u + 1024), dg.lower[j], du.lower[j]);
        }
        write(c, 2ll * cols, row, rows, col + n, cols, dg);
        write(c + cols, 2ll * cols, row, rows, col + n, cols, du);
    }
}
#endif

// Multiplies the tiles of this warpgroup, number `group` of two.
__device__ inline void multiply(Shared& s, const TensorMap& h_map, bf16* c, bf16* h, const Tiles& tiles, int rows,
                                int cols, int k_tiles) {
    int warp = threadIdx.x / WARP - 4, lane = threadIdx.x % WARP, group = warp / 4;
    int step = TURNS ? 2 * gridDim.x : gridDim.x, begin = blockIdx.x + (TURNS ? group * gridDim.x : 0);
    // Number of stages that this warpgroup has passed, including the other one's if they work in turns.
    int at = TURNS ? group * k_tiles : 0;
    auto first_row = [&](int part) { return TURNS ? 64 * part + warp % 4 * 16 : warp * 16; };
#if GRADIENT
    // Pieces of h: by tile, part, and 64 columns.
    const int pieces = PARTS * TILE_N / 64;
    int fetched = 0, used = 0, fetched_tile = begin;
    auto fetch_h = [&] {
        if (fetched_tile >= tiles.count()) return;
        int row, col, piece = fetched % pieces, slot = fetched % H_AHEAD;
        tiles.locate(fetched_tile, row, col);
        if (lane == 0) {
            char* to = s.h[warp][slot];
            Barrier* full = &s.h_full[warp][slot];
            barrier_arrive_and_expect(full, H_BYTES);
            row += first_row(piece / (TILE_N / 64)), col += piece % (TILE_N / 64) * 64;
            copy_box(to, &h_map, full, col, 0, row);
            copy_box(to + H_BYTES / 2, &h_map, full, col, 1, row);
        }
        if (++fetched % pieces == 0) fetched_tile += step;
    };
    for (int i = 0; i < H_AHEAD; i++) fetch_h();
#endif
    float d[PARTS][TILE_N / 2];
    u32 turn = group ^ 1;
    for (int i = begin; i < tiles.count(); i += step, turn ^= 1) {
        int row, col;
        tiles.locate(i, row, col);
        if (TURNS) barrier_wait(&s.turn[group], turn);
        for (int k = 0; k < k_tiles; k++, at++) {
            int stage = at % STAGES;
            barrier_wait(&s.full[stage], at / STAGES % 2);
            const char *a = s.a[stage] + (TURNS ? 0 : group * SQUARE), *b = s.b[stage];
            wgmma_fence();
#pragma unroll
            for (int j = 0; j < TILE_K / 16; j++)
#pragma unroll
                for (int part = 0; part < PARTS; part++)
                    wgmma<false, GRADIENT>(d[part], a + part * SQUARE + j * 32, b + j * (GRADIENT ? 2048 : 32),
                                           k + j > 0);
            wgmma_commit();
            // When the previous stage's group of multiplications has ended, that stage has been read.
            if (k > 0) {
                wgmma_wait<1>();
                if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
            }
        }
        if (TURNS && lane == 0) barrier_arrive(&s.turn[group ^ 1]);
        wgmma_wait<0>();
        if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
        if (TURNS) at += k_tiles;
#pragma unroll
        for (int part = 0; part < PARTS; part++) {
#if GRADIENT
#pragma unroll
            for (int n = 0; n < TILE_N; n += 64, used++) {
                int slot = used % H_AHEAD;
                barrier_wait(&s.h_full[warp][slot], used / H_AHEAD % 2);
                write_gradients(d[part] + n / 2, c, s.h[warp][slot], row + first_row(part), rows, col + n, cols);
                __syncwarp();
                fetch_h();
            }
#else
            write_results(d[part], c, h, row + first_row(part), rows, col, cols);
#endif
        }
    }
}

// `h` is written in forward; backward reads it through its map. `group`: see Tiles.
extern "C" __global__ void __launch_bounds__(384, 1)
    linear_glu(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
               const __grid_constant__ TensorMap h_map, bf16* c, bf16* h, i64 rows, i64 cols, i64 k, i64 group) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) {
            barrier_init(&s.full[i], 1);
            barrier_init(&s.empty[i], TURNS ? 4 : MULTIPLIERS);
        }
        for (int i = 0; i < MULTIPLIERS; i++)
            for (int j = 0; j < H_AHEAD; j++) barrier_init(&s.h_full[i][j], 1);
        for (int i = 0; i < 2; i++) barrier_init(&s.turn[i], 4);
        fence_barriers();
    }
    __syncthreads();
    int m_tiles = (rows + TILE_M - 1) / TILE_M, n_tiles = (cols + TILE_COLS - 1) / TILE_COLS;
    int k_tiles = (k + TILE_K - 1) / TILE_K;
    Tiles tiles = {m_tiles, n_tiles, (int)group};
    if (threadIdx.x < 128) {
        lower_registers<40>();
        if (threadIdx.x == 0) load_tiles(s, a_map, b_map, tiles, k_tiles);
    } else {
        raise_registers<232>();
        multiply(s, h_map, c, h, tiles, rows, cols, k_tiles);
    }
}
