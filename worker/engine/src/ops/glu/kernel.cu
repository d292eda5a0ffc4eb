// Gated activations. h (N, 2 F) holds g and u side by side in each row; a (N, F). Compiled per function f,
// -DACTIVATION.
//
// Grid: one block per GLU_ROWS rows, which its threads fetch together. `end`: the number of rows that exist, if only
// the device knows it. `amax`: the output's largest magnitude, 0 before; null if it is not wanted.

// Bound g by `limit`, and u by -limit as well. NaN stays.
__device__ inline float bounded(float g, float limit) { return g > limit ? limit : g; }
__device__ inline float bounded_twice(float u, float limit) { return u < -limit ? -limit : bounded(u, limit); }

// Writes the padding of rows that do not exist. Returns whether none of the block's rows exists.
__device__ inline bool pads(ACT* to, const int* end, i64 first, i64& rows, i64 cols) {
    if (!end) return false;
    i64 exist = min((i64)*end, rows), padded = min(exist + PADDING_ROWS, rows);
    bool wide = is_wide(to, cols);
    for (i64 row = max(first, exist); row < min(first + GLU_ROWS, padded); row++)
        for (i64 c = threadIdx.x * 8ll; c < cols; c += blockDim.x * 8ll)
            store8(to + row * cols, c, cols, wide, Vec8{});
    rows = exist;
    return first >= exist;
}

// a = f(g) u, with g and u within `limit`, and u plus `offset`
extern "C" __global__ void glu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a,
                                   const int* __restrict__ end, float* amax, i64 rows, i64 ffn, float limit,
                                   float offset) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, ffn) && is_wide(a, ffn);
    i64 first = blockIdx.x * (i64)GLU_ROWS;
    if (pads(a, end, first, rows, ffn)) return;
    u32 largest = 0;
    for (i64 c = threadIdx.x * 8ll; c < ffn; c += blockDim.x * 8ll) {
        Packed<ACT> gs[GLU_ROWS], us[GLU_ROWS];
#pragma unroll
        for (int i = 0; i < GLU_ROWS; i++) {
            if (first + i >= rows) break;
            const ACT *g = h + (first + i) * 2 * ffn, *u = g + ffn;
            gs[i] = fetch8(g, c, ffn, wide);
            us[i] = fetch8(u, c, ffn, wide);
        }
#pragma unroll
        for (int i = 0; i < GLU_ROWS; i++) {
            if (first + i >= rows) break;
            Vec8 x = unpack(gs[i]), y = unpack(us[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float g = bounded(x.x[j], limit);
                y.x[j] = (bounded_twice(y.x[j], limit) + offset) * (g * gate<ACTIVATION>(g));
            }
            largest = largest_magnitude(largest, y);
            store8(a + (first + i) * ffn, c, ffn, wide, y);
        }
    }
    if (amax) raise_amax(amax, largest);
}

// du = da f(g), dg = da u f'(g); 0 beyond the limit
extern "C" __global__ void glu_bwd(const ACT* __restrict__ h, const ACT* __restrict__ da, ACT* __restrict__ dh,
                                   const int* __restrict__ end, float* amax, i64 rows, i64 ffn, float limit,
                                   float offset) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, ffn) && is_wide(da, ffn) && is_wide(dh, ffn);
    i64 first = blockIdx.x * (i64)GLU_ROWS;
    if (pads(dh, end, first, rows, 2 * ffn)) return;
    u32 largest = 0;
    for (i64 c = threadIdx.x * 8ll; c < ffn; c += blockDim.x * 8ll) {
        Packed<ACT> gs[GLU_ROWS], us[GLU_ROWS], das[GLU_ROWS];
#pragma unroll
        for (int i = 0; i < GLU_ROWS; i++) {
            if (first + i >= rows) break;
            const ACT *g = h + (first + i) * 2 * ffn, *u = g + ffn;
            gs[i] = fetch8(g, c, ffn, wide);
            us[i] = fetch8(u, c, ffn, wide);
            das[i] = fetch8(da + (first + i) * ffn, c, ffn, wide);
        }
#pragma unroll
        for (int i = 0; i < GLU_ROWS; i++) {
            if (first + i >= rows) break;
            ACT *dg = dh + (first + i) * 2 * ffn, *du = dg + ffn;
            Vec8 x = unpack(gs[i]), y = unpack(us[i]), d = unpack(das[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float g = bounded(x.x[j], limit), s = gate<ACTIVATION>(g);
                float up = bounded_twice(y.x[j], limit) + offset;
                y.x[j] = fabsf(y.x[j]) > limit ? 0.0f : d.x[j] * g * s;
                d.x[j] = x.x[j] > limit ? 0.0f : d.x[j] * times_derivative<ACTIVATION>(up, g, s);
            }
            largest = largest_magnitude(largest_magnitude(largest, y), d);
            store8(du, c, ffn, wide, y);
            store8(dg, c, ffn, wide, d);
        }
    }
    if (amax) raise_amax(amax, largest);
}
