// Symmetric products of matrices on compute capability 9.0, in bf16 and summed in fp32 in the order of the products:
//
//     c = x y^T, or x^T y with TALL        if `added` is null
//     c = alpha I + beta added + gamma x y^T otherwise
//
// One block per SM goes through tiles of the results, TILE_M x TILE_N each, of all matrices. Only tiles with elements
// on or above the diagonal are computed. Blocks of 128 x 128 elements above it are written twice, the second time
// transposed; blocks below it in such a tile are not written. One thread requests tiles of both operands, TILE_K deep,
// into a ring of STAGES buffers in shared memory; two warpgroups multiply 64 rows each.
//
// Boxes of the maps are 64 elements wide, swizzled: (64, TILE_M, 1) of x and (64, TILE_N, 1) of y, which are (depth,
// side, matrices). With TALL, these are (side, depth, matrices) and boxes are 64 x 64. Innermost sizes are multiples of
// 8.

#define TILE_N 256
#define MULTIPLIERS 8
// The edge of blocks.
#define BLOCK 128

struct Shared {
    char a[STAGES][TILE_M * TILE_K * 2];
    char b[STAGES][TILE_N * TILE_K * 2];
    // Per stage: its tiles have arrived; its tiles are no longer needed.
    Barrier full[STAGES], empty[STAGES];
};

struct Tile {
    int matrix, row, col;
};

// Tiles in the order in which blocks take them.
struct Tiles {
    int side, matrices;

    __device__ int down() const { return (side + TILE_M - 1) / TILE_M; }
    __device__ int across() const { return (side + TILE_N - 1) / TILE_N; }
    // Tiles of the rows of tiles before `row`, an even number. Rows 2 i and 2 i + 1 begin with tile i.
    __device__ int before(int row) const { return row * across() - row / 2 * (row / 2 - 1); }
    __device__ int each() const {
        int even = down() / 2 * 2;
        return before(even) + (down() - even) * (across() - even / 2);
    }
    __device__ int count() const { return matrices * each(); }

    __device__ Tile locate(int i) const {
        int matrix = i / each(), rest = i % each(), row = 0;
        while (row + 2 < down() && before(row + 2) <= rest) row += 2;
        int width = across() - row / 2;
        rest -= before(row);
        return {matrix, (row + rest / width) * TILE_M, (row / 2 + rest % width) * TILE_N};
    }
};

__device__ inline void load_tiles(Shared& s, const TensorMap& a_map, const TensorMap& b_map, const Tiles& tiles,
                                  int depth) {
    int at = 0;
    for (int i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
        Tile tile = tiles.locate(i);
        for (int k = 0; k < depth; k += TILE_K, at++) {
            int stage = at % STAGES;
            barrier_wait(&s.empty[stage], at / STAGES % 2 ^ 1);
            char *a = s.a[stage], *b = s.b[stage];
            Barrier* full = &s.full[stage];
            barrier_arrive_and_expect(full, sizeof s.a[0] + sizeof s.b[0]);
            if (TALL) {
                for (int j = 0; j < TILE_M / 64; j++)
                    copy_box(a + j * SQUARE, &a_map, full, tile.row + 64 * j, k, tile.matrix);
                for (int j = 0; j < TILE_N / 64; j++)
                    copy_box(b + j * SQUARE, &b_map, full, tile.col + 64 * j, k, tile.matrix);
            } else {
                copy_box(a, &a_map, full, k, tile.row, tile.matrix);
                copy_box(b, &b_map, full, k, tile.col, tile.matrix);
            }
        }
    }
}

// d = this warpgroup's 64 rows of a tile. `at`: number of stages passed.
__device__ inline void multiply(float (&d)[TILE_N / 2], Shared& s, int depth, int& at) {
    int lane = threadIdx.x % WARP, group = threadIdx.x / 128 - 1;
    for (int k = 0; k < depth; k += TILE_K, at++) {
        int stage = at % STAGES;
        barrier_wait(&s.full[stage], at / STAGES % 2);
        char *a = s.a[stage] + group * SQUARE, *b = s.b[stage];
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE_K / 16; j++)
            wgmma<TALL, TALL>(d, a + j * (TALL ? 2048 : 32), b + j * (TALL ? 2048 : 32), k > 0 || j > 0);
        wgmma_commit();
        // When the previous stage's group of multiplications has ended, that stage has been read.
        if (k > 0) {
            wgmma_wait<1>();
            if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
        }
    }
    wgmma_wait<0>();
    wgmma_results(d);
    if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
}

// Reads what `write` has written.
__device__ inline Pairs read(const bf16* x, int side, int row, int col) {
    int lane = threadIdx.x % WARP;
    row += lane / 4, col += lane % 4 * 8;
    uint4 none = make_uint4(0, 0, 0, 0);
    const bf16* from = x + (i64)row * side + col;
    uint4 upper = row < side && col < side ? *(const uint4*)from : none;
    uint4 lower = row + 8 < side && col < side ? *(const uint4*)(from + 8 * (i64)side) : none;
    Pairs pairs = {{upper.x, upper.y, upper.z, upper.w}, {lower.x, lower.y, lower.z, lower.w}};
    transpose(pairs.upper);
    transpose(pairs.lower);
    return pairs;
}

// The transpose of 8 x 8 elements, of which each thread has two neighbours in row lane / 4.
__device__ inline u32 flip(u32 pair) {
    int lane = threadIdx.x % WARP, from = lane % 4 * 8 + lane / 8;
    u32 x = __shfl_sync(FULL_WARP, pair, from), y = __shfl_sync(FULL_WARP, pair, from + 4);
    return lane / 4 % 2 ? x >> 16 | (y & 0xffff0000u) : (x & 0xffffu) | y << 16;
}

// Writes 16 rows and 32 columns, transposed: columns `row` to `row + 16` of rows `col` to `col + 32`.
__device__ inline void write_transposed(bf16* c, int side, int row, int col, const Pairs& x) {
    int lane = threadIdx.x % WARP, part = lane % 4;
    int to_row = col + part / 2 * 8 + lane / 4, to_col = row + part % 2 * 8;
#pragma unroll
    for (int j = 0; j < 4; j += 2, to_row += 16) {
        u32 words[4] = {flip(x.upper[j]), flip(x.lower[j]), flip(x.upper[j + 1]), flip(x.lower[j + 1])};
        transpose(words);
        if (to_row < side && to_col < side)
            *(uint4*)(c + (i64)to_row * side + to_col) = make_uint4(words[0], words[1], words[2], words[3]);
    }
}

// Writes rows `row` to `row + 16` of a tile, and their transpose.
__device__ inline void write_symmetric(const float (&d)[TILE_N / 2], const bf16* added, bf16* c, int side, int row,
                                       int col, float alpha, float beta, float gamma) {
    int lane = threadIdx.x % WARP;
#pragma unroll
    for (int n = 0; n < TILE_N; n += 32) {
        int first = col + n;
        if (first >= side || first / BLOCK < row / BLOCK) continue;
        Pairs x = {};
        if (added) x = read(added, side, row, first);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* e = d + n / 2 + 4 * j;
            int on = first + 8 * j + lane % 4 * 2 - row - lane / 4;
            auto sum = [&](u32 pair, float left, float right, int on) {
                if (!added) return bf16_pair(left, right);
                left = gamma * left + beta * __uint_as_float(pair << 16) + (on == 0 ? alpha : 0.0f);
                right = gamma * right + beta * __uint_as_float(pair & 0xffff0000u) + (on == -1 ? alpha : 0.0f);
                return bf16_pair(left, right);
            };
            x.upper[j] = sum(x.upper[j], e[0], e[1], on);
            x.lower[j] = sum(x.lower[j], e[2], e[3], on - 8);
        }
        if (first / BLOCK > row / BLOCK) write_transposed(c, side, row, first, x);
        write(c, side, row, side, first, side, x);
    }
}

extern "C" __global__ void __launch_bounds__(384, 1)
    symmetric_product(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                      const bf16* added, bf16* c, i64 side, i64 depth, i64 matrices, float alpha, float beta,
                      float gamma) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], MULTIPLIERS);
        fence_barriers();
    }
    __syncthreads();
    Tiles tiles = {(int)side, (int)matrices};
    if (threadIdx.x < 128) {
        lower_registers<40>();
        if (threadIdx.x == 0) load_tiles(s, a_map, b_map, tiles, (int)depth);
        return;
    }
    raise_registers<232>();
    float d[TILE_N / 2];
    int at = 0, first_row = (threadIdx.x / WARP - 4) * 16;
    for (int i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
        Tile tile = tiles.locate(i);
        multiply(d, s, (int)depth, at);
        i64 offset = tile.matrix * side * side;
        const bf16* own = added ? added + offset : added;
        write_symmetric(d, own, c + offset, (int)side, tile.row + first_row, tile.col, alpha, beta, gamma);
    }
}
