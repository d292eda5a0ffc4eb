// The parts of a Muon step that are not products of matrices. All of them are for steps that the AdamW kernel applies
// afterwards: see adamw/kernel.cu.

// Consecutive elements of a matrix; see MuonPiece.
struct Piece {
    i64 at, packed, len, first, cols, row;
    float factor;
    unsigned unused;
};

// The blocks with the same x share a piece or a matrix.

// m = momentum m + (1 - momentum) g, update = (1 - momentum) g + momentum m. With `packed`, `update` holds the packed
// updates from `from` on, and pieces outside it have no update.
extern "C" __global__ void muon_momentum(const Piece* __restrict__ pieces, const void* __restrict__ grads,
                                         bool grads_bf16, float* __restrict__ m, ACT* __restrict__ update,
                                         bool packed, i64 from, i64 held, const float* grad_norm_sq,
                                         const float* loss, const float* skipped, float momentum, float max_norm,
                                         float skip_limit) {
    pdl_wait_and_launch();
    if (!is_applied(grad_norm_sq, loss, skipped, skip_limit)) return;
    float norm = sqrtf(grad_norm_sq[0]);
    float clip = max_norm > 0.0f && norm > max_norm ? max_norm / norm : 1.0f;
    Piece piece = pieces[blockIdx.x];
    i64 len = piece.len, place = packed ? piece.packed - from : piece.at;
    bool written = !packed || (place >= 0 && place + len <= held);
    const float* wide_grads = (const float*)grads + piece.at;
    const bf16* narrow_grads = (const bf16*)grads + piece.at;
    float* own_m = m + piece.at;
    ACT* own_update = written ? update + place : update;
    bool wide = is_wide(own_m, len) && (grads_bf16 ? is_wide(narrow_grads, len) : is_wide(wide_grads, len)) &&
                is_wide(own_update, len);
    FOR_EIGHT(i, len, blockIdx.y, gridDim.y) {
        Vec8 g = grads_bf16 ? load8(narrow_grads, i, len, wide) : load8(wide_grads, i, len, wide);
        Vec8 a = load8(own_m, i, len, wide), u;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            float x = g.x[j] * clip;
            a.x[j] = momentum * a.x[j] + (1.0f - momentum) * x;
            u.x[j] = (1.0f - momentum) * x + momentum * a.x[j];
        }
        store8(own_m, i, len, wide, a);
        if (written) store8(own_update, i, len, wide, u);
    }
}

// Copies pieces from their places in the model to their places among packed updates.
extern "C" __global__ void muon_pack(const Piece* __restrict__ pieces, const ACT* __restrict__ from,
                                     ACT* __restrict__ to) {
    pdl_wait_and_launch();
    Piece piece = pieces[blockIdx.x];
    const ACT* x = from + piece.at;
    ACT* y = to + piece.packed;
    bool wide = is_wide(x, piece.len) && is_wide(y, piece.len);
    FOR_EIGHT(i, piece.len, blockIdx.y, gridDim.y) store8(y, i, piece.len, wide, load8(x, i, piece.len, wide));
}

// partials (matrices, gridDim.x) = sums of x^2 over the elements of each block. Matrices are `len` elements each, and
// blockIdx.y counts them.
extern "C" __global__ void muon_norm_partials(const ACT* __restrict__ x, float* __restrict__ partials, i64 len) {
    pdl_wait_and_launch();
    x += blockIdx.y * len;
    bool wide = is_wide(x, len);
    float sum = 0.0f;
    FOR_EIGHT(i, len, blockIdx.x, gridDim.x) {
        Vec8 v = load8(x, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += v.x[j] * v.x[j];
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) partials[blockIdx.y * (i64)gridDim.x + blockIdx.x] = sum;
}

// out = x / (margin norm + eps), with the norms of matrices from their partial sums.
extern "C" __global__ void muon_scale(const ACT* __restrict__ x, ACT* __restrict__ out, const float* partials,
                                      i64 parts, i64 len, float margin, float eps) {
    pdl_wait_and_launch();
    float sum = block_sum(threadIdx.x < parts ? partials[blockIdx.y * parts + threadIdx.x] : 0.0f);
    float factor = 1.0f / (margin * sqrtf(sum) + eps);
    x += blockIdx.y * len;
    out += blockIdx.y * len;
    bool wide = is_wide(x, len) && is_wide(out, len);
    FOR_EIGHT(i, len, blockIdx.x, gridDim.x) {
        Vec8 v = load8(x, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) v.x[j] *= factor;
        store8(out, i, len, wide, v);
    }
}

// squared = a I + b gram + c squared, for (n, n) matrices, which blockIdx.y counts.
extern "C" __global__ void muon_polynomial(const ACT* __restrict__ gram, ACT* __restrict__ squared, i64 n, float a,
                                           float b, float c) {
    pdl_wait_and_launch();
    i64 len = n * n;
    gram += blockIdx.y * len;
    squared += blockIdx.y * len;
    bool wide = is_wide(gram, len) && is_wide(squared, len);
    FOR_EIGHT(i, len, blockIdx.x, gridDim.x) {
        Vec8 g = load8(gram, i, len, wide), s = load8(squared, i, len, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            bool diagonal = (i + j) / n == (i + j) % n;
            s.x[j] = b * g.x[j] + c * s.x[j] + (diagonal ? a : 0.0f);
        }
        store8(squared, i, len, wide, s);
    }
}

// For each row that begins in a piece: moments[row] = mean of the squares of its update, and moments[rows + row] = v =
// beta2 v + (1 - beta2) mean. v is in the place of the row's first element. One warp per row.
extern "C" __global__ void muon_row_moments(const Piece* __restrict__ pieces, const ACT* __restrict__ update,
                                            float* __restrict__ v, float* __restrict__ moments, i64 rows,
                                            const float* grad_norm_sq, const float* loss, const float* skipped,
                                            float beta2, float skip_limit) {
    pdl_wait_and_launch();
    bool applied = is_applied(grad_norm_sq, loss, skipped, skip_limit);
    Piece piece = pieces[blockIdx.x];
    int lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
    i64 cols = piece.cols, end = (piece.first + piece.len + cols - 1) / cols;
    i64 begin = (piece.first + cols - 1) / cols + blockIdx.y * (i64)warps + threadIdx.x / WARP;
    for (i64 row = begin; row < end; row += gridDim.y * (i64)warps) {
        i64 offset = row * cols - piece.first;
        const ACT* x = update + piece.packed + offset;
        bool wide = is_wide(x, cols);
        float sum = 0.0f;
        for (i64 i = lane * 8; i < cols; i += WARP * 8) {
            Vec8 u = load8(x, i, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += u.x[j] * u.x[j];
        }
        float mean = warp_sum(sum) / cols;
        if (lane != 0) continue;
        float moment = v[piece.at + offset];
        if (applied) v[piece.at + offset] = moment = beta2 * moment + (1.0f - beta2) * mean;
        moments[piece.row + row] = mean;
        moments[rows + piece.row + row] = moment;
    }
}

// Turns the second moments in moments[rows ..] into factors of rows: 1 / (sqrt(v) + eps), times the number that keeps
// the norm of the matrix. One block per matrix.
extern "C" __global__ void muon_row_factors(const Piece* __restrict__ matrices, float* __restrict__ moments, i64 rows,
                                            float eps) {
    pdl_wait_and_launch();
    Piece matrix = matrices[blockIdx.x];
    const float* squares = moments + matrix.row;
    float* factors = moments + rows + matrix.row;
    i64 count = matrix.len / matrix.cols;
    float before = 0.0f, after = 0.0f;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) {
        float factor = 1.0f / (sqrtf(factors[i]) + eps);
        before += squares[i];
        after += squares[i] * factor * factor;
    }
    before = block_sum(before);
    after = block_sum(after);
    float kept = after > 0.0f ? sqrtf(before / after) : 0.0f;
    for (i64 i = threadIdx.x; i < count; i += blockDim.x) factors[i] = kept / (sqrtf(factors[i]) + eps);
}

// params -= rate (factor row_factor update + weight_decay params). With `cautious`, weights decay only if the update
// has their sign. work (len,) and row_factors (rows,) or null.
extern "C" __global__ void muon_update(const Piece* __restrict__ pieces, const ACT* __restrict__ update,
                                       float* __restrict__ params, bf16* __restrict__ work,
                                       const float* __restrict__ row_factors, const float* scalars,
                                       const float* grad_norm_sq, const float* loss, const float* skipped,
                                       float weight_decay, bool cautious, float skip_limit) {
    pdl_wait_and_launch();
    if (!is_applied(grad_norm_sq, loss, skipped, skip_limit)) return;
    float rate = scalars[MUON_RATE];
    Piece piece = pieces[blockIdx.x];
    i64 len = piece.len;
    update += piece.packed;
    params += piece.at;
    if (work) work += piece.at;
    if (row_factors) row_factors += piece.row;
    bool wide = is_wide(params, len) && is_wide(update, len) && is_wide(work, len);
    FOR_EIGHT(i, len, blockIdx.y, gridDim.y) {
        Vec8 u = load8(update, i, len, wide), p = load8(params, i, len, wide);
        i64 row = row_factors ? (piece.first + i) / piece.cols : 0, end = (row + 1) * piece.cols - piece.first;
        float factor = piece.factor * (row_factors ? row_factors[row] : 1.0f);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (row_factors && i + j == end && end < len) {
                factor = piece.factor * row_factors[++row];
                end += piece.cols;
            }
            float decay = !cautious || u.x[j] * p.x[j] >= 0.0f ? weight_decay : 0.0f;
            p.x[j] -= rate * (factor * u.x[j] + decay * p.x[j]);
        }
        store8(params, i, len, wide, p);
        if (work) store8(work, i, len, wide, p);
    }
}
