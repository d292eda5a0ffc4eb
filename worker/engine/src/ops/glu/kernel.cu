// Gated activations. h (N, 2 F) holds g and u side by side in each row; a (N, F). Compiled per function f,
// -DACTIVATION.
//
// Grid: one block per GLU_ROWS rows, which its threads fetch together. `end`: the number of rows that exist, if only
// the device knows it.

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

// a = f(g) u
extern "C" __global__ void glu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a,
                                   const int* __restrict__ end, i64 rows, i64 ffn) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, ffn) && is_wide(a, ffn);
    i64 first = blockIdx.x * (i64)GLU_ROWS;
    if (pads(a, end, first, rows, ffn)) return;
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
            for (int j = 0; j < 8; j++) y.x[j] *= x.x[j] * gate<ACTIVATION>(x.x[j]);
            store8(a + (first + i) * ffn, c, ffn, wide, y);
        }
    }
}

// du = da f(g), dg = da u f'(g)
extern "C" __global__ void glu_bwd(const ACT* __restrict__ h, const ACT* __restrict__ da, ACT* __restrict__ dh,
                                   const int* __restrict__ end, i64 rows, i64 ffn) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, ffn) && is_wide(da, ffn) && is_wide(dh, ffn);
    i64 first = blockIdx.x * (i64)GLU_ROWS;
    if (pads(dh, end, first, rows, 2 * ffn)) return;
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
                float g = gate<ACTIVATION>(x.x[j]), up = y.x[j];
                y.x[j] = d.x[j] * x.x[j] * g;
                d.x[j] *= times_derivative<ACTIVATION>(up, x.x[j], g);
            }
            store8(du, c, ffn, wide, y);
            store8(dg, c, ffn, wide, d);
        }
    }
}
