// GELU (tanh form) and the gated SiLU of llama, eight elements at a time.

#define GELU_SCALE 0.7978845608f
#define GELU_CUBE 0.044715f

// (1 + tanh(u)) / 2 = sigmoid(2 u).
__device__ inline float gelu_gate(float x) { return sigmoid_for<ACT>(2.0f * GELU_SCALE * (x + GELU_CUBE * x * x * x)); }

// Eights of a thread, a block's width apart.
#define EIGHTS 4

extern "C" __global__ void gelu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a, i64 len) {
    after_the_kernel_before();
    bool wide = is_wide(h, len) && is_wide(a, len);
    i64 first = (blockIdx.x * (i64)blockDim.x * EIGHTS + threadIdx.x) * 8, step = blockDim.x * 8;
    Packed<ACT> hs[EIGHTS];
#pragma unroll
    for (int k = 0; k < EIGHTS; k++)
        if (first + k * step < len) hs[k] = fetch8(h, first + k * step, len, wide);
#pragma unroll
    for (int k = 0; k < EIGHTS; k++) {
        if (first + k * step >= len) return;
        Eight e = unpack(hs[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] *= gelu_gate(e.x[j]);
        store8(a, first + k * step, len, wide, e);
    }
}

// Rows of a thread at once.
#define ROWS 2

// In d [N,F], da becomes dh; every block's sums over its rows of dh: partials [rows of blocks, F].
//
// Grid: (F / 256, any number of rows of blocks, which take rows in turn); block (32 times 8 columns, 8 rows).
extern "C" __global__ void __launch_bounds__(256, sizeof(ACT) == 2 ? 4 : 2)
    gelu_bwd(const ACT* __restrict__ h, ACT* __restrict__ d, float* __restrict__ partials, i64 rows, i64 cols) {
    after_the_kernel_before();
    i64 c = (blockIdx.x * 32ll + threadIdx.x) * 8, step = gridDim.y * 8, end = c < cols ? rows : 0;
    bool wide = is_wide(h, cols) && is_wide(d, cols);
    Eight sum = {};
    for (i64 first = blockIdx.y * 8 + threadIdx.y; first < end; first += ROWS * step) {
        Packed<ACT> hs[ROWS], ds[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            i64 row = first + i * step;
            if (row >= rows) break;
            hs[i] = fetch8(h + row * cols, c, cols, wide);
            ds[i] = fetch8(d + row * cols, c, cols, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            i64 row = first + i * step;
            if (row >= rows) break;
            Eight e = unpack(hs[i]), dh = unpack(ds[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float x = e.x[j], gate = gelu_gate(x);
                float slope = 2.0f * GELU_SCALE * (1.0f + 3.0f * GELU_CUBE * x * x);
                dh.x[j] *= gate + gate * (1.0f - gate) * x * slope;
                sum.x[j] += dh.x[j];
            }
            store8(d + row * cols, c, cols, wide, dh);
        }
    }
    sum_of_rows(sum, partials + blockIdx.y * cols, c, cols);
}

// Grid: one block per ROWS rows; h [N,2F] holds g and u side by side.
extern "C" __global__ void swiglu_fwd(const ACT* __restrict__ h, ACT* __restrict__ a, i64 rows, i64 ffn) {
    after_the_kernel_before();
    bool wide = is_wide(h, ffn) && is_wide(a, ffn);
    i64 first = blockIdx.x * (i64)ROWS;
    for (i64 c = threadIdx.x * 8ll; c < ffn; c += blockDim.x * 8ll) {
        Packed<ACT> gs[ROWS], us[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (first + i >= rows) break;
            const ACT *g = h + (first + i) * 2 * ffn, *u = g + ffn;
            gs[i] = fetch8(g, c, ffn, wide);
            us[i] = fetch8(u, c, ffn, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (first + i >= rows) break;
            Eight x = unpack(gs[i]), y = unpack(us[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) y.x[j] *= x.x[j] * sigmoid_for<ACT>(x.x[j]);
            store8(a + (first + i) * ffn, c, ffn, wide, y);
        }
    }
}

extern "C" __global__ void swiglu_bwd(const ACT* __restrict__ h, const ACT* __restrict__ da, ACT* __restrict__ dh,
                                      i64 rows, i64 ffn) {
    after_the_kernel_before();
    bool wide = is_wide(h, ffn) && is_wide(da, ffn) && is_wide(dh, ffn);
    i64 first = blockIdx.x * (i64)ROWS;
    for (i64 c = threadIdx.x * 8ll; c < ffn; c += blockDim.x * 8ll) {
        Packed<ACT> gs[ROWS], us[ROWS], das[ROWS];
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (first + i >= rows) break;
            const ACT *g = h + (first + i) * 2 * ffn, *u = g + ffn;
            gs[i] = fetch8(g, c, ffn, wide);
            us[i] = fetch8(u, c, ffn, wide);
            das[i] = fetch8(da + (first + i) * ffn, c, ffn, wide);
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (first + i >= rows) break;
            ACT *dg = dh + (first + i) * 2 * ffn, *du = dg + ffn;
            Eight x = unpack(gs[i]), y = unpack(us[i]), d = unpack(das[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float gate = sigmoid_for<ACT>(x.x[j]), up = y.x[j];
                y.x[j] = d.x[j] * x.x[j] * gate;
                d.x[j] *= up * gate * (1.0f + x.x[j] * (1.0f - gate));
            }
            store8(du, c, ffn, wide, y);
            store8(dg, c, ffn, wide, d);
        }
    }
}
