// Instructions of compute capability 9.0 that are in progress in a block: barriers in shared memory (mbarrier), copies
// of boxes (TMA), and multiplications by warpgroups (wgmma).
#pragma once

#include <algorithm>
#include <array>
#include <cstddef>
#include <cstdint>
#include <memory>
#include <unordered_map>
#include <vector>

#include "interface.h"

namespace emulator {

constexpr unsigned WARPGROUP = 128, MAX_WARPGROUPS = 8, MAX_WARPGROUP_WARPS = 32, WARPS_OF_GROUP = 4;

// Return addresses of a call of the emulator, and of the call of the function that contains it.
struct Callers {
    void *own, *outer;
};

struct Site {
    const char* file;
    int line;
    Callers callers;
};
// The call site of the function of hopper.cuh that calls the emulator's function with these parameters.
#define SITE {file, line, {__builtin_return_address(0), __builtin_return_address(1)}}

// For each warp, the number of the newest multiplication that the warp is known to have waited for; then, for each,
// that of its newest fence_async, and that of its newest arrival at a barrier in shared memory. Barriers pass this
// knowledge on. Multiplications of a warpgroup, fences of a thread, and arrivals of a warp are numbered from 1.
using Clock = std::array<uint32_t, 3 * MAX_WARPGROUP_WARPS>;
constexpr unsigned FENCES = MAX_WARPGROUP_WARPS, ARRIVALS = 2 * MAX_WARPGROUP_WARPS;

// Rows of boxes in shared memory: eight chunks of 16 bytes, in an order that depends on the row.
constexpr unsigned ROW_BYTES = 128;
inline uintptr_t swizzled(uintptr_t address) { return address ^ (address >> 7 & 7) << 4; }

// Contents of the 128 bytes of a CUtensorMap. Sizes are in elements, strides and elements in bytes.
struct TensorMap {
    static constexpr uint64_t MAGIC = 0x70616d726f736e74;
    uint64_t magic, address, sizes[3], strides[3];
    uint32_t box[3], element;
};
static_assert(sizeof(TensorMap) <= 128);

struct Mbarrier {
    uint32_t arrivals;
    // Missing arrivals and bytes of the current phase. Bytes can be copied before they are announced.
    uint32_t pending;
    int64_t bytes = 0;
    uint32_t phase = 0;
    // Whether a thread has waited for the previous phase.
    bool observed = true;
    // The thread that initialised it; copies may use the barrier after a fence of that thread.
    unsigned initialised_by;
    bool fenced = false;
    // Knowledge from the arrivals of the current phase, and from those of earlier ones.
    Clock arrived{}, released{};
};

struct BoxCopy {
    // Or the address of bytes without a map.
    uintptr_t from = 0;
    TensorMap map;
    int64_t at[3];
    uintptr_t to, barrier;
    size_t bytes;
    Site site;
};

// Registers of a warpgroup to which multiplications in progress add, and the sums so far, (64, n).
struct Accumulator {
    unsigned n;
    std::array<float*, WARPGROUP> d;
    std::vector<float> sums;
    unsigned users = 0;
};

struct Multiplication {
    Accumulator* to;
    const char *a, *b;
    bool add, a_across, b_across;
    EmulatorElement element;
    // The left operand if it is in registers: for each thread, their address and contents.
    std::vector<std::pair<const unsigned*, std::array<unsigned, 4>>> registers;
    uint32_t number;
    // Number of groups that were committed before.
    uint32_t group;
    Site site;
};

// Operands of the multiplication being done: (depth, ROWS) and (depth, n). This is not thread-local memory, of which a
// library that is loaded late has little.
struct Operands {
    static constexpr unsigned MOST_DEPTH = 32, ROWS = 64, MOST_COLUMNS = 256;
    float a[MOST_DEPTH * ROWS], b[MOST_DEPTH * MOST_COLUMNS];
};

struct Warpgroup {
    std::vector<Multiplication> pending;
    std::vector<std::unique_ptr<Accumulator>> accumulators;
    uint32_t issued = 0, committed = 0;
    // The thread for which the other ones wait.
    unsigned awaited = 0;
};

// Asynchronous operations of a block.
struct Async {
    std::unordered_map<uintptr_t, Mbarrier> barriers;
    std::vector<BoxCopy> copies;
    Warpgroup warpgroups[MAX_WARPGROUPS];
    bool multiplies = false;
    // For each 16 bytes of dynamic shared memory and each warpgroup, the newest multiplication that reads them.
    std::vector<std::array<uint32_t, MAX_WARPGROUPS>> readers;
    // For each two bytes of it, the fence of the last writer that makes them visible to wgmma; empty before any fence.
    std::vector<uint32_t> published_by;
    // Number of arrivals of each warp. For each 16 bytes of dynamic shared memory and each warp, the arrival that
    // follows its last access; empty before any arrival.
    uint32_t arrivals[MAX_WARPGROUP_WARPS] = {};
    std::vector<std::array<uint32_t, MAX_WARPGROUP_WARPS>> accessed_before;
    Operands operands;

    void reset() {
        barriers.clear(), copies.clear(), readers.clear(), published_by.clear();
        accessed_before.clear(), std::fill(std::begin(arrivals), std::end(arrivals), 0);
        if (multiplies)
            for (Warpgroup& group : warpgroups) group = {};
        multiplies = false;
    }
};

// Fails unless warps have 32 threads, as the instructions require.
void require_warps_of_32(const Site& site);

}  // namespace emulator
