// Prepended to every kernel file. NVRTC ships no headers, so element types and reductions are defined here.
//
// Compiled with -DACT=float or -DACT=bf16: the element type of activations and of the parameters that forward and
// backward read. Parameter gradients are float or bf16 independently of ACT: they are passed as a pointer and a flag.
// Constants that the launch code also needs are defined in Rust and passed as macros (see `Macro` in cuda/compile.rs).
//
// Rules for kernels: the first statement is pdl_wait_and_launch(); sums have a fixed order, so that every run gives the
// same bits; all floating-point arithmetic is in float.

typedef long long i64;
typedef unsigned char u8;

struct bf16 {
    unsigned short bits;
};

__device__ inline float load(const float* p, i64 i) { return p[i]; }
__device__ inline float load(const bf16* p, i64 i) { return __uint_as_float((unsigned)p[i].bits << 16); }

__device__ inline bf16 to_bf16(float x) { return {bf16_bits(x)}; }

__device__ inline void store(float* p, i64 i, float x) { p[i] = x; }
__device__ inline void store(bf16* p, i64 i, float x) { p[i] = to_bf16(x); }

// Eight neighbouring elements, unpacked: one 16-byte access in bf16, two in float.
struct Vec8 {
    float x[8];
};

// The same eight elements, as laid out in memory. Kernels fetch everything they need before unpacking any of it, so
// that all loads are in flight together; in bf16 the packed form also takes half the registers in the meantime.
template <typename T>
struct Packed;
template <>
struct Packed<bf16> {
    uint4 words;
};
template <>
struct Packed<float> {
    float4 low, high;
};

__device__ inline Vec8 unpack(const Packed<bf16>& p) {
    const unsigned w[4] = {p.words.x, p.words.y, p.words.z, p.words.w};
    Vec8 e;
#pragma unroll
    for (int i = 0; i < 4; i++) {
        e.x[2 * i] = __uint_as_float(w[i] << 16);
        e.x[2 * i + 1] = __uint_as_float(w[i] & 0xffff0000u);
    }
    return e;
}

__device__ inline Vec8 unpack(const Packed<float>& p) {
    return {{p.low.x, p.low.y, p.low.z, p.low.w, p.high.x, p.high.y, p.high.z, p.high.w}};
}

__device__ inline unsigned pack_bf16(float low, float high) {
    return (unsigned)to_bf16(high).bits << 16 | to_bf16(low).bits;
}

__device__ inline void pack(const Vec8& e, Packed<bf16>& p) {
    p.words = make_uint4(pack_bf16(e.x[0], e.x[1]), pack_bf16(e.x[2], e.x[3]), pack_bf16(e.x[4], e.x[5]),
                         pack_bf16(e.x[6], e.x[7]));
}

__device__ inline void pack(const Vec8& e, Packed<float>& p) {
    p.low = make_float4(e.x[0], e.x[1], e.x[2], e.x[3]);
    p.high = make_float4(e.x[4], e.x[5], e.x[6], e.x[7]);
}

// Unconditional vector access: p is aligned to 16 bytes.
template <typename T>
__device__ inline Packed<T> fetch8(const T* p) {
    return *(const Packed<T>*)p;
}

// Starts to copy a vector to shared memory. It is visible to this thread after wait_copies.
template <typename T>
__device__ inline void copy8_async(Packed<T>& to, const T* from) {
#pragma unroll
    for (int i = 0; i < (int)sizeof(Packed<T>); i += 16) copy_async_16((char*)&to + i, (const char*)from + i, 16);
}

template <typename T>
__device__ inline void store8(T* p, const Vec8& e) {
    pack(e, *(Packed<T>*)p);
}

// Elements i to i + 8 of len: as one vector if `wide` (see is_wide), otherwise one by one. Elements past the end read
// as 0 and are not written.
template <typename T>
__device__ inline Packed<T> fetch8(const T* p, i64 i, i64 len, bool wide) {
    if (wide) return fetch8(p + i);
    Vec8 e;
#pragma unroll
    for (int j = 0; j < 8; j++) e.x[j] = i + j < len ? load(p, i + j) : 0.0f;
    Packed<T> packed;
    pack(e, packed);
    return packed;
}

template <typename T>
__device__ inline Vec8 load8(const T* p, i64 i, i64 len, bool wide) {
    return unpack(fetch8(p, i, len, wide));
}

template <typename T>
__device__ inline void store8(T* p, i64 i, i64 len, bool wide, const Vec8& e) {
    if (wide) {
        store8(p + i, e);
        return;
    }
#pragma unroll
    for (int j = 0; j < 8; j++)
        if (i + j < len) store(p, i + j, e.x[j]);
}

// Whether a row of len elements at p allows vector accesses: aligned to 16 bytes, and len a multiple of 8.
template <typename T>
__device__ inline bool is_wide(const T* p, i64 len) {
    return len % 8 == 0 && (unsigned long long)p % 16 == 0;
}

// Iterates over `len` elements that `blocks` blocks share, eight per thread and iteration.
#define FOR_EIGHT(i, len, block, blocks) \
    for (i64 i = ((block) * (i64)blockDim.x + threadIdx.x) * 8; i < (len); i += (blocks) * (i64)blockDim.x * 8)

// Exponential, reciprocal, sigmoid and tanh to the accuracy of results of type T: bf16 keeps 8 bits, for which the
// special-function unit is accurate enough; float gets the library functions. sigmoid(x) = 1 / (1 + exp(-x)).
template <typename T>
__device__ inline float exp_for(float x) { return expf(x); }
template <>
__device__ inline float exp_for<bf16>(float x) {
    return exp2_approx(x * 1.4426950408889634f);
}

template <typename T>
__device__ inline float reciprocal_for(float x) { return 1.0f / x; }
template <>
__device__ inline float reciprocal_for<bf16>(float x) {
    return reciprocal_approx(x);
}

template <typename T>
__device__ inline float sigmoid_for(float x) { return 1.0f / (1.0f + expf(-x)); }
template <>
__device__ inline float sigmoid_for<bf16>(float x) {
    return reciprocal_approx(1.0f + exp_for<bf16>(-x));
}

// tanh(x) = 2 sigmoid(2 x) - 1 in bf16; its absolute error is about 1e-7, far below the rounding of 1 to bf16.
template <typename T>
__device__ inline float tanh_for(float x) { return tanhf(x); }
template <>
__device__ inline float tanh_for<bf16>(float x) {
    return 2.0f * sigmoid_for<bf16>(2.0f * x) - 1.0f;
}

// Gradients of parameters: float or bf16, according to the flag.
__device__ inline float load_grad(const void* p, bool is_bf16, i64 i) {
    return is_bf16 ? load((const bf16*)p, i) : load((const float*)p, i);
}

__device__ inline void store_grad(void* p, bool is_bf16, i64 i, float x) {
    if (is_bf16) store((bf16*)p, i, x);
    else store((float*)p, i, x);
}

// Adds e to elements i to i + 8 of a gradient row of len elements; elements past the end are skipped.
template <typename T>
__device__ inline void add8(T* row, i64 i, i64 len, Vec8 e) {
    bool wide = is_wide(row, len);
    Vec8 old = load8(row, i, len, wide);
#pragma unroll
    for (int j = 0; j < 8; j++) e.x[j] += old.x[j];
    store8(row, i, len, wide, e);
}

__device__ inline void add_grad8(void* p, bool is_bf16, i64 row, i64 i, i64 len, const Vec8& e) {
    if (is_bf16) add8((bf16*)p + row, i, len, e);
    else add8((float*)p + row, i, len, e);
}

#if WARP == 32
#define FULL_WARP 0xffffffffu
#else
#define FULL_WARP 0xffffffffffffffffu
#endif

__device__ inline float warp_sum(float x) {
    for (int lane = WARP / 2; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int lane = WARP / 2; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

// Sum over a block of at most 1024 threads, returned to every thread. The barrier before the write makes back-to-back
// calls safe.
__device__ inline float block_sum(float x) {
    __shared__ float partial[1024 / WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = (blockDim.x + WARP - 1) / WARP;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

__device__ inline float block_max(float x) {
    __shared__ float partial[1024 / WARP];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, warps = (blockDim.x + WARP - 1) / WARP;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : __int_as_float(0xff800000));
}

// The bits of a positive float or NaN compare like unsigned numbers, with NaN as the largest.
__device__ inline u32 magnitude(float x) { return __float_as_uint(x) & 0x7fffffffu; }

// Returns the larger of `largest` and the magnitudes of e.
__device__ inline u32 largest_magnitude(u32 largest, const Vec8& e) {
#pragma unroll
    for (int j = 0; j < 8; j++) largest = max(largest, magnitude(e.x[j]));
    return largest;
}

// *amax = max(*amax, the largest magnitude of all threads of a block of at most 1024, rounded to ACT): as rounding
// keeps the order, that is the largest magnitude of the rounded numbers.
__device__ inline void raise_amax(float* amax, u32 largest) {
    __shared__ u32 partial[1024 / WARP];
    int warps = (blockDim.x + WARP - 1) / WARP;
    for (int lane = WARP / 2; lane > 0; lane /= 2) largest = max(largest, __shfl_xor_sync(FULL_WARP, largest, lane));
    if (threadIdx.x % WARP == 0) partial[threadIdx.x / WARP] = largest;
    __syncthreads();
    if (threadIdx.x > 0) return;
    for (int warp = 1; warp < warps; warp++) largest = max(largest, partial[warp]);
    ACT rounded;
    store(&rounded, 0, __uint_as_float(largest));
    atomicMax((u32*)amax, magnitude(load(&rounded, 0)));
}

// Exclusive prefix sum over a block of WARPS warps, plus `before`; afterwards the block's total is added to `before`.
template <int WARPS>
__device__ inline int block_prefix_sum(int mine, int& before) {
    __shared__ int sums[WARPS];
    int warp = threadIdx.x / WARP, lane = threadIdx.x % WARP, sum = mine;
    for (int distance = 1; distance < WARP; distance *= 2) {
        int other = __shfl_up_sync(FULL_WARP, sum, distance);
        if (lane >= distance) sum += other;
    }
    __syncthreads();
    if (lane == WARP - 1) sums[warp] = sum;
    __syncthreads();
    int start = before + sum - mine;
    for (int w = 0; w < WARPS; w++) {
        if (w < warp) start += sums[w];
        before += sums[w];
    }
    return start;
}

// out[c..c + 8] = sum of `mine` over threadIdx.y, in order, for a block of at most BLOCK_THREADS threads.
__device__ inline void store_column_sums(const Vec8& mine, float* out, i64 c, i64 cols) {
    __shared__ float sums[8][BLOCK_THREADS];
    int thread = threadIdx.y * blockDim.x + threadIdx.x;
    __syncthreads();
#pragma unroll
    for (int j = 0; j < 8; j++) sums[j][thread] = mine.x[j];
    __syncthreads();
    if (threadIdx.y > 0 || c >= cols) return;
    Vec8 sum = mine;
    for (int row = 1; row < blockDim.y; row++)
#pragma unroll
        for (int j = 0; j < 8; j++) sum.x[j] += sums[j][row * blockDim.x + threadIdx.x];
    store8(out, c, cols, is_wide(out, cols), sum);
}

// Whether a step is applied, as the AdamW kernel decides after all other kernels that ask.
__device__ inline bool is_applied(const float* grad_norm_sq, const float* loss, const float* skipped,
                                  float skip_limit) {
    return isfinite(grad_norm_sq[0]) && isfinite(loss[0]) && *skipped < skip_limit;
}
