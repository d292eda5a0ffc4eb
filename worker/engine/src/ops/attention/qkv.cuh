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

// Sliding windows, -DWINDOWED: a query at position i sees the keys i - window + 1 to i. Without, `window` is unused.
//
// Documents, -DDOCUMENTS: a query sees only keys of its own document. first_keys (B, T) has the first key of each
// query's document, last_queries (B, T) the last query of each key's. Neither decreases within a row. Without, both are
// unused.

// The bound of a row of the sequence; rows past T have the last one's.
__device__ inline i64 bound_of(const int* bounds, i64 row, i64 seq) { return bounds[row < seq ? row : seq - 1]; }

// The first key that any of the queries from `query` on sees.
__device__ inline i64 first_key(i64 query, i64 window, const int* first_keys, i64 seq) {
    i64 key = WINDOWED && query >= window ? query - window + 1 : 0;
    i64 first = DOCUMENTS ? bound_of(first_keys, query, seq) : 0;
    return key < first ? first : key;
}

// The end of the queries that see any of the keys before `key_end`.
__device__ inline i64 query_end(i64 key_end, i64 window, const int* last_queries, i64 seq) {
    i64 end = WINDOWED && key_end - 1 + window < seq ? key_end - 1 + window : seq;
    i64 last = DOCUMENTS ? bound_of(last_queries, key_end - 1, seq) + 1 : seq;
    return end < last ? end : last;
}
