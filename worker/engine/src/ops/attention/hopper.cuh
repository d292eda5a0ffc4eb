// Causal attention on compute capability 9.0 in bf16: common parts of hopper_fwd.cu and hopper_bwd.cu. Layouts, results
// and formulas are those of kernel.cu. The division of work follows FlashAttention-3 (Shah et al., 2024): one thread
// requests tiles from the copy engine, and warpgroups multiply them and compute exponentials at the same time.
//
// Tiles in shared memory consist of squares of 64 x 64 elements, SQUARE bytes each, as boxes of the maps: (64, 64, 1)
// of ((H + 2 Hkv) D, T, B), or (H D, T, B) for dout. Rows past T are zero. D is WIDTH, a multiple of 64.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define INF __int_as_float(0x7f800000)
// Number of squares side by side in the rows of a head.
#define SLICES (WIDTH / 64)
// Queries in a tile of backward, see hopper_bwd.cu. Statistics and sums of a head have a multiple of this many rows.
#define QUERIES (8192 / WIDTH)
// Number of sums of dq that a warpgroup adds for a tile of queries: 64 x 64.
#define PART 4096

// Position in a ring of buffers: uses of the same buffer have alternating parities.
template <int LENGTH>
struct Ring {
    int stage = 0;
    u32 parity = 0;
    __device__ void advance() {
        if (++stage == LENGTH) stage = 0, parity ^= 1;
    }
};

// The order in which tiles of all heads are computed: `section` heads at a time, whose tensors stay in the L2 cache,
// and within a section by rank.
struct Sections {
    int tiles, heads, section;

    __device__ int count() const { return tiles * heads; }
    __device__ void locate(int i, int& rank, int& head) const {
        int first = i / (tiles * section) * section, width = min(section, heads - first), rest = i - first * tiles;
        rank = rest / width, head = first + rest % width;
    }
};

// Loads the squares of 64 rows of a head, `step` bytes apart.
__device__ inline void load_rows(char* to, int step, const TensorMap& map, Barrier* full, int col, int row, int batch) {
#pragma unroll
    for (int slice = 0; slice < SLICES; slice++) copy_box(to + slice * step, &map, full, col + 64 * slice, row, batch);
}

// Reductions over the 4 threads of a row.
__device__ inline float quad_max(float x) {
    x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 1));
    return fmaxf(x, __shfl_xor_sync(FULL_WARP, x, 2));
}
__device__ inline float quad_sum(float x) {
    x += __shfl_xor_sync(FULL_WARP, x, 1);
    return x + __shfl_xor_sync(FULL_WARP, x, 2);
}

// Results of wgmma as left operands, in bf16.
template <int LENGTH>
__device__ inline void pack(const float (&d)[LENGTH], u32 (&a)[LENGTH / 8][4]) {
#pragma unroll
    for (int i = 0; i < LENGTH / 2; i++) a[i / 4][i % 4] = bf16_pair(d[2 * i], d[2 * i + 1]);
}

// Writes 16 rows of a head from the results of a warp, rows `lane / 4` and 8 below multiplied by these factors.
template <int LENGTH>
__device__ inline void write_rows(bf16* to, i64 stride, int row, int rows, const float (&d)[LENGTH], float upper,
                                  float lower) {
#pragma unroll
    for (int n = 0; n < 2 * LENGTH; n += 32) {
        Pairs x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            const float* from = d + n / 2 + 4 * j;
            x.upper[j] = bf16_pair(from[0] * upper, from[1] * upper);
            x.lower[j] = bf16_pair(from[2] * lower, from[3] * lower);
        }
        write(to, stride, row, rows, n, 2 * LENGTH, x);
    }
}
