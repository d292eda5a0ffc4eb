// Offsets of the heads within a token's row of qkv (B, T, (H + 2 Hkv) D): H query heads, Hkv key heads, Hkv value
// heads. D is WIDTH. Query head h attends to key head h / (H / Hkv).
struct QkvLayout {
    i64 seq, heads, kv_heads;
    __device__ i64 row() const { return (heads + 2 * kv_heads) * WIDTH; }
    __device__ i64 kv(i64 head) const { return head / (heads / kv_heads); }
    __device__ i64 q_at(i64 head) const { return head * WIDTH; }
    __device__ i64 k_at(i64 head) const { return (heads + kv(head)) * WIDTH; }
    __device__ i64 v_at(i64 head) const { return (heads + kv_heads + kv(head)) * WIDTH; }
};
