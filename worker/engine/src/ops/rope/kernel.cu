// Rotary position embedding of the query and key heads of qkv (B, T, (H + 2 Hkv) D), in place.
//
// (x_i, x_{i+D/2}) is rotated by the angle of position t and pair i. table (T, D): D/2 cosines, then D/2 sines.
// direction 1 rotates, -1 rotates back (the transposed rotation, which is the backward). A thread rotates eight pairs:
// neighbours in the first half of a head and their partners in the second. Positions count from `first` (B, T), if it
// is not null. Grid: one thread per eight pairs, < 2^32.
extern "C" __global__ void rope(ACT* __restrict__ qkv, const float* __restrict__ table,
                                const int* __restrict__ first, i64 rows, i64 seq, i64 rotated_heads, i64 width,
                                i64 qkv_width, float direction) {
    pdl_wait_and_launch();
    // 32-bit divisions are several times faster than 64-bit ones.
    unsigned half = width / 2, parts = (half + 7) / 8, items = rotated_heads * parts;
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, row = thread / items, item = thread % items;
    if (row >= rows) return;
    unsigned pair = item % parts * 8;
    ACT *heads = qkv + row * qkv_width, *low = heads + item / parts * width, *high = low + half;
    unsigned position = row % (unsigned)seq;
    if (first) position -= first[row];
    const float* angles = table + position * width;
    bool wide = half % 8 == 0 && is_wide(heads, qkv_width);
    Vec8 c = load8(angles, pair, half, wide), s = load8(angles + half, pair, half, wide);
    Vec8 a = load8(low, pair, half, wide), b = load8(high, pair, half, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        // x' = x cos - y sin, y' = y cos + x sin
        float x = a.x[j], y = b.x[j], sine = s.x[j] * direction;
        a.x[j] = x * c.x[j] - y * sine;
        b.x[j] = y * c.x[j] + x * sine;
    }
    store8(low, pair, half, wide, a);
    store8(high, pair, half, wide, b);
}
