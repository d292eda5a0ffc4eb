// RMSNorm of the query and key heads of qkv (B, T, (H + 2 Hkv) D), then their rotation as in rope/kernel.cu:
// z = x r (offset + gamma), r = 1 / sqrt(mean(x^2) + eps), out = rotate(z). Values are copied.
//
// A thread works on items: eight neighbours in the first half of a head and their partners in the second half. With
// qk_norm_head_*, a mean is that of a head, whose items belong to a group of lanes of one warp: threadIdx.x, which is a
// power of two in number; a block has several groups (threadIdx.y). With qk_norm_full_*, there is one mean of all query
// heads and one of all key heads, and a block works on one row after another. There a thread keeps its first item in
// registers, and copies that of the next row to shared memory in the meantime: few blocks fit on a multiprocessor.
// Further items, in rows of more items than threads, are read again for every pass.
//
// In backward, dqkv is the gradient of out and becomes that of qkv. With dz = dout rotated back and
// g = dz (offset + gamma): dx = r (g - x r mean(g x r)), dgamma = sum dz x r.

// Eight pairs of elements; packed, as in prelude.cuh.
struct Pairs {
    Vec8 low, high;
};

struct PackedPairs {
    Packed<ACT> low, high;
};

__device__ inline Pairs unpack(const PackedPairs& p) { return {unpack(p.low), unpack(p.high)}; }

// Sizes of a row of qkv, and access to items by the offset of their first element.
struct QkvRows {
    // (B, T): index of the first token of each token's document, from which positions count; or null.
    const int* first_tokens;
    i64 rows;
    unsigned seq, heads, kv_heads, width;
    bool wide;

    __device__ unsigned half() const { return width / 2; }
    __device__ unsigned normed_heads() const { return heads + kv_heads; }
    __device__ unsigned all_heads() const { return heads + 2 * kv_heads; }
    __device__ i64 at(i64 row, unsigned head) const { return (row * all_heads() + head) * width; }

    __device__ PackedPairs fetch(const ACT* head, unsigned pair) const {
        return {fetch8(head, pair, half(), wide), fetch8(head + half(), pair, half(), wide)};
    }

    template <typename T>
    __device__ Pairs load(const T* head, unsigned pair) const {
        return {load8(head, pair, half(), wide), load8(head + half(), pair, half(), wide)};
    }

    template <typename T>
    __device__ void store(T* head, unsigned pair, const Pairs& x) const {
        store8(head, pair, half(), wide, x.low);
        store8(head + half(), pair, half(), wide, x.high);
    }

    // Cosines and sines of the angles of the row's position. Without a table, nothing is rotated.
    __device__ Pairs angles(const float* table, i64 row, unsigned pair) const {
        // 32-bit divisions are several times faster than 64-bit ones.
        unsigned position = (unsigned)row % seq;
        if (table && first_tokens) position -= first_tokens[row];
        if (table) return load(table + position * (i64)width, pair);
        return {{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}, {}};
    }
};

// Rotates by these angles, or back with direction -1.
__device__ inline void rotate(Pairs& x, const Pairs& angles, float direction) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        // a' = a cos - b sin, b' = b cos + a sin
        float a = x.low.x[j], b = x.high.x[j], c = angles.low.x[j], s = angles.high.x[j] * direction;
        x.low.x[j] = a * c - b * s;
        x.high.x[j] = b * c + a * s;
    }
}

__device__ inline QkvRows qkv_rows(const ACT* qkv, const ACT* out, const ACT* q_gamma, const ACT* k_gamma,
                                   const int* first_tokens, i64 rows, i64 seq, i64 heads, i64 kv_heads, i64 width) {
    i64 half = width / 2;
    bool wide = is_wide(qkv, half) && is_wide(out, half) && is_wide(q_gamma, half) && is_wide(k_gamma, half);
    return {first_tokens, rows, (unsigned)seq, (unsigned)heads, (unsigned)kv_heads, (unsigned)width, wide};
}

__device__ inline float squares(const Pairs& x) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += x.low.x[j] * x.low.x[j] + x.high.x[j] * x.high.x[j];
    return sum;
}

// x = x r (offset + gamma)
__device__ inline void normalize(Pairs& x, const Pairs& gamma, float r, float offset) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x.low.x[j] *= r * (offset + gamma.low.x[j]);
        x.high.x[j] *= r * (offset + gamma.high.x[j]);
    }
}

// sum of g x
__device__ inline float products(const Pairs& x, const Pairs& dz, const Pairs& gamma, float offset) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum += dz.low.x[j] * (offset + gamma.low.x[j]) * x.low.x[j];
        sum += dz.high.x[j] * (offset + gamma.high.x[j]) * x.high.x[j];
    }
    return sum;
}

// Replaces dz by dx, and adds to dgamma.
__device__ inline void differentiate(const Pairs& x, Pairs& dz, const Pairs& gamma, float r, float mean_gx,
                                     float offset, Pairs& dgamma) {
    auto element = [&](float x, float& dz, float gamma, float& dgamma) {
        float normed = x * r, g = dz * (offset + gamma);
        dgamma += dz * normed;
        dz = r * (g - normed * mean_gx);
    };
#pragma unroll
    for (int j = 0; j < 8; j++) {
        element(x.low.x[j], dz.low.x[j], gamma.low.x[j], dgamma.low.x[j]);
        element(x.high.x[j], dz.high.x[j], gamma.high.x[j], dgamma.high.x[j]);
    }
}

// Sum over a group of lanes, returned to all of them.
__device__ inline float group_sum(float x) {
    for (int lane = blockDim.x / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

// Grid: a group of lanes for each head of each row, values included; fewer than 2^32.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS)
    qk_norm_head_fwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ out,
                     i64 rows, i64 seq, i64 heads, i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    QkvRows s = qkv_rows(qkv, out, q_gamma, k_gamma, first_tokens, rows, seq, heads, kv_heads, width);
    unsigned group = blockIdx.x * blockDim.y + threadIdx.y, head = group % s.all_heads(), pair = threadIdx.x * 8;
    i64 row = group / s.all_heads();
    // All lanes of a warp take part in the sums.
    bool valid = row < rows && pair < s.half();
    Pairs x = {}, gamma = {};
    if (valid) {
        PackedPairs packed = s.fetch(qkv + s.at(row, head), pair);
        gamma = s.load(head < s.heads ? q_gamma : k_gamma, pair);
        x = unpack(packed);
    }
    float r = 1.0f / sqrtf(group_sum(squares(x)) / width + eps);
    if (!valid) return;
    if (head < s.normed_heads()) {
        normalize(x, gamma, r, offset);
        rotate(x, s.angles(table, row, pair), 1.0f);
    }
    s.store(out + s.at(row, head), pair, x);
}

// The heads from `first_head` on, which share gamma. `dgammas` (gridDim.x, D) gets the sums over each block's heads.
__device__ inline void head_bwd(const QkvRows& s, const ACT* __restrict__ qkv, const ACT* __restrict__ gamma,
                                const float* __restrict__ table, ACT* __restrict__ dqkv, float* __restrict__ dgammas,
                                unsigned first_head, unsigned heads, float eps, float offset) {
    unsigned pair = threadIdx.x * 8, groups = s.rows * heads, step = gridDim.x * blockDim.y;
    PackedPairs packed_gamma = {};
    if (pair < s.half()) packed_gamma = s.fetch(gamma, pair);
    Pairs dgamma = {};
    for (i64 first = blockIdx.x * blockDim.y; first < groups; first += step) {
        unsigned group = first + threadIdx.y, head = first_head + group % heads;
        i64 row = group / heads;
        // All lanes of a warp take part in the sums.
        bool valid = group < groups && pair < s.half();
        PackedPairs packed = {}, packed_dz = {};
        if (valid) {
            packed = s.fetch(qkv + s.at(row, head), pair);
            packed_dz = s.fetch(dqkv + s.at(row, head), pair);
        }
        Pairs x = unpack(packed), dz = unpack(packed_dz), g = unpack(packed_gamma);
        if (valid) rotate(dz, s.angles(table, row, pair), -1.0f);
        float r = 1.0f / sqrtf(group_sum(squares(x)) / s.width + eps);
        float mean_gx = group_sum(products(x, dz, g, offset)) * r / s.width;
        if (!valid) continue;
        differentiate(x, dz, g, r, mean_gx, offset, dgamma);
        s.store(dqkv + s.at(row, head), pair, dz);
    }
    dgammas += blockIdx.x * (i64)s.width;
    store_column_sums(dgamma.low, dgammas, pair, s.half());
    store_column_sums(dgamma.high, dgammas + s.half(), pair, s.half());
}

// dq_gammas, dk_gammas (gridDim.x, D). Grid: any number of blocks; there are fewer than 2^31 heads.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, QK_NORM_HEAD_BLOCKS)
    qk_norm_head_bwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ dqkv,
                     float* __restrict__ dq_gammas, float* __restrict__ dk_gammas, i64 rows, i64 seq, i64 heads,
                     i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    QkvRows s = qkv_rows(qkv, dqkv, q_gamma, k_gamma, first_tokens, rows, seq, heads, kv_heads, width);
    head_bwd(s, qkv, q_gamma, table, dqkv, dq_gammas, 0, s.heads, eps, offset);
    head_bwd(s, qkv, k_gamma, table, dqkv, dk_gammas, s.heads, s.kv_heads, eps, offset);
}

// Sums over a block, returned to every thread. Calls alternate between two buffers, which saves a barrier: a thread
// that writes to a buffer again has passed the other buffer's barrier, so all threads have read this one.
template <int COUNT>
__device__ inline void block_sums(float (&x)[COUNT], int& buffer) {
    __shared__ float partial[2][COUNT][1024 / WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = blockDim.x / WARP;
#pragma unroll
    for (int i = 0; i < COUNT; i++) {
        x[i] = warp_sum(x[i]);
        if (lane == 0) partial[buffer][i][warp] = x[i];
    }
    __syncthreads();
#pragma unroll
    for (int i = 0; i < COUNT; i++) x[i] = warp_sum(lane < warps ? partial[buffer][i][lane] : 0.0f);
    buffer ^= 1;
}

// An item of a whole row. Query heads come before key heads, and these before value heads.
struct Item {
    unsigned head, pair;

    __device__ Item(const QkvRows& s, unsigned index) {
        unsigned parts = (s.half() + 7) / 8;
        head = index / parts;
        pair = index % parts * 8;
    }

    __device__ bool is_key(const QkvRows& s) const { return head >= s.heads; }

    // Returns this head's part of arrays with all query heads and all key heads.
    template <typename T>
    __device__ T* of(const QkvRows& s, T* queries, T* keys) const {
        return is_key(s) ? keys + (head - s.heads) * (i64)s.width : queries + head * (i64)s.width;
    }
};

// The first items of a thread in ARRAYS arrays. If `wide`, start_copy copies the next row's to dynamic shared memory. A
// thread reads only data that it has copied itself, so no barrier is needed.
template <int ARRAYS>
struct FirstItems {
    const QkvRows& s;
    Item item;
    bool inside;
    const ACT* arrays[ARRAYS];

    __device__ Packed<ACT>& slot(int array, int half) {
        extern __shared__ uint4 memory[];
        return ((Packed<ACT>*)memory)[(2 * array + half) * blockDim.x + threadIdx.x];
    }

    __device__ void start_copy(i64 row) {
        if (s.wide && inside && row < s.rows) {
#pragma unroll
            for (int array = 0; array < ARRAYS; array++) {
                const ACT* from = arrays[array] + s.at(row, item.head) + item.pair;
                copy8_async(slot(array, 0), from);
                copy8_async(slot(array, 1), from + s.half());
            }
        }
        commit_copies();
    }

    // The copies of this row have been started, and waited for.
    __device__ PackedPairs fetch(i64 row, int array) {
        if (!inside) return {};
        if (s.wide) return {slot(array, 0), slot(array, 1)};
        return s.fetch(arrays[array] + s.at(row, item.head), item.pair);
    }
};

// Grid: any number of blocks, of whole warps.
extern "C" __global__ void __launch_bounds__(QK_NORM_FULL_THREADS)
    qk_norm_full_fwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ out,
                     i64 rows, i64 seq, i64 heads, i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    QkvRows s = qkv_rows(qkv, out, q_gamma, k_gamma, first_tokens, rows, seq, heads, kv_heads, width);
    unsigned parts = (s.half() + 7) / 8, items = s.all_heads() * parts, normed = s.normed_heads() * parts;
    Item first(s, threadIdx.x);
    bool inside = threadIdx.x < items, is_normed = threadIdx.x < normed;
    FirstItems<1> block = {s, first, inside, {qkv}};
    block.start_copy(blockIdx.x);
    PackedPairs first_gamma = {};
    if (is_normed) first_gamma = s.fetch(first.of(s, q_gamma, k_gamma), first.pair);
    int buffer = 0;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        Pairs angles = {};
        if (is_normed) angles = s.angles(table, row, first.pair);
        wait_copies<0>();
        PackedPairs mine = block.fetch(row, 0);
        block.start_copy(row + gridDim.x);
        auto fetch = [&](const Item& item) { return s.fetch(qkv + s.at(row, item.head), item.pair); };
        // Squares of queries and of keys.
        float sums[2] = {};
        if (is_normed) sums[first.is_key(s)] = squares(unpack(mine));
        for (unsigned i = threadIdx.x + blockDim.x; i < normed; i += blockDim.x)
            sums[Item(s, i).is_key(s)] += squares(unpack(fetch({s, i})));
        block_sums(sums, buffer);
        float q_scale = 1.0f / sqrtf(sums[0] / (heads * width) + eps);
        float k_scale = 1.0f / sqrtf(sums[1] / (kv_heads * width) + eps);
        auto norm = [&](const Item& item, Pairs& x, const Pairs& gamma, const Pairs& angles) {
            normalize(x, gamma, item.is_key(s) ? k_scale : q_scale, offset);
            rotate(x, angles, 1.0f);
        };
        Pairs x = unpack(mine);
        if (is_normed) norm(first, x, unpack(first_gamma), angles);
        if (inside) s.store(out + s.at(row, first.head), first.pair, x);
        for (unsigned i = threadIdx.x + blockDim.x; i < items; i += blockDim.x) {
            Item item(s, i);
            Pairs x = unpack(fetch(item));
            if (i < normed)
                norm(item, x, s.load(item.of(s, q_gamma, k_gamma), item.pair), s.angles(table, row, item.pair));
            s.store(out + s.at(row, item.head), item.pair, x);
        }
    }
}

// dq_gammas (gridDim.x, H D), dk_gammas (gridDim.x, Hkv D). Grid: at most as many blocks as rows, of whole warps.
extern "C" __global__ void __launch_bounds__(QK_NORM_FULL_BWD_THREADS)
    qk_norm_full_bwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ dqkv,
                     float* __restrict__ dq_gammas, float* __restrict__ dk_gammas, i64 rows, i64 seq, i64 heads,
                     i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    QkvRows s = qkv_rows(qkv, dqkv, q_gamma, k_gamma, first_tokens, rows, seq, heads, kv_heads, width);
    unsigned items = s.normed_heads() * ((s.half() + 7) / 8);
    dq_gammas += blockIdx.x * heads * width;
    dk_gammas += blockIdx.x * kv_heads * width;
    Item first(s, threadIdx.x);
    bool inside = threadIdx.x < items;
    FirstItems<2> block = {s, first, inside, {qkv, dqkv}};
    block.start_copy(blockIdx.x);
    PackedPairs first_gamma = {};
    if (inside) first_gamma = s.fetch(first.of(s, q_gamma, k_gamma), first.pair);
    Pairs first_dgamma = {};
    int buffer = 0;
    for (i64 row = blockIdx.x; row < rows; row += gridDim.x) {
        auto at = [&](const Item& item) { return s.at(row, item.head); };
        auto load_dz = [&](const Item& item) {
            Pairs dz = s.load(dqkv + at(item), item.pair);
            rotate(dz, s.angles(table, row, item.pair), -1.0f);
            return dz;
        };
        auto load_gamma = [&](const Item& item) { return s.load(item.of(s, q_gamma, k_gamma), item.pair); };
        // Squares of queries and of keys, then their products.
        float sums[4] = {};
        auto add = [&](const Item& item, const Pairs& x, const Pairs& dz, const Pairs& gamma) {
            int key = item.is_key(s);
            sums[key] += squares(x);
            sums[2 + key] += products(x, dz, gamma, offset);
        };
        Pairs angles = {};
        if (inside) angles = s.angles(table, row, first.pair);
        wait_copies<0>();
        PackedPairs mine = block.fetch(row, 0);
        Pairs dz = unpack(block.fetch(row, 1));
        block.start_copy(row + gridDim.x);
        rotate(dz, angles, -1.0f);
        if (inside) add(first, unpack(mine), dz, unpack(first_gamma));
        for (unsigned i = threadIdx.x + blockDim.x; i < items; i += blockDim.x) {
            Item item(s, i);
            add(item, s.load(qkv + at(item), item.pair), load_dz(item), load_gamma(item));
        }
        block_sums(sums, buffer);
        float q_scale = 1.0f / sqrtf(sums[0] / (heads * width) + eps), q_mean = sums[2] * q_scale / (heads * width);
        float k_scale = 1.0f / sqrtf(sums[1] / (kv_heads * width) + eps);
        float k_mean = sums[3] * k_scale / (kv_heads * width);
        auto finish = [&](const Item& item, const Pairs& x, Pairs& dz, const Pairs& gamma, Pairs& dgamma) {
            bool key = item.is_key(s);
            differentiate(x, dz, gamma, key ? k_scale : q_scale, key ? k_mean : q_mean, offset, dgamma);
            s.store(dqkv + at(item), item.pair, dz);
        };
        if (inside) finish(first, unpack(mine), dz, unpack(first_gamma), first_dgamma);
        // The sums of further items are in global memory.
        for (unsigned i = threadIdx.x + blockDim.x; i < items; i += blockDim.x) {
            Item item(s, i);
            float* sum = item.of(s, dq_gammas, dk_gammas);
            Pairs dz = load_dz(item), dgamma = {};
            if (row != blockIdx.x) dgamma = s.load(sum, item.pair);
            finish(item, s.load(qkv + at(item), item.pair), dz, load_gamma(item), dgamma);
            s.store(sum, item.pair, dgamma);
        }
    }
    if (inside) s.store(first.of(s, dq_gammas, dk_gammas), first.pair, first_dgamma);
}
