// Instructions for which CUDA C++ has no function. Prepended to every kernel file, before the prelude.
//
// NVRTC compiles the PTX. The alternative version of each function is for the host's C++ compiler, with which tests run
// the kernels on CPU threads (tests/kernels); its emulator_ functions are declared there.

typedef unsigned u32;

#ifdef __CUDACC_RTC__
#define ON_GPU 1
#else
#define ON_GPU 0
#endif

// The first statement of every kernel. Kernels are launched with programmatic dependent launch (PDL): a grid may start
// while its predecessor is still running, which hides most of the launch latency. Nothing before the wait may touch
// global memory; after it, all writes of earlier kernels are visible. The successor is released right away: it blocks
// in its own wait until this grid has finished, so the early release is always safe.
__device__ inline void pdl_wait_and_launch() {
#if ON_GPU && __CUDA_ARCH__ >= 900
    asm volatile("griddepcontrol.wait;" ::: "memory");
    asm volatile("griddepcontrol.launch_dependents;" ::: "memory");
#endif
}

// The bits of x as bf16, rounded to nearest even, as the CPU does; NaN stays NaN.
__device__ inline unsigned short bf16_bits(float x) {
    unsigned short y;
#if ON_GPU && __CUDA_ARCH__ >= 800
    asm("cvt.rn.bf16.f32 %0, %1;" : "=h"(y) : "f"(x));
#else
    u32 bits = __float_as_uint(x);
    bool nan = (bits & 0x7fffffffu) > 0x7f800000u;
    y = nan ? 0x7fffu : (bits + 0x7fffu + ((bits >> 16) & 1u)) >> 16;
#endif
    return y;
}

// Two floats as bf16, the first in the lower half. (cvt takes the upper half first.)
__device__ inline u32 bf16_pair(float low, float high) {
#if ON_GPU && __CUDA_ARCH__ >= 800
    u32 x;
    asm("cvt.rn.bf16x2.f32 %0, %1, %2;" : "=r"(x) : "f"(high), "f"(low));
    return x;
#else
    return (u32)bf16_bits(high) << 16 | bf16_bits(low);
#endif
}

// The bits of x as FP8 with 4 exponent and 3 mantissa bits, or 5 and 2: rounded to nearest even; larger values become
// the largest number; NaN stays NaN. From compute capability 8.9 on, fp8_pair uses an instruction instead.
template <bool E5M2>
__device__ inline u32 fp8_bits(float x) {
    const u32 mantissa = E5M2 ? 2 : 3, bias = E5M2 ? 15 : 7, dropped = 23 - mantissa;
    const float largest = E5M2 ? 57344.0f : 448.0f, smallest_normal = E5M2 ? 1.0f / 16384 : 1.0f / 64;
    u32 bits = __float_as_uint(x), sign = bits >> 24 & 0x80u;
    bits &= 0x7fffffffu;
    if (bits > 0x7f800000u) return 0x7fu;
    x = __uint_as_float(bits);
    if (x >= largest) x = largest, bits = __float_as_uint(largest);
    // Adding 2^23 rounds a multiple of the smallest number to an integer.
    if (x < smallest_normal) return sign | (__float_as_uint(x / smallest_normal * (1 << mantissa) + 8388608.0f) & 0xfu);
    return sign | (bits + (1u << (dropped - 1)) - 1 + (bits >> dropped & 1u) >> dropped) - (127 - bias << mantissa);
}

// Two floats as FP8, the first in the lower byte. (cvt takes the upper byte first.)
template <bool E5M2>
__device__ inline u32 fp8_pair(float low, float high) {
#if ON_GPU && __CUDA_ARCH__ >= 890
    unsigned short x;
    if (E5M2) asm("cvt.rn.satfinite.e5m2x2.f32 %0, %1, %2;" : "=h"(x) : "f"(high), "f"(low));
    else asm("cvt.rn.satfinite.e4m3x2.f32 %0, %1, %2;" : "=h"(x) : "f"(high), "f"(low));
    return x;
#else
    return fp8_bits<E5M2>(high) << 8 | fp8_bits<E5M2>(low);
#endif
}

// 2^x and 1/x by the special-function unit, with relative errors up to 2^-22 and 2^-23; subnormal results become 0.
__device__ inline float exp2_approx(float x) {
    float y;
#if ON_GPU
    asm("ex2.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
    y = exp2f(x);
    if (y < 1.17549435e-38f) y = 0.0f;
#endif
    return y;
}

__device__ inline float reciprocal_approx(float x) {
    float y;
#if ON_GPU
    asm("rcp.approx.ftz.f32 %0, %1;" : "=f"(y) : "f"(x));
#else
    y = 1.0f / x;
#endif
    return y;
}

// Tells tests that look for data races that other blocks write the same values to these bytes, in any order.
__device__ inline void written_alike(const void* p, int bytes) {
#if !ON_GPU
    emulator_written_alike(p, bytes);
#endif
}

// Time in nanoseconds.
__device__ inline unsigned long long global_timer() {
    unsigned long long now;
#if ON_GPU
    asm volatile("mov.u64 %0, %%globaltimer;" : "=l"(now));
#else
    now = emulator_time();
#endif
    return now;
}

// Starts to copy 16 bytes to shared memory without going through registers; if `bytes` is 0, they become zero.
__device__ inline void copy_async_16(void* to, const void* from, u32 bytes) {
#if ON_GPU
    asm volatile("cp.async.cg.shared.global [%0], [%1], 16, %2;" ::"r"((u32)__cvta_generic_to_shared(to)), "l"(from),
                 "r"(bytes));
#else
    emulator_copy_async(to, from, bytes);
#endif
}

__device__ inline void commit_copies() {
#if ON_GPU
    asm volatile("cp.async.commit_group;");
#else
    emulator_commit_copies();
#endif
}

// Waits for this thread's copies, except those of the LATER newest groups.
template <int LATER>
__device__ inline void wait_copies() {
#if ON_GPU
    asm volatile("cp.async.wait_group %0;" ::"n"(LATER) : "memory");
#else
    emulator_wait_copies(LATER);
#endif
}

// Loads fragments of four 8 x 8 matrices of 16-bit elements; lane i supplies the address of row i % 8 of matrix i / 8.
__device__ inline void ldmatrix_x4(u32 (&x)[4], const void* row) {
#if ON_GPU
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
#else
    EmulatorMatrix call = {row, x};
    emulator_warp(EMULATOR_LDMATRIX, 0xffffffffu, &call, __FILE__, __LINE__);
#endif
}

__device__ inline void ldmatrix_x4_transposed(u32 (&x)[4], const void* row) {
#if ON_GPU
    asm volatile("ldmatrix.sync.aligned.m8n8.x4.trans.shared.b16 {%0, %1, %2, %3}, [%4];"
                 : "=r"(x[0]), "=r"(x[1]), "=r"(x[2]), "=r"(x[3])
                 : "r"((u32)__cvta_generic_to_shared(row))
                 : "memory");
#else
    EmulatorMatrix call = {row, x};
    emulator_warp(EMULATOR_LDMATRIX_TRANSPOSED, 0xffffffffu, &call, __FILE__, __LINE__);
#endif
}

// c (16, 8) += a (16, 16) b (16, 8) in bf16, with the operands in the registers of a warp as PTX defines them.
__device__ inline void mma_bf16(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ON_GPU && __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k16.row.col.f32.bf16.bf16.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif !ON_GPU
    const u32 b[2] = {b0, b1};
    EmulatorMma call = {c, a, b};
    emulator_warp(EMULATOR_MMA_BF16, 0xffffffffu, &call, __FILE__, __LINE__);
#endif
}

// c (16, 8) += a (16, 8) b (8, 8) in tf32.
__device__ inline void mma_tf32(float (&c)[4], const u32 (&a)[4], u32 b0, u32 b1) {
#if ON_GPU && __CUDA_ARCH__ >= 800
    asm volatile("mma.sync.aligned.m16n8k8.row.col.f32.tf32.tf32.f32 {%0, %1, %2, %3}, {%4, %5, %6, %7}, {%8, %9}, "
                 "{%0, %1, %2, %3};"
                 : "+f"(c[0]), "+f"(c[1]), "+f"(c[2]), "+f"(c[3])
                 : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "r"(b0), "r"(b1));
#elif !ON_GPU
    const u32 b[2] = {b0, b1};
    EmulatorMma call = {c, a, b};
    emulator_warp(EMULATOR_MMA_TF32, 0xffffffffu, &call, __FILE__, __LINE__);
#endif
}
