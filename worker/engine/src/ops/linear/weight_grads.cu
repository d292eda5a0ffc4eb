// Gradients of the weights of two linear layers on compute capability 9.0: dw (O, I) = dy^T x over all rows of a step.
//
// There may be fewer tiles of dw than SMs, so the rows are divided as well: a block multiplies one tile over one part
// of the rows. Each block leaves its sums in `partials`, and the last of a tile's blocks to finish adds them in the
// order of the rows, so that results do not depend on which block is last. Each warp does that for its own 16 rows of
// the tile. All blocks fit on the device at once and go through the rows at the same pace, so that most of their loads
// hit the L2 cache.
//
// dy (rows, O) and x (rows, I) are not transposed in memory, so rows run down the tiles ("across" in hopper.cuh). The
// boxes of their maps are 64 x 64, swizzled. O and I are multiples of 8.

#define TILE_N 128
#define MULTIPLIERS 8
// Floats of a warp's sums.
#define SUMS (16 * TILE_N)

struct Shared {
    char dy[STAGES][2 * SQUARE];
    char x[STAGES][2 * SQUARE];
    Barrier full[STAGES], empty[STAGES];
};

// Tiles of dw.
struct Layer {
    bf16* dw;
    int outputs, inputs;

    __device__ int across() const { return (inputs + TILE_N - 1) / TILE_N; }
    __device__ int tiles() const { return (outputs + TILE_M - 1) / TILE_M * across(); }
};

// The work of a block.
struct Work {
    Layer layer;
    // The tile's corner in dw.
    int row, col;
    // The rows of dy and x, in multiples of TILE_K.
    int begin, end;
};

__device__ inline void load_tiles(Shared& s, const Work& work, const TensorMap* dy, const TensorMap* x) {
    for (int i = 0; i < work.end - work.begin; i++) {
        int stage = i % STAGES, row = (work.begin + i) * TILE_K;
        barrier_wait(&s.empty[stage], i / STAGES % 2 ^ 1);
        Barrier* full = &s.full[stage];
        barrier_arrive_and_expect(full, sizeof s.dy[0] + sizeof s.x[0]);
        for (int j = 0; j < 2; j++) {
            copy_box(s.dy[stage] + j * SQUARE, dy, full, work.row + 64 * j, row, 0);
            copy_box(s.x[stage] + j * SQUARE, x, full, work.col + 64 * j, row, 0);
        }
    }
}

// Leaves this warp's sums to the last of the tile's blocks. Returns whether this block is the last; then `d` is the sum
// over all of them.
__device__ inline bool combine(float (&d)[TILE_N / 2], int tile, int tiles, int parts, float* partials, u32* counters) {
    int warp = threadIdx.x / WARP - 4, lane = threadIdx.x % WARP;
    auto sums = [&](i64 part) {
        return (float4*)(partials + ((part * tiles + tile) * MULTIPLIERS + warp) * SUMS) + lane;
    };
    float4* mine = sums(blockIdx.y);
#pragma unroll
    for (int j = 0; j < TILE_N / 8; j++)
        mine[j * WARP] = make_float4(d[4 * j], d[4 * j + 1], d[4 * j + 2], d[4 * j + 3]);
    __threadfence();
    __syncwarp();
    u32* counter = counters + tile * MULTIPLIERS + warp;
    u32 before = lane == 0 ? atomicAdd(counter, 1u) : 0;
    if (__shfl_sync(FULL_WARP, before, 0) != parts - 1) return false;
    __threadfence();
    // Only lane 0 has read the counter.
    __syncwarp();
    // Reset for the next launch.
    if (lane == 0) *counter = 0;
#pragma unroll
    for (int j = 0; j < TILE_N / 2; j++) d[j] = 0.0f;
    for (int part = 0; part < parts; part++) {
        const float4* theirs = sums(part);
#pragma unroll
        for (int j = 0; j < TILE_N / 8; j++) {
            float4 x = theirs[j * WARP];
            d[4 * j] += x.x, d[4 * j + 1] += x.y, d[4 * j + 2] += x.z, d[4 * j + 3] += x.w;
        }
    }
    return true;
}

// d = this warpgroup's 64 rows of the tile.
__device__ inline void multiply(float (&d)[TILE_N / 2], Shared& s, const Work& work) {
    int lane = threadIdx.x % WARP, group = threadIdx.x / 128 - 1, count = work.end - work.begin;
    for (int i = 0; i < count; i++) {
        int stage = i % STAGES;
        barrier_wait(&s.full[stage], i / STAGES % 2);
        const char *dy = s.dy[stage] + group * SQUARE, *x = s.x[stage];
        wgmma_fence();
#pragma unroll
        for (int j = 0; j < TILE_K / 16; j++) wgmma<true, true>(d, dy + j * 2048, x + j * 2048, i + j > 0);
        wgmma_commit();
        // When the previous stage's group of multiplications has ended, that stage has been read.
        if (i > 0) {
            wgmma_wait<1>();
            if (lane == 0) barrier_arrive(&s.empty[(i - 1) % STAGES]);
        }
    }
    wgmma_wait<0>();
}

// Grid: the tiles of both layers, parts. `partials`: MULTIPLIERS * SUMS floats per block, unused if there is one part.
// `counters`: MULTIPLIERS per tile, zero before and after.
extern "C" __global__ void __launch_bounds__(384, 1)
    weight_grads(const __grid_constant__ TensorMap first_dy, const __grid_constant__ TensorMap first_x,
                 const __grid_constant__ TensorMap second_dy, const __grid_constant__ TensorMap second_x,
                 bf16* first_dw, i64 first_outputs, i64 first_inputs, bf16* second_dw, i64 second_outputs,
                 i64 second_inputs, i64 rows, float* partials, u32* counters) {
    pdl_wait_and_launch();
    extern __shared__ uint4 bytes[];
    Shared& s = *(Shared*)(((unsigned long long)bytes + 1023) / 1024 * 1024);
    if (threadIdx.x == 0) {
        for (int i = 0; i < STAGES; i++) barrier_init(&s.full[i], 1), barrier_init(&s.empty[i], MULTIPLIERS);
        fence_barriers();
    }
    __syncthreads();
    Layer first = {first_dw, (int)first_outputs, (int)first_inputs};
    Layer second = {second_dw, (int)second_outputs, (int)second_inputs};
    int tile = blockIdx.x, parts = gridDim.y, depth = (rows + TILE_K - 1) / TILE_K;
    bool is_first = tile < first.tiles();
    Layer layer = is_first ? first : second;
    int at = is_first ? tile : tile - first.tiles(), across = layer.across();
    int begin = (i64)depth * blockIdx.y / parts, end = (i64)depth * (blockIdx.y + 1) / parts;
    Work work = {layer, at / across * TILE_M, at % across * TILE_N, begin, end};
    if (threadIdx.x < 128) {
        lower_registers<40>();
        if (threadIdx.x == 0) load_tiles(s, work, is_first ? &first_dy : &second_dy, is_first ? &first_x : &second_x);
    } else {
        raise_registers<232>();
        float d[TILE_N / 2];
        multiply(d, s, work);
        if (parts == 1 || combine(d, tile, gridDim.x, parts, partials, counters))
            write_tile(d, layer.dw, work.row + 16 * (threadIdx.x / WARP - 4), layer.outputs, work.col, layer.inputs);
    }
}
