// Softmax cross entropy, fused with its gradient, which replaces the logits. A block takes rows round-robin and keeps
// the first `kept` logits of a row in shared memory, where copies bring those of its next row while it writes the
// gradient of this one. The other logits are read again for the gradient, at once after the sum: they are still in the
// L2 cache.
//
// loss = log(sum exp(l - max)) + max - l[target]; dl = (softmax(l) - onehot(target)) grad_scale, 0 in the padding.

#define NEG_INF __int_as_float(0xff800000)

// Groups of copies of a row: the sum begins when the first group has arrived.
constexpr int GROUPS = 4;

// Vectors that a thread works on at once.
constexpr int VECS = 4;

// Waits for group `group` of the copies of a row.
__device__ inline void wait_group(int group) {
    switch (group) {
        case 0: wait_copies<GROUPS - 1>(); break;
        case 1: wait_copies<GROUPS - 2>(); break;
        case 2: wait_copies<GROUPS - 3>(); break;
        default: wait_copies<0>();
    }
}

// The maximum of what a thread has read of a row, and the sum of exponentials relative to it.
struct Softmax {
    float max = NEG_INF, sum = 0.0f;

    __device__ void add(const Vec8 (&e)[VECS]) {
        float new_max = max;
#pragma unroll
        for (int k = 0; k < VECS; k++)
#pragma unroll
            for (int j = 0; j < 8; j++) new_max = fmaxf(new_max, e[k].x[j]);
        // Nothing but padding, or NaN, has been read where the maximum is still -inf.
        float reference = new_max == NEG_INF ? 0.0f : new_max;
        sum *= exp_for<ACT>(max - reference);
        max = new_max;
#pragma unroll
        for (int k = 0; k < VECS; k++)
#pragma unroll
            for (int j = 0; j < 8; j++) sum += exp_for<ACT>(e[k].x[j] - reference);
    }
};

// logits (N, Vp), targets (N,), losses (N,). Grid: any number of blocks. `kept` is a multiple of 8; that many logits
// fit into dynamic shared memory.
extern "C" __global__ void __launch_bounds__(CLASSIFIER_THREADS)
    classifier(ACT* logits, const int* __restrict__ targets, float* __restrict__ losses, i64 rows, i64 vocab,
               i64 padded, bool with_grad, float grad_scale, i64 kept) {
    pdl_wait_and_launch();
    extern __shared__ uint4 memory[];
    Packed<ACT>* vectors = (Packed<ACT>*)memory;
    bool wide = is_wide(logits, padded);
    int first = threadIdx.x * 8, step = blockDim.x * 8, keep = (int)kept;
    // Columns of a group of copies.
    int part = (keep + GROUPS * step - 1) / (GROUPS * step) * step;

    // In reverse order: the GEMM before this kernel wrote the last rows last, so they are still in the L2 cache.
    auto row_of = [&](i64 turn) { return logits + (rows - 1 - turn) * padded; };
    // Each thread reads only the vectors that it has copied itself, so no barrier is needed.
    auto start_copy = [&](const ACT* row, int i) {
        if (wide)
            copy8_async(vectors[i / 8], row + i);
        else
            vectors[i / 8] = fetch8(row, i, padded, false);
    };
    // Logits in the padding are meaningless: they become -inf, so that their exponentials are 0.
    auto masked = [&](const Packed<ACT>& packed, int i) {
        Vec8 e = unpack(packed);
        if (i + 8 > vocab) {
#pragma unroll
            for (int j = 0; j < 8; j++)
                if (i + j >= vocab) e.x[j] = NEG_INF;
        }
        return e;
    };

    if (blockIdx.x < rows)
        for (int group = 0; group < GROUPS; group++) {
            for (int i = group * part + first; i < min((group + 1) * part, keep); i += step)
                start_copy(row_of(blockIdx.x), i);
            commit_copies();
        }
    for (i64 turn = blockIdx.x; turn < rows; turn += gridDim.x) {
        ACT* row = row_of(turn);
        int target = targets[rows - 1 - turn];
        float target_logit = load(row, target);

        auto fetch = [&](int i) { return fetch8((const ACT*)row, i, padded, wide); };
        Softmax mine;
        // Adds the thread's vectors of columns `start` to `end`, which are in shared memory or not.
        auto add = [&](int start, int end, bool in_shared) {
            for (int i = start + first; i < end; i += VECS * step) {
                Packed<ACT> packed[VECS] = {};
                Vec8 e[VECS];
#pragma unroll
                for (int k = 0; k < VECS; k++)
                    if (i + k * step < end) packed[k] = in_shared ? vectors[(i + k * step) / 8] : fetch(i + k * step);
#pragma unroll
                for (int k = 0; k < VECS; k++) e[k] = masked(packed[k], i + k * step < end ? i + k * step : (int)vocab);
                mine.add(e);
            }
        };
#pragma unroll
        for (int group = 0; group < GROUPS; group++) {
            wait_group(group);
            add(group * part, min((group + 1) * part, keep), true);
        }
        add(keep, (int)padded, false);
        float row_max = block_max(mine.max);
        float sum = block_sum(mine.sum * exp_for<ACT>(mine.max - row_max));
        if (threadIdx.x == 0) losses[rows - 1 - turn] = logf(sum) + row_max - target_logit;

        float factor = grad_scale / sum;
        auto store_gradient = [&](int i, const Packed<ACT>& packed) {
            Vec8 e = masked(packed, i);
#pragma unroll
            for (int j = 0; j < 8; j++) {
                e.x[j] = exp_for<ACT>(e.x[j] - row_max) * factor;
                if (i + j == target) e.x[j] -= grad_scale;
            }
            store8(row, i, padded, wide, e);
        };
        if (with_grad) {
#pragma unroll 2
            for (int i = keep + first; i < padded; i += step)
                store_gradient(i, fetch(i));
        }
        bool more = turn + gridDim.x < rows;
        for (int group = 0; group < GROUPS; group++) {
#pragma unroll 2
            for (int i = group * part + first; i < min((group + 1) * part, keep); i += step) {
                if (with_grad) store_gradient(i, vectors[i / 8]);
                if (more) start_copy(row_of(turn + gridDim.x), i);
            }
            commit_copies();
        }
    }
}
