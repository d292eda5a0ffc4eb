// Rounding of tensors to FP8 with one scale, and max|x|, from which the scale comes (see mod.rs).
//
// Sizes are multiples of 16, so every access is a whole vector.

// Vectors that a thread fetches at once.
#define AMAX_VECS 4

// Number of rows that exist; only the device may know it.
__device__ inline i64 existing_rows(const int* end, i64 rows) { return end ? min((i64)*end, rows) : rows; }

// *amax = max|x|; zero before. Grid-stride loop.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    fp8_amax(const ACT* __restrict__ x, float* amax, const int* __restrict__ end, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    i64 len = existing_rows(end, rows) * cols;
    u32 largest = 0;
    i64 step = gridDim.x * (i64)BLOCK_THREADS * 8;
    for (i64 first = (blockIdx.x * (i64)BLOCK_THREADS + threadIdx.x) * 8; first < len; first += AMAX_VECS * step) {
        Packed<ACT> p[AMAX_VECS] = {};
#pragma unroll
        for (int k = 0; k < AMAX_VECS; k++)
            if (first + k * step < len) p[k] = fetch8(x + first + k * step);
#pragma unroll
        for (int k = 0; k < AMAX_VECS; k++) largest = largest_magnitude(largest, unpack(p[k]));
    }
    raise_amax(amax, largest);
}

// A block rounds a tile of FP8_TILE x FP8_TILE elements, each of its FP8_THREADS threads 8 x 8 of them.
#define FP8_PIECES (FP8_TILE / 8)

// Transposes a 4 x 4 matrix of bytes with these rows.
__device__ inline void transpose_bytes(u32 (&w)[4]) {
    u32 a = __byte_perm(w[0], w[1], 0x5140), b = __byte_perm(w[2], w[3], 0x5140);
    u32 c = __byte_perm(w[0], w[1], 0x7362), d = __byte_perm(w[2], w[3], 0x7362);
    w[0] = __byte_perm(a, b, 0x5410), w[1] = __byte_perm(a, b, 0x7632);
    w[2] = __byte_perm(c, d, 0x5410), w[3] = __byte_perm(c, d, 0x7632);
}

template <bool E5M2>
__device__ inline void quantize(const ACT* __restrict__ x, const float* __restrict__ amax,
                                const int* __restrict__ end, u8* __restrict__ q, u8* __restrict__ transposed,
                                float* __restrict__ scale, i64 rows, i64 cols) {
    // For each column of the tile, its rows in pieces of 8 bytes. The threads of a warp write pieces of different
    // columns at the same time, but read those of one column. To use all banks in both cases, the index of a piece is
    // XORed with bits of the column's index.
    __shared__ uint4 tile[FP8_TILE][FP8_PIECES / 2];
    const float largest = E5M2 ? 57344.0f : 448.0f;
    float x_max = *amax;
    // If x_max is NaN, the comparison is false and it stays NaN.
    if (x_max < FP8_SMALLEST_MAX) x_max = FP8_SMALLEST_MAX;
    float inverse = largest / x_max;
    if (blockIdx.x == 0 && threadIdx.x == 0) *scale = x_max / largest;

    int group = threadIdx.x % FP8_PIECES, piece = threadIdx.x / FP8_PIECES;
    i64 across = (cols + FP8_TILE - 1) / FP8_TILE;
    i64 first_row = blockIdx.x / across * FP8_TILE, first_col = blockIdx.x % across * FP8_TILE;
    i64 row = first_row + 8 * piece, col = first_col + 8 * group, exist = existing_rows(end, rows);
    // The next tile is cleared: sums over rows read up to a tile's rows past the last one.
    if (first_row >= exist + FP8_TILE) return;
    bool inside = row < rows && col < cols;
    Packed<ACT> p[8] = {};
    if (inside)
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (row + i < exist) p[i] = fetch8(x + (row + i) * cols + col);
    // Indexed by columns 0 to 3 and 4 to 7, then rows 0 to 3 and 4 to 7.
    u32 words[2][2][4];
#pragma unroll
    for (int i = 0; i < 8; i++) {
        Vec8 e = unpack(p[i]);
#pragma unroll
        for (int half = 0; half < 2; half++) {
            const float* v = e.x + 4 * half;
            words[half][i / 4][i % 4] = fp8_pair<E5M2>(v[0] * inverse, v[1] * inverse) |
                                        fp8_pair<E5M2>(v[2] * inverse, v[3] * inverse) << 16;
        }
        if (q && inside) {
            uint2 bytes = {words[0][i / 4][i % 4], words[1][i / 4][i % 4]};
            *(uint2*)(q + (row + i) * cols + col) = bytes;
        }
    }
    if (!transposed) return;
#pragma unroll
    for (int half = 0; half < 2; half++) {
        transpose_bytes(words[half][0]);
        transpose_bytes(words[half][1]);
#pragma unroll
        for (int j = 0; j < 4; j++) {
            uint2 bytes = {words[half][0][j], words[half][1][j]};
            ((uint2*)tile[8 * group + 4 * half + j])[piece ^ group] = bytes;
        }
    }
    __syncthreads();
    for (int i = threadIdx.x; i < FP8_TILE * FP8_PIECES / 2; i += FP8_THREADS) {
        int column = i / (FP8_PIECES / 2), pair = i % (FP8_PIECES / 2), flip = column / 8;
        i64 to_row = first_col + column, to_col = first_row + 16 * pair;
        if (to_row >= cols || to_col >= rows) continue;
        uint4 bytes = tile[column][pair ^ flip / 2];
        // The two pieces of the pair are swapped.
        if (flip % 2) bytes = make_uint4(bytes.z, bytes.w, bytes.x, bytes.y);
        *(uint4*)(transposed + to_row * rows + to_col) = bytes;
    }
}

// x (N, C), q (N, C) or null, transposed (C, N) or null. Grid: one block per tile, row by row.
extern "C" __global__ void __launch_bounds__(FP8_THREADS)
    fp8_quantize_e4m3(const ACT* x, const float* amax, const int* end, u8* q, u8* transposed, float* scale,
                      i64 rows, i64 cols) {
    pdl_wait_and_launch();
    quantize<false>(x, amax, end, q, transposed, scale, rows, cols);
}

extern "C" __global__ void __launch_bounds__(FP8_THREADS)
    fp8_quantize_e5m2(const ACT* x, const float* amax, const int* end, u8* q, u8* transposed, float* scale,
                      i64 rows, i64 cols) {
    pdl_wait_and_launch();
    quantize<true>(x, amax, end, q, transposed, scale, rows, cols);
}
