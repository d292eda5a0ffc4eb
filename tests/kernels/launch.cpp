#include "launch.h"

#include <link.h>

#include <algorithm>
#include <chrono>
#include <condition_variable>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <thread>

#include "runner.h"

// How the ABI names a place in thread-local memory: a module is a loaded library, or the program.
struct TlsIndex {
    unsigned long module, offset;
};
extern "C" void* __tls_get_addr(TlsIndex*);

namespace emulator {

thread_local Runner* runner = nullptr;

namespace {

// Entry of every fiber.
void fiber_main() {
    Runner* r = runner;
    Fiber& self = *r->current;
    r->grid.launch.kernel->call(r->grid.args.data());
    r->finish_multiplications();
    self.state = State::Done;
    r->yield();
    abort();
}

// Static shared memory of this OS thread: the thread-local memory of the kernel's library. Its address is not taken from
// dlpi_tls_data, which glibc leaves out at times while another thread loads a library.
void find_shared(const EmulatorKernel* kernel, uintptr_t* begin, size_t* bytes) {
    struct Query {
        uintptr_t kernel;
        TlsIndex block;
        size_t bytes;
    } query = {reinterpret_cast<uintptr_t>(kernel), {0, 0}, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto& query = *static_cast<Query*>(data);
            size_t thread_local_bytes = 0;
            bool is_found = false;
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto& header = info->dlpi_phdr[i];
                if (header.p_type == PT_TLS) thread_local_bytes = header.p_memsz;
                if (header.p_type == PT_LOAD && query.kernel - info->dlpi_addr - header.p_vaddr < header.p_memsz)
                    is_found = true;
            }
            if (is_found) query.block.module = info->dlpi_tls_modid, query.bytes = thread_local_bytes;
            return int(is_found);
        },
        &query);
    *begin = query.bytes ? reinterpret_cast<uintptr_t>(__tls_get_addr(&query.block)) : 0, *bytes = query.bytes;
}

// Number of blocks that run at either end of a grid, for operands that are too large for all: $EMULATOR_EDGE_BLOCKS, or
// all.
const uint64_t edge_blocks = [] {
    const char* text = getenv("EMULATOR_EDGE_BLOCKS");
    return text ? strtoull(text, nullptr, 10) : UINT64_MAX;
}();

std::atomic<uint32_t> launches{0};

// The cores on which launches run. Several launches, by threads of the host, share them: with more OS threads than
// cores, one thread might wait for the lock of a cell whose holder is not running.
class Cores {
public:
    explicit Cores(uint64_t blocks) {
        std::unique_lock<std::mutex> guard(lock);
        launches++;
        freed.wait(guard, [] { return idle > 0; });
        // On a single core, a launch needs no locks; other launches take the other cores.
        count = launches > 1 ? 1 : unsigned(std::min<uint64_t>(idle, std::max<uint64_t>(blocks, 1)));
        idle -= count;
    }
    ~Cores() {
        {
            std::lock_guard<std::mutex> guard(lock);
            idle += count, launches--;
        }
        freed.notify_all();
    }
    unsigned count;

private:
    static std::mutex lock;
    static std::condition_variable freed;
    // Cores, and launches that run or wait.
    static unsigned idle, launches;
};
std::mutex Cores::lock;
std::condition_variable Cores::freed;
unsigned Cores::idle = std::max(1u, std::thread::hardware_concurrency()), Cores::launches = 0;

// Resources that no OS thread is using.
std::mutex spare_lock;
std::vector<std::unique_ptr<Resources>> spare;

}  // namespace

std::unique_ptr<Resources> Resources::take() {
    std::lock_guard<std::mutex> guard(spare_lock);
    if (spare.empty()) return std::make_unique<Resources>();
    auto resources = std::move(spare.back());
    spare.pop_back();
    return resources;
}

void Resources::give_back(std::unique_ptr<Resources> resources) {
    std::lock_guard<std::mutex> guard(spare_lock);
    spare.push_back(std::move(resources));
}

void Runner::report(std::string problem) {
    std::lock_guard<std::mutex> guard(grid.lock);
    if (!grid.failed.exchange(true)) grid.problem = std::move(problem);
}

void Runner::fail(const char* format, ...) {
    char text[2048];
    va_list args;
    va_start(args, format);
    vsnprintf(text, sizeof text, format, args);
    va_end(args);
    std::string where = "block (" + std::to_string(block_index.x) + ", " + std::to_string(block_index.y) + ", " +
                        std::to_string(block_index.z) + ")";
    report(std::string(text) + ", in " + where);
    // The fiber is given up, as is its block.
    for (;;) yield();
}

void Runner::run_blocks() {
    runner = this;
    const Launch& launch = grid.launch;
    // The same for all blocks of this OS thread.
    uintptr_t shared;
    size_t shared_bytes;
    find_shared(launch.kernel, &shared, &shared_bytes);
    uint64_t x = launch.grid.x, y = launch.grid.y, blocks = x * y * launch.grid.z;
    while (!grid.failed) {
        // With a seed, blocks also begin in a different order, starting at a random one.
        uint64_t next = grid.next_block++;
        if (next >= blocks) break;
        block = (next + (grid.seed ? grid.seed % blocks : 0)) % blocks;
        if (block >= edge_blocks && blocks - block > edge_blocks) continue;
        block_index = {unsigned(block % x), unsigned(block / x % y), unsigned(block / x / y)};
        run_block(shared, shared_bytes);
    }
    runner = nullptr;
}

void Runner::run_block(uintptr_t shared, size_t shared_bytes) {
    const Launch& launch = grid.launch;
    count = launch.block.x * launch.block.y * launch.block.z;
    random.state = grid.seed * 0x9e3779b97f4a7c15 + block;
    epoch = 0, fenced = false;
    std::fill(std::begin(awaited), std::end(awaited), 0);
    fixed.reset(shared, shared_bytes);
    // Aligned to exactly 16 bytes: a kernel must not rely on more than CUDA promises.
    auto dynamic_bytes = reinterpret_cast<uintptr_t>(resources->dynamic_bytes.get());
    dynamic.reset((dynamic_bytes + 1023) / 1024 * 1024 + 16, launch.dynamic_shared);
    async.reset();
    for (unsigned i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack = new_stack();
        fiber.context.prepare(fiber.stack, i, fiber_main);
        fiber.state = State::Ready;
        fiber.index = {i % launch.block.x, i / launch.block.x % launch.block.y, i / launch.block.x / launch.block.y};
        fiber.warp_epoch = 0;
        fiber.completed = {}, fiber.fenced = false;
        fiber.copies.resize(1);
        fiber.copies[0].clear();
    }
    do resume_ready();
    while (!grid.failed && release_barrier());
}

// Runs until all threads wait or are done.
void Runner::resume_ready() {
    std::vector<unsigned>& ready = resources->ready;
    do {
        ready.clear();
        for (unsigned i = 0; i < count; i++)
            if (fibers[i].state == State::Ready) ready.push_back(i);
        if (grid.seed)
            for (size_t i = ready.size(); i > 1; i--) std::swap(ready[i - 1], ready[random.below(unsigned(i))]);
        for (size_t at = 0; at < ready.size(); at++) {
            // Threads are in no order that a processor foresees, and their stacks are more than its fastest cache has.
            if (at + 2 < ready.size()) __builtin_prefetch(&fibers[ready[at + 2]]);
            if (at + 1 < ready.size()) fibers[ready[at + 1]].context.prefetch();
            current = &fibers[ready[at]];
            scheduler.switch_to(current->context);
            current = nullptr;
            if (grid.failed) return;
        }
    } while (!ready.empty());
}

// Continues all threads that wait at a barrier, if all have arrived; otherwise delivers a TMA copy. Returns whether it
// did either.
bool Runner::release_barrier() {
    const Fiber *first = nullptr, *other = nullptr;
    for (unsigned i = 0; i < count; i++) {
        const Fiber& fiber = fibers[i];
        if (fiber.state == State::Done) continue;
        if (!first) first = &fiber;
        bool same = fiber.state == State::AtBarrier && first->state == State::AtBarrier && fiber.line == first->line &&
                    !strcmp(fiber.file, first->file);
        if (!same) other = &fiber;
    }
    if (!first) return check_copies_done(), false;
    if (other) {
        if (deliver_copy()) return true;
        std::string waits = describe_waits();
        if (!waits.empty()) return report(waits), false;
        auto describe = [&](const Fiber& fiber) {
            const char* what = fiber.state == State::AtBarrier ? "at the barrier"
                               : fiber.state == State::InWarp    ? "for its warp"
                                                                 : "for its warpgroup";
            return "thread " + std::to_string(number_of(fiber)) + " waits " + what + " at " + fiber.file + ":" +
                   std::to_string(fiber.line);
        };
        std::string problem = std::string(other->file) + ":" + std::to_string(other->line) + ": divergence: ";
        problem += describe(*first);
        if (first != other) problem += ", " + describe(*other);
        report(problem);
        return false;
    }
    epoch++;
    join_clocks(0, count, ~uint64_t(0));
    for (unsigned i = 0; i < count; i++)
        if (fibers[i].state == State::AtBarrier) fibers[i].state = State::Ready;
    return true;
}

std::string run(const Launch& launch) {
    const char* seed = getenv("EMULATOR_SEED");
    uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    if (threads == 0 || threads > MAX_THREADS) return "a block has " + std::to_string(threads) + " threads";
    uint32_t number = ++launches;
    Cores cores(blocks);
    Grid grid{launch, number, seed ? strtoull(seed, nullptr, 10) * 1000003 + number : 0, cores.count > 1, {}};
    for (const Argument& arg : launch.args) grid.args.push_back(const_cast<Argument::Line*>(arg.lines.data()));
    grid.released.reset(new std::atomic<uint64_t>[blocks]());
    grid.acquired.reset(new std::atomic<uint64_t>[blocks]());
    auto work = [&] { Runner(grid).run_blocks(); };
    std::vector<std::thread> others;
    for (unsigned i = 1; i < cores.count; i++) others.emplace_back(work);
    // Not on the caller's thread, whose static shared memory would remain.
    std::thread(work).join();
    for (auto& other : others) other.join();
    return grid.failed ? std::string(launch.name) + ": " + grid.problem : std::string();
}

}  // namespace emulator

using namespace emulator;

extern "C" {

EmulatorIndex emulator_thread_index() { return runner->current->index; }
EmulatorIndex emulator_block_index() { return runner->block_index; }
EmulatorIndex emulator_block_size() { return runner->grid.launch.block; }
EmulatorIndex emulator_grid_size() { return runner->grid.launch.grid; }
unsigned emulator_lane() { return runner->number_of(*runner->current) & (WARP - 1); }
void* emulator_dynamic_shared() { return reinterpret_cast<void*>(runner->dynamic.begin); }

uint64_t emulator_time() {
    auto now = std::chrono::steady_clock::now().time_since_epoch();
    return std::chrono::duration_cast<std::chrono::nanoseconds>(now).count();
}

void emulator_barrier(const char* file, int line) {
    Fiber& self = *runner->current;
    self.state = State::AtBarrier, self.file = file, self.line = line;
    runner->yield();
}
}
