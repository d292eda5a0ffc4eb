// Attention of new tokens over cached keys and values, on FP32 units. Reading the cache takes nearly all of the time.
//
// Compiled per head width, -DWIDTH=D, and number of query heads per block, -DGROUP. qkv (N, (H + 2 Hkv) D), keys and
// values (S, Hkv, T, D), out (N, H D), table (T, D) or null: D/2 cosines, then D/2 sines.
//
// LANES neighbouring threads read one key or value, eight elements each (D / 8 rounded up to a power of two; the rest
// are idle). The THREADS / LANES such teams of a block take positions in turn, UNROLL at a time. Each team has its own
// softmax; they are combined at the end: with m = max of m_i, sum = sum_i exp(m_i - m) sum_i.

#define TEAMS (THREADS / LANES)
#define WARPS (THREADS / WARP)
// Floats of the result of a warp or split for one head: WIDTH sums, the maximum, the denominator.
#define RESULT (WIDTH + 2)

// Elements d to d + 8 of a head at `head`, rotated by `angles` if not null, rounded to ACT:
// x' = x cos - y sin, y' = y cos + x sin for the pairs (x_i, x_{i + D/2}).
__device__ inline Packed<ACT> rotated8(const ACT* head, const float* angles, int d) {
    Vec8 e;
#pragma unroll
    for (int j = 0; j < 8; j++) {
        int i = d + j;
        e.x[j] = load(head, i);
        if (!angles) continue;
        bool low = i < WIDTH / 2;
        int pair = low ? i : i - WIDTH / 2;
        float other = load(head, low ? i + WIDTH / 2 : pair), cosine = angles[pair], sine = angles[pair + WIDTH / 2];
        e.x[j] = low ? e.x[j] * cosine - other * sine : e.x[j] * cosine + other * sine;
    }
    Packed<ACT> packed;
    pack(e, packed);
    return packed;
}

// Stores eight elements of a new key and value.
__device__ inline void store_new(const ACT* token, const float* angles, ACT* key, ACT* value, i64 heads, i64 kv_heads,
                                 i64 kv, int d) {
    *(Packed<ACT>*)(key + d) = rotated8(token + (heads + kv) * WIDTH, angles, d);
    *(Packed<ACT>*)(value + d) = fetch8(token + (heads + kv_heads + kv) * WIDTH + d);
}

// Stores the keys and values of all rows. Grid: one block per row.
extern "C" __global__ void cache_store(const ACT* qkv, const float* table, const int* slots, const int* positions,
                                       ACT* keys, ACT* values, i64 heads, i64 kv_heads, i64 capacity) {
    pdl_wait_and_launch();
    i64 row = blockIdx.x, position = positions[row];
    const ACT* token = qkv + row * (heads + 2 * kv_heads) * WIDTH;
    const float* angles = table ? table + position * WIDTH : nullptr;
    for (int i = threadIdx.x; i < WIDTH / 8 * kv_heads; i += blockDim.x) {
        i64 kv = i / (WIDTH / 8), at = ((slots[row] * kv_heads + kv) * capacity + position) * WIDTH;
        store_new(token, angles, keys + at, values + at, heads, kv_heads, kv, i % (WIDTH / 8) * 8);
    }
}

// A softmax over some positions: the largest score, the sum of exponentials, and the weighted sum of values.
struct Softmax {
    float largest, total;
    Vec8 sums;
};

// Factor that rescales sums relative to `largest` when the maximum becomes `now`. If `largest` is infinite, nothing was
// summed.
__device__ inline float rescale(float largest, float now) {
    return largest == now ? 1.0f : exp_for<ACT>(largest - now);
}

// Combines the teams of a warp.
__device__ inline void combine_teams(Softmax& s) {
#pragma unroll
    for (int distance = LANES; distance < WARP; distance *= 2) {
        float largest = __shfl_xor_sync(FULL_WARP, s.largest, distance);
        float total = __shfl_xor_sync(FULL_WARP, s.total, distance);
        float now = fmaxf(s.largest, largest), mine = rescale(s.largest, now), theirs = rescale(largest, now);
        s.largest = now;
        s.total = s.total * mine + total * theirs;
#pragma unroll
        for (int j = 0; j < 8; j++)
            s.sums.x[j] = s.sums.x[j] * mine + __shfl_xor_sync(FULL_WARP, s.sums.x[j], distance) * theirs;
    }
}

// Element c of the combination of `count` results, `stride` floats apart. Also returns its maximum and denominator.
__device__ inline float combine_results(const volatile float* results, int count, i64 stride, int c, float& largest,
                                        float& total) {
    largest = __int_as_float(0xff800000), total = 0.0f;
    float sum = 0.0f;
    for (int i = 0; i < count; i++) largest = fmaxf(largest, results[i * stride + WIDTH]);
    for (int i = 0; i < count; i++) {
        float factor = rescale(results[i * stride + WIDTH], largest);
        sum += results[i * stride + c] * factor;
        total += results[i * stride + WIDTH + 1] * factor;
    }
    return sum;
}

// The part of a head's sink in the denominator, relative to the largest score.
__device__ inline float sink_part(const ACT* sinks, i64 head, float largest) {
    return sinks ? exp_for<ACT>(load(sinks, head) - largest) : 0.0f;
}

// Grid: (splits of `split` positions, H / GROUP, N). A row sees its own and the `window - 1` positions before it; the
// first block takes the first split that has any of them. Scores are capped if softcap > 0. With `append`, the block
// that has a row's own position stores its key and value; otherwise cache_store has done so. sinks: (H,) or null;
// partials: splits x RESULT floats per head; counters: one per block of a row, zero before and after.
extern "C" __global__ void __launch_bounds__(THREADS)
    cached_attention(const ACT* qkv, const float* table, const int* slots, const int* positions, ACT* keys,
                     ACT* values, const ACT* sinks, ACT* out, float* partials, unsigned* counters, i64 heads,
                     i64 kv_heads, i64 capacity, i64 split, bool append, float scale, i64 window, float softcap) {
    pdl_wait_and_launch();
    i64 row = blockIdx.z, head = blockIdx.y * (i64)GROUP, kv = head / (heads / kv_heads);
    // The first position that the row sees, and the first split that has any.
    int position = positions[row], low = max(position - (int)window + 1, 0), begin = low / split;
    int first = (begin + blockIdx.x) * split, last = min(position, (int)(first + split - 1));
    if (first > position) return;
    first = max(first, low);
    int part = threadIdx.x % LANES, team = threadIdx.x / LANES, d = part * 8;
    bool inside = d < WIDTH;
    const ACT* token = qkv + row * (heads + 2 * kv_heads) * WIDTH;
    const float* angles = table ? table + position * (i64)WIDTH : nullptr;
    i64 start = (slots[row] * kv_heads + kv) * capacity * WIDTH;
    keys += start + d, values += start + d;
    if (append && last == position) {
        // Blocks of other query heads of this key head write the same values.
        i64 at = position * (i64)WIDTH - d;
        if (team == 0 && inside) {
            written_alike(keys + at + d, sizeof(Packed<ACT>));
            written_alike(values + at + d, sizeof(Packed<ACT>));
            store_new(token, angles, keys + at, values + at, heads, kv_heads, kv, d);
        }
        __syncthreads();
    }
    Vec8 q[GROUP];
    Softmax state[GROUP];
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        state[g] = {__int_as_float(0xff800000), 0.0f, {}};
        q[g] = {};
        if (inside) q[g] = unpack(rotated8(token + (head + g) * WIDTH, angles, d));
#pragma unroll
        for (int j = 0; j < 8; j++) q[g].x[j] *= scale;
    }
    for (int base = first; base <= last; base += TEAMS * UNROLL) {
        Packed<ACT> ks[UNROLL] = {}, vs[UNROLL] = {};
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            int key = base + u * TEAMS + team;
            if (!inside || key > last) continue;
            ks[u] = fetch8(keys + key * (i64)WIDTH);
            vs[u] = fetch8(values + key * (i64)WIDTH);
        }
#pragma unroll
        for (int u = 0; u < UNROLL; u++) {
            bool valid = base + u * TEAMS + team <= last;
            Vec8 k = unpack(ks[u]), v = unpack(vs[u]);
#pragma unroll
            for (int g = 0; g < GROUP; g++) {
                float score = 0.0f;
#pragma unroll
                for (int j = 0; j < 8; j++) score += q[g].x[j] * k.x[j];
#pragma unroll
                for (int distance = LANES / 2; distance > 0; distance /= 2)
                    score += __shfl_xor_sync(FULL_WARP, score, distance);
                if (!valid) continue;
                if (softcap > 0.0f) score = softcap * tanh_for<ACT>(score / softcap);
                float now = fmaxf(state[g].largest, score), old = rescale(state[g].largest, now);
                float p = exp_for<ACT>(score - now);
                state[g].largest = now;
                state[g].total = state[g].total * old + p;
#pragma unroll
                for (int j = 0; j < 8; j++) state[g].sums.x[j] = state[g].sums.x[j] * old + p * v.x[j];
            }
        }
    }
    __shared__ float results[GROUP][WARPS][RESULT];
    int warp = threadIdx.x / WARP;
#pragma unroll
    for (int g = 0; g < GROUP; g++) {
        combine_teams(state[g]);
        if (threadIdx.x % WARP >= LANES) continue;
        float* result = results[g][warp];
        for (int j = 0; inside && j < 8; j++) result[d + j] = state[g].sums.x[j];
        if (part == 0) result[WIDTH] = state[g].largest, result[WIDTH + 1] = state[g].total;
    }
    __syncthreads();
    int active = position / split - begin + 1;
    out += (row * heads + head) * WIDTH;
    float* mine = partials + (row * heads + head) * gridDim.x * RESULT;
    for (int i = threadIdx.x; i < GROUP * WIDTH; i += THREADS) {
        int g = i / WIDTH, c = i % WIDTH;
        float largest, total, sum = combine_results(results[g][0], WARPS, RESULT, c, largest, total);
        if (active == 1) {
            store(out, i, sum / (total + sink_part(sinks, head + g, largest)));
            continue;
        }
        float* result = mine + (g * gridDim.x + blockIdx.x) * RESULT;
        result[c] = sum;
        if (c == 0) result[WIDTH] = largest, result[WIDTH + 1] = total;
    }
    if (active == 1) return;
    // The last block of this row and these heads combines all splits, in order.
    __shared__ bool is_last;
    __threadfence();
    __syncthreads();
    unsigned* counter = counters + row * gridDim.y + blockIdx.y;
    if (threadIdx.x == 0) is_last = atomicAdd(counter, 1u) == active - 1;
    __syncthreads();
    if (!is_last) return;
    __threadfence();
    for (int i = threadIdx.x; i < GROUP * WIDTH; i += THREADS) {
        float largest, total;
        float sum = combine_results(mine + i / WIDTH * gridDim.x * RESULT, active, RESULT, i % WIDTH, largest, total);
        store(out, i, sum / (total + sink_part(sinks, head + i / WIDTH, largest)));
    }
    if (threadIdx.x == 0) *counter = 0;
}
