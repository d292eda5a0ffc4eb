// Linear layers of experts on compute capability 9.0, in bf16 and summed in fp32 in the order of the products:
// PRODUCT 0: y[i] = x[i] w[e]^T; 1: dx[i] = dy[i] w[e]; 2: dw[e] = sum_i dy[i]^T x[i]; see mod.rs. With FP8, operands
// are those of mod.rs' table, and results are multiplied by both scales.
//
// One block per SM goes through the tiles of the result, TILE_M x TILE_N each. One thread requests tiles of both
// operands, DEPTH deep, into a ring of STAGES buffers in shared memory; two warpgroups multiply 64 rows each.
//
// Tiles do not cross from one expert to the next. The last rows of a tile may be those of the next expert: they are
// computed, but not written. In the weights' gradient, where rows are summed over, those of other experts are cleared
// in one operand.
//
// Boxes of the maps are 64 elements wide, swizzled: x (64, TILE_M, 1) of (I, M, 1) and w (64, TILE_N, 1) of (I, O, E)
// for PRODUCT 0; operands that are "across" (see hopper.cuh) are in boxes of 64 x 64. I and O are multiples of 8. In
// FP8 no operand is across, and boxes are 128 elements wide.

#define TILE_N 256
#define MULTIPLIERS 8
#define BLOCK_WARPS 12
#define A_ACROSS (!FP8 && PRODUCT == 2)
#define B_ACROSS (!FP8 && PRODUCT != 0)
// Bytes of a row of a tile, and products that it holds.
#define ROW_BYTES 128
#define DEPTH (FP8 ? ROW_BYTES : TILE_K)

struct Shared {
    char a[STAGES][TILE_M * ROW_BYTES];
    char b[STAGES][TILE_N * ROW_BYTES];
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
    // The products that are summed. In the weights' gradient they are rows, of which only those from `first` to `last`
    // are the expert's: the others are cleared.
    int begin, end, first, last;
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
        if (PRODUCT != 2) return {expert, begin + row, col, end, 0, PRODUCT == 0 ? inputs : outputs, 0, 0};
        // A copy begins at a multiple of 16 bytes of its rows.
        int start = FP8 ? begin / 16 * 16 : begin;
        // An expert without rows has a product of cleared rows, so that its gradient is written.
        return {expert, row, col, outputs, start, max(end, start + 1), begin, end};
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
        for (int k = tile.begin; k < tile.end; k += DEPTH, at++) {
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

// Returns a word without its bytes before `first` and from `last` on.
__device__ inline u32 kept_bytes(u32 word, int first, int last) {
    for (int i = 0; i < 4; i++)
        if (i < first || i >= last) word &= ~(0xffu << 8 * i);
    return word;
}

// Clears all products of this warpgroup's 64 rows of dw but those from `first` to `last`.
__device__ inline void clear_products(char* square, int first, int last, int group) {
    int begin = A_ACROSS ? last * 8 : 0;
    for (int i = begin + threadIdx.x % 128; i < 64 * 8; i += 128) {
        int row = i / 8, byte = i % 8 * 16;
        if (!A_ACROSS && byte >= first && byte + 16 <= last) continue;
        uint4& x = *(uint4*)(square + row * ROW_BYTES + (byte ^ row % 8 << 4));
        int lo = first - byte, hi = last - byte;
        if (A_ACROSS) x = make_uint4(0, 0, 0, 0);
        else x = make_uint4(kept_bytes(x.x, lo, hi), kept_bytes(x.y, lo - 4, hi - 4), kept_bytes(x.z, lo - 8, hi - 8),
                            kept_bytes(x.w, lo - 12, hi - 12));
    }
    fence_async();
    group_wait<128>(1 + group);
}

// Waits for the tiles of a stage, the number `at`, with the products from k on. Returns this warpgroup's 64 rows of a.
__device__ inline char* await_stage(Shared& s, const Tile& tile, int k, int at) {
    int stage = at % STAGES, group = threadIdx.x / 128 - 1;
    barrier_wait(&s.full[stage], at / STAGES % 2);
    char* a = s.a[stage] + group * SQUARE;
    if (PRODUCT == 2 && (k < tile.first || tile.last < k + DEPTH))
        clear_products(a, tile.first - k, tile.last - k, group);
    return a;
}

// Starts to compute d (+)= a b, for the columns of b that d has.
template <int LENGTH>
__device__ inline void start_products(float (&d)[LENGTH], const char* a, const char* b, bool add) {
    wgmma_fence();
#pragma unroll
    for (int j = 0; j < ROW_BYTES / 32; j++) {
#if FP8
        wgmma_fp8<PRODUCT != 0>(d, a + j * 32, b + j * 32, add || j > 0);
#else
        wgmma<A_ACROSS, B_ACROSS>(d, a + j * (A_ACROSS ? 2048 : 32), b + j * (B_ACROSS ? 2048 : 32), add || j > 0);
#endif
    }
    wgmma_commit();
}

// d = this warpgroup's 64 rows of the tile.
__device__ inline void multiply(float (&d)[TILE_N / 2], Shared& s, const Tile& tile, int& at) {
    int lane = threadIdx.x % WARP;
#if FP8 && PRODUCT != 0
    // Tensor cores keep fewer bits of sums of FP8 products than fp32 has, too few for long sums of gradients. Registers
    // hold the sums, and those of the newest products for half of the columns.
    for (int k = tile.begin; k < tile.end; k += DEPTH, at++) {
        const char *a = await_stage(s, tile, k, at), *b = s.b[at % STAGES];
#pragma unroll
        for (int half = 0; half < 2; half++) {
            float part[TILE_N / 4];
            start_products(part, a, b + half * TILE_N / 2 * ROW_BYTES, false);
            wgmma_wait<0>();
            wgmma_results(part);
            if (half == 1 && lane == 0) barrier_arrive(&s.empty[at % STAGES]);
#pragma unroll
            for (int i = 0; i < TILE_N / 4; i++) {
                float& sum = d[half * TILE_N / 4 + i];
                sum = k > tile.begin ? sum + part[i] : part[i];
            }
        }
    }
#else
    for (int k = tile.begin; k < tile.end; k += DEPTH, at++) {
        const char* a = await_stage(s, tile, k, at);
        start_products(d, a, s.b[at % STAGES], k > tile.begin);
        // When the previous stage's group of multiplications has ended, that stage has been read.
        if (k > tile.begin) {
            wgmma_wait<1>();
            if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
        }
    }
    wgmma_wait<0>();
    wgmma_results(d);
    if (lane == 0) barrier_arrive(&s.empty[(at - 1) % STAGES]);
#endif
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

// `out` is in bf16 and overwritten unless it is the weights' gradient. Only FP8 has scales.
extern "C" __global__ void __launch_bounds__(384, 1)
    grouped_hopper(const __grid_constant__ TensorMap a_map, const __grid_constant__ TensorMap b_map,
                   const int* __restrict__ offsets, const float* __restrict__ a_scale,
                   const float* __restrict__ b_scale, void* out, bool out_bf16, bool add, i64 experts, i64 outputs,
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
        if (FP8)
#pragma unroll
            for (int j = 0; j < TILE_N / 2; j++) d[j] *= *a_scale * *b_scale;
        int row = tile.row + first_row, cols = tiles.cols();
        if (PRODUCT != 2) write_tile(d, (bf16*)out, row, tile.rows, tile.col, cols);
        else if (out_bf16 && !add)
            write_tile(d, (bf16*)out + (i64)tile.expert * outputs * inputs, row, tile.rows, tile.col, cols);
        else write_gradients(d, out, out_bf16, add, row, tile, cols);
    }
}
