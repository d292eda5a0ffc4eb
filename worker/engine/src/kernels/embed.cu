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
// integers; the sums that follow are in the order of the rows, cut at fixed places, so that every run gives the same bits.

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

// starts[token] = sum of the counts before it. A thread per token, in blocks of 1024, each of which adds up for itself what
// is counted before its own.
extern "C" __global__ void embed_starts(const int* __restrict__ counts, int* __restrict__ starts, i64 vocab) {
    after_the_kernel_before();
    i64 first = blockIdx.x * 1024ll, token = first + threadIdx.x;
    int earlier = 0, before = 0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < first; i += 1024) earlier += counts[i];
    running_sum<32>(earlier, before);
    int start = running_sum<32>(token < vocab ? counts[token] : 0, before);
    if (token < vocab) starts[token] = start;
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
#define FEW 512
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

// Each token's rows in order, from its start on. A thread finds the place of one row among few; a block sorts the many of
// a token that starts in its part. Grid: a thread per row, in blocks of 512.
extern "C" __global__ void __launch_bounds__(512)
    embed_sort(const int* __restrict__ tokens, const int* __restrict__ counts, const int* __restrict__ starts,
               const int* __restrict__ order, int* __restrict__ sorted, i64 rows) {
    after_the_kernel_before();
    __shared__ int found[512], many;
    if (threadIdx.x == 0) many = 0;
    __syncthreads();
    i64 place = blockIdx.x * 512ll + threadIdx.x;
    if (place < rows) {
        int row = order[place], token = tokens[row], start = starts[token], count = counts[token];
        if (count <= FEW || rows > MOST_BITS) {
            int rank = 0;
#pragma unroll 8
            for (int i = 0; i < count; i++) rank += order[start + i] < row;
            sorted[start + rank] = row;
        } else if (place == start) {
            found[atomicAdd(&many, 1)] = token;
        }
    }
    __syncthreads();
    // Tokens do not depend on each other: in which order they are found does not matter.
    for (int i = 0; i < many; i++) {
        int start = starts[found[i]];
        sort_by_bits(order + start, sorted + start, counts[found[i]], rows);
        __syncthreads();
    }
}

// Sorted rows that a block adds up. What it has of a token that others have rows of, too, it leaves to embed_bwd_joins:
// frequent tokens do not keep one block busy while all others are done.
#define PART 64

// dwte[token] += sum of dout's rows with that token, where one block has them all; otherwise heads[block] = its first
// token's rows if there are some before them, tails[block] = its last token's if there are only some behind them. One
// thread for eight columns. Grid: (rows / PART, C / 8 / block). heads, tails [grid, C].
extern "C" __global__ void embed_bwd_tokens(const int* __restrict__ tokens, const int* __restrict__ sorted,
                                            const ACT* __restrict__ dout, void* dwte, bool dwte_bf16,
                                            float* __restrict__ heads, float* __restrict__ tails, i64 rows, i64 cols) {
    after_the_kernel_before();
    __shared__ int row_of[PART], token_of[PART + 2];
    i64 first = blockIdx.x * (i64)PART;
    int many = (int)min((i64)PART, rows - first);
    // With the neighbours' nearest tokens before and behind this block's.
    for (int i = threadIdx.x; i < many + 2; i += blockDim.x) {
        i64 place = first + i - 1;
        int row = place >= 0 && place < rows ? sorted[place] : -1;
        token_of[i] = row < 0 ? -1 : tokens[row];
        if (i > 0 && i <= many) row_of[i - 1] = row;
    }
    __syncthreads();
    i64 c = (blockIdx.y * (i64)blockDim.x + threadIdx.x) * 8;
    if (c >= cols) return;
    bool wide = is_wide(dout, cols), is_head = token_of[0] == token_of[1];
    Eight sum = {};
    for (int start = 0; start < many; start += 8) {
        Packed<ACT> douts[8] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (start + i < many) douts[i] = fetch8(dout + row_of[start + i] * cols, c, cols, wide);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int at = start + i;
            if (at >= many) break;
            Eight d = unpack(douts[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
            int token = token_of[at + 1];
            bool goes_on = token_of[at + 2] == token;
            if (goes_on && at + 1 < many) continue;
            if (is_head || goes_on) {
                float* left = (is_head ? heads : tails) + blockIdx.x * cols;
                store8(left, c, cols, is_wide(left, cols), sum);
            } else {
                add_grad8(dwte, dwte_bf16, token * cols, c, cols, sum);
            }
            is_head = false;
            sum = Eight{};
        }
    }
}

// dwte[token] += what several blocks have of it, in their order, by the block in whose part the token starts. Grid and
// threads as above.
extern "C" __global__ void embed_bwd_joins(const int* __restrict__ tokens, const int* __restrict__ counts,
                                           const int* __restrict__ starts, const int* __restrict__ sorted, void* dwte,
                                           bool dwte_bf16, const float* __restrict__ heads,
                                           const float* __restrict__ tails, i64 rows, i64 cols) {
    after_the_kernel_before();
    i64 first = blockIdx.x * (i64)PART, c = (blockIdx.y * (i64)blockDim.x + threadIdx.x) * 8;
    int token = tokens[sorted[min(first + PART, rows) - 1]], start = starts[token];
    i64 last = (start + counts[token] - 1) / PART;
    if (start < first || last == blockIdx.x || c >= cols) return;
    bool wide = is_wide(heads, cols);
    Eight sum = load8(tails + blockIdx.x * cols, c, cols, wide);
#pragma unroll 8
    for (i64 part = blockIdx.x + 1; part <= last; part++) {
        Eight more = load8(heads + part * cols, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += more.x[j];
    }
    add_grad8(dwte, dwte_bf16, token * cols, c, cols, sum);
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
    add_grad8(dwpe, dwpe_bf16, t * cols, c, cols, sum);
}
