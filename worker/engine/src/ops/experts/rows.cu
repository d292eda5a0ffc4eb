// Rows of choices from tokens, and back: see rows.rs. A row has C elements; N tokens have k choices each. `end`: the
// number of rows that exist, if only the device knows it.

// rows[i] = x[choice_of[i] / k]. Grid: blocks of blockDim.y rows.
extern "C" __global__ void gather_rows(const int* __restrict__ choice_of, const ACT* __restrict__ x,
                                       ACT* __restrict__ rows, const int* __restrict__ end, i64 choices, i64 chosen,
                                       i64 cols) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)blockDim.y + threadIdx.y, past = end ? row - *end : -1;
    if (row >= choices || past >= PADDING_ROWS) return;
    const ACT* from = x + (unsigned)choice_of[row] / (unsigned)chosen * cols;
    ACT* to = rows + row * cols;
    bool wide = is_wide(x, cols) && is_wide(rows, cols);
    for (i64 c = threadIdx.x * 8ll; c < cols; c += blockDim.x * 8ll)
        store8(to, c, cols, wide, past < 0 ? load8(from, c, cols, wide) : Vec8{});
}

// Rows that a thread fetches together.
#define ROWS_AT_ONCE 4

// out[n] (+)= sum over j of weights[n k + j] rows[row_of[n k + j]], in order, of the rows that exist; without weights,
// they are 1.
__device__ inline void sum_choices(const int* row_of, const float* weights, const ACT* rows, ACT* out, const int* end,
                                   i64 tokens, i64 chosen, i64 cols, bool add) {
    i64 token = blockIdx.x * (i64)blockDim.y + threadIdx.y;
    if (token >= tokens) return;
    row_of += token * chosen, out += token * cols;
    if (weights) weights += token * chosen;
    int rows_end = end ? *end : 0x7fffffff;
    bool wide = is_wide(rows, cols) && is_wide(out, cols);
    for (i64 c = threadIdx.x * 8ll; c < cols; c += blockDim.x * 8ll) {
        Vec8 sum = {};
        for (int first = 0; first < chosen; first += ROWS_AT_ONCE) {
            Packed<ACT> xs[ROWS_AT_ONCE];
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++)
                if (first + i < chosen && row_of[first + i] < rows_end)
                    xs[i] = fetch8(rows + row_of[first + i] * cols, c, cols, wide);
#pragma unroll
            for (int i = 0; i < ROWS_AT_ONCE; i++) {
                if (first + i >= chosen) break;
                if (row_of[first + i] >= rows_end) continue;
                float weight = weights ? weights[first + i] : 1.0f;
                Vec8 x = unpack(xs[i]);
#pragma unroll
                for (int j = 0; j < 8; j++) sum.x[j] += weight * x.x[j];
            }
        }
        if (add) {
            Vec8 old = load8(out, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += old.x[j];
        }
        store8(out, c, cols, wide, sum);
    }
}

// Grid of both: blocks of blockDim.y tokens.
extern "C" __global__ void sum_rows(const int* __restrict__ row_of, const ACT* __restrict__ rows,
                                    ACT* __restrict__ out, const int* __restrict__ end, i64 tokens, i64 chosen,
                                    i64 cols, bool add) {
    pdl_wait_and_launch();
    sum_choices(row_of, nullptr, rows, out, end, tokens, chosen, cols, add);
}

extern "C" __global__ void combine_rows(const int* __restrict__ row_of, const float* __restrict__ weights,
                                        const ACT* __restrict__ rows, ACT* __restrict__ out,
                                        const int* __restrict__ end, i64 tokens, i64 chosen, i64 cols, bool add) {
    pdl_wait_and_launch();
    sum_choices(row_of, weights, rows, out, end, tokens, chosen, cols, add);
}

// drows[row] = weights[choice] dout[n], dweights[choice] = dout[n] . rows[row], which is 0 if the row does not exist.
// Grid: one warp per choice.
extern "C" __global__ void combine_rows_bwd(const int* __restrict__ row_of, const float* __restrict__ weights,
                                            const ACT* __restrict__ rows, const ACT* __restrict__ dout,
                                            ACT* __restrict__ drows, float* __restrict__ dweights,
                                            const int* __restrict__ end, i64 choices, i64 chosen, i64 cols) {
    pdl_wait_and_launch();
    i64 choice = blockIdx.x * (i64)(blockDim.x / WARP) + threadIdx.x / WARP;
    if (choice >= choices) return;
    if (end && row_of[choice] >= *end) {
        if (threadIdx.x % WARP == 0) dweights[choice] = 0.0f;
        return;
    }
    i64 row = row_of[choice] * cols;
    float weight = weights[choice], sum = 0.0f;
    bool wide = is_wide(rows, cols) && is_wide(dout, cols) && is_wide(drows, cols);
    dout += (unsigned)choice / (unsigned)chosen * cols;
    for (i64 c = threadIdx.x % WARP * 8ll; c < cols; c += WARP * 8ll) {
        Vec8 d = load8(dout, c, cols, wide), x = load8(rows + row, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += d.x[j] * x.x[j], d.x[j] *= weight;
        store8(drows + row, c, cols, wide, d);
    }
    sum = warp_sum(sum);
    if (threadIdx.x % WARP == 0) dweights[choice] = sum;
}
