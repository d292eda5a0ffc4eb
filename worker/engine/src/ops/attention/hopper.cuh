// Causal attention on compute capability 9.0 in bf16: common parts of hopper_fwd.cu and hopper_bwd.cu. Layouts, results
// and formulas are those of kernel.cu. The division of work follows FlashAttention-3 (Shah et al., 2024): one thread
// requests tiles from the copy engine, and warpgroups multiply them and compute exponentials at the same time.
//
// Tiles in shared memory consist of squares of 64 x 64 elements, SQUARE bytes each, as boxes of the maps: (64, 64, 1)
// of ((H + 2 Hkv) D, T, B), or (H D, T, B) for dout. Rows past T are zero. D is WIDTH, a multiple of 16. Columns past D
// in the last square of a row are those of another head, or zero. Nothing is summed over them or written for them.

#define LOG2E 1.4426950408889634f
#define LN2 0.6931471805599453f
#define INF __int_as_float(0x7f800000)
// Number of squares side by side in the rows of a head.
#define SLICES ((WIDTH + 63) / 64)
// Queries in a tile of backward. Statistics and sums of a head have a multiple of this many rows.
#define QUERIES (SLICES == 1 ? 128 : 64)
// Sums of dq for a tile of queries are in PARTS of 64 queries and columns. PARTS are side by side, except if a head has
// one square.
#define PARTS (SLICES == 1 ? 2 : SLICES)
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

// The same address. What is derived from it is not kept in registers from one use to the next: the descriptors of a
// wide operand that all tiles share would need too many.
__device__ inline const char* computed_here(const char* p) {
#if ON_GPU
    asm volatile("" : "+l"(p));
#endif
    return p;
}

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

// Scores are `factor` times what is computed from the products of queries and keys: the products themselves, or with
// CAPPED their tanh(scale s / cap).
struct Scale {
    float scale, cap;

    __device__ float factor() const { return CAPPED ? cap : scale; }
    template <int LENGTH>
    __device__ void apply(float (&s)[LENGTH]) const {
        if (!CAPPED) return;
#pragma unroll
        for (int i = 0; i < LENGTH; i++) s[i] = tanh_for<bf16>(s[i] * (scale / cap));
    }
    // Derivative of the score by `scale s`, from the computed value.
    __device__ static float slope(float t) { return CAPPED ? 1.0f - t * t : 1.0f; }
};

// Results of wgmma as left operands, in bf16.
template <int LENGTH>
__device__ inline void pack(const float (&d)[LENGTH], u32 (&a)[LENGTH / 8][4]) {
#pragma unroll
    for (int i = 0; i < LENGTH / 2; i++) a[i / 4][i % 4] = bf16_pair(d[2 * i], d[2 * i + 1]);
}

// Writes `cols` columns of 16 rows of a head from the results of a warp, rows `lane / 4` and 8 below multiplied by
// these factors.
template <int LENGTH>
__device__ inline void write_rows(bf16* to, i64 stride, int row, int rows, int cols, const float (&d)[LENGTH],
                                  float upper, float lower) {
#pragma unroll
    for (int n = 0; n < 2 * LENGTH; n += 32) {
        Pairs x;
#pragma unroll
        for (int j = 0; j < 4; j++) {
            // The last columns may be fewer than 32.
            const float* from = d + min(n / 2 + 4 * j, LENGTH - 4);
            x.upper[j] = bf16_pair(from[0] * upper, from[1] * upper);
            x.lower[j] = bf16_pair(from[2] * lower, from[3] * lower);
        }
        write(to, stride, row, rows, n, cols, x);
    }
}
