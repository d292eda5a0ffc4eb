// Token and position embedding: out[n] = wte[tokens[n]] + wpe[n % T]; the gradients are segment sums of dout's rows.
// With documents, positions count from the first token of each.

// tokens (N,), wte (V, C), wpe (T, C) or null, positions (N,) or null, first (N,) or null, out (N, C). Grid: one block
// per blockDim.y tokens.
extern "C" __global__ void embed_fwd(const int* tokens, const ACT* __restrict__ wte, const ACT* __restrict__ wpe,
                                     const int* positions, const int* first, ACT* __restrict__ out, i64 rows, i64 seq,
                                     i64 cols) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)blockDim.y + threadIdx.y;
    if (row >= rows) return;
    const ACT* token = wte + tokens[row] * cols;
    unsigned at = (unsigned)row % (unsigned)seq - (first ? first[row] : 0);
    const ACT* position = wpe ? wpe + (positions ? positions[row] : at) * cols : nullptr;
    out += row * cols;
    bool wide = is_wide(token, cols) && is_wide(out, cols) && (!position || is_wide(position, cols));
    for (i64 c = threadIdx.x * 8ll; c < cols; c += blockDim.x * 8ll) {
        Vec8 e = load8(token, c, cols, wide);
        if (position) {
            Vec8 p = load8(position, c, cols, wide);
#pragma unroll
            for (int j = 0; j < 8; j++) e.x[j] += p.x[j];
        }
        store8(out, c, cols, wide, e);
    }
}

// Backward groups the rows by token with a counting sort: count, prefix sum, scatter, sort within each token. Counting
// and scattering use integer atomics, whose order may vary; the sort restores row order, and the sums that follow are
// cut at fixed positions, so that every run gives the same bits.

// counts[token] = number of rows with that token; counts must be zero. Grid: one thread per row.
extern "C" __global__ void embed_count(const int* __restrict__ tokens, int* counts, i64 rows) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (row < rows) atomicAdd(counts + tokens[row], 1);
}

// starts[token] = sum of the counts before it. Grid: one thread per token in blocks of EMBED_STARTS_THREADS. Each block
// sums all earlier counts itself, which needs no second kernel.
extern "C" __global__ void embed_starts(const int* __restrict__ counts, int* __restrict__ starts, i64 vocab) {
    pdl_wait_and_launch();
    i64 first = blockIdx.x * (i64)EMBED_STARTS_THREADS, token = first + threadIdx.x;
    int earlier = 0, before = 0;
#pragma unroll 8
    for (i64 i = threadIdx.x; i < first; i += EMBED_STARTS_THREADS) earlier += counts[i];
    block_prefix_sum<EMBED_STARTS_THREADS / WARP>(earlier, before);
    int start = block_prefix_sum<EMBED_STARTS_THREADS / WARP>(token < vocab ? counts[token] : 0, before);
    if (token < vocab) starts[token] = start;
}

// order[starts[token]..] = the rows of each token in any order; placed must be zero. Grid: one thread per row.
extern "C" __global__ void embed_places(const int* __restrict__ tokens, const int* __restrict__ starts, int* placed,
                                        int* __restrict__ order, i64 rows) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x * (i64)blockDim.x + threadIdx.x;
    if (row >= rows) return;
    int token = tokens[row];
    order[starts[token] + atomicAdd(placed + token, 1)] = (int)row;
}

// Tokens with at most this many rows are sorted by rank (comparing all pairs), others with bitmaps of all rows.
#define RANK_SORT_MAX 512
// Rows that fit into a bitmap in shared memory.
#define BITMAP_ROWS 131072

// Sorts `count` rows by setting a bit for each and counting the bits before it, BITMAP_ROWS rows at a time. One block
// of EMBED_SORT_THREADS threads.
__device__ inline void sort_by_bits(const int* __restrict__ order, int* sorted, int count, i64 rows) {
    __shared__ unsigned bits[BITMAP_ROWS / 32];
    int before = 0;
    for (i64 first = 0; first < rows; first += BITMAP_ROWS) {
        int here = (int)min(rows - first, (i64)BITMAP_ROWS), words = (here + 31) / 32;
        for (int i = threadIdx.x; i < words; i += EMBED_SORT_THREADS) bits[i] = 0;
        __syncthreads();
        for (int i = threadIdx.x; i < count; i += EMBED_SORT_THREADS) {
            i64 row = order[i] - first;
            if (row >= 0 && row < here) atomicOr(bits + row / 32, 1u << row % 32);
        }
        __syncthreads();
        for (int start = 0; start < words; start += EMBED_SORT_THREADS) {
            unsigned word = start + threadIdx.x < words ? bits[start + threadIdx.x] : 0;
            int at = block_prefix_sum<EMBED_SORT_THREADS / WARP>(__popc(word), before);
            int row = (int)first + (start + threadIdx.x) * 32 - 1;
            for (; word; word &= word - 1) sorted[at++] = row + __ffs(word);
        }
        __syncthreads();
    }
}

// sorted[starts[token]..] = the rows of each token in ascending order. For rare tokens a thread computes the rank of
// one row; frequent tokens are sorted by the block in which they start. Grid: one thread per row.
extern "C" __global__ void __launch_bounds__(EMBED_SORT_THREADS)
    embed_sort(const int* __restrict__ tokens, const int* __restrict__ counts, const int* __restrict__ starts,
               const int* __restrict__ order, int* __restrict__ sorted, i64 rows) {
    pdl_wait_and_launch();
    __shared__ int frequent[EMBED_SORT_THREADS], frequent_count;
    if (threadIdx.x == 0) frequent_count = 0;
    __syncthreads();
    i64 place = blockIdx.x * (i64)EMBED_SORT_THREADS + threadIdx.x;
    if (place < rows) {
        int row = order[place], token = tokens[row], start = starts[token], count = counts[token];
        if (count <= RANK_SORT_MAX) {
            int rank = 0;
#pragma unroll 8
            for (int i = 0; i < count; i++) rank += order[start + i] < row;
            sorted[start + rank] = row;
        } else if (place == start) {
            frequent[atomicAdd(&frequent_count, 1)] = token;
        }
    }
    __syncthreads();
    // Tokens are independent: the order in which the atomic listed them does not affect the result.
    for (int i = 0; i < frequent_count; i++) {
        int start = starts[frequent[i]];
        sort_by_bits(order + start, sorted + start, counts[frequent[i]], rows);
        __syncthreads();
    }
}

// dwte[token] += sum of dout's rows with that token. Each block sums EMBED_PART sorted rows, so that a frequent token
// is spread over several blocks. If a token's rows cross the block's boundary, the block leaves a partial sum for
// embed_bwd_joins instead: heads[block] for a first token that began in an earlier block, tails[block] for a last token
// that begins here and continues in the next block. heads, tails (N / EMBED_PART, C).
// Grid: (N / EMBED_PART, C / 8 / blockDim.x), one thread per eight columns.
extern "C" __global__ void embed_bwd_tokens(const int* __restrict__ tokens, const int* __restrict__ sorted,
                                            const ACT* __restrict__ dout, void* dwte, bool dwte_bf16,
                                            float* __restrict__ heads, float* __restrict__ tails, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    __shared__ int row_of[EMBED_PART], token_of[EMBED_PART + 2];
    i64 first = blockIdx.x * (i64)EMBED_PART;
    int count = (int)min((i64)EMBED_PART, rows - first);
    // This includes the last token of the previous block and the first of the next.
    for (int i = threadIdx.x; i < count + 2; i += blockDim.x) {
        i64 place = first + i - 1;
        int row = place >= 0 && place < rows ? sorted[place] : -1;
        token_of[i] = row < 0 ? -1 : tokens[row];
        if (i > 0 && i <= count) row_of[i - 1] = row;
    }
    __syncthreads();
    i64 c = (blockIdx.y * (i64)blockDim.x + threadIdx.x) * 8;
    if (c >= cols) return;
    bool wide = is_wide(dout, cols), is_head = token_of[0] == token_of[1];
    Vec8 sum = {};
    for (int start = 0; start < count; start += 8) {
        Packed<ACT> douts[8] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (start + i < count) douts[i] = fetch8(dout + row_of[start + i] * cols, c, cols, wide);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            int at = start + i;
            if (at >= count) break;
            Vec8 d = unpack(douts[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
            int token = token_of[at + 1];
            bool continues = token_of[at + 2] == token;
            if (continues && at + 1 < count) continue;
            if (is_head || continues) {
                float* partial = (is_head ? heads : tails) + blockIdx.x * cols;
                store8(partial, c, cols, is_wide(partial, cols), sum);
            } else {
                add_grad8(dwte, dwte_bf16, token * cols, c, cols, sum);
            }
            is_head = false;
            sum = Vec8{};
        }
    }
}

// dwte[token] += the partial sums of a token that spans several blocks, in block order. The block in which the token
// starts does this.
// Grid and block are those of embed_bwd_tokens.
extern "C" __global__ void embed_bwd_joins(const int* __restrict__ tokens, const int* __restrict__ counts,
                                           const int* __restrict__ starts, const int* __restrict__ sorted, void* dwte,
                                           bool dwte_bf16, const float* __restrict__ heads,
                                           const float* __restrict__ tails, i64 rows, i64 cols) {
    pdl_wait_and_launch();
    i64 first = blockIdx.x * (i64)EMBED_PART, c = (blockIdx.y * (i64)blockDim.x + threadIdx.x) * 8;
    int token = tokens[sorted[min(first + EMBED_PART, rows) - 1]], start = starts[token];
    i64 last = (start + counts[token] - 1) / EMBED_PART;
    if (start < first || last == blockIdx.x || c >= cols) return;
    bool wide = is_wide(heads, cols);
    Vec8 sum = load8(tails + blockIdx.x * cols, c, cols, wide);
#pragma unroll 8
    for (i64 part = blockIdx.x + 1; part <= last; part++) {
        Vec8 more = load8(heads + part * cols, c, cols, wide);
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += more.x[j];
    }
    add_grad8(dwte, dwte_bf16, token * cols, c, cols, sum);
}

// sum += dout's rows at position t of all documents, in order: from each document's last token follows the next one.
__device__ inline void add_documents(Vec8& sum, const ACT* __restrict__ dout, const int* __restrict__ last, i64 t,
                                     i64 batch, i64 seq, i64 cols, i64 c, bool wide) {
    for (i64 b = 0; b < batch; b++, dout += seq * cols, last += seq) {
        i64 start = 0;
        while (start + t < seq) {
            i64 end = last[start];
            if (start + t <= end) {
                Vec8 d = load8(dout + (start + t) * cols, c, cols, wide);
#pragma unroll
                for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
            }
            start = end + 1;
        }
    }
}

// dwpe[t] += sum of dout's rows at position t, with documents if `last` (N,) is not null. Grid: (T, C / 8 /
// blockDim.x), one thread per eight columns.
extern "C" __global__ void embed_bwd_positions(const ACT* __restrict__ dout, const int* __restrict__ last, void* dwpe,
                                               bool dwpe_bf16, i64 batch, i64 seq, i64 cols) {
    pdl_wait_and_launch();
    i64 c = (blockIdx.y * (i64)blockDim.x + threadIdx.x) * 8, t = blockIdx.x;
    if (c >= cols) return;
    bool wide = is_wide(dout, cols);
    Vec8 sum = {};
    if (last) add_documents(sum, dout, last, t, batch, seq, cols, c, wide);
    for (i64 first = 0; !last && first < batch; first += 8) {
        Packed<ACT> douts[8] = {};
#pragma unroll
        for (int i = 0; i < 8; i++)
            if (first + i < batch) douts[i] = fetch8(dout + ((first + i) * seq + t) * cols, c, cols, wide);
#pragma unroll
        for (int i = 0; i < 8; i++) {
            Vec8 d = unpack(douts[i]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum.x[j] += d.x[j];
        }
    }
    add_grad8(dwpe, dwpe_bf16, t * cols, c, cols, sum);
}
