// Rotary position embedding of the query and key heads of qkv [B,T,(H+2Hkv)D], in place.
//
// table [T,D]: D/2 cosines, then D/2 sines. direction 1 rotates, -1 rotates back. A thread turns eight pairs: neighbours in
// the first half of a head, and their partners in the second. Grid: threads for all of them, below 2^32.
extern "C" __global__ void rope(ACT* __restrict__ qkv, const float* __restrict__ table, i64 rows, i64 seq,
                                i64 rotated_heads, i64 width, i64 qkv_width, float direction) {
    after_the_kernel_before();
    // Divisions of 32 bits are several times faster than of 64.
    unsigned half = width / 2, parts = (half + 7) / 8, items = rotated_heads * parts;
    unsigned thread = blockIdx.x * blockDim.x + threadIdx.x, row = thread / items, item = thread % items;
    if (row >= rows) return;
    unsigned pair = item % parts * 8;
    ACT *heads = qkv + row * qkv_width, *low = heads + item / parts * width, *high = low + half;
    const float* angles = table + row % (unsigned)seq * width;
    bool wide = half % 8 == 0 && is_wide(heads, qkv_width);
    Eight c = load8(angles, pair, half, wide), s = load8(angles + half, pair, half, wide);
    Eight a = load8(low, pair, half, wide), b = load8(high, pair, half, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) {
        float x = a.x[j], y = b.x[j], sine = s.x[j] * direction;
        a.x[j] = x * c.x[j] - y * sine;
        b.x[j] = y * c.x[j] + x * sine;
    }
    store8(low, pair, half, wide, a);
    store8(high, pair, half, wide, b);
}
