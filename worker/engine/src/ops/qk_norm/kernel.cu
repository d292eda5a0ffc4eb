// RMSNorm of the query and key heads of qkv (B, T, (H + 2 Hkv) D), then their rotation as in rope/kernel.cu:
// z = x r (offset + gamma), r = 1 / sqrt(mean(x^2) + eps), out = rotate(z). Values are copied.
//
// A thread works on items: eight neighbours in the first half of a head and their partners in the second half. With
// qk_norm_head_*, a mean is that of a head, whose items belong to a group of lanes of one warp: threadIdx.x, which is a
// power of two in number; a block has several groups (threadIdx.y). With qk_norm_full_*, there is one mean of all query
// heads and one of all key heads, and a block works on one row after another. There a thread keeps its first item in
// registers; further items, in rows of more items than threads, are read again for every pass. Few blocks fit on a
// multiprocessor, so threads copy items to shared memory ahead (Ahead). Multiprocessors are busy with arithmetic for
// most of the time that memory takes, hence WIDE, shares instead of divisions, and rsqrtf.
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

// An item of a whole row. Query heads come before key heads, and these before value heads.
struct Item {
    unsigned head, pair;
};

// Sizes of a row of qkv.
struct Sizes {
    // (B, T): index of the first token of each token's document, from which positions count; or null.
    const int* first_tokens;
    i64 rows;
    unsigned seq, heads, kv_heads, width;

    __device__ unsigned half() const { return width / 2; }
    __device__ unsigned normed_heads() const { return heads + kv_heads; }
    __device__ unsigned all_heads() const { return heads + 2 * kv_heads; }
    __device__ i64 at(i64 row, unsigned head) const { return (row * all_heads() + head) * width; }

    // Whether rows of these arrays, and gammas, allow accesses as vectors.
    __device__ bool is_wide(const ACT* qkv, const ACT* out, const ACT* q_gamma, const ACT* k_gamma) const {
        return ::is_wide(qkv, half()) && ::is_wide(out, half()) && ::is_wide(q_gamma, half()) &&
               ::is_wide(k_gamma, half());
    }

    __device__ unsigned items(unsigned heads) const { return heads * ((half() + 7) / 8); }
    __device__ Item item(unsigned index) const { return {index / items(1), index % items(1) * 8}; }
    __device__ bool is_key(const Item& item) const { return item.head >= heads; }

    // Returns this head's part of arrays with all query heads and all key heads.
    template <typename T>
    __device__ T* of(const Item& item, T* queries, T* keys) const {
        return is_key(item) ? keys + (item.head - heads) * (i64)width : queries + item.head * (i64)width;
    }
};

// Access to items by the offset of the first element of their head, as vectors if WIDE.
template <bool WIDE>
struct QkvRows : Sizes {
    __device__ PackedPairs fetch(const ACT* head, unsigned pair) const {
        return {fetch8(head, pair, half(), WIDE), fetch8(head + half(), pair, half(), WIDE)};
    }

    template <typename T>
    __device__ Pairs load(const T* head, unsigned pair) const {
        return {load8(head, pair, half(), WIDE), load8(head + half(), pair, half(), WIDE)};
    }

    // offset + gamma
    __device__ Pairs factors(const ACT* gamma, unsigned pair, float offset) const {
        Pairs x = load(gamma, pair);
#pragma unroll
        for (int j = 0; j < 8; j++) x.low.x[j] += offset, x.high.x[j] += offset;
        return x;
    }

    template <typename T>
    __device__ void store(T* head, unsigned pair, const Pairs& x) const {
        store8(head, pair, half(), WIDE, x.low);
        store8(head + half(), pair, half(), WIDE, x.high);
    }

    // Cosines and sines of the angles of the row's position. Without a table, nothing is rotated.
    __device__ Pairs angles(const float* table, i64 row, unsigned pair) const {
        if (!table) return {{1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f, 1.0f}, {}};
        // 32-bit divisions are several times faster than 64-bit ones.
        unsigned position = (unsigned)row % seq;
        if (first_tokens) position -= first_tokens[row];
        return load(table + position * (i64)width, pair);
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

__device__ inline float squares(const Pairs& x) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) sum += x.low.x[j] * x.low.x[j] + x.high.x[j] * x.high.x[j];
    return sum;
}

// x = x r factors
__device__ inline void normalize(Pairs& x, const Pairs& factors, float r) {
#pragma unroll
    for (int j = 0; j < 8; j++) {
        x.low.x[j] *= r * factors.low.x[j];
        x.high.x[j] *= r * factors.high.x[j];
    }
}

// sum of g x
__device__ inline float products(const Pairs& x, const Pairs& dz, const Pairs& factors) {
    float sum = 0.0f;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        sum += dz.low.x[j] * factors.low.x[j] * x.low.x[j];
        sum += dz.high.x[j] * factors.high.x[j] * x.high.x[j];
    }
    return sum;
}

// Replaces dz by dx, and adds to dgamma.
__device__ inline void differentiate(const Pairs& x, Pairs& dz, const Pairs& factors, float r, float mean_gx,
                                     Pairs& dgamma) {
    float share = r * r * r * mean_gx;
    auto element = [&](float x, float& dz, float factor, float& dgamma) {
        dz *= r;
        dgamma += dz * x;
        dz = dz * factor - x * share;
    };
#pragma unroll
    for (int j = 0; j < 8; j++) {
        element(x.low.x[j], dz.low.x[j], factors.low.x[j], dgamma.low.x[j]);
        element(x.high.x[j], dz.high.x[j], factors.high.x[j], dgamma.high.x[j]);
    }
}

// A thread's next items of ARRAYS arrays, at the same offsets in each, which it copies to dynamic shared memory while
// it works on earlier ones. It reads only what it has copied itself, so no barrier is needed. Without WIDE, items are
// read when they are taken.
template <bool WIDE, int ARRAYS>
struct Ahead {
    // Items that are copied at a time, in 4 bytes per element and array.
    static constexpr unsigned ITEMS = 4 / sizeof(ACT);

    const QkvRows<WIDE>& s;
    unsigned pair;
    const ACT* arrays[ARRAYS];
    unsigned slot;

    __device__ Packed<ACT>& copy(int array, int half) {
        extern __shared__ uint4 memory[];
        unsigned thread = threadIdx.y * blockDim.x + threadIdx.x, threads = blockDim.x * blockDim.y;
        return ((Packed<ACT>*)memory)[((slot * ARRAYS + array) * 2 + half) * threads + thread];
    }

    // Starts to copy the item of the head at this offset, if there is one, to the place of the item taken last.
    __device__ void start(bool valid, i64 head) {
        if (WIDE && valid) {
#pragma unroll
            for (int array = 0; array < ARRAYS; array++) {
                const ACT* from = arrays[array] + head + pair;
                copy8_async(copy(array, 0), from);
                copy8_async(copy(array, 1), from + s.half());
            }
        }
        commit_copies();
        slot = (slot + 1) % ITEMS;
    }

    // Returns the items of the oldest copy, that of the head at this offset; zeros if there is none.
    __device__ void take(bool valid, i64 head, PackedPairs (&items)[ARRAYS]) {
        wait_copies<ITEMS - 1>();
#pragma unroll
        for (int array = 0; array < ARRAYS; array++) {
            items[array] = {};
            if (!valid) continue;
            if (WIDE)
                items[array] = {copy(array, 0), copy(array, 1)};
            else
                items[array] = s.fetch(arrays[array] + head, pair);
        }
    }
};

// Order in which the groups of a warp work on `count` heads: on neighbours at a time, and on runs of such neighbours,
// most of which share a row and so its angles.
struct Heads {
    unsigned count, groups, first, warps, run_bits;

    __device__ explicit Heads(unsigned count) : count(count), groups(WARP / blockDim.x) {
        first = (blockIdx.x * blockDim.y + threadIdx.y) / groups;
        warps = gridDim.x * blockDim.y / groups;
        run_bits = count >= 4 * warps * groups ? 2 : 0;
    }

    // Number i of the heads of this warp's first group; that of group g is the g-th after it.
    __device__ unsigned at(unsigned i) const {
        unsigned run = (i >> run_bits) * warps + first;
        return ((run << run_bits) + (i & ((1 << run_bits) - 1))) * groups;
    }

    // Number i of this thread's group, which may be past the last one.
    __device__ unsigned of_group(unsigned i) const { return at(i) + threadIdx.y % groups; }
};

// Sum over a group of lanes, returned to all of them.
__device__ inline float group_sum(float x) {
    for (int lane = blockDim.x / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

template <bool WIDE>
__device__ inline void head_fwd(const QkvRows<WIDE>& s, const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma,
                                const ACT* __restrict__ k_gamma, const float* __restrict__ table,
                                ACT* __restrict__ out, float eps, float offset) {
    Heads order(s.rows * s.all_heads());
    unsigned pair = threadIdx.x * 8, angles_row = ~0u;
    float share = 1.0f / s.width;
    Pairs angles = {}, factors = {};
    const ACT* gamma = nullptr;
    Ahead<WIDE, 1> ahead = {s, pair, {qkv}};
    auto is_valid = [&](unsigned head) { return head < order.count && pair < s.half(); };
    auto start = [&](unsigned head) { ahead.start(is_valid(head), head * (i64)s.width); };
    for (unsigned i = 0; i < ahead.ITEMS; i++) start(order.of_group(i));
    for (unsigned i = 0; order.at(i) < order.count; i++) {
        unsigned index = order.of_group(i), row = index / s.all_heads(), head = index - row * s.all_heads();
        // All lanes of a warp take part in the sums.
        bool valid = is_valid(index), normed = valid && head < s.normed_heads();
        if (normed && row != angles_row) angles = s.angles(table, row, pair);
        if (normed) angles_row = row;
        const ACT* head_gamma = head < s.heads ? q_gamma : k_gamma;
        if (normed && gamma != head_gamma) factors = s.factors(head_gamma, pair, offset);
        if (normed) gamma = head_gamma;
        PackedPairs packed[1];
        ahead.take(valid, index * (i64)s.width, packed);
        start(order.of_group(i + ahead.ITEMS));
        Pairs x = unpack(packed[0]);
        float r = rsqrtf(group_sum(squares(x)) * share + eps);
        if (normed) {
            normalize(x, factors, r);
            rotate(x, angles, 1.0f);
        }
        if (valid) s.store(out + index * (i64)s.width, pair, x);
    }
}

// Grid: any number of blocks; there are fewer than 2^31 heads, values included.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, QK_NORM_HEAD_BLOCKS)
    qk_norm_head_fwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ out,
                     i64 rows, i64 seq, i64 heads, i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    Sizes s = {first_tokens, rows, (unsigned)seq, (unsigned)heads, (unsigned)kv_heads, (unsigned)width};
    if (s.is_wide(qkv, out, q_gamma, k_gamma))
        head_fwd(QkvRows<true>{s}, qkv, q_gamma, k_gamma, table, out, eps, offset);
    else
        head_fwd(QkvRows<false>{s}, qkv, q_gamma, k_gamma, table, out, eps, offset);
}

// The heads from `first_head` on, which share gamma. `dgammas` (gridDim.x, D) gets the sums over each block's heads.
template <bool WIDE>
__device__ inline void some_heads_bwd(const QkvRows<WIDE>& s, const ACT* __restrict__ qkv,
                                      const ACT* __restrict__ gamma, const float* __restrict__ table,
                                      ACT* __restrict__ dqkv, float* __restrict__ dgammas, unsigned first_head,
                                      unsigned heads, float eps, float offset) {
    Heads order(s.rows * heads);
    unsigned pair = threadIdx.x * 8, angles_row = ~0u;
    float share = 1.0f / s.width;
    Pairs factors = {}, dgamma = {}, angles = {};
    if (pair < s.half()) factors = s.factors(gamma, pair, offset);
    Ahead<WIDE, 2> ahead = {s, pair, {qkv, dqkv}};
    auto is_valid = [&](unsigned head) { return head < order.count && pair < s.half(); };
    auto offset_of = [&](unsigned head, unsigned row) { return s.at(row, first_head + head - row * heads); };
    auto start = [&](unsigned head) { ahead.start(is_valid(head), offset_of(head, head / heads)); };
    for (unsigned i = 0; i < ahead.ITEMS; i++) start(order.of_group(i));
    for (unsigned i = 0; order.at(i) < order.count; i++) {
        unsigned index = order.of_group(i), row = index / heads;
        i64 at = offset_of(index, row);
        // All lanes of a warp take part in the sums.
        bool valid = is_valid(index);
        if (valid && row != angles_row) angles = s.angles(table, row, pair);
        if (valid) angles_row = row;
        PackedPairs packed[2];
        ahead.take(valid, at, packed);
        start(order.of_group(i + ahead.ITEMS));
        Pairs x = unpack(packed[0]), dz = unpack(packed[1]);
        rotate(dz, angles, -1.0f);
        float r = rsqrtf(group_sum(squares(x)) * share + eps);
        float mean_gx = group_sum(products(x, dz, factors)) * share;
        if (!valid) continue;
        differentiate(x, dz, factors, r, mean_gx, dgamma);
        s.store(dqkv + at, pair, dz);
    }
    dgammas += blockIdx.x * (i64)s.width;
    store_column_sums(dgamma.low, dgammas, pair, s.half());
    store_column_sums(dgamma.high, dgammas + s.half(), pair, s.half());
}

template <bool WIDE>
__device__ inline void head_bwd(const QkvRows<WIDE>& s, const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma,
                                const ACT* __restrict__ k_gamma, const float* __restrict__ table,
                                ACT* __restrict__ dqkv, float* __restrict__ dq_gammas, float* __restrict__ dk_gammas,
                                float eps, float offset) {
    some_heads_bwd(s, qkv, q_gamma, table, dqkv, dq_gammas, 0, s.heads, eps, offset);
    some_heads_bwd(s, qkv, k_gamma, table, dqkv, dk_gammas, s.heads, s.kv_heads, eps, offset);
}

// dq_gammas, dk_gammas (gridDim.x, D). Grid: any number of blocks; there are fewer than 2^31 heads.
extern "C" __global__ void __launch_bounds__(BLOCK_THREADS, QK_NORM_HEAD_BLOCKS)
    qk_norm_head_bwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ dqkv,
                     float* __restrict__ dq_gammas, float* __restrict__ dk_gammas, i64 rows, i64 seq, i64 heads,
                     i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    Sizes s = {first_tokens, rows, (unsigned)seq, (unsigned)heads, (unsigned)kv_heads, (unsigned)width};
    if (s.is_wide(qkv, dqkv, q_gamma, k_gamma))
        head_bwd(QkvRows<true>{s}, qkv, q_gamma, k_gamma, table, dqkv, dq_gammas, dk_gammas, eps, offset);
    else
        head_bwd(QkvRows<false>{s}, qkv, q_gamma, k_gamma, table, dqkv, dq_gammas, dk_gammas, eps, offset);
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

// Adds to the sum of queries or of keys.
__device__ inline void add_to(float* sums, bool key, float x) {
    sums[0] += key ? 0.0f : x;
    sums[1] += key ? x : 0.0f;
}

template <bool WIDE>
__device__ inline void full_fwd(const QkvRows<WIDE>& s, const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma,
                                const ACT* __restrict__ k_gamma, const float* __restrict__ table,
                                ACT* __restrict__ out, float eps, float offset) {
    unsigned items = s.items(s.all_heads()), normed = s.items(s.normed_heads());
    float q_share = 1.0f / (s.heads * s.width), k_share = 1.0f / (s.kv_heads * s.width);
    Item first = s.item(threadIdx.x);
    bool inside = threadIdx.x < items, is_normed = threadIdx.x < normed;
    Ahead<WIDE, 1> ahead = {s, first.pair, {qkv}};
    auto start = [&](i64 row) { ahead.start(inside && row < s.rows, s.at(row, first.head)); };
    for (unsigned i = 0; i < ahead.ITEMS; i++) start(blockIdx.x + i * gridDim.x);
    // Without WIDE, registers do not suffice for these.
    Pairs first_factors = {};
    auto load_factors = [&](const Item& item) {
        return s.factors(s.of(item, q_gamma, k_gamma), item.pair, offset);
    };
    if (WIDE && is_normed) first_factors = load_factors(first);
    int buffer = 0;
    for (i64 row = blockIdx.x; row < s.rows; row += gridDim.x) {
        Pairs angles = {};
        if (is_normed) angles = s.angles(table, row, first.pair);
        PackedPairs mine[1];
        ahead.take(inside, s.at(row, first.head), mine);
        start(row + ahead.ITEMS * gridDim.x);
        Pairs x = unpack(mine[0]);
        auto load = [&](const Item& item) { return s.load(qkv + s.at(row, item.head), item.pair); };
        // Squares of queries and of keys.
        float sums[2] = {};
        if (is_normed) add_to(sums, s.is_key(first), squares(x));
        for (unsigned i = threadIdx.x + blockDim.x; i < normed; i += blockDim.x)
            add_to(sums, s.is_key(s.item(i)), squares(load(s.item(i))));
        block_sums(sums, buffer);
        float q_scale = rsqrtf(sums[0] * q_share + eps), k_scale = rsqrtf(sums[1] * k_share + eps);
        auto norm = [&](const Item& item, Pairs& x, const Pairs& factors, const Pairs& angles) {
            normalize(x, factors, s.is_key(item) ? k_scale : q_scale);
            rotate(x, angles, 1.0f);
        };
        if (is_normed) norm(first, x, WIDE ? first_factors : load_factors(first), angles);
        if (inside) s.store(out + s.at(row, first.head), first.pair, x);
        for (unsigned i = threadIdx.x + blockDim.x; i < items; i += blockDim.x) {
            Item item = s.item(i);
            Pairs x = load(item);
            if (i < normed) norm(item, x, load_factors(item), s.angles(table, row, item.pair));
            s.store(out + s.at(row, item.head), item.pair, x);
        }
    }
}

// Grid: any number of blocks, of whole warps.
extern "C" __global__ void __launch_bounds__(QK_NORM_FULL_THREADS * 2 / sizeof(ACT))
    qk_norm_full_fwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ out,
                     i64 rows, i64 seq, i64 heads, i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    Sizes s = {first_tokens, rows, (unsigned)seq, (unsigned)heads, (unsigned)kv_heads, (unsigned)width};
    if (s.is_wide(qkv, out, q_gamma, k_gamma))
        full_fwd(QkvRows<true>{s}, qkv, q_gamma, k_gamma, table, out, eps, offset);
    else
        full_fwd(QkvRows<false>{s}, qkv, q_gamma, k_gamma, table, out, eps, offset);
}

template <bool WIDE>
__device__ inline void full_bwd(const QkvRows<WIDE>& s, const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma,
                                const ACT* __restrict__ k_gamma, const float* __restrict__ table,
                                ACT* __restrict__ dqkv, float* __restrict__ dq_gammas, float* __restrict__ dk_gammas,
                                float eps, float offset) {
    unsigned items = s.items(s.normed_heads());
    float q_share = 1.0f / (s.heads * s.width), k_share = 1.0f / (s.kv_heads * s.width);
    dq_gammas += blockIdx.x * (i64)s.heads * s.width;
    dk_gammas += blockIdx.x * (i64)s.kv_heads * s.width;
    Item first = s.item(threadIdx.x);
    bool inside = threadIdx.x < items;
    Ahead<WIDE, 2> ahead = {s, first.pair, {qkv, dqkv}};
    auto start = [&](i64 row) { ahead.start(inside && row < s.rows, s.at(row, first.head)); };
    for (unsigned i = 0; i < ahead.ITEMS; i++) start(blockIdx.x + i * gridDim.x);
    auto load_factors = [&](const Item& item) {
        return s.factors(s.of(item, q_gamma, k_gamma), item.pair, offset);
    };
    Pairs first_factors = {}, first_dgamma = {};
    if (inside) first_factors = load_factors(first);
    int buffer = 0;
    for (i64 row = blockIdx.x; row < s.rows; row += gridDim.x) {
        auto at = [&](const Item& item) { return s.at(row, item.head); };
        auto load_dz = [&](const Item& item) {
            Pairs dz = s.load(dqkv + at(item), item.pair);
            rotate(dz, s.angles(table, row, item.pair), -1.0f);
            return dz;
        };
        // Squares of queries and of keys, then their products.
        float sums[4] = {};
        auto add = [&](const Item& item, const Pairs& x, const Pairs& dz, const Pairs& factors) {
            add_to(sums, s.is_key(item), squares(x));
            add_to(sums + 2, s.is_key(item), products(x, dz, factors));
        };
        Pairs angles = {};
        if (inside) angles = s.angles(table, row, first.pair);
        PackedPairs mine[2];
        ahead.take(inside, at(first), mine);
        start(row + ahead.ITEMS * gridDim.x);
        Pairs x = unpack(mine[0]), dz = unpack(mine[1]);
        rotate(dz, angles, -1.0f);
        if (inside) add(first, x, dz, first_factors);
        for (unsigned i = threadIdx.x + blockDim.x; i < items; i += blockDim.x) {
            Item item = s.item(i);
            add(item, s.load(qkv + at(item), item.pair), load_dz(item), load_factors(item));
        }
        block_sums(sums, buffer);
        float q_scale = rsqrtf(sums[0] * q_share + eps), k_scale = rsqrtf(sums[1] * k_share + eps);
        auto finish = [&](const Item& item, const Pairs& x, Pairs& dz, const Pairs& factors, Pairs& dgamma) {
            bool key = s.is_key(item);
            float mean_gx = key ? sums[3] * k_share : sums[2] * q_share;
            differentiate(x, dz, factors, key ? k_scale : q_scale, mean_gx, dgamma);
            s.store(dqkv + at(item), item.pair, dz);
        };
        if (inside) finish(first, x, dz, first_factors, first_dgamma);
        // The sums of further items are in global memory.
        for (unsigned i = threadIdx.x + blockDim.x; i < items; i += blockDim.x) {
            Item item = s.item(i);
            float* sum = s.of(item, dq_gammas, dk_gammas);
            Pairs dz = load_dz(item), dgamma = {};
            if (row != blockIdx.x) dgamma = s.load(sum, item.pair);
            finish(item, s.load(qkv + at(item), item.pair), dz, load_factors(item), dgamma);
            s.store(sum, item.pair, dgamma);
        }
    }
    if (inside) s.store(s.of(first, dq_gammas, dk_gammas), first.pair, first_dgamma);
}

// dq_gammas (gridDim.x, H D), dk_gammas (gridDim.x, Hkv D). Grid: at most as many blocks as rows, of whole warps.
extern "C" __global__ void __launch_bounds__(QK_NORM_FULL_BWD_THREADS * 2 / sizeof(ACT))
    qk_norm_full_bwd(const ACT* __restrict__ qkv, const ACT* __restrict__ q_gamma, const ACT* __restrict__ k_gamma,
                     const float* __restrict__ table, const int* __restrict__ first_tokens, ACT* __restrict__ dqkv,
                     float* __restrict__ dq_gammas, float* __restrict__ dk_gammas, i64 rows, i64 seq, i64 heads,
                     i64 kv_heads, i64 width, float eps, float offset) {
    pdl_wait_and_launch();
    Sizes s = {first_tokens, rows, (unsigned)seq, (unsigned)heads, (unsigned)kv_heads, (unsigned)width};
    if (s.is_wide(qkv, dqkv, q_gamma, k_gamma))
        full_bwd(QkvRows<true>{s}, qkv, q_gamma, k_gamma, table, dqkv, dq_gammas, dk_gammas, eps, offset);
    else
        full_bwd(QkvRows<false>{s}, qkv, q_gamma, k_gamma, table, dqkv, dq_gammas, dk_gammas, eps, offset);
}
