// What every kernel file begins with. NVRTC ships no headers, so element types and reductions are made here.
//
// Compiled with -DACT=float or -DACT=bf16: the element type of activations and of the parameters that forward and
// backward read. Gradients of parameters are float or bf16 whatever ACT is: they come as a pointer and a flag.

typedef long long i64;
typedef unsigned char u8;

struct bf16 {
    unsigned short bits;
};

__device__ inline float load(const float* p, i64 i) { return p[i]; }
__device__ inline float load(const bf16* p, i64 i) { return __uint_as_float((unsigned)p[i].bits << 16); }

// Round to nearest even, as the CPU does; NaN stays NaN.
__device__ inline bf16 to_bf16(float x) {
    bf16 y;
#if __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y.bits) : "f"(x));
#else
    unsigned bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y.bits = nan ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
    return y;
}

__device__ inline void store(float* p, i64 i, float x) { p[i] = x; }
__device__ inline void store(bf16* p, i64 i, float x) { p[i] = to_bf16(x); }

// A gradient: float or bf16 by the flag.
__device__ inline float load_grad(const void* p, bool is_bf16, i64 i) {
    return is_bf16 ? load((const bf16*)p, i) : load((const float*)p, i);
}

__device__ inline void store_grad(void* p, bool is_bf16, i64 i, float x) {
    if (is_bf16) store((bf16*)p, i, x);
    else store((float*)p, i, x);
}

#define FULL_WARP 0xffffffffu

__device__ inline float warp_sum(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x += __shfl_xor_sync(FULL_WARP, x, lane);
    return x;
}

__device__ inline float warp_max(float x) {
    for (int lane = 16; lane > 0; lane /= 2) x = fmaxf(x, __shfl_xor_sync(FULL_WARP, x, lane));
    return x;
}

// Sum over a block of at most 1024 threads; the same in every thread. May be called again at once.
__device__ inline float block_sum(float x) {
    __shared__ float partial[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    x = warp_sum(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_sum(lane < warps ? partial[lane] : 0.0f);
}

__device__ inline float block_max(float x) {
    __shared__ float partial[32];
    int warp = threadIdx.x / 32, lane = threadIdx.x % 32, warps = (blockDim.x + 31) / 32;
    x = warp_max(x);
    __syncthreads();
    if (lane == 0) partial[warp] = x;
    __syncthreads();
    return warp_max(lane < warps ? partial[lane] : __int_as_float(0xff800000));
}
