// A launch while it runs: what its OS threads share, and the blocks and fibers of each of them.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <string>
#include <vector>

#include "fiber.h"
#include "launch.h"
#include "memory.h"

namespace emulator {

constexpr unsigned MAX_WARP = 64, MAX_THREADS = 1024;
constexpr size_t MAX_SHARED = 228 << 10;

enum class State { Ready, AtBarrier, InWarp, Done };

struct Copy {
    void* to;
    const void* from;
    unsigned bytes;
};

struct Fiber {
    Context context;
    char* stack = nullptr;
    State state;
    EmulatorIndex index;
    uint16_t warp_epoch;
    // Where it waits, and for what.
    const char* file;
    int line;
    EmulatorOperation operation;
    uint64_t mask;
    void* data;
    // By group of cp.async; the last one is not committed yet.
    std::vector<std::vector<Copy>> copies;
};

// A launch as its OS threads share it.
struct Grid {
    const Launch& launch;
    uint32_t number;
    uint64_t seed;
    std::vector<void*> args;
    std::atomic<uint64_t> next_block{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    std::string problem;
    // For each block: the time of its last fence with an atomic after it, and of its last atomic; 0: none.
    std::unique_ptr<std::atomic<uint64_t>[]> released, acquired;
    std::atomic<uint64_t> clock{0};
};

// Shared memory: two bytes each.
struct SharedMemory {
    uintptr_t begin = 0, end = 0;
    std::vector<Cell> cells;
    std::vector<uint8_t> written;

    void reset(uintptr_t at, size_t bytes) {
        begin = at, end = at + bytes;
        if (bytes) memset(reinterpret_cast<void*>(at), 0xff, bytes);
        cells.assign(bytes / 2 + 1, Cell{});
        written.assign(bytes, 0);
    }
    bool contains(uintptr_t address) const { return address >= begin && address < end; }
};

// Runs the blocks of one OS thread, one after the other.
struct Runner {
    Grid& grid;
    Context scheduler;
    std::unique_ptr<Fiber[]> fibers{new Fiber[MAX_THREADS]};
    unsigned count;
    Fiber* current = nullptr;
    uint64_t block;
    EmulatorIndex block_index;
    uint16_t epoch;
    bool fenced;
    std::mt19937_64 random;
    SharedMemory fixed, dynamic;
    std::unique_ptr<char[]> dynamic_bytes{new char[MAX_SHARED + 16]};

    explicit Runner(Grid& grid) : grid(grid) {}
    ~Runner() {
        for (unsigned i = 0; i < MAX_THREADS; i++)
            if (fibers[i].stack) munmap(fibers[i].stack, STACK_BYTES);
    }

    void run_blocks();
    void run_block();
    bool release_barrier();
    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    void report(std::string problem);
    SharedMemory* shared_at(uintptr_t address) {
        if (fixed.contains(address)) return &fixed;
        return dynamic.contains(address) ? &dynamic : nullptr;
    }
    unsigned number_of(const Fiber& fiber) const { return &fiber - fibers.get(); }
    Fiber& lane(unsigned i) { return fibers[number_of(*current) / WARP * WARP + i]; }
    void yield() {
        Fiber& self = *current;
        self.context.switch_to(scheduler);
    }
    void complete(EmulatorOperation operation);
    void copy(const Copy& copy);
};

// Forgets what was known of a cell before this launch.
inline void refresh(Cell& cell, uint32_t launch) {
    if (cell.launch != launch) cell = {launch, false, {}, {}, {}};
}

// Of this OS thread, while it runs blocks.
extern __attribute__((tls_model("initial-exec"))) thread_local Runner* runner;

// Volatile accesses may overlap with each other; so may atomic ones, which are no plain ones either.
enum class Kind { Plain, Volatile, Atomic };

// Checks and records an access of the current thread. `pc` or else `site` says where it is.
void access(uintptr_t address, size_t size, bool write, Kind kind, void* pc, const char* site = nullptr);

// `file:line` of an address in a kernel: of the innermost call that is not in device.h.
std::string source_of(void* address);

}  // namespace emulator
