// Rotary position embedding of the query and key heads of qkv [B,T,(H+2Hkv)D], in place.
//
// Grid: one block per token row. table [T,D]: D/2 cosines, then D/2 sines. direction 1 rotates, -1 rotates back.
extern "C" __global__ void rope(ACT* qkv, const float* table, i64 seq, i64 rotated_heads, i64 width, i64 qkv_width,
                                float direction) {
    i64 row = blockIdx.x, half = width / 2;
    ACT* heads = qkv + row * qkv_width;
    const float* angles = table + row % seq * width;
    for (i64 i = threadIdx.x; i < rotated_heads * half; i += blockDim.x) {
        i64 pair = i % half, at = i / half * width + pair;
        float c = angles[pair], s = angles[half + pair] * direction;
        float a = load(heads, at), b = load(heads, at + half);
        store(heads, at, a * c - b * s);
        store(heads, at + half, b * c + a * s);
    }
}
