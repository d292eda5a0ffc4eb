// Runs kernels: one launch at a time, its blocks on all cores.
#pragma once

#include <string>
#include <vector>

#include "interface.h"

namespace emulator {

struct Launch {
    const char* name;
    const EmulatorKernel* kernel;
    // The library with the kernel: any address in it, and its function that returns one in static shared memory.
    void* (*shared)();
    EmulatorIndex grid, block;
    size_t dynamic_shared;
    std::vector<std::string> args;
};

// Returns what the kernel did wrong, or nothing.
std::string run(const Launch& launch);

}  // namespace emulator
