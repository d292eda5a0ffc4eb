// Runs kernels: executes the blocks of a launch on all cores.
#pragma once

#include <cstring>
#include <string>
#include <vector>

#include "interface.h"

namespace emulator {

// Threads per warp: $EMULATOR_WARP, or 32. A power of two.
extern const unsigned WARP;
// Logarithm of WARP. Most accesses need the warp of a thread, and a division is slow.
extern const unsigned WARP_BITS;
inline unsigned warp_of(unsigned thread) { return thread >> WARP_BITS; }

// A copy of a kernel's argument, with the alignment of the largest one, a TensorMap.
struct Argument {
    struct alignas(64) Line {
        char bytes[64];
    };
    std::vector<Line> lines;

    Argument(const void* from, size_t bytes) : lines((bytes + 63) / 64) { memcpy(lines.data(), from, bytes); }
};

struct Launch {
    const char* name;
    const EmulatorKernel* kernel;
    EmulatorIndex grid, block;
    size_t dynamic_shared;
    std::vector<Argument> args;
};

// Returns a description of the kernel's error, or an empty string. Concurrent launches by several threads of the host
// must not use the same memory.
std::string run(const Launch& launch);

}  // namespace emulator
