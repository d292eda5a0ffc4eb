// The subset of CUDA C++ used by the kernels, for the host's C++ compiler. It is included before the text of every
// kernel.
//
// A thread of a block is a fiber. Joint operations of threads (barriers, shuffles, tensor core operations) are calls of
// the emulator, which continues with other fibers until all participants have arrived. Loads and stores are reported to
// it by the instrumentation of the compiler's thread sanitizer, whose run-time library the emulator replaces.
#pragma once

// The header of C: that of C++ takes longer to read than most kernels.
#define _GLIBCXX_INCLUDE_NEXT_C_HEADERS
#include <math.h>
#include <string.h>

#include "interface.h"

#define __device__
#define __global__
#define __launch_bounds__(...)
#define __grid_constant__
#define __shared__ static __thread

#define threadIdx emulator_thread_index()
#define blockIdx emulator_block_index()
#define blockDim emulator_block_size()
#define gridDim emulator_grid_size()

struct alignas(8) float2 {
    float x, y;
};
struct alignas(8) uint2 {
    unsigned x, y;
};
struct alignas(16) float4 {
    float x, y, z, w;
};
struct alignas(16) uint4 {
    unsigned x, y, z, w;
};
inline float2 make_float2(float x, float y) { return {x, y}; }
inline float4 make_float4(float x, float y, float z, float w) { return {x, y, z, w}; }
inline uint4 make_uint4(unsigned x, unsigned y, unsigned z, unsigned w) { return {x, y, z, w}; }

template <typename To, typename From>
inline To bit_cast(From x) {
    static_assert(sizeof(To) == sizeof(From));
    To y;
    memcpy(&y, &x, sizeof y);
    return y;
}
inline unsigned __float_as_uint(float x) { return bit_cast<unsigned>(x); }
inline float __uint_as_float(unsigned x) { return bit_cast<float>(x); }
inline float __int_as_float(int x) { return bit_cast<float>(x); }
inline float rsqrtf(float x) { return 1.0f / sqrtf(x); }
// The bytes of a and b (b in the upper half) that are selected by the four lowest digits of the selector.
inline unsigned __byte_perm(unsigned a, unsigned b, unsigned selector) {
    uint64_t bytes = (uint64_t)b << 32 | a;
    unsigned x = 0;
    for (int i = 0; i < 4; i++) x |= (unsigned)(bytes >> 8 * (selector >> 4 * i & 7) & 0xff) << 8 * i;
    return x;
}
inline int __popc(unsigned x) { return __builtin_popcount(x); }
inline int __ffs(int x) { return __builtin_ffs(x); }

// CUDA's overloads.
template <typename A, typename B>
inline auto min(A a, B b) -> decltype(a + b) {
    return a < b ? a : b;
}
template <typename A, typename B>
inline auto max(A a, B b) -> decltype(a + b) {
    return a < b ? b : a;
}

#define __syncthreads() emulator_barrier(__FILE__, __LINE__)
#define __syncwarp() emulator_warp(EMULATOR_SYNC, FULL_WARP, nullptr, __FILE__, __LINE__)
#define __threadfence() emulator_fence()

template <typename T>
inline T emulator_shuffle(uint64_t mask, T value, int from, const char* file, int line) {
    static_assert(sizeof(T) <= 8);
    EmulatorShuffle call = {0, from};
    memcpy(&call.value, &value, sizeof value);
    emulator_warp(EMULATOR_SHUFFLE, mask, &call, file, line);
    memcpy(&value, &call.value, sizeof value);
    return value;
}
#define __shfl_xor_sync(mask, value, lanes) \
    emulator_shuffle(mask, value, (int)emulator_lane() ^ (lanes), __FILE__, __LINE__)
#define __shfl_sync(mask, value, lane) emulator_shuffle(mask, value, (int)(lane), __FILE__, __LINE__)
#define __shfl_up_sync(mask, value, lanes) \
    emulator_shuffle(mask, value, (int)emulator_lane() - (int)(lanes), __FILE__, __LINE__)

template <typename T, typename U>
inline T atomicAdd(T* p, U x) {
    return __atomic_fetch_add(p, (T)x, __ATOMIC_SEQ_CST);
}
template <typename T, typename U>
inline T atomicOr(T* p, U x) {
    return __atomic_fetch_or(p, (T)x, __ATOMIC_SEQ_CST);
}

inline unsigned atomicMax(unsigned* p, unsigned x) { return emulator_atomic_max(p, x); }

// A kernel in the form in which the emulator calls it: each argument is passed through a pointer, as for
// cuLaunchKernel.
template <auto F>
struct EmulatorCall;
template <typename... A, void (*F)(A...)>
struct EmulatorCall<F> {
    static constexpr unsigned sizes[] = {sizeof(A)...};

    // The arguments of a constructor in braces are evaluated in order.
    struct Caller {
        __attribute__((no_sanitize("thread"))) explicit Caller(A&... args) { F(args...); }
    };

    __attribute__((no_sanitize("thread"))) static void call(void** args) { Caller{*(A*)*args++...}; }

    static constexpr EmulatorKernel kernel() { return {&call, sizeof...(A), sizes}; }
};
#define EMULATOR_KERNEL(name) extern "C" const EmulatorKernel emulator_kernel_##name = EmulatorCall<&name>::kernel();
