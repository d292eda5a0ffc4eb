// LayerNorm and RMSNorm; the formulas are with the CPU twin. One warp per row, WARPS rows per block.

#define WARPS 4
// Rows whose column sums one block forms.
#define ROWS 128

// A lane takes eight columns at a time, every 256; `each` runs over its chunks.
#define each(c) (i64 c = (threadIdx.x % 32) * 8; c < cols; c += 256)

// With branch: sum = x + branch comes first, and sum as it was rounded is what is normalised. means is null for RMSNorm.
extern "C" __global__ void norm_fwd(const ACT* x, const ACT* branch, ACT* sum, const ACT* __restrict__ gamma,
                                    const ACT* __restrict__ beta, ACT* __restrict__ y, float* means, float* scales,
                                    i64 rows, i64 cols, float eps) {
    i64 row = blockIdx.x * (i64)WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * cols;
    y += row * cols;
    bool wide = is_wide(x, cols) && is_wide(y, cols) && is_wide(gamma, cols) && (!beta || is_wide(beta, cols));
    float mean = 0.0f;
    if (branch) {
        branch += row * cols;
        sum += row * cols;
        wide = wide && is_wide(branch, cols) && is_wide(sum, cols);
        // Each lane reads back below what it writes here, and nothing else.
        for each (c) {
            Eight a = load8(x, c, cols, wide), b = load8(branch, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) a.x[j] += b.x[j];
            store8(sum, c, cols, wide, a);
        }
        x = sum;
    }
    if (means) {
        for each (c) {
            Eight a = load8(x, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) mean += a.x[j];
        }
        mean = warp_sum(mean) / cols;
    }
    float variance = 0.0f;
    for each (c) {
        Eight a = load8(x, c, cols, wide, mean);
#pragma unroll
        for (int j = 0; j < 8; j++) variance += (a.x[j] - mean) * (a.x[j] - mean);
    }
    float scale = 1.0f / sqrtf(warp_sum(variance) / cols + eps);
    for each (c) {
        Eight a = load8(x, c, cols, wide), g = load8(gamma, c, cols, wide), b = {};
        if (beta) b = load8(beta, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float normed = (a.x[j] - mean) * scale * g.x[j];
            a.x[j] = beta ? normed + b.x[j] : normed;
        }
        store8(y, c, cols, wide, a);
    }
    if (threadIdx.x % 32 == 0) {
        if (means) means[row] = mean;
        scales[row] = scale;
    }
}

extern "C" __global__ void norm_bwd_input(const ACT* __restrict__ x, const ACT* __restrict__ gamma,
                                          const float* __restrict__ means, const float* __restrict__ scales,
                                          const ACT* __restrict__ dy, ACT* __restrict__ dx, bool add, i64 rows,
                                          i64 cols) {
    i64 row = blockIdx.x * (i64)WARPS + threadIdx.x / 32;
    if (row >= rows) return;
    x += row * cols;
    dy += row * cols;
    dx += row * cols;
    bool wide = is_wide(x, cols) && is_wide(dy, cols) && is_wide(dx, cols) && is_wide(gamma, cols);
    float mean = means ? means[row] : 0.0f, scale = scales[row];
    float mean_g = 0.0f, mean_gx = 0.0f;
    for each (c) {
        Eight a = load8(x, c, cols, wide, mean), d = load8(dy, c, cols, wide), g = load8(gamma, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float dg = d.x[j] * g.x[j];
            mean_g += dg;
            mean_gx += dg * (a.x[j] - mean) * scale;
        }
    }
    mean_g = means ? warp_sum(mean_g) / cols : 0.0f;
    mean_gx = warp_sum(mean_gx) / cols;
    for each (c) {
        Eight a = load8(x, c, cols, wide), d = load8(dy, c, cols, wide), g = load8(gamma, c, cols, wide), old = {};
        if (add) old = load8(dx, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float normed = (a.x[j] - mean) * scale;
            float change = scale * (d.x[j] * g.x[j] - mean_g - normed * mean_gx);
            d.x[j] = add ? old.x[j] + change : change;
        }
        store8(dx, c, cols, wide, d);
    }
}

// Column sums of ROWS rows, for dgamma and dbeta: gammas and betas [blocks of rows, C], betas may be null.
//
// Grid: (C / 256, blocks of rows); block (32 times 8 columns, 8 rows at a time).
extern "C" __global__ void norm_bwd_params(const ACT* __restrict__ x, const float* __restrict__ means,
                                           const float* __restrict__ scales, const ACT* __restrict__ dy,
                                           float* __restrict__ gammas, float* __restrict__ betas, i64 rows, i64 cols) {
    i64 c = (blockIdx.x * 32ll + threadIdx.x) * 8;
    i64 first = blockIdx.y * (i64)ROWS, last = min(first + ROWS, rows);
    bool wide = is_wide(x, cols) && is_wide(dy, cols);
    Eight dgamma = {}, dbeta = {};
    if (c < cols) {
#pragma unroll 2
        for (i64 row = first + threadIdx.y; row < last; row += 8) {
            float mean = means ? means[row] : 0.0f, scale = scales[row];
            Eight a = load8(x + row * cols, c, cols, wide), d = load8(dy + row * cols, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                dgamma.x[j] += d.x[j] * (a.x[j] - mean) * scale;
                dbeta.x[j] += d.x[j];
            }
        }
    }
    sum_of_rows(dgamma, gammas + blockIdx.y * cols, c, cols);
    if (betas) sum_of_rows(dbeta, betas + blockIdx.y * cols, c, cols);
}
