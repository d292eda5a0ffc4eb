#include "launch.h"

#include <link.h>

#include <algorithm>
#include <chrono>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <thread>

#include "runner.h"

namespace emulator {

thread_local Runner* runner = nullptr;

namespace {

// Entry of every fiber.
void fiber_main() {
    Runner* r = runner;
    Fiber& self = *r->current;
    r->grid.launch.kernel->call(r->grid.args.data());
    self.state = State::Done;
    r->yield();
    abort();
}

// Static shared memory of this OS thread: the thread-local memory of the library with the kernel.
void find_shared(void* anchor, uintptr_t* begin, size_t* bytes) {
    struct Query {
        uintptr_t anchor, begin;
        size_t bytes;
    } query = {reinterpret_cast<uintptr_t>(anchor), 0, 0};
    dl_iterate_phdr(
        [](dl_phdr_info* info, size_t, void* data) {
            auto& query = *static_cast<Query*>(data);
            auto begin = reinterpret_cast<uintptr_t>(info->dlpi_tls_data);
            for (int i = 0; i < info->dlpi_phnum; i++) {
                const auto& header = info->dlpi_phdr[i];
                if (header.p_type == PT_TLS && begin && query.anchor - begin < header.p_memsz)
                    query.begin = begin, query.bytes = header.p_memsz;
            }
            return 0;
        },
        &query);
    *begin = query.begin, *bytes = query.bytes;
}

// Blocks that run at either end of a grid, for operands that are too large for all: $EMULATOR_EDGE_BLOCKS, or all.
const uint64_t edge_blocks = [] {
    const char* text = getenv("EMULATOR_EDGE_BLOCKS");
    return text ? strtoull(text, nullptr, 10) : UINT64_MAX;
}();

std::atomic<uint32_t> launches{0};
std::mutex one_launch;

}  // namespace

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
    uint64_t x = launch.grid.x, y = launch.grid.y, blocks = x * y * launch.grid.z;
    while (!grid.failed) {
        // With a seed, blocks begin in an order of their own, too: from a random one on.
        uint64_t next = grid.next_block++;
        if (next >= blocks) break;
        block = (next + (grid.seed ? grid.seed % blocks : 0)) % blocks;
        if (block >= edge_blocks && blocks - block > edge_blocks) continue;
        block_index = {unsigned(block % x), unsigned(block / x % y), unsigned(block / x / y)};
        run_block();
    }
    runner = nullptr;
}

void Runner::run_block() {
    const Launch& launch = grid.launch;
    count = launch.block.x * launch.block.y * launch.block.z;
    random.seed(grid.seed ? grid.seed * 0x9e3779b97f4a7c15ull + block : 0);
    epoch = 0, fenced = false;
    uintptr_t begin;
    size_t bytes;
    find_shared(launch.shared(), &begin, &bytes);
    fixed.reset(begin, bytes);
    dynamic.reset((reinterpret_cast<uintptr_t>(dynamic_bytes.get()) + 15) / 16 * 16, launch.dynamic_shared);
    for (unsigned i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        if (!fiber.stack) fiber.stack = new_stack();
        fiber.context.prepare(fiber.stack, fiber_main);
        fiber.state = State::Ready;
        fiber.index = {i % launch.block.x, i / launch.block.x % launch.block.y, i / launch.block.x / launch.block.y};
        fiber.warp_epoch = 0;
        fiber.copies.assign(1, {});
    }
    std::vector<unsigned> ready;
    do {
        ready.clear();
        for (unsigned i = 0; i < count; i++)
            if (fibers[i].state == State::Ready) ready.push_back(i);
        if (grid.seed) std::shuffle(ready.begin(), ready.end(), random);
        for (unsigned i : ready) {
            // Another one may have been resumed in its turn by what a fiber before it did.
            if (fibers[i].state != State::Ready) continue;
            current = &fibers[i];
            scheduler.switch_to(fibers[i].context);
            current = nullptr;
            if (grid.failed) return;
        }
    } while (!ready.empty() || release_barrier());
}

// Lets all threads go on that wait at a barrier, if those are all. Returns whether there are any.
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
    if (!first) return false;
    if (other) {
        auto describe = [&](const Fiber& fiber) {
            const char* what = fiber.state == State::AtBarrier ? "at the barrier" : "for its warp";
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
    for (unsigned i = 0; i < count; i++)
        if (fibers[i].state == State::AtBarrier) fibers[i].state = State::Ready;
    return true;
}

std::string run(const Launch& launch) {
    std::lock_guard<std::mutex> guard(one_launch);
    const char* seed = getenv("EMULATOR_SEED");
    uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    if (threads == 0 || threads > MAX_THREADS) return "a block has " + std::to_string(threads) + " threads";
    uint32_t number = ++launches;
    Grid grid{launch, number, seed ? strtoull(seed, nullptr, 10) * 1000003 + number : 0, {}};
    for (const std::string& arg : launch.args) grid.args.push_back(const_cast<char*>(arg.data()));
    grid.released.reset(new std::atomic<uint64_t>[blocks]());
    grid.acquired.reset(new std::atomic<uint64_t>[blocks]());
    auto work = [&] { Runner(grid).run_blocks(); };
    std::vector<std::thread> others;
    uint64_t cores = std::min<uint64_t>(std::max(1u, std::thread::hardware_concurrency()), blocks);
    for (uint64_t i = 1; i < cores; i++) others.emplace_back(work);
    // Not on the caller's own thread, whose static shared memory would stay.
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
unsigned emulator_lane() { return runner->number_of(*runner->current) % WARP; }
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
