// Interface between kernels compiled as C++ and the emulator.
#pragma once

#include <cstddef>
#include <cstdint>

struct EmulatorIndex {
    unsigned x, y, z;
};

// Lanes exchange a value of at most 8 bytes. For a lane that does not exist, the result is the own value.
struct EmulatorShuffle {
    uint64_t value;
    int from;
};

// `row` is 16 bytes of shared memory; x are the fragments of four 8 x 8 matrices of 16-bit elements.
struct EmulatorMatrix {
    const void* row;
    unsigned* x;
};

// Fragments as PTX defines them for mma.m16n8k16 (bf16) and m16n8k8 (tf32).
struct EmulatorMma {
    float* c;
    const unsigned *a, *b;
};

// Elements of the left operand of wgmma. The right one has the same, but is never E5M2.
enum EmulatorElement { EMULATOR_BF16, EMULATOR_E4M3, EMULATOR_E5M2 };

// `d` has n / 2 floats of this thread. If across, k runs down the tile. If `registers` is not null, it is the left
// operand (four words of this thread), and `a` is null.
struct EmulatorWgmma {
    float* d;
    unsigned n;
    const void *a, *b;
    bool add, a_across, b_across;
    const unsigned* registers;
    enum EmulatorElement element;
};

// Joint operations of the lanes of a warp.
enum EmulatorOperation {
    EMULATOR_SYNC,
    EMULATOR_SHUFFLE,
    EMULATOR_LDMATRIX,
    EMULATOR_LDMATRIX_TRANSPOSED,
    EMULATOR_MMA_BF16,
    EMULATOR_MMA_TF32,
};

struct EmulatorKernel {
    void (*call)(void** args);
    unsigned args;
    const unsigned* sizes;
};

extern "C" {
EmulatorIndex emulator_thread_index();
EmulatorIndex emulator_block_index();
EmulatorIndex emulator_block_size();
EmulatorIndex emulator_grid_size();
unsigned emulator_lane();
uint64_t emulator_time();

void emulator_barrier(const char* file, int line);
void emulator_warp(EmulatorOperation operation, uint64_t mask, void* data, const char* file, int line);
void emulator_fence();
// Compilers have no such operation. Returns the previous number.
unsigned emulator_atomic_max(unsigned* p, unsigned x);
void* emulator_dynamic_shared();
// Several blocks write the same values to these bytes.
void emulator_written_alike(const void* p, size_t bytes);

// Copies 16 bytes to shared memory; the last `16 - bytes` become zero. The copy is complete after a corresponding wait.
void emulator_copy_async(void* to, const void* from, unsigned bytes);
void emulator_commit_copies();
// Waits for all but the `later` newest groups.
void emulator_wait_copies(unsigned later);

// For compute capability 9.0. A barrier is 8 bytes of shared memory; an arrival announces bytes of copies, or none.
void emulator_barrier_init(void* barrier, unsigned arrivals, const char* file, int line);
void emulator_fence_barriers();
void emulator_barrier_arrive(void* barrier, unsigned bytes, const char* file, int line);
void emulator_barrier_wait(void* barrier, unsigned parity, const char* file, int line);
// Copies a box, whose map was made by cuTensorMapEncodeTiled, to shared memory; the barrier counts its bytes.
void emulator_copy_box(void* to, const void* map, void* barrier, int x, int y, int z, const char* file, int line);
// Copies bytes in the same way, which are a multiple of 16.
void emulator_copy_bytes(void* to, const void* from, unsigned bytes, void* barrier, const char* file, int line);
// Makes the thread's writes of shared memory visible to wgmma.
void emulator_fence_async();
// Barrier of some threads, named by a number; they wait, or only arrive.
void emulator_group_barrier(int number, unsigned threads, bool wait, const char* file, int line);
// Adds to device memory.
void emulator_add_async(float* p, const float* x, unsigned count);
void emulator_wgmma_fence();
// Called by all threads of a warpgroup. The multiplication is complete after a corresponding wait.
void emulator_wgmma(EmulatorWgmma* call, const char* file, int line);
void emulator_wgmma_commit(const char* file, int line);
void emulator_wgmma_wait(unsigned later, const char* file, int line);
}
