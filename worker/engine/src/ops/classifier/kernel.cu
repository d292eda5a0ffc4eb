// Softmax cross entropy, fused with its gradient, which replaces the logits.
//
// loss = log(sum exp(l - max)) + max - l[target]; dl = (softmax(l) - onehot(target)) grad_scale, 0 in the padding.

#define NEG_INF __int_as_float(0xff800000)

// The vector at column i of a row. Logits in the padding are meaningless: they become -inf, so that their exponentials
// are 0.
__device__ inline Packed<ACT> masked(Packed<ACT> p, i64 i, i64 vocab) {
    if (i + 8 <= vocab) return p;
    Vec8 e = unpack(p);
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (i + j >= vocab) e.x[j] = NEG_INF;
    pack(e, p);
    return p;
}

// Vectors that a thread fetches at once.
#define CLASSIFIER_VECS 5

// logits (N, Vp), targets (N,), losses (N,). Grid: one block per row, which fits into shared memory; two of them on a
// multiprocessor, so that one computes while the other waits for memory.
extern "C" __global__ void __launch_bounds__(CLASSIFIER_THREADS, sizeof(ACT) == 2 ? 2 : 1)
    classifier(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 vocab, i64 padded,
               bool with_grad, float grad_scale) {
    pdl_wait_and_launch();
    extern __shared__ uint4 memory[];
    // In reverse order: the GEMM before this kernel wrote the last rows last, so they are still in the L2 cache.
    i64 row = gridDim.x - 1 - blockIdx.x;
    ACT* l = logits + row * padded;
    int target = targets[row];
    float target_logit = load(l, target);
    bool wide = is_wide(l, padded);
    // Each thread reads back only the vectors that it wrote itself, so no barrier is needed.
    auto reload = [&](i64 i) { return unpack(((Packed<ACT>*)memory)[(unsigned)i / 8]); };

    i64 first = threadIdx.x * 8ll, step = blockDim.x * 8ll;
    float row_max = NEG_INF;
    for (i64 start = first; start < padded; start += CLASSIFIER_VECS * step) {
        Packed<ACT> p[CLASSIFIER_VECS];
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++)
            if (start + k * step < padded) p[k] = fetch8((const ACT*)l, start + k * step, padded, wide);
#pragma unroll
        for (int k = 0; k < CLASSIFIER_VECS; k++) {
            i64 i = start + k * step;
            if (i >= padded) break;
            p[k] = masked(p[k], i, vocab);
            ((Packed<ACT>*)memory)[(unsigned)i / 8] = p[k];
            Vec8 e = unpack(p[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) row_max = fmaxf(row_max, e.x[j]);
        }
    }
    row_max = block_max(row_max);
    float sum = 0.0f;
#pragma unroll 2
    for (i64 i = first; i < padded; i += step) {
        Vec8 e = reload(i);
#pragma unroll
        for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e.x[j] - row_max);
    }
    sum = block_sum(sum);
    if (threadIdx.x == 0) losses[row] = logf(sum) + row_max - target_logit;
    if (!with_grad) return;
    float factor = grad_scale / sum;
#pragma unroll 2
    for (i64 i = first; i < padded; i += step) {
        Vec8 e = reload(i);
#pragma unroll
        for (int j = 0; j < 8; j++) e.x[j] = exp_for<ACT>(e.x[j] - row_max) * factor;
        store8(l, i, padded, wide, e);
    }
    // Every thread has read the target's logit before the barriers of block_max. Its gradient is written last.
    __syncthreads();
    if (threadIdx.x == 0) store(l, target, exp_for<ACT>(target_logit - row_max) * factor - grad_scale);
}

// Rows of which a multiprocessor has room for one only. A block takes rows round-robin.
//
// The memory must not be idle while a block computes: each thread keeps its first HELD vectors of a row in registers,
// and the first `slots` of them pass through shared memory, where copies bring those of the block's next row as soon as
// a slot is free. Vectors beyond the slots are read again for the gradient, at once after the sum, so that they are
// still in the L2 cache.

constexpr int HELD = sizeof(ACT) == 2 ? CLASSIFIER_HELD_BF16 : CLASSIFIER_HELD_F32;

// Other vectors that a thread works on at once.
constexpr int VECS = 2;

// The maximum of what a thread has read of a row, and the sum of exponentials relative to it.
struct Softmax {
    float max = NEG_INF, sum = 0.0f;

    template <int N>
    __device__ void add(const Packed<ACT> (&packed)[N]) {
        float new_max = max;
#pragma unroll
        for (int k = 0; k < N; k++) {
            Vec8 e = unpack(packed[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) new_max = fmaxf(new_max, e.x[j]);
        }
        // Nothing but padding, or NaN, has been read where the maximum is still -inf.
        float reference = new_max == NEG_INF ? 0.0f : new_max;
        sum *= exp_for<ACT>(max - reference);
        max = new_max;
#pragma unroll
        for (int k = 0; k < N; k++) {
            Vec8 e = unpack(packed[k]);
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e.x[j] - reference);
        }
    }
};

// Grid: any number of blocks. Shared: `slots` vectors per thread, of those that cover a row.
extern "C" __global__ void __launch_bounds__(CLASSIFIER_WIDE_THREADS, 1)
    classifier_wide(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 rows, i64 vocab,
               i64 padded, bool with_grad, float grad_scale, i64 slots) {
    pdl_wait_and_launch();
    extern __shared__ uint4 memory[];
    Packed<ACT>* mine = (Packed<ACT>*)memory + threadIdx.x;
    bool wide = is_wide(logits, padded);
    int width = (int)padded, step = blockDim.x * 8, count = (width + step - 1) / step;
    int shared = (int)slots;

    // In reverse order: the GEMM before this kernel wrote the last rows last, so they are still in the L2 cache.
    auto row_of = [&](i64 turn) { return logits + (rows - 1 - turn) * padded; };
    auto column_of = [&](int vector) { return (int)threadIdx.x * 8 + vector * step; };
    // Each thread reads only the vectors that it has copied itself, so no barrier is needed.
    auto start_copy = [&](i64 turn, int vector) {
        int i = column_of(vector);
        if (turn >= rows || i >= width) return;
        if (wide)
            copy8_async(mine[vector * blockDim.x], row_of(turn) + i);
        else
            mine[vector * blockDim.x] = fetch8((const ACT*)row_of(turn), i, padded, false);
    };
    // A vector of the current row; -inf past its end.
    auto fetch = [&](const ACT* row, int vector) {
        int i = column_of(vector);
        Packed<ACT> packed = {};
        if (i < width && vector < shared) packed = mine[vector * blockDim.x];
        else if (i < width) packed = fetch8(row, i, padded, wide);
        return masked(packed, i, vocab);
    };

    // Copies are waited for in two groups per row: vectors that will be held, and the others.
    for (int vector = 0; vector < HELD && vector < shared; vector++) start_copy(blockIdx.x, vector);
    commit_copies();
    for (int vector = HELD; vector < shared; vector++) start_copy(blockIdx.x, vector);
    commit_copies();
    for (i64 turn = blockIdx.x; turn < rows; turn += gridDim.x) {
        ACT* row = row_of(turn);
        i64 next = turn + gridDim.x;
        int target = targets[rows - 1 - turn];
        float target_logit = load(row, target);

        Softmax softmax;
        Packed<ACT> held[HELD];
        wait_copies<1>();
#pragma unroll
        for (int vector = 0; vector < HELD; vector++) {
            held[vector] = fetch(row, vector);
            if (vector < shared) start_copy(next, vector);
        }
        commit_copies();
        softmax.add(held);
        wait_copies<1>();
        for (int vector = HELD; vector < count; vector += VECS) {
            Packed<ACT> packed[VECS];
#pragma unroll
            for (int k = 0; k < VECS; k++) packed[k] = fetch(row, vector + k);
            softmax.add(packed);
        }
        float row_max = block_max(softmax.max);
        float sum = block_sum(softmax.sum * exp_for<ACT>(softmax.max - row_max));
        if (threadIdx.x == 0) losses[rows - 1 - turn] = logf(sum) + row_max - target_logit;

        float factor = grad_scale / sum;
        auto store_gradient = [&](int vector, const Packed<ACT>& packed) {
            int i = column_of(vector);
            if (!with_grad || i >= width) return;
            Vec8 e = unpack(packed);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                e.x[j] = exp_for<ACT>(e.x[j] - row_max) * factor;
                if (i + j == target) e.x[j] -= grad_scale;
            }
            store8(row, i, padded, wide, e);
        };
#pragma unroll 2
        for (int vector = max(shared, HELD); vector < count; vector++) store_gradient(vector, fetch(row, vector));
#pragma unroll 2
        for (int vector = HELD; vector < shared; vector++) {
            store_gradient(vector, fetch(row, vector));
            start_copy(next, vector);
        }
        commit_copies();
#pragma unroll
        for (int vector = 0; vector < HELD; vector++) store_gradient(vector, held[vector]);
    }
}
