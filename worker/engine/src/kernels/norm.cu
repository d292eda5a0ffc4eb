// LayerNorm and RMSNorm; the formulas are with the CPU twin.
//
// Rows of up to 2048 columns stay in registers and are read once: the threads of a row (threadIdx.x, whole warps) own
// eight neighbouring columns each, a block has several rows (threadIdx.y), a thread ROWS of them at a time. Wider rows
// are read again for every pass: norm_fwd_any, norm_bwd_any.

#define MOST_THREADS 192
#define ROWS 2

// Sums over the threads of each row, the same in all of them. Calls alternate between turn 0 and 1: whoever writes a
// buffer again has passed the other's barrier, behind everyone's reading.
template <int COUNT>
__device__ inline void row_sums(float (&x)[COUNT], int turn) {
    __shared__ float partial[2][COUNT][MOST_THREADS / 32];
    int warps = blockDim.x / 32, first = threadIdx.y * warps, warp = first + threadIdx.x / 32;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = warp_sum(x[i]);
        if (threadIdx.x % 32 == 0) partial[turn][i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = 0.0f;
    for (int w = first; w < first + warps; w++)
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] += partial[turn][i][w];
}

// With branch: sum = x + branch comes first, and sum as it was rounded is what is normalised. means is null for
// RMSNorm. Grid: a block for every blockDim.y * ROWS rows.
extern "C" __global__ void __launch_bounds__(MOST_THREADS)
    norm_fwd(const ACT* __restrict__ x, const ACT* __restrict__ branch, ACT* __restrict__ sum,
             const ACT* __restrict__ gamma, const ACT* __restrict__ beta, ACT* __restrict__ y,
             float* __restrict__ means, float* __restrict__ scales, i64 rows, i64 cols, float eps) {
    after_the_kernel_before();
    i64 c = threadIdx.x * 8ll, first = blockIdx.x * (i64)blockDim.y * ROWS + threadIdx.y;
    bool inside = c < cols, here[ROWS];
    Packed<ACT> xs[ROWS] = {}, branches[ROWS] = {}, g = {}, b = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        i64 row = first + i * blockDim.y;
        here[i] = inside && row < rows;
        if (here[i]) xs[i] = fetch8(x + row * cols + c);
        if (here[i] && branch) branches[i] = fetch8(branch + row * cols + c);
    }
    if (inside) g = fetch8(gamma + c);
    if (inside && beta) b = fetch8(beta + c);
    Eight a[ROWS];
    float mean[ROWS] = {}, scale[ROWS] = {};
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        a[i] = unpack(xs[i]);
        if (branch) {
            Eight added = unpack(branches[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) a[i].x[j] += added.x[j];
            pack(a[i], xs[i]);
            a[i] = unpack(xs[i]);
            if (here[i]) store8(sum + (first + i * blockDim.y) * cols + c, a[i]);
        }
#pragma unroll
        for (int j = 0; j < 8; j++) mean[i] += a[i].x[j];
    }
    if (means) row_sums(mean, 0);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        mean[i] = means ? mean[i] / cols : 0.0f;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            // Threads beyond the row have no part in its variance.
            float distance = inside ? a[i].x[j] - mean[i] : 0.0f;
            scale[i] += distance * distance;
        }
    }
    row_sums(scale, 1);
    Eight gs = unpack(g), bs = unpack(b);
#pragma unroll
    for (int i = 0; i < ROWS; i++) {
        if (!here[i]) continue;
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

// dx, and every block's sums over its rows of dy times what was normalised, of dy, and of dx: gammas, betas and sums
// [blocks, C], the last two or either null. Grid: any number of blocks, which take rows in turn.
extern "C" __global__ void __launch_bounds__(MOST_THREADS, sizeof(ACT) == 2 ? 3 : 2)
    norm_bwd(const ACT* __restrict__ x, const ACT* __restrict__ gamma, const float* __restrict__ means,
             const float* __restrict__ scales, const ACT* __restrict__ dy, ACT* __restrict__ dx, bool add,
             float* __restrict__ gammas, float* __restrict__ betas, float* __restrict__ sums, i64 rows, i64 cols) {
    after_the_kernel_before();
    i64 c = threadIdx.x * 8ll, step = blockDim.y * ROWS;
    bool inside = c < cols;
    Packed<ACT> g = {};
    if (inside) g = fetch8(gamma + c);
    Eight dgamma = {}, dbeta = {}, dsum = {};
    int turn = 0;
    for (i64 first = blockIdx.x * step; first < rows; first += gridDim.x * step, turn ^= 1) {
        bool here[ROWS];
        Packed<ACT> xs[ROWS] = {}, dys[ROWS] = {}, olds[ROWS] = {};
        float mean[ROWS] = {}, scale[ROWS] = {}, totals[2 * ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            i64 row = first + i * blockDim.y + threadIdx.y;
            here[i] = inside && row < rows;
            if (!here[i]) continue;
            xs[i] = fetch8(x + row * cols + c);
            dys[i] = fetch8(dy + row * cols + c);
            if (add) olds[i] = fetch8(dx + row * cols + c);
            if (means) mean[i] = means[row];
            scale[i] = scales[row];
        }
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Eight a = unpack(xs[i]), d = unpack(dys[i]), gs = unpack(g);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean[i]) * scale[i], change = d.x[j] * gs.x[j];
                totals[2 * i] += change;
                totals[2 * i + 1] += change * normed;
                dgamma.x[j] += d.x[j] * normed;
                dbeta.x[j] += d.x[j];
            }
        }
        row_sums(totals, turn);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!here[i]) continue;
            i64 row = first + i * blockDim.y + threadIdx.y;
            float mean_g = means ? totals[2 * i] / cols : 0.0f, mean_gx = totals[2 * i + 1] / cols;
            Eight a = unpack(xs[i]), d = unpack(dys[i]), gs = unpack(g), old = unpack(olds[i]);
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
    sum_of_rows(dgamma, gammas + mine, c, cols);
    if (betas) sum_of_rows(dbeta, betas + mine, c, cols);
    if (sums) sum_of_rows(dsum, sums + mine, c, cols);
}

// The columns of a thread: eight at a time.
#define each(c) (i64 c = threadIdx.x * 8; c < cols; c += blockDim.x * 8)

// norm_fwd for rows of any width. Grid: a block for every row.
extern "C" __global__ void norm_fwd_any(const ACT* x, const ACT* branch, ACT* sum, const ACT* __restrict__ gamma,
                                        const ACT* __restrict__ beta, ACT* __restrict__ y, float* means, float* scales,
                                        i64 rows, i64 cols, float eps) {
    after_the_kernel_before();
    i64 row = blockIdx.x;
    x += row * cols;
    y += row * cols;
    bool wide = is_wide(x, cols) && is_wide(gamma, cols) && is_wide(beta, cols) && is_wide(y, cols);
    if (branch) {
        branch += row * cols;
        sum += row * cols;
        wide = wide && is_wide(branch, cols) && is_wide(sum, cols);
        // Each thread reads back below what it writes here, and nothing else.
        for each (c) {
            Eight a = load8(x, c, cols, wide), b = load8(branch, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) a.x[j] += b.x[j];
            store8(sum, c, cols, wide, a);
        }
        x = sum;
    }
    float mean = 0.0f, variance = 0.0f;
    if (means) {
        for each (c) {
            Eight a = load8(x, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) mean += a.x[j];
        }
        mean = block_sum(mean) / cols;
    }
    for each (c) {
        Eight a = load8(x, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) variance += c + j < cols ? (a.x[j] - mean) * (a.x[j] - mean) : 0.0f;
    }
    float scale = 1.0f / sqrtf(block_sum(variance) / cols + eps);
    for each (c) {
        Eight a = load8(x, c, cols, wide), g = load8(gamma, c, cols, wide), b = {};
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

// norm_bwd for rows of any width, with the block's sums kept in memory. Grid: no more blocks than rows.
extern "C" __global__ void norm_bwd_any(const ACT* __restrict__ x, const ACT* __restrict__ gamma,
                                        const float* __restrict__ means, const float* __restrict__ scales,
                                        const ACT* __restrict__ dy, ACT* __restrict__ dx, bool add,
                                        float* __restrict__ gammas, float* __restrict__ betas,
                                        float* __restrict__ sums, i64 rows, i64 cols) {
    after_the_kernel_before();
    i64 mine = blockIdx.x * cols;
    bool wide = is_wide(x, cols) && is_wide(gamma, cols) && is_wide(dy, cols) && is_wide(dx, cols);
    auto add_to = [&](float* out, i64 c, bool fresh, Eight e) {
        if (!out) return;
        Eight old = {};
        if (!fresh) old = load8(out + mine, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] += old.x[j];
        store8(out + mine, c, cols, wide, e);
    };
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        i64 at = row * cols;
        float mean = means ? means[row] : 0.0f, scale = scales[row], mean_g = 0.0f, mean_gx = 0.0f;
        for each (c) {
            Eight a = load8(x + at, c, cols, wide), d = load8(dy + at, c, cols, wide), g = load8(gamma, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                mean_g += d.x[j] * g.x[j];
                mean_gx += d.x[j] * g.x[j] * (a.x[j] - mean) * scale;
            }
        }
        mean_g = means ? block_sum(mean_g) / cols : 0.0f;
        mean_gx = block_sum(mean_gx) / cols;
        for each (c) {
            Eight a = load8(x + at, c, cols, wide), d = load8(dy + at, c, cols, wide), g = load8(gamma, c, cols, wide);
            Eight dgamma, change = {};
            if (add) change = load8(dx + at, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean) * scale;
                change.x[j] += scale * (d.x[j] * g.x[j] - mean_g - normed * mean_gx);
                dgamma.x[j] = d.x[j] * normed;
            }
            store8(dx + at, c, cols, wide, change);
            bool fresh = row == blockIdx.x;
            add_to(gammas, c, fresh, dgamma);
            add_to(betas, c, fresh, d);
            add_to(sums, c, fresh, change);
        }
    }
}
