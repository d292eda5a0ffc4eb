// Runs kernels: one launch at a time, its blocks on all cores.
#pragma once

#include <string>
#include <vector>

#include "interface.h"

namespace emulator {

// Threads of a warp: $EMULATOR_WARP, or 32.
extern const unsigned WARP;

struct Launch {
    const char* name;
    const EmulatorKernel* kernel;
    // Of the library with the kernel: returns an address in its static shared memory.
    void* (*shared)();
    EmulatorIndex grid, block;
    size_t dynamic_shared;
    std::vector<std::string> args;
};

// Returns what the kernel did wrong, or nothing.
std::string run(const Launch& launch);

}  // namespace emulator
