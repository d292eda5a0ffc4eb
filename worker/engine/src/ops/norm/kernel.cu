// LayerNorm and RMSNorm of rows of C elements: xh = (x - mean) scale, y = xh (offset + gamma) + beta, with
// scale = 1 / sqrt(var + eps). RMSNorm has no mean (`means` is null), no beta, and the mean square in place of var.
//
// Rows of up to 8 NORM_WIDE_THREADS columns stay in registers: the threads of a row (threadIdx.x, whole warps) own
// eight neighbouring columns each. Up to 8 NORM_THREADS columns, a block has several rows (threadIdx.y), and a thread
// works on NORM_ROWS of them at a time; above, a block has one row at a time (*_wide). Even wider rows, or rows that
// cannot be read as vectors, are read again for every pass (*_any).
//
// In backward and for wide rows, few blocks fit on a multiprocessor. There a block copies its next rows to shared
// memory while it works: otherwise the memory would be idle while the threads of a row wait for each other.

// Sums over the threads of each row, returned to all of them. Calls alternate between two buffers, which saves a
// barrier: a thread that writes to a buffer again has passed the other buffer's barrier, so all threads have read this
// one.
template <int THREADS, int COUNT>
__device__ inline void row_sums(float (&x)[COUNT], int& buffer) {
    __shared__ float partial[2][COUNT][THREADS / WARP];
    int warps = blockDim.x / WARP, first = threadIdx.y * warps, warp = first + threadIdx.x / WARP;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = warp_sum(x[i]);
        if (threadIdx.x % WARP == 0) partial[buffer][i][warp] = x[i];
    }
    __syncthreads();
    if constexpr (THREADS == NORM_THREADS) {
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = 0.0f;
        for (int w = first; w < first + warps; w++)
#pragma unroll
            for (int i = 0; i < COUNT; i++) x[i] += partial[buffer][i][w];
    } else {
        // Each warp adds up the sums of all warps, of which there are at most 32.
        int lane = threadIdx.x % WARP;
#pragma unroll
        for (int i = 0; i < COUNT; i++) x[i] = warp_sum(lane < warps ? partial[buffer][i][lane] : 0.0f);
    }
    buffer ^= 1;
}

// A block's rows of ARRAYS arrays; each thread has a vector of each of ROWS rows. With AHEAD, start_copy copies the
// next ones to dynamic shared memory. A thread reads only data that it has copied itself, so no barrier is needed.
template <int ROWS, int ARRAYS, bool AHEAD>
struct Rows {
    i64 rows, cols, column;
    const ACT* arrays[ARRAYS];

    __device__ Packed<ACT>& slot(int array, int i) {
        extern __shared__ uint4 memory[];
        int thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
        return ((Packed<ACT>*)memory)[(array * ROWS + i) * threads + thread];
    }

    // Row i of this thread, where the block's first one is `first`.
    __device__ i64 row(i64 first, int i) { return first + i * blockDim.y + threadIdx.y; }

    __device__ bool has(i64 first, int i) { return column < cols && row(first, i) < rows; }

    __device__ const ACT* at(i64 first, int array, int i) { return arrays[array] + row(first, i) * cols + column; }

    __device__ void start_copy(i64 first) {
        if constexpr (!AHEAD) return;
#pragma unroll
        for (int i = 0; i < ROWS; i++)
#pragma unroll
            for (int array = 0; array < ARRAYS; array++)
                if (arrays[array] && has(first, i)) copy8_async(slot(array, i), at(first, array, i));
        commit_copies();
    }

    __device__ void wait() {
        if constexpr (AHEAD) wait_copies<0>();
    }

    // Returns zero past the last row, and for an array that is null.
    __device__ Packed<ACT> fetch(i64 first, int array, int i) {
        if (!arrays[array] || !has(first, i)) return {};
        if constexpr (AHEAD) return slot(array, i);
        return fetch8(at(first, array, i));
    }
};

// y = norm(x); with `other` and `sum`: sum = x + other, y = norm(sum), where the rounded sum is normalised; with
// `other` alone: y = other + norm(x). x, other, sum, y (N, C); gamma, beta (C,); means, scales (N,). Blocks have up to
// THREADS threads, each of which works on ROWS rows at a time. Grid: any number of blocks.
template <int THREADS, int ROWS>
__device__ inline void forward(const ACT* x, const ACT* other, ACT* sum, const ACT* __restrict__ gamma,
                               const ACT* __restrict__ beta, ACT* __restrict__ y, float* __restrict__ means,
                               float* __restrict__ scales, i64 rows, i64 cols, float eps, float offset) {
    i64 c = threadIdx.x * 8ll, step = blockDim.y * ROWS, first = blockIdx.x * step;
    Rows<ROWS, 2, (THREADS > NORM_THREADS)> block = {rows, cols, c, {x, other}};
    block.start_copy(first);
    bool inside = c < cols;
    Packed<ACT> g = {}, b = {};
    if (inside) g = fetch8(gamma + c);
    if (inside && beta) b = fetch8(beta + c);
    int buffer = 0;
    for (; first < rows; first += gridDim.x * step) {
        Vec8 a[ROWS];
        float mean[ROWS] = {}, scale[ROWS] = {};
        bool valid[ROWS];
        Packed<ACT> xs[ROWS] = {}, others[ROWS] = {};
        block.wait();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            valid[i] = block.has(first, i);
            if (!valid[i]) continue;
            xs[i] = block.fetch(first, 0, i);
            others[i] = block.fetch(first, 1, i);
        }
        block.start_copy(first + gridDim.x * step);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            a[i] = unpack(xs[i]);
            if (sum) {
                Vec8 added = unpack(others[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) a[i].x[j] += added.x[j];
                pack(a[i], xs[i]);
                a[i] = unpack(xs[i]);
                if (valid[i]) store8(sum + block.row(first, i) * cols + c, a[i]);
            }
#pragma unroll
            for (int j = 0; j < 8; j++) mean[i] += a[i].x[j];
        }
        if (means) row_sums<THREADS>(mean, buffer);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            mean[i] = means ? mean[i] / cols : 0.0f;
#pragma unroll
            for (int j = 0; j < 8; j++) {
                // Threads past the end of the row must not contribute to its variance.
                float distance = inside ? a[i].x[j] - mean[i] : 0.0f;
                scale[i] += distance * distance;
            }
        }
        row_sums<THREADS>(scale, buffer);
        Vec8 gs = unpack(g), bs = unpack(b);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!valid[i]) continue;
            i64 row = block.row(first, i);
            scale[i] = 1.0f / sqrtf(scale[i] / cols + eps);
#pragma unroll
            for (int j = 0; j < 8; j++) a[i].x[j] = (a[i].x[j] - mean[i]) * scale[i] * (offset + gs.x[j]) + bs.x[j];
            if (other && !sum) {
                Vec8 stream = unpack(others[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) a[i].x[j] += stream.x[j];
            }
            store8(y + row * cols + c, a[i]);
            if (threadIdx.x == 0) {
                if (means) means[row] = mean[i];
                scales[row] = scale[i];
            }
        }
    }
}

// x and sum may be the same memory.
extern "C" __global__ void __launch_bounds__(NORM_THREADS)
    norm_fwd(const ACT* x, const ACT* other, ACT* sum, const ACT* __restrict__ gamma, const ACT* __restrict__ beta,
             ACT* __restrict__ y, float* __restrict__ means, float* __restrict__ scales, i64 rows, i64 cols, float eps,
             float offset) {
    pdl_wait_and_launch();
    forward<NORM_THREADS, NORM_ROWS>(x, other, sum, gamma, beta, y, means, scales, rows, cols, eps, offset);
}

extern "C" __global__ void __launch_bounds__(NORM_WIDE_THREADS)
    norm_fwd_wide(const ACT* x, const ACT* other, ACT* sum, const ACT* __restrict__ gamma,
                  const ACT* __restrict__ beta, ACT* __restrict__ y, float* __restrict__ means,
                  float* __restrict__ scales, i64 rows, i64 cols, float eps, float offset) {
    pdl_wait_and_launch();
    forward<NORM_WIDE_THREADS, 1>(x, other, sum, gamma, beta, y, means, scales, rows, cols, eps, offset);
}

// With g = dy (offset + gamma): dx (+)= scale (g - mean(g) - xh mean(g xh)), without mean(g) for RMSNorm. Each block
// also writes the sums over its rows of dy xh, dy and the new dx: dgammas, dbetas, dsums (gridDim.x, C); the last two
// may be null. Grid, THREADS and ROWS as above.
template <int THREADS, int ROWS>
__device__ inline void backward(const ACT* __restrict__ x, const ACT* __restrict__ gamma,
                                const float* __restrict__ means, const float* __restrict__ scales,
                                const ACT* __restrict__ dy, ACT* dx, bool add, float* __restrict__ dgammas,
                                float* __restrict__ dbetas, float* __restrict__ dsums, i64 rows, i64 cols,
                                float offset) {
    i64 c = threadIdx.x * 8ll, step = blockDim.y * ROWS, first = blockIdx.x * step;
    Rows<ROWS, 3, true> block = {rows, cols, c, {x, dy, add ? dx : nullptr}};
    block.start_copy(first);
    bool inside = c < cols;
    Packed<ACT> g = {};
    if (inside) g = fetch8(gamma + c);
    Vec8 dgamma = {}, dbeta = {}, dsum = {};
    int buffer = 0;
    for (; first < rows; first += gridDim.x * step) {
        Packed<ACT> xs[ROWS], dys[ROWS], olds[ROWS];
        float mean[ROWS] = {}, scale[ROWS] = {}, totals[2 * ROWS] = {};
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!block.has(first, i)) continue;
            if (means) mean[i] = means[block.row(first, i)];
            scale[i] = scales[block.row(first, i)];
        }
        block.wait();
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            xs[i] = block.fetch(first, 0, i);
            dys[i] = block.fetch(first, 1, i);
            olds[i] = block.fetch(first, 2, i);
        }
        block.start_copy(first + gridDim.x * step);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            Vec8 a = unpack(xs[i]), d = unpack(dys[i]), gs = unpack(g);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean[i]) * scale[i], grad = d.x[j] * (offset + gs.x[j]);
                totals[2 * i] += grad;
                totals[2 * i + 1] += grad * normed;
                dgamma.x[j] += d.x[j] * normed;
                dbeta.x[j] += d.x[j];
            }
        }
        row_sums<THREADS>(totals, buffer);
#pragma unroll
        for (int i = 0; i < ROWS; i++) {
            if (!block.has(first, i)) continue;
            float mean_g = means ? totals[2 * i] / cols : 0.0f, mean_gx = totals[2 * i + 1] / cols;
            Vec8 a = unpack(xs[i]), d = unpack(dys[i]), gs = unpack(g), old = unpack(olds[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                float normed = (a.x[j] - mean[i]) * scale[i];
                old.x[j] += scale[i] * (d.x[j] * (offset + gs.x[j]) - mean_g - normed * mean_gx);
                dsum.x[j] += old.x[j];
            }
            store8(dx + block.row(first, i) * cols + c, old);
        }
    }
    auto store_sums = [&](const Vec8& mine, float* sums) {
        if (!sums) return;
        sums += blockIdx.x * cols;
        // If a block has one row at a time, its threads already have the sums of all of their columns.
        if constexpr (THREADS == NORM_THREADS)
            store_column_sums(mine, sums, c, cols);
        else if (inside)
            store8(sums, c, cols, is_wide(sums, cols), mine);
    };
    store_sums(dgamma, dgammas);
    store_sums(dbeta, dbetas);
    store_sums(dsum, dsums);
}

extern "C" __global__ void __launch_bounds__(NORM_THREADS,
                                             sizeof(ACT) == 2 ? NORM_BWD_BLOCKS_BF16 : NORM_BWD_BLOCKS_F32)
    norm_bwd(const ACT* __restrict__ x, const ACT* __restrict__ gamma, const float* __restrict__ means,
             const float* __restrict__ scales, const ACT* __restrict__ dy, ACT* dx, bool add,
             float* __restrict__ dgammas, float* __restrict__ dbetas, float* __restrict__ dsums, i64 rows, i64 cols,
             float offset) {
    pdl_wait_and_launch();
    backward<NORM_THREADS, NORM_ROWS>(x, gamma, means, scales, dy, dx, add, dgammas, dbetas, dsums, rows, cols, offset);
}

extern "C" __global__ void __launch_bounds__(NORM_WIDE_THREADS)
    norm_bwd_wide(const ACT* __restrict__ x, const ACT* __restrict__ gamma, const float* __restrict__ means,
                  const float* __restrict__ scales, const ACT* __restrict__ dy, ACT* dx, bool add,
                  float* __restrict__ dgammas, float* __restrict__ dbetas, float* __restrict__ dsums, i64 rows,
                  i64 cols, float offset) {
    pdl_wait_and_launch();
    backward<NORM_WIDE_THREADS, 1>(x, gamma, means, scales, dy, dx, add, dgammas, dbetas, dsums, rows, cols, offset);
}

// Loop over the columns of a thread, eight at a time.
#define each(c) (i64 c = threadIdx.x * 8; c < cols; c += blockDim.x * 8)

// norm_fwd for rows of any width. Grid: one block per row.
extern "C" __global__ void norm_fwd_any(const ACT* x, const ACT* other, ACT* sum, const ACT* __restrict__ gamma,
                                        const ACT* __restrict__ beta, ACT* __restrict__ y, float* means, float* scales,
                                        i64 rows, i64 cols, float eps, float offset) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x;
    x += row * cols;
    y += row * cols;
    bool wide = is_wide(x, cols) && is_wide(gamma, cols) && is_wide(beta, cols) && is_wide(y, cols);
    if (other) {
        other += row * cols;
        wide = wide && is_wide(other, cols);
    }
    if (sum) {
        sum += row * cols;
        wide = wide && is_wide(sum, cols);
        // Below, each thread reads back only elements that it has written itself, so no barrier is needed.
        for each (c) {
            Vec8 a = load8(x, c, cols, wide), b = load8(other, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) a.x[j] += b.x[j];
            store8(sum, c, cols, wide, a);
        }
        x = sum;
        other = nullptr;
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
        Vec8 stream = {};
        if (other) stream = load8(other, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) a.x[j] = (a.x[j] - mean) * scale * (offset + g.x[j]) + b.x[j] + stream.x[j];
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
                                        float* __restrict__ dsums, i64 rows, i64 cols, float offset) {
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
                float grad = d.x[j] * (offset + g.x[j]);
                mean_g += grad;
                mean_gx += grad * (a.x[j] - mean) * scale;
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
                grad.x[j] += scale * (d.x[j] * (offset + g.x[j]) - mean_g - normed * mean_gx);
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
