// Linear layers of experts on compute capability 9.0, in bf16 and summed in fp32 in the order of the products:
// PRODUCT 0: y[i] = x[i] w[e]^T; 1: dx[i] = dy[i] w[e]; 2: dw[e] = sum_i dy[i]^T x[i]; see mod.rs.
//
// One block per SM goes through the tiles of the result, TILE_M x TILE_N each. One thread requests tiles of both
// operands, TILE_K deep, into a ring of STAGES buffers in shared memory; two warpgroups multiply 64 rows each.
//
// Tiles do not cross from one expert to the next. The last rows of a tile may be those of the next expert: they are
// computed, but not written. In the weights' gradient, where rows are summed over, they are cleared in one operand.
//
// Boxes of the maps are 64 elements wide, swizzled: x (64, TILE_M, 1) of (I, M, 1) and w (64, TILE_N, 1) of (I, O, E)
// for PRODUCT 0; operands that are "across" (see hopper.cuh) are in boxes of 64 x 64. I and O are multiples of 8.

#define TILE_N 256
#define MULTIPLIERS 8
#define BLOCK_WARPS 12
#define A_ACROSS (PRODUCT == 2)
#define B_ACROSS (PRODUCT != 0)

struct Shared {
    char a[STAGES][TILE_M * TILE_K * 2];
    char b[STAGES][TILE_N * TILE_K * 2];
    // Per stage: its tiles have arrived; its tiles are no longer needed.
    Barrier full[STAGES], empty[STAGES];
    int offsets[MAX_EXPERTS + 1];
    // Number of row tiles of the experts up to and including this one.
    int ends[MAX_EXPERTS];
};

struct Tile {
    int expert;
    // Its corner in the result, and the end of the expert's rows.
    int row, col, rows;
    // The products that are summed. In the weights' gradient they are rows; those from `clear` on are cleared.
    int begin, end, clear;
};

// Tiles in the order in which blocks take them: by expert, and column by column within `group` rows of tiles, so that
// the data that the blocks work on at a time fits into the L2 cache.
struct Tiles {
    const Shared& s;
    int experts, outputs, inputs, group;

    __device__ int cols() const { return PRODUCT == 0 ? outputs : inputs; }
    __device__ int across() const { return (cols() + TILE_N - 1) / TILE_N; }
    // Row tiles of dw.
    __device__ int down() const { return (outputs + TILE_M - 1) / TILE_M; }
    __device__ int count() const { return (PRODUCT == 2 ? experts * down() : s.ends[experts - 1]) * across(); }

    __device__ Tile locate(int i) const {
        int expert = 0, first = 0, height = down();
        if (PRODUCT == 2) {
            expert = i / (height * across());
            first = expert * height;
        } else {
            // The first expert whose tiles end after this one.
            for (int last = experts - 1; expert < last;) {
                int middle = (expert + last) / 2;
                if (s.ends[middle] * across() > i) last = middle;
                else expert = middle + 1;
            }
            first = expert == 0 ? 0 : s.ends[expert - 1];
            height = s.ends[expert] - first;
        }
        int rest = i - first * across(), top = rest / (group * across()) * group, rows = min(group, height - top);
        rest -= top * across();
        int row = (top + rest % rows) * TILE_M, col = rest / rows * TILE_N;
        int begin = s.offsets[expert], end = s.offsets[expert + 1];
        // An expert without rows has a product of cleared rows, so that its gradient is written.
        if (PRODUCT == 2) return {expert, row, col, outputs, begin, max(end, begin + 1), end};
        return {expert, begin + row, col, end, 0, PRODUCT == 0 ? inputs : outputs, 0};
    }
};

// Reads the offsets and counts the row tiles of each expert.
__device__ inline void read_offsets(Shared& s, const int* offsets, int experts) {
    int before = 0;
    for (int first = 0; first <= experts; first += BLOCK_WARPS * WARP) {
        int expert = first + threadIdx.x, tiles = 0;
        if (expert <= experts) s.offsets[expert] = offsets[expert];
        if (expert < experts) tiles = (offsets[expert + 1] - offsets[expert] + TILE_M - 1) / TILE_M;
        int start = block_prefix_sum<BLOCK_WARPS>(tiles, before);
        if (expert < experts) s.ends[expert] = start + tiles;
    }
}

__device__ inline void load_tiles(Shared& s, const TensorMap& a_map, const TensorMap& b_map, const Tiles& tiles) {
    int at = 0;
    for (int i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
        Tile tile = tiles.locate(i);
        for (int k = tile.begin; k < tile.end; k += TILE_K, at++) {
            int stage = at % STAGES;
            barrier_wait(&s.empty[stage], at / STAGES % 2 ^ 1);
            char *a = s.a[stage], *b = s.b[stage];
            Barrier* full = &s.full[stage];
            barrier_arrive_and_expect(full, sizeof s.a[0] + sizeof s.b[0]);
            if (A_ACROSS) {
                for (int j = 0; j < TILE_M / 64; j++) copy_box(a + j * SQUARE, &a_map, full, tile.row + 64 * j, k, 0);
            } else {
                copy_box(a, &a_map, full, k, tile.row, 0);
            }
            int expert = PRODUCT == 2 ? 0 : tile.expert;
            if (B_ACROSS) {
                for (int j = 0; j < TILE_N / 64; j++)
                    copy_box(b + j * SQUARE, &b_map, full, tile.col + 64 * j, k, expert);
            } else {
                copy_box(b, &b_map, full, k, tile.col, expert);
            }
        }
    }
}

// Clears the rows from `rows` on of this warpgroup's 64 x 64 elements.
__device__ inline void clear_rows(char* square, int rows, int group) {
    for (int i = rows * 8 + threadIdx.x % 128; i < 64 * 8; i += 128) ((uint4*)square)[i] = make_uint4(0, 0, 0, 0);
    fence_async();
    group_wait<128>(1 + group);
}

// d = this warpgroup's 64 rows of the tile. `at`: number of stages passed.
__device__ inline void multiply(float (&d)[TILE_N / 2], Shared& s, const Tile& tile, int& at) {
    int lane = threadIdx.x % WARP, group = threadIdx.x / 128 - 1;
    for (int k = tile.begin; k < tile.end; k += TILE_K, at++) {
        int stage = at % STAGES;
        barrier_wait(&s.full[stage], at / STAGES % 2);
        char *a = s.a[stage] + group * SQUARE, *b = s.b[stage];
        if (A_ACROSS && tile.clear - k < TILE_K) clear_rows(a, tile.clear - k, group);
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE_K / 16; j++)
            wgmma<A_ACROSS, B_ACROSS>(d, a + j * (A_ACROSS ? 2048 : 32), b + j * (B_ACROSS ? 2048 : 32),
                                      k > tile.begin || j > 0);
        wgmma_commit();
        // When the previous stage's group of multiplications has ended, that stage has been read.
        if (k > tile.begin) {
            wgmma_wait<1>();
            if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
        }
    }
    wgmma_wait<0>();
    wgmma_results(d);
    if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
}

// Writes rows `row` to `row + 16` of gradients that are added, or in fp32.
__device__ inline void write_gradients(const float (&d)[TILE_N / 2], void* dw, bool dw_bf16, bool add, int row,
                                       const Tile& tile, int cols) {
    int lane = threadIdx.x % WARP;
    row += lane / 4;
#pragma unroll
    for (int n = 0; n < TILE_N / 2; n += 2) {
        int r = row + n % 4 * 4, c = tile.col + n / 4 * 8 + lane % 4 * 2;
        if (r >= tile.rows || c >= cols) continue;
        i64 at = ((i64)tile.expert * tile.rows + r) * cols + c;
        float x = d[n], y = d[n + 1];
        if (add) x += load_grad(dw, dw_bf16, at), y += load_grad(dw, dw_bf16, at + 1);
        if (dw_bf16) *(u32*)((bf16*)dw + at) = bf16_pair(x, y);
        else *(float2*)((float*)dw + at) = make_float2(x, y);
    }
}

// `out` is in bf16 and overwritten unless it is the weights' gradient.
extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                   const int* __restrict__ offsets, void* out, bool out_bf16, bool add, i64 experts, i64 outputs,
                   i64 inputs, i64 group) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    read_offsets(s, offsets, (int)experts);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], MULTIPLIERS);
        fence_barriers();
    }
    __syncthreads();
    Tiles tiles = {s, (int)experts, (int)outputs, (int)inputs, (int)group};
    if (threadIdx.x < 128) {
        lower_registers<40>();
        if (threadIdx.x == 0) load_tiles(s, a_map, b_map, tiles);
        return;
    }
    raise_registers<232>();
    float d[TILE_N / 2];
    int at = 0, first_row = (threadIdx.x / WARP - 4) * 16;
    for (int i = blockIdx.x; i < tiles.count(); i += gridDim.x) {
        Tile tile = tiles.locate(i);
        multiply(d, s, tile, at);
        int row = tile.row + first_row, cols = tiles.cols();
        if (PRODUCT != 2) write_tile(d, (bf16*)out, row, tile.rows, tile.col, cols);
        else if (out_bf16 && !add)
            write_tile(d, (bf16*)out + (i64)tile.expert * outputs * inputs, row, tile.rows, tile.col, cols);
        else write_gradients(d, out, out_bf16, add, row, tile, cols);
    }
}
