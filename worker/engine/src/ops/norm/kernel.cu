// LayerNorm and RMSNorm of rows of C elements: xh = (x - mean) scale, y = xh gamma + beta, with
// scale = 1 / sqrt(var + eps). RMSNorm has no mean (`means` is null), no beta, and the mean square in place of var.
//
// Rows of up to 8 NORM_MAX_THREADS columns stay in registers and are read once: the threads of a row (threadIdx.x,
// whole warps) own eight neighbouring columns each, a block has several rows (threadIdx.y), and a thread works on
// NORM_ROWS of them at a time. Wider rows, or rows that cannot be read as vectors, are read again for every pass:
// *_any.

// Sums over the threads of each row, returned to all of them. Calls alternate between buffer 0 and 1, which saves a
// barrier: a thread that writes a buffer again has passed the other buffer's barrier, so everyone has read this one.
template <int COUNT>
__device__ inline void row_sums(float (&x)[COUNT], int buffer) {
    __shared__ float partial[2][COUNT][NORM_MAX_THREADS / 32];
    int warps = blockDim.x / 32, first = threadIdx.y * warps, warp = first + threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = warp_sum(x[i]);
        if (threadIdx.x % 32 == 0) partial[buffer][i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = 0.0f;
    for (int w = first; w < first + warps; w++)
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] += partial[buffer][i][w];
}

// y = norm(x), or with `branch`: sum = x + branch, y = norm(sum), where the rounded sum is what is normalised.
// x, branch, sum, y (N, C); gamma, beta (C,); means, scales (N,). Grid: one block per blockDim.y * NORM_ROWS rows.
extern "C" __global__ void __launch_bounds__(NORM_MAX_THREADS)
    norm_fwd(const ACT* __restrict__ x, const ACT* __restrict__ branch, ACT* __restrict__ sum,
             const ACT* __restrict__ gamma, const ACT* __restrict__ beta, ACT* __restrict__ y,
             float* __restrict__ means, float* __restrict__ scales, i64 rows, i64 cols, float eps) {
    pdl_wait_and_launch();
    i64 c = threadIdx.x * 8ll, first = blockIdx.x * (i64)blockDim.y * NORM_ROWS + threadIdx.y;
    bool inside = c < cols, valid[NORM_ROWS];
    Packed<ACT> xs[NORM_ROWS] = {}, branches[NORM_ROWS] = {}, g = {}, b = {};
#pragma unroll
    for (int i = 0; i < NORM_ROWS; i++) {
        i64 row = first + i * blockDim.y;
        valid[i] = inside && row < rows;
        if (valid[i]) xs[i] = fetch8(x + row * cols + c);
        if (valid[i] && branch) branches[i] = fetch8(branch + row * cols + c);
    }
    if (inside) g = fetch8(gamma + c);
    if (inside && beta) b = fetch8(beta + c);
    Vec8 a[NORM_ROWS];
    float mean[NORM_ROWS] = {}, scale[NORM_ROWS] = {};
#pragma unroll
    for (int i = 0; i < NORM_ROWS; i++) {
        a[i] = unpack(xs[i]);
        if (branch) {
            Vec8 added = unpack(branches[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) a[i].x[j] += added.x[j];
            pack(a[i], xs[i]);
            a[i] = unpack(xs[i]);
            if (valid[i]) store8(sum + (first + i * blockDim.y) * cols + c, a[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) mean[i] += a[i].x[j];
    }
    if (means) row_sums(mean, 0);
#pragma unroll
    for (int i = 0; i < NORM_ROWS; i++) {
        mean[i] = means ? mean[i] / cols : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // Threads past the end of the row must not contribute to its variance.
            float distance = inside ? a[i].x[j] - mean[i] : 0.0f;
            scale[i] += distance * distance;
        }
    }
    row_sums(scale, 1);
    Vec8 gs = unpack(g), bs = unpack(b);
#pragma unroll
    for (int i = 0; i < NORM_ROWS; i++) {
        if (!valid[i]) continue;
        i64 row = first + i * blockDim.y;
        scale[i] = 1.0f / sqrtf(scale[i] / cols + eps);
#pragma unroll
        for (int j = 0; j < 8; j++) a[i].x[j] = (a[i].x[j] - mean[i]) * scale[i] * gs.x[j] + bs.x[j];
        store8(y + row * cols + c, a[i]);
        if (threadIdx.x == 0) {
            if (means) means[row] = mean[i];
            scales[row] = scale[i];
        }
    }
}

// With g = dy gamma: dx (+)= scale (g - mean(g) - xh mean(g xh)), without mean(g) for RMSNorm. Each block also writes
// the sums over its rows of dy xh, dy and the new dx: dgammas, dbetas, dsums (gridDim.x, C); the last two may be null.
// Grid: any number of blocks; rows are taken round-robin.
extern "C" __global__ void __launch_bounds__(NORM_MAX_THREADS,
                                             sizeof(ACT) == 2 ? NORM_BWD_BLOCKS_BF16 : NORM_BWD_BLOCKS_F32)
    norm_bwd(const ACT* __restrict__ x, const ACT* __restrict__ gamma, const float* __restrict__ means,
             const float* __restrict__ scales, const ACT* __restrict__ dy, ACT* __restrict__ dx, bool add,
             float* __restrict__ dgammas, float* __restrict__ dbetas, float* __restrict__ dsums, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    i64 c = threadIdx.x * 8ll, step = blockDim.y * NORM_ROWS;
    bool inside = c < cols;
    Packed<ACT> g = {};
    if (inside) g = fetch8(gamma + c);
    Vec8 dgamma = {}, dbeta = {}, dsum = {};
    int buffer = 0;
    for (i64 first = blockIdx.x * step; first < rows; first += gridDim.x * step, buffer ^= 1) {
        bool valid[NORM_ROWS];
        Packed<ACT> xs[NORM_ROWS] = {}, dys[NORM_ROWS] = {}, olds[NORM_ROWS] = {};
        float mean[NORM_ROWS] = {}, scale[NORM_ROWS] = {}, totals[2 * NORM_ROWS] = {};
#pragma unroll
        for (int i = 0; i < NORM_ROWS; i++) {
            i64 row = first + i * blockDim.y + threadIdx.y;
            valid[i] = inside && row < rows;
            if (!valid[i]) continue;
            xs[i] = fetch8(x + row * cols + c);
            dys[i] = fetch8(dy + row * cols + c);
            if (add) olds[i] = fetch8(dx + row * cols + c);
            if (means) mean[i] = means[row];
            scale[i] = scales[row];
        }
#pragma unroll
        for (int i = 0; i < NORM_ROWS; i++) {
            Vec8 a = unpack(xs[i]), d = unpack(dys[i]), gs = unpack(g);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean[i]) * scale[i], grad = d.x[j] * gs.x[j];
                totals[2 * i] += grad;
                totals[2 * i + 1] += grad * normed;
                dgamma.x[j] += d.x[j] * normed;
                dbeta.x[j] += d.x[j];
            }
        }
        row_sums(totals, buffer);
#pragma unroll
        for (int i = 0; i < NORM_ROWS; i++) {
            if (!valid[i]) continue;
            i64 row = first + i * blockDim.y + threadIdx.y;
            float mean_g = means ? totals[2 * i] / cols : 0.0f, mean_gx = totals[2 * i + 1] / cols;
            Vec8 a = unpack(xs[i]), d = unpack(dys[i]), gs = unpack(g), old = unpack(olds[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean[i]) * scale[i];
                old.x[j] += scale[i] * (d.x[j] * gs.x[j] - mean_g - normed * mean_gx);
                dsum.x[j] += old.x[j];
            }
            store8(dx + row * cols + c, old);
        }
    }
    i64 mine = blockIdx.x * cols;
    store_column_sums(dgamma, dgammas + mine, c, cols);
    if (dbetas) store_column_sums(dbeta, dbetas + mine, c, cols);
    if (dsums) store_column_sums(dsum, dsums + mine, c, cols);
}

// Loop over the columns of a thread, eight at a time.
#define each(c) (i64 c = threadIdx.x * 8; c < cols; c += blockDim.x * 8)

// norm_fwd for rows of any width. Grid: one block per row.
extern "C" __global__ void norm_fwd_any(const ACT* x, const ACT* branch, ACT* sum, const ACT* __restrict__ gamma,
                                        const ACT* __restrict__ beta, ACT* __restrict__ y, float* means, float* scales,
                                        i64 rows, i64 cols, float eps) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x;
    x += row * cols;
    y += row * cols;
    bool wide = is_wide(x, cols) && is_wide(gamma, cols) && is_wide(beta, cols) && is_wide(y, cols);
    if (branch) {
        branch += row * cols;
        sum += row * cols;
        wide = wide && is_wide(branch, cols) && is_wide(sum, cols);
        // Below, each thread reads back only what it writes valid, so no barrier is needed.
        for each (c) {
            Vec8 a = load8(x, c, cols, wide), b = load8(branch, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) a.x[j] += b.x[j];
            store8(sum, c, cols, wide, a);
        }
        x = sum;
    }
    float mean = 0.0f, variance = 0.0f;
    if (means) {
        for each (c) {
            Vec8 a = load8(x, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) mean += a.x[j];
        }
        mean = block_sum(mean) / cols;
    }
    for each (c) {
        Vec8 a = load8(x, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) variance += c + j < cols ? (a.x[j] - mean) * (a.x[j] - mean) : 0.0f;
    }
    float scale = 1.0f / sqrtf(block_sum(variance) / cols + eps);
    for each (c) {
        Vec8 a = load8(x, c, cols, wide), g = load8(gamma, c, cols, wide), b = {};
        if (beta) b = load8(beta, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) a.x[j] = (a.x[j] - mean) * scale * g.x[j] + b.x[j];
        store8(y, c, cols, wide, a);
    }
    if (threadIdx.x == 0) {
        if (means) means[row] = mean;
        scales[row] = scale;
    }
}

// norm_bwd for rows of any width; the block's sums are accumulated in global memory. Grid: at most as many blocks as
// rows.
extern "C" __global__ void norm_bwd_any(const ACT* __restrict__ x, const ACT* __restrict__ gamma,
                                        const float* __restrict__ means, const float* __restrict__ scales,
                                        const ACT* __restrict__ dy, ACT* __restrict__ dx, bool add,
                                        float* __restrict__ dgammas, float* __restrict__ dbetas,
                                        float* __restrict__ dsums, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    i64 mine = blockIdx.x * cols;
    bool wide = is_wide(x, cols) && is_wide(gamma, cols) && is_wide(dy, cols) && is_wide(dx, cols);
    auto add_to = [&](float* out, i64 c, bool fresh, Vec8 e) {
        if (!out) return;
        Vec8 old = {};
        if (!fresh) old = load8(out + mine, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] += old.x[j];
        store8(out + mine, c, cols, wide, e);
    };
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * cols;
        float mean = means ? means[row] : 0.0f, scale = scales[row], mean_g = 0.0f, mean_gx = 0.0f;
        for each (c) {
            Vec8 a = load8(x + at, c, cols, wide), d = load8(dy + at, c, cols, wide), g = load8(gamma, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                mean_g += d.x[j] * g.x[j];
                mean_gx += d.x[j] * g.x[j] * (a.x[j] - mean) * scale;
            }
        }
        mean_g = means ? block_sum(mean_g) / cols : 0.0f;
        mean_gx = block_sum(mean_gx) / cols;
        for each (c) {
            Vec8 a = load8(x + at, c, cols, wide), d = load8(dy + at, c, cols, wide), g = load8(gamma, c, cols, wide);
            Vec8 dgamma, grad = {};
            if (add) grad = load8(dx + at, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean) * scale;
                grad.x[j] += scale * (d.x[j] * g.x[j] - mean_g - normed * mean_gx);
                dgamma.x[j] = d.x[j] * normed;
            }
            store8(dx + at, c, cols, wide, grad);
            bool fresh = row == blockIdx.x;
            add_to(dgammas, c, fresh, dgamma);
            add_to(dbetas, c, fresh, d);
            add_to(dsums, c, fresh, grad);
        }
    }
}
