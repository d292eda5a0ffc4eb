// Token and position embedding.

// Grid: one block per token row.
extern "C" __global__ void embed_fwd(const int* tokens, const ACT* __restrict__ wte, const ACT* __restrict__ wpe,
                                     ACT* __restrict__ out, i64 seq, i64 cols) {
    i64 row = blockIdx.x;
    const ACT* token = wte + tokens[row] * cols;
    const ACT* position = wpe ? wpe + row % seq * cols : nullptr;
    out += row * cols;
    bool wide = is_wide(token, cols) && is_wide(out, cols) && (!position || is_wide(position, cols));
    for (i64 c = threadIdx.x * 8ll; c < cols; c += blockDim.x * 8ll) {
        Eight e = load8(token, c, cols, wide);
        if (position) {
            Eight p = load8(position, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) e.x[j] += p.x[j];
        }
        store8(out, c, cols, wide, e);
    }
}

// dwte[token] += sum of dout's rows with that token, in order, without atomics: the same bits every run.
//
// Grid: (rows, columns / blockDim.x). The block of a token's first row collects all its rows; the others see an
// earlier row with their token and leave. Matches lie near, so the search goes backwards and ends early.
extern "C" __global__ void embed_bwd_tokens(const int* tokens, const ACT* dout, void* dwte, bool dwte_bf16, i64 rows,
                                            i64 cols) {
    i64 row = blockIdx.x;
    int token = tokens[row];
    for (i64 end = row; end > 0; end -= blockDim.x) {
        i64 other = end - 1 - threadIdx.x;
        if (__syncthreads_or(other >= 0 && tokens[other] == token)) return;
    }
    __shared__ int found[1024];
    __shared__ int counts[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = blockDim.x / 32;
    i64 c = blockIdx.y * (i64)blockDim.x + threadIdx.x;
    float sum = 0.0f;
    for (i64 start = row; start < rows; start += blockDim.x) {
        i64 other = start + threadIdx.x;
        unsigned matches = __ballot_sync(FULL_WARP, other < rows && tokens[other] == token);
        __syncthreads();
        if (lane == 0) counts[warp] = __popc(matches);
        __syncthreads();
        int before = 0, total = 0;
        for (int w = 0; w < warps; w++) {
            if (w < warp) before += counts[w];
            total += counts[w];
        }
        if (matches >> lane & 1) found[before + __popc(matches & ((1u << lane) - 1))] = threadIdx.x;
        __syncthreads();
        if (c < cols)
            for (int i = 0; i < total; i++) sum += load(dout, (start + found[i]) * cols + c);
    }
    if (c < cols) {
        i64 at = token * cols + c;
        store_grad(dwte, dwte_bf16, at, load_grad(dwte, dwte_bf16, at) + sum);
    }
}

// dwpe[t] += sum of dout's rows at position t. One thread per element of dwpe.
extern "C" __global__ void embed_bwd_positions(const ACT* dout, void* dwpe, bool dwpe_bf16, i64 batch, i64 seq,
                                               i64 cols) {
    i64 i = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (i >= seq * cols) return;
    float sum = 0.0f;
    for (i64 b = 0; b < batch; b++) sum += load(dout, b * seq * cols + i);
    store_grad(dwpe, dwpe_bf16, i, load_grad(dwpe, dwpe_bf16, i) + sum);
}
