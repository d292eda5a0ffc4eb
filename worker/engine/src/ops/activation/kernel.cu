// Activation functions without a gate. Compiled per function, -DACTIVATION.

// a = f(h). Grid: one thread per ACTIVATION_VECS vectors, which are a block's width apart.
extern "C" __global__ void activation_fwd(const ACT* __restrict__ h, ACT* __restrict__ a, i64 len) {
    pdl_wait_and_launch();
    bool wide = is_wide(h, len) && is_wide(a, len);
    i64 first = (blockIdx.x * (i64)blockDim.x * ACTIVATION_VECS + threadIdx.x) * 8, step = blockDim.x * 8;
    Packed<ACT> hs[ACTIVATION_VECS];
#pragma unroll
    for (int k = 0; k < ACTIVATION_VECS; k++)
        if (first + k * step < len) hs[k] = fetch8(h, first + k * step, len, wide);
#pragma unroll
    for (int k = 0; k < ACTIVATION_VECS; k++) {
        if (first + k * step >= len) return;
        Vec8 e = unpack(hs[k]);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] *= gate<ACTIVATION>(e.x[j]);
        store8(a, first + k * step, len, wide, e);
    }
}

// Rows that a thread fetches at once.
#define BWD_ROWS 2

// dh = da f'(h), in place in d (N, F), and the column sums of dh: partials (gridDim.y, F), unless null.
//
// Grid and block as for column_sum_partials. The minimum number of blocks per multiprocessor caps registers, so that
// enough loads are in flight.
extern "C" __global__ void __launch_bounds__(COLUMN_BLOCK_X * COLUMN_BLOCK_Y, sizeof(ACT) == 2 ? 4 : 2)
    activation_bwd(const ACT* __restrict__ h, ACT* __restrict__ d, float* __restrict__ partials, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    i64 c = (blockIdx.x * (i64)COLUMN_BLOCK_X + threadIdx.x) * 8, step = gridDim.y * COLUMN_BLOCK_Y;
    i64 end = c < cols ? rows : 0;
    bool wide = is_wide(h, cols) && is_wide(d, cols);
    Vec8 sum = {};
    for (i64 first = blockIdx.y * COLUMN_BLOCK_Y + threadIdx.y; first < end; first += BWD_ROWS * step) {
        Packed<ACT> hs[BWD_ROWS], ds[BWD_ROWS];
#pragma unroll
        for (int i = 0; i < BWD_ROWS; i++) {
            i64 row = first + i * step;
            if (row >= rows) break;
            hs[i] = fetch8(h + row * cols, c, cols, wide);
            ds[i] = fetch8(d + row * cols, c, cols, wide);
        }
#pragma unroll
        for (int i = 0; i < BWD_ROWS; i++) {
            i64 row = first + i * step;
            if (row >= rows) break;
            Vec8 e = unpack(hs[i]), dh = unpack(ds[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dh.x[j] = times_derivative<ACTIVATION>(dh.x[j], e.x[j], gate<ACTIVATION>(e.x[j]));
                sum.x[j] += dh.x[j];
            }
            store8(d + row * cols, c, cols, wide, dh);
        }
    }
    if (partials) store_column_sums(sum, partials + blockIdx.y * cols, c, cols);
}
