// Token and position embedding.

// Grid: one block per token row.
extern "C" __global__ void embed_fwd(const int* tokens, const ACT* __restrict__ wte, const ACT* __restrict__ wpe,
                                     ACT* __restrict__ out, i64 seq, i64 cols) {
    after_the_kernel_before();
    i64 row = blockIdx.x;
    const ACT* token = wte + tokens[row] * cols;
    const ACT* position = wpe ? wpe + blockIdx.x % (unsigned)seq * cols : nullptr;
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

// The rows of each token, in order, for dwte: counted, placed, sorted. Counts and places are made with atomics on
// integers; the sums that follow are in the order of the rows, so that every run gives the same bits.

// counts[token] = rows with that token; counts is zero before. One thread per row.
extern "C" __global__ void embed_count(const int* __restrict__ tokens, int* counts, i64 rows) {
    after_the_kernel_before();
    i64 row = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (row < rows) atomicAdd(counts + tokens[row], 1);
}

// `before` and what the threads before this one have, over a block of WARPS warps; then `before` becomes the sum of all.
template <int WARPS>
__device__ inline int running_sum(int mine, int& before) {
    __shared__ int sums[WARPS];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, sum = mine;
    for (int distance = 1; distance < 32; distance *= 2) {
        int other = __shfl_up_sync(FULL_WARP, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == 31) sums[warp] = sum;
    __syncthreads();
    int start = before + sum - mine;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) start += sums[w];
        before += sums[w];
    }
    return start;
}

// starts[token] = sum of the counts before it. One block of 1024 threads; each takes eight neighbours at a time.
extern "C" __global__ void embed_starts(const int* __restrict__ counts, int* __restrict__ starts, i64 vocab) {
    after_the_kernel_before();
    int before = 0;
    for (i64 first = 0; first < vocab; first += 1024 * 8) {
        i64 token = first + threadIdx.x * 8;
        int mine[8], total = 0;
#pragma unroll
        for (int j = 0; j < 8; j++) {
            mine[j] = token + j < vocab ? counts[token + j] : 0;
            total += mine[j];
        }
        int start = running_sum<32>(total, before);
#pragma unroll
        for (int j = 0; j < 8; j++) {
            if (token + j < vocab) starts[token + j] = start;
            start += mine[j];
        }
    }
}

// The rows of each token from its start on, in any order; placed is zero before. One thread per row.
extern "C" __global__ void embed_places(const int* __restrict__ tokens, const int* __restrict__ starts, int* placed,
                                        int* __restrict__ order, i64 rows) {
    after_the_kernel_before();
    i64 row = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int token = tokens[row];
    order[starts[token] + atomicAdd(placed + token, 1)] = (int)row;
}

// Rows of a token that are sorted by comparing all with all; more are sorted by a bit for every row there is.
#define FEW 64
#define MOST_BITS 131072

// The rows in order, by marking each in a field of bits and counting those before it. One block of 512 threads.
__device__ inline void sort_by_bits(const int* __restrict__ order, int* sorted, int count, i64 rows) {
    __shared__ unsigned bits[MOST_BITS / 32];
    int words = (int)((rows + 31) / 32);
    for (int i = threadIdx.x; i < words; i += 512) bits[i] = 0;
    __syncthreads();
    for (int i = threadIdx.x; i < count; i += 512) atomicOr(bits + order[i] / 32, 1u << order[i] % 32);
    __syncthreads();
    int before = 0;
    for (int start = 0; start < words; start += 512) {
        unsigned word = start + threadIdx.x < words ? bits[start + threadIdx.x] : 0;
        int at = running_sum<16>(__popc(word), before);
        for (; word; word &= word - 1) sorted[at++] = (start + threadIdx.x) * 32 + __ffs(word) - 1;
    }
}

// dwte[token] += sum of dout's rows with that token, `count` of them, in `order`. A block of 512 threads, of which
// groups take rows in turn and a group's threads eight columns each. sorted: room for as many rows.
__device__ inline void sum_token(i64 token, int count, const int* __restrict__ order, int* sorted,
                                 const ACT* __restrict__ dout, void* dwte, bool dwte_bf16, i64 rows, i64 cols) {
    __shared__ float sums[512][8];
    if (count <= FEW || rows > MOST_BITS) {
        for (int i = threadIdx.x; i < count; i += 512) {
            int row = order[i], rank = 0;
            for (int j = 0; j < count; j++) rank += order[j] < row;
            sorted[rank] = row;
        }
    } else {
        sort_by_bits(order, sorted, count, rows);
    }
    __syncthreads();
    int lanes = (int)min((cols + 7) / 8, 512ll), groups = 512 / lanes;
    int group = threadIdx.x / lanes, lane = threadIdx.x % lanes;
    bool wide = is_wide(dout, cols);
    for (i64 first = 0; first < cols; first += lanes * 8) {
        i64 c = first + lane * 8;
        Eight sum = {};
        if (group < groups && c < cols) {
#pragma unroll 8
            for (int i = group; i < count; i += groups) {
                Eight d = load8(dout + sorted[i] * cols, c, cols, wide);
#pragma unroll
                for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
            }
        }
        __syncthreads();
#pragma unroll
        for (int j = 0; j < 8; j++) sums[threadIdx.x][j] = sum.x[j];
        __syncthreads();
        if (group == 0 && c < cols) {
            for (int other = 1; other < groups && other < count; other++)
#pragma unroll
                for (int j = 0; j < 8; j++) sum.x[j] += sums[other * lanes + lane][j];
            for (int j = 0; j < 8 && c + j < cols; j++) {
                i64 at = token * cols + c + j;
                store_grad(dwte, dwte_bf16, at, load_grad(dwte, dwte_bf16, at) + sum.x[j]);
            }
        }
    }
}

// All tokens' sums: every block looks for tokens whose rows start at its places in the order, every gridDim-th, and
// works for them. Grid: as many blocks as run at once, of 512 threads. sorted: room for as many rows as order has.
extern "C" __global__ void __launch_bounds__(512, 2)
    embed_bwd_tokens(const int* __restrict__ tokens, const int* __restrict__ counts, const int* __restrict__ starts,
                     const int* __restrict__ order, int* sorted, const ACT* __restrict__ dout, void* dwte,
                     bool dwte_bf16, i64 rows, i64 cols) {
    after_the_kernel_before();
    __shared__ int found[512], many;
    for (int first = blockIdx.x; first < rows; first += gridDim.x * 512) {
        __syncthreads();
        if (threadIdx.x == 0) many = 0;
        __syncthreads();
        int place = first + threadIdx.x * gridDim.x;
        // Tokens do not depend on each other: in which order they are found does not matter.
        if (place < rows && starts[tokens[order[place]]] == place) found[atomicAdd(&many, 1)] = place;
        __syncthreads();
        for (int i = 0; i < many; i++) {
            int start = found[i], token = tokens[order[start]];
            sum_token(token, counts[token], order + start, sorted + start, dout, dwte, dwte_bf16, rows, cols);
        }
    }
}

// dwpe[t] += sum of dout's rows at position t. One thread for eight columns. Grid: (T, C / 8 / block).
extern "C" __global__ void embed_bwd_positions(const ACT* __restrict__ dout, void* dwpe, bool dwpe_bf16, i64 batch,
                                               i64 seq, i64 cols) {
    after_the_kernel_before();
    i64 c = (blockIdx.y * (i64)blockDim.x + threadIdx.x) * 8, t = blockIdx.x;
    if (c >= cols) return;
    bool wide = is_wide(dout, cols);
    Eight sum = {};
    for (i64 first = 0; first < batch; first += 8) {
        Packed<ACT> douts[8] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (first + i < batch) douts[i] = fetch8(dout + ((first + i) * seq + t) * cols, c, cols, wide);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            Eight d = unpack(douts[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
        }
    }
    for (int j = 0; j < 8 && c + j < cols; j++) {
        i64 at = t * cols + c + j;
        store_grad(dwpe, dwpe_bf16, at, load_grad(dwpe, dwpe_bf16, at) + sum.x[j]);
    }
}
