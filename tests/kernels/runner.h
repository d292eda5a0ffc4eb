// A running launch: state shared by its OS threads, and the blocks and fibers of each of them.
#pragma once

#include <atomic>
#include <cstring>
#include <memory>
#include <mutex>
#include <string>
#include <vector>

#include "fiber.h"
#include "hopper.h"
#include "launch.h"
#include "memory.h"

namespace emulator {

constexpr unsigned MIN_WARP = 32, MAX_WARP = 64, MAX_THREADS = 1024;
constexpr size_t MAX_SHARED = 228 << 10;

enum class State { Ready, AtBarrier, AtMbarrier, InWarp, InWarpgroup, Done };

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
    // Place and operation that the thread waits for.
    const char* file;
    int line;
    EmulatorOperation operation;
    uint64_t mask;
    void* data;
    Callers callers;
    uintptr_t barrier;
    unsigned parity;
    // Knowledge of this thread about multiplications.
    Clock completed;
    // Whether a wgmma_fence followed the last wait that returned registers.
    bool fenced;
    // Copies by group of cp.async; the last group is not committed yet.
    std::vector<std::vector<Copy>> copies;
};

// State of a launch that its OS threads share.
struct Grid {
    const Launch& launch;
    uint32_t number;
    uint64_t seed;
    bool is_parallel;
    std::vector<void*> args;
    std::atomic<uint64_t> next_block{0};
    std::atomic<bool> failed{false};
    std::mutex lock;
    std::string problem;
    // Held during an atomic access to device memory.
    std::mutex atomics;
    // For each block: the time of its last release (an atomic after a fence), and of its last atomic; 0 if none. Only
    // the releases of one warp count, the first one to release.
    std::unique_ptr<std::atomic<uint64_t>[]> released, acquired;
    uint64_t clock = 0;
};

// Atomic accesses to two bytes of shared memory.
struct AtomicAccess {
    Access access;
    uint16_t warp_epoch;
};

// Shared memory. Each cell, and each set of atomic accessors, covers two bytes.
struct SharedMemory {
    uintptr_t begin = 0, end = 0;
    uint32_t time = 0;
    std::vector<Cell> cells;
    // Empty before the first atomic of a block.
    std::vector<AtomicAccess> atomics;
    std::vector<uint8_t> written;

    void reset(uintptr_t at, size_t bytes) {
        begin = at, end = at + bytes;
        if (bytes) memset(reinterpret_cast<void*>(at), 0xff, bytes);
        // Cells of the previous block are older than this.
        time++;
        if (cells.size() <= bytes / 2) cells.resize(bytes / 2 + 1);
        atomics.clear();
        written.assign(bytes, 0);
    }
    bool contains(uintptr_t address) const { return address >= begin && address < end; }
};

// Random numbers for the order of threads: splitmix64.
struct Random {
    uint64_t state;

    // Returns a number below a limit that is small compared with 2^32.
    unsigned below(unsigned limit) {
        uint64_t x = state += 0x9e3779b97f4a7c15;
        x = (x ^ x >> 30) * 0xbf58476d1ce4e5b9;
        x = (x ^ x >> 27) * 0x94d049bb133111eb;
        return unsigned(((x ^ x >> 31) >> 32) * limit >> 32);
    }
};

// Resources of an OS thread for running blocks. Later launches reuse them: threads of a block need stacks, and mapping
// them takes long.
struct Resources {
    std::unique_ptr<Fiber[]> fibers{new Fiber[MAX_THREADS]};
    SharedMemory fixed, dynamic;
    std::unique_ptr<char[]> dynamic_bytes{new char[MAX_SHARED + 1024 + 16]};
    Async async;
    std::vector<unsigned> ready;

    static std::unique_ptr<Resources> take();
    static void give_back(std::unique_ptr<Resources> resources);
};

// Runs the blocks of one OS thread, one after the other.
struct Runner {
    Grid& grid;
    std::unique_ptr<Resources> resources = Resources::take();
    Fiber* const fibers = resources->fibers.get();
    SharedMemory &fixed = resources->fixed, &dynamic = resources->dynamic;
    Async& async = resources->async;
    Context scheduler;
    unsigned count;
    Fiber* current = nullptr;
    uint64_t block;
    EmulatorIndex block_index;
    uint16_t epoch;
    bool fenced;
    // The warp whose releases count.
    unsigned releaser;
    Random random;
    // For each warp, the lane for which its other lanes wait.
    unsigned awaited[MAX_THREADS / MIN_WARP];

    explicit Runner(Grid& grid) : grid(grid) {}
    ~Runner() { Resources::give_back(std::move(resources)); }

    void run_blocks();
    void run_block(uintptr_t shared, size_t shared_bytes);
    void resume_ready();
    bool release_barrier();
    [[noreturn]] void fail(const char* format, ...) __attribute__((format(printf, 2, 3)));
    void report(std::string problem);
    SharedMemory* shared_at(uintptr_t address) {
        if (fixed.contains(address)) return &fixed;
        return dynamic.contains(address) ? &dynamic : nullptr;
    }
    unsigned number_of(const Fiber& fiber) const { return unsigned(&fiber - fibers); }
    Fiber& lane(unsigned i) { return fibers[warp_of(number_of(*current)) * WARP + i]; }
    void yield() {
        Fiber& self = *current;
        self.context.switch_to(scheduler);
    }
    void complete(EmulatorOperation operation);
    void copy(const Copy& copy);

    // mbarrier.cpp, wgmma.cpp
    Mbarrier& barrier_at(uintptr_t address, const Site& site);
    bool end_phase(uintptr_t address, const Site& site);
    void count_arrival();
    void start_copy(const BoxCopy& copy);
    bool deliver_copy();
    void check_copies_done();
    std::string describe_waits();
    bool gather_warpgroup(void* data, const Site& site);
    void release_warpgroup();
    void start_multiplication(const Site& site);
    void finish_groups(unsigned later);
    void finish_multiplications();
    void join_clocks(unsigned first, unsigned threads, uint64_t mask);
    // Whether the current thread must not access some of its registers: `check_registers` finds none otherwise.
    bool has_registers_in_use() const {
        return !async.warpgroups[number_of(*current) / WARPGROUP].accumulators.empty();
    }
    // Fail if registers, or bytes to write, belong to a multiplication that is not known to have ended.
    void check_registers(uintptr_t address, size_t size, const char* what, const Site& site);
    void check_published(const Clock& known, uintptr_t address, size_t size, const Site& site);
    void check_operands(uintptr_t address, size_t size, const Site& site);
};

// Returns a cell without state from before this time.
inline Cell refreshed(const Cell& cell, uint32_t time) {
    return cell.time == time ? cell : Cell{time, 0, 0, 0, {}, {}};
}

// The runner of this OS thread, while it runs blocks.
extern __attribute__((tls_model("initial-exec"))) thread_local Runner* runner;

// Volatile accesses may overlap with each other. So may atomic ones, but neither may overlap with plain accesses.
enum class Kind { Plain, Volatile, Atomic };

// Checks and records an access of the current thread. `pc` or else `site` is its location.
void access(uintptr_t address, size_t size, bool write, Kind kind, void* pc, const Site* site = nullptr);

// Returns `file:line` of an address in a kernel: the innermost call that is not in device.h. If `header` is not null,
// calls in that file are skipped as well; "?" if no call remains.
std::string source_of(void* address, const char* header = nullptr);
// Same for a call of the emulator: the innermost one outside of the header with the instruction's function.
std::string source_of(const Site& site);

}  // namespace emulator
