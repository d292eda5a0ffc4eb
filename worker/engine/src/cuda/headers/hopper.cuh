// Instructions of compute capability 9.0 for matrix multiplication: tiles copied by an SM's copy engine (TMA), barriers
// in shared memory, and wgmma. Comes after ptx.cuh and the prelude. Compiled for sm_90a.
//
// The alternative version of each function is for the emulator, as in ptx.cuh.

// A description of a tensor in device memory, made by cuTensorMapEncodeTiled.
struct alignas(64) TensorMap {
    unsigned long long words[16];
};

// A barrier in shared memory. A phase ends when all arrivals have happened and all announced bytes have been copied.
// Waiting threads name a phase by its parity: 0, 1, 0, ...
typedef unsigned long long Barrier;

#if ON_GPU
__device__ inline u32 shared_address(const void* p) { return (u32)__cvta_generic_to_shared(p); }
#endif

__device__ inline void barrier_init(Barrier* barrier, u32 arrivals) {
#if ON_GPU
    asm volatile("mbarrier.init.shared::cta.b64 [%0], %1;" ::"r"(shared_address(barrier)), "r"(arrivals) : "memory");
#else
    emulator_barrier_init(barrier, arrivals, __FILE__, __LINE__);
#endif
}

// Makes initialised barriers visible to the copy engine. The block's threads also need a __syncthreads.
__device__ inline void fence_barriers() {
#if ON_GPU
    asm volatile("fence.mbarrier_init.release.cluster;" ::: "memory");
#else
    emulator_fence_barriers();
#endif
}

__device__ inline void barrier_arrive(Barrier* barrier) {
#if ON_GPU
    asm volatile("mbarrier.arrive.shared::cta.b64 _, [%0];" ::"r"(shared_address(barrier)) : "memory");
#else
    emulator_barrier_arrive(barrier, 0, __FILE__, __LINE__);
#endif
}

// Arrives at the barrier, and announces bytes that copies to shared memory will bring.
__device__ inline void barrier_arrive_and_expect(Barrier* barrier, u32 bytes) {
#if ON_GPU
    asm volatile("mbarrier.arrive.expect_tx.shared::cta.b64 _, [%0], %1;" ::"r"(shared_address(barrier)), "r"(bytes)
                 : "memory");
#else
    emulator_barrier_arrive(barrier, bytes, __FILE__, __LINE__);
#endif
}

// Waits until the phase of this parity has ended. The phase before it has ended already.
__device__ inline void barrier_wait(Barrier* barrier, u32 parity) {
#if ON_GPU
    asm volatile(
        "{\n"
        ".reg .pred ended;\n"
        "AGAIN:\n"
        "mbarrier.try_wait.parity.shared::cta.b64 ended, [%0], %1;\n"
        "@!ended bra AGAIN;\n"
        "}" ::"r"(shared_address(barrier)),
        "r"(parity)
        : "memory");
#else
    emulator_barrier_wait(barrier, parity, __FILE__, __LINE__);
#endif
}

// Starts to copy the map's box at these coordinates to shared memory; elements outside the tensor become zero. The
// barrier counts the bytes of the box when they have arrived. `to` is a multiple of 1,024 bytes.
__device__ inline void copy_box(void* to, const TensorMap* map, Barrier* barrier, int x, int y, int z) {
#if ON_GPU
    asm volatile(
        "cp.async.bulk.tensor.3d.shared::cluster.global.mbarrier::complete_tx::bytes "
        "[%0], [%1, {%3, %4, %5}], [%2];" ::"r"(shared_address(to)),
        "l"(map), "r"(shared_address(barrier)), "r"(x), "r"(y), "r"(z)
        : "memory");
#else
    emulator_copy_box(to, map, barrier, x, y, z, __FILE__, __LINE__);
#endif
}

// Raises or lowers the number of registers per thread, for all threads of a warpgroup.
template <int COUNT>
__device__ inline void raise_registers() {
#if ON_GPU
    asm volatile("setmaxnreg.inc.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}
template <int COUNT>
__device__ inline void lower_registers() {
#if ON_GPU
    asm volatile("setmaxnreg.dec.sync.aligned.u32 %0;" ::"n"(COUNT));
#endif
}

// Required before the first wgmma that uses registers written by other instructions.
__device__ inline void wgmma_fence() {
#if ON_GPU
    asm volatile("wgmma.fence.sync.aligned;" ::: "memory");
#else
    emulator_wgmma_fence();
#endif
}

__device__ inline void wgmma_commit() {
#if ON_GPU
    asm volatile("wgmma.commit_group.sync.aligned;" ::: "memory");
#else
    emulator_wgmma_commit(__FILE__, __LINE__);
#endif
}

// Waits for this warpgroup's multiplications, except those of the LATER newest groups. Only then are their results in
// registers, and only then may their operands in shared memory be overwritten.
template <int LATER>
__device__ inline void wgmma_wait() {
#if ON_GPU
    asm volatile("wgmma.wait_group.sync.aligned %0;" ::"n"(LATER) : "memory");
#else
    emulator_wgmma_wait(LATER, __FILE__, __LINE__);
#endif
}

#if ON_GPU
// Descriptor of an operand in shared memory whose rows of 64 elements have the 128-byte swizzle; see "Shared Memory
// Matrix Layout" in the PTX ISA. Groups of 8 rows follow each other; with `ACROSS`, so do blocks of 64 rows of k.
template <bool ACROSS>
__device__ inline unsigned long long wgmma_operand(const void* p) {
    const unsigned long long block = ACROSS ? 8192 : 16, group = 1024, swizzle_128 = 1ull << 62;
    return (shared_address(p) & 0x3ffff) >> 4 | block >> 4 << 16 | group >> 4 << 32 | swizzle_128;
}
#endif

// Makes this thread's earlier writes of shared memory visible to wgmma, for all threads that pass a barrier afterwards.
__device__ inline void fence_async() {
#if ON_GPU
    asm volatile("fence.proxy.async.shared::cta;" ::: "memory");
#else
    emulator_fence_async();
#endif
}

// Barriers of THREADS threads of a block, numbered from 1 (0 is __syncthreads). Whole warps wait, or only arrive.
template <int THREADS>
__device__ inline void group_wait(int number) {
#if ON_GPU
    asm volatile("bar.sync %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
#else
    emulator_group_barrier(number, THREADS, true, __FILE__, __LINE__);
#endif
}
template <int THREADS>
__device__ inline void group_arrive(int number) {
#if ON_GPU
    asm volatile("bar.arrive %0, %1;" ::"r"(number), "n"(THREADS) : "memory");
#else
    emulator_group_barrier(number, THREADS, false, __FILE__, __LINE__);
#endif
}

// Starts to copy bytes to shared memory, a multiple of 16 and aligned to 16. The barrier counts them.
__device__ inline void copy_bytes(void* to, const void* from, u32 bytes, Barrier* barrier) {
#if ON_GPU
    asm volatile(
        "cp.async.bulk.shared::cluster.global.mbarrier::complete_tx::bytes [%0], [%1], %2, [%3];" ::"r"(
            shared_address(to)),
        "l"(from), "r"(bytes), "r"(shared_address(barrier))
        : "memory");
#else
    emulator_copy_bytes(to, from, bytes, barrier, __FILE__, __LINE__);
#endif
}

// p[0..4] += x, without waiting for the result. Other threads may add at the same time.
__device__ inline void add4_async(float* p, float x0, float x1, float x2, float x3) {
#if ON_GPU
    asm volatile("red.relaxed.gpu.global.add.v4.f32 [%0], {%1, %2, %3, %4};" ::"l"(p), "f"(x0), "f"(x1), "f"(x2),
                 "f"(x3)
                 : "memory");
#else
    const float x[4] = {x0, x1, x2, x3};
    emulator_add_async(p, x, 4);
#endif
}

// Follows the wait for multiplications that write d: otherwise the compiler may move reads of d before the wait.
template <int LENGTH>
__device__ inline void wgmma_results(float (&d)[LENGTH]) {
#if ON_GPU
#pragma unroll
    for (int i = 0; i < LENGTH; i++) asm volatile("" : "+f"(d[i])::"memory");
#endif
}

// d (64, N) = a b, or d += a b, by a warpgroup: a (64, 16), b (16, N) in bf16, where N is twice the length of d. This
// only starts the multiplication; see wgmma_wait. Elements 4 j and 4 j + 1 of each thread are in row 16 warp + lane / 4
// and in columns 8 j + lane % 4 * 2 and the next one; elements 4 j + 2 and 4 j + 3 are 8 rows below.
//
// Operands are tiles that copy_box has written with the 128-byte swizzle, or threads in the same layout. Rows of a, and
// columns of b, are rows of the tile. With ACROSS, k runs down the tile: each 64 rows of a, or columns of b, are the
// columns of a separate tile.
//
// In the second form, a is in registers: for results d of an earlier multiplication, bf16 pairs of d[8 j] to
// d[8 j + 7] are the columns 16 j to 16 j + 15 of a.
#if ON_GPU
#define WGMMA_0_31 \
    "%0, %1, %2, %3, %4, %5, %6, %7, %8, %9, %10, %11, %12, %13, %14, %15, " \
    "%16, %17, %18, %19, %20, %21, %22, %23, %24, %25, %26, %27, %28, %29, %30, %31"
#define WGMMA_32_63 \
    "%32, %33, %34, %35, %36, %37, %38, %39, %40, %41, %42, %43, %44, %45, %46, %47, " \
    "%48, %49, %50, %51, %52, %53, %54, %55, %56, %57, %58, %59, %60, %61, %62, %63"
#define WGMMA_32_39 "%32, %33, %34, %35, %36, %37, %38, %39"
#define WGMMA_40_47 "%40, %41, %42, %43, %44, %45, %46, %47"
#define WGMMA_64_95 \
    "%64, %65, %66, %67, %68, %69, %70, %71, %72, %73, %74, %75, %76, %77, %78, %79, " \
    "%80, %81, %82, %83, %84, %85, %86, %87, %88, %89, %90, %91, %92, %93, %94, %95"
#define WGMMA_96_127 \
    "%96, %97, %98, %99, %100, %101, %102, %103, %104, %105, %106, %107, %108, %109, %110, %111, " \
    "%112, %113, %114, %115, %116, %117, %118, %119, %120, %121, %122, %123, %124, %125, %126, %127"
#define WGMMA_8(i) \
    "+f"(d[i]), "+f"(d[i + 1]), "+f"(d[i + 2]), "+f"(d[i + 3]), "+f"(d[i + 4]), "+f"(d[i + 5]), "+f"(d[i + 6]), \
        "+f"(d[i + 7])
#define WGMMA_32(i) WGMMA_8(i), WGMMA_8(i + 8), WGMMA_8(i + 16), WGMMA_8(i + 24)
#define WGMMA_64(i) WGMMA_32(i), WGMMA_32(i + 32)

#define WGMMA_NUMBERS_32 WGMMA_0_31
#define WGMMA_NUMBERS_40 WGMMA_0_31 ", " WGMMA_32_39
#define WGMMA_NUMBERS_48 WGMMA_NUMBERS_40 ", " WGMMA_40_47
#define WGMMA_NUMBERS_64 WGMMA_0_31 ", " WGMMA_32_63
#define WGMMA_NUMBERS_96 WGMMA_NUMBERS_64 ", " WGMMA_64_95
#define WGMMA_NUMBERS_128 WGMMA_NUMBERS_96 ", " WGMMA_96_127
#define WGMMA_RESULTS_32 WGMMA_32(0)
#define WGMMA_RESULTS_40 WGMMA_32(0), WGMMA_8(32)
#define WGMMA_RESULTS_48 WGMMA_RESULTS_40, WGMMA_8(40)
#define WGMMA_RESULTS_64 WGMMA_64(0)
#define WGMMA_RESULTS_96 WGMMA_64(0), WGMMA_32(64)
#define WGMMA_RESULTS_128 WGMMA_64(0), WGMMA_64(64)
#define WGMMA_ASM(LENGTH, N, ADD, OPERANDS)                                                                            \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " ADD ", 0;\n"                                                  \
                 "wgmma.mma_async.sync.aligned.m64n" N "k16.f32.bf16.bf16 "                                            \
                 "{" WGMMA_NUMBERS_##LENGTH "}, " OPERANDS ";\n}"                                                      \
                 : WGMMA_RESULTS_##LENGTH
// P0 to P6 are the numbers of the operands after the results.
#define WGMMA(LENGTH, N, P0, P1, P2, P3, P4, P5, P6)                                                                   \
    template <bool A_ACROSS, bool B_ACROSS>                                                                            \
    __device__ inline void wgmma(float (&d)[LENGTH], const void* a, const void* b, bool add) {                         \
        WGMMA_ASM(LENGTH, N, P2, P0 ", " P1 ", add, 1, 1, " P3 ", " P4)                                                \
                     : "l"(wgmma_operand<A_ACROSS>(a)), "l"(wgmma_operand<B_ACROSS>(b)), "r"((int)add),                \
                       "n"(A_ACROSS), "n"(B_ACROSS));                                                                  \
    }                                                                                                                  \
    template <bool B_ACROSS>                                                                                           \
    __device__ inline void wgmma(float (&d)[LENGTH], const u32 (&a)[4], const void* b, bool add) {                     \
        WGMMA_ASM(LENGTH, N, P5, "{" P0 ", " P1 ", " P2 ", " P3 "}, " P4 ", add, 1, 1, " P6)                           \
                     : "r"(a[0]), "r"(a[1]), "r"(a[2]), "r"(a[3]), "l"(wgmma_operand<B_ACROSS>(b)), "r"((int)add),     \
                       "n"(B_ACROSS));                                                                                 \
    }
WGMMA(32, "64", "%32", "%33", "%34", "%35", "%36", "%37", "%38")
WGMMA(40, "80", "%40", "%41", "%42", "%43", "%44", "%45", "%46")
WGMMA(48, "96", "%48", "%49", "%50", "%51", "%52", "%53", "%54")
WGMMA(64, "128", "%64", "%65", "%66", "%67", "%68", "%69", "%70")
WGMMA(96, "192", "%96", "%97", "%98", "%99", "%100", "%101", "%102")
WGMMA(128, "256", "%128", "%129", "%130", "%131", "%132", "%133", "%134")
// The same for FP8: a (64, 32), b (32, N), not across. b is E4M3, and so is a unless it is E5M2.
#define WGMMA_FP8_ASM(LENGTH, N, TYPES, P0, P1, P2)                                                                    \
    asm volatile("{\n.reg .pred add;\nsetp.ne.b32 add, " P2 ", 0;\n"                                                   \
                 "wgmma.mma_async.sync.aligned.m64n" N "k32.f32." TYPES " "                                            \
                 "{" WGMMA_NUMBERS_##LENGTH "}, " P0 ", " P1 ", add, 1, 1;\n}"                                         \
                 : WGMMA_RESULTS_##LENGTH                                                                              \
                 : "l"(wgmma_operand<false>(a)), "l"(wgmma_operand<false>(b)), "r"((int)add))
#define WGMMA_FP8(LENGTH, N, P0, P1, P2)                                                                               \
    template <bool E5M2>                                                                                               \
    __device__ inline void wgmma_fp8(float (&d)[LENGTH], const void* a, const void* b, bool add) {                     \
        if (E5M2) WGMMA_FP8_ASM(LENGTH, N, "e5m2.e4m3", P0, P1, P2);                                                   \
        else WGMMA_FP8_ASM(LENGTH, N, "e4m3.e4m3", P0, P1, P2);                                                        \
    }
WGMMA_FP8(64, "128", "%64", "%65", "%66")
WGMMA_FP8(128, "256", "%128", "%129", "%130")
#else
template <bool A_ACROSS, bool B_ACROSS, int LENGTH>
__device__ inline void wgmma(float (&d)[LENGTH], const void* a, const void* b, bool add) {
    EmulatorWgmma call = {d, 2 * LENGTH, a, b, add, A_ACROSS, B_ACROSS, nullptr, EMULATOR_BF16};
    emulator_wgmma(&call, __FILE__, __LINE__);
}
template <bool B_ACROSS, int LENGTH>
__device__ inline void wgmma(float (&d)[LENGTH], const u32 (&a)[4], const void* b, bool add) {
    EmulatorWgmma call = {d, 2 * LENGTH, nullptr, b, add, false, B_ACROSS, a, EMULATOR_BF16};
    emulator_wgmma(&call, __FILE__, __LINE__);
}
template <bool E5M2, int LENGTH>
__device__ inline void wgmma_fp8(float (&d)[LENGTH], const void* a, const void* b, bool add) {
    EmulatorWgmma call = {d, 2 * LENGTH, a, b, add, false, false, nullptr, E5M2 ? EMULATOR_E5M2 : EMULATOR_E4M3};
    emulator_wgmma(&call, __FILE__, __LINE__);
}
#endif
