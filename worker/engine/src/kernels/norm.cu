// LayerNorm and RMSNorm; the formulas are with the CPU twin. One warp per row, WARPS rows per block.

#define WARPS 4
// Rows whose column sums one block forms.
#define ROWS 64

// With branch: sum = x + branch comes first, and sum as it was rounded is what is normalised. means is null for RMSNorm.
extern "C" __global__ void norm_fwd(const ACT* x, const ACT* branch, ACT* sum, const ACT* gamma, const ACT* beta, ACT* y,
                                    float* means, float* scales, i64 rows, i64 cols, float eps) {
    i64 row = blockIdx.x * (i64)WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * cols;
    y += row * cols;
    if (branch) {
        branch += row * cols;
        sum += row * cols;
        // Each lane reads back below what it writes here, and nothing else.
        for (i64 c = lane; c < cols; c += 32) store(sum, c, load(x, c) + load(branch, c));
        x = sum;
    }
    float mean = 0.0f;
    if (means) {
        for (i64 c = lane; c < cols; c += 32) mean += load(x, c);
        mean = warp_sum(mean) / cols;
    }
    float variance = 0.0f;
    for (i64 c = lane; c < cols; c += 32) {
        float d = load(x, c) - mean;
        variance += d * d;
    }
    float scale = 1.0f / sqrtf(warp_sum(variance) / cols + eps);
    for (i64 c = lane; c < cols; c += 32) {
        float normed = (load(x, c) - mean) * scale * load(gamma, c);
        store(y, c, beta ? normed + load(beta, c) : normed);
    }
    if (lane == 0) {
        if (means) means[row] = mean;
        scales[row] = scale;
    }
}

extern "C" __global__ void norm_bwd_input(const ACT* x, const ACT* gamma, const float* means, const float* scales,
                                          const ACT* dy, ACT* dx, bool add, i64 rows, i64 cols) {
    i64 row = blockIdx.x * (i64)WARPS + threadIdx.x / 32;
    int lane = threadIdx.x % 32;
    if (row >= rows) return;
    x += row * cols;
    dy += row * cols;
    dx += row * cols;
    float mean = means ? means[row] : 0.0f, scale = scales[row];
    float mean_g = 0.0f, mean_gx = 0.0f;
    for (i64 c = lane; c < cols; c += 32) {
        float g = load(dy, c) * load(gamma, c);
        mean_g += g;
        mean_gx += g * (load(x, c) - mean) * scale;
    }
    mean_g = means ? warp_sum(mean_g) / cols : 0.0f;
    mean_gx = warp_sum(mean_gx) / cols;
    for (i64 c = lane; c < cols; c += 32) {
        float normed = (load(x, c) - mean) * scale;
        float d = scale * (load(dy, c) * load(gamma, c) - mean_g - normed * mean_gx);
        store(dx, c, add ? load(dx, c) + d : d);
    }
}

// Column sums of ROWS rows, for dgamma and dbeta: gammas and betas [blocks of rows, C], betas may be null.
//
// Grid: (C / 32, blocks of rows); block (32 columns, 8 rows at a time).
extern "C" __global__ void norm_bwd_params(const ACT* x, const float* means, const float* scales, const ACT* dy,
                                           float* gammas, float* betas, i64 rows, i64 cols) {
    __shared__ float gamma_sums[8][33], beta_sums[8][33];
    i64 c = blockIdx.x * 32ll + threadIdx.x;
    i64 first = blockIdx.y * (i64)ROWS, last = min(first + ROWS, rows);
    float dgamma = 0.0f, dbeta = 0.0f;
    if (c < cols) {
        for (i64 row = first + threadIdx.y; row < last; row += 8) {
            float d = load(dy, row * cols + c), mean = means ? means[row] : 0.0f;
            dgamma += d * (load(x, row * cols + c) - mean) * scales[row];
            dbeta += d;
        }
    }
    gamma_sums[threadIdx.y][threadIdx.x] = dgamma;
    beta_sums[threadIdx.y][threadIdx.x] = dbeta;
    __syncthreads();
    if (threadIdx.y > 0 || c >= cols) return;
    for (int i = 1; i < 8; i++) {
        dgamma += gamma_sums[i][threadIdx.x];
        dbeta += beta_sums[i][threadIdx.x];
    }
    gammas[blockIdx.y * cols + c] = dgamma;
    if (betas) betas[blockIdx.y * cols + c] = dbeta;
}
