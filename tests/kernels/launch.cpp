#include "launch.h"

#include <dlfcn.h>
#include <link.h>

#include <algorithm>
#include <atomic>
#include <chrono>
#include <cmath>
#include <cstdarg>
#include <cstdio>
#include <cstring>
#include <memory>
#include <mutex>
#include <random>
#include <thread>

#include "fiber.h"
#include "memory.h"

namespace emulator {

namespace {

constexpr unsigned WARP = 32, MAX_THREADS = 1024;
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
    unsigned mask;
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

__attribute__((tls_model("initial-exec"))) thread_local Runner* runner = nullptr;

// `file:line` of an address in a kernel: of the innermost call that is not in device.h.
std::string source_of(void* address) {
    Dl_info info;
    if (!dladdr(address, &info) || !info.dli_fname) return "?";
    char command[4096], line[1024];
    size_t offset = static_cast<char*>(address) - static_cast<char*>(info.dli_fbase) - 1;
    snprintf(command, sizeof command, "addr2line -i -e '%s' 0x%zx 2>/dev/null", info.dli_fname, offset);
    FILE* pipe = popen(command, "r");
    std::string found = "?";
    while (pipe && fgets(line, sizeof line, pipe)) {
        std::string text(line);
        text = text.substr(0, text.find_first_of(" \n"));
        if (found == "?" && text.find("device.h:") == std::string::npos) found = text;
    }
    if (pipe) pclose(pipe);
    return found;
}

bool ordered(const Access& a, uint16_t thread, uint16_t epoch, uint16_t warp_epoch) {
    if (a.epoch != epoch || a.thread == thread) return true;
    unsigned warp = a.thread & WHOLE_WARP ? a.thread & ~WHOLE_WARP : a.thread / WARP;
    return a.thread != MANY_THREADS && warp == thread / WARP && a.warp_epoch != warp_epoch;
}

// Adds a reader to those that a later writer must be ordered after.
void add_reader(Access& a, uint32_t block, uint16_t thread, uint16_t epoch, uint16_t warp_epoch) {
    if (a.block && a.block != block) {
        a.block = MANY_BLOCKS;
    } else if (!a.block || a.epoch != epoch) {
        a = {block, thread, epoch, warp_epoch};
    } else if (a.thread != thread && a.thread != MANY_THREADS) {
        uint16_t warp = thread / WARP | WHOLE_WARP;
        unsigned other = a.thread & WHOLE_WARP ? a.thread : a.thread / WARP | WHOLE_WARP;
        a.thread = other == warp ? warp : MANY_THREADS;
        a.warp_epoch = warp_epoch;
    } else {
        a.warp_epoch = warp_epoch;
    }
}

std::string name_of(const Access& a) {
    char text[64];
    if (a.thread == MANY_THREADS) return "several threads";
    if (a.thread & WHOLE_WARP) snprintf(text, sizeof text, "threads of warp %d", a.thread & ~WHOLE_WARP);
    else snprintf(text, sizeof text, "thread %d", a.thread);
    return text;
}

// Volatile accesses may overlap with each other; so may atomic ones, which are no plain ones either.
enum class Kind { Plain, Volatile, Atomic };

// Checks and records an access of the current thread. `pc` or else `site` says where it is.
void access(uintptr_t address, size_t size, bool write, Kind kind, void* pc, const char* site = nullptr) {
    Runner* r = runner;
    if (!r || !r->current) return;
    Fiber& self = *r->current;
    uintptr_t stack = reinterpret_cast<uintptr_t>(self.stack);
    if (address - stack < STACK_BYTES || !size) return;
    auto at = [=] { return site ? std::string(site) : source_of(pc); };
    const char* what = write ? "write" : "read";
    Cell* cells;
    uint8_t* written;
    bool is_shared = false;
    SharedMemory* shared = r->shared_at(address);
    if (shared) {
        if (size > shared->end - address) r->fail("%s: %s past the end of shared memory", at().c_str(), what);
        cells = &shared->cells[(address - shared->begin) / 2];
        written = &shared->written[address - shared->begin];
        is_shared = true;
    } else {
        Range range = find(address, size);
        if (range.place == Place::Nowhere) {
            Dl_info info;
            // Constants of the kernel's own library.
            if (!write && pc && dladdr(reinterpret_cast<void*>(address), &info)) {
                Dl_info own;
                if (dladdr(pc, &own) && own.dli_fbase == info.dli_fbase) return;
            }
            r->fail("%s: %s of %zu bytes outside of all allocations", at().c_str(), what, size);
        }
        if (size > range.end - address)
            r->fail("%s: %s of %zu bytes past the end of an allocation", at().c_str(), what, size);
        if (range.place == Place::Host) return;
        cells = cell_of(address);
        written = written_of(address);
    }
    // A kernel's types are aligned to their sizes.
    if (size <= 16 && (size & (size - 1)) == 0 && address % size)
        r->fail("%s: %s of %zu bytes at an address that is not aligned to them", at().c_str(), what, size);
    if ((!write || kind == Kind::Atomic) && memchr(written, 0, size))
        r->fail("%s: %s of %s memory that nothing has written", at().c_str(), what, is_shared ? "shared" : "device");
    if (write) memset(written, 1, size);
    if ((kind == Kind::Atomic && !is_shared) || (kind == Kind::Volatile && write)) return;
    uint16_t thread = r->number_of(self), epoch = r->epoch, warp_epoch = self.warp_epoch;
    // Blocks have shared memory of their own.
    uint32_t block = is_shared ? 1 : static_cast<uint32_t>(r->block + 1);
    for (Cell *cell = cells, *end = cells + (size + address % 2 + 1) / 2; cell < end; cell++) {
        if (cell->launch != r->grid.number) *cell = {r->grid.number, false, {}, {}, {}};
        auto conflicts = [&](const Access& other) {
            if (!other.block) return false;
            if (other.block == block) return !ordered(other, thread, epoch, warp_epoch);
            if (cell->alike) return false;
            if (other.block == MANY_BLOCKS) return true;
            uint64_t released = r->grid.released[other.block - 1], acquired = r->grid.acquired[r->block];
            return !(released && released < acquired);
        };
        bool after_write = conflicts(cell->writer), after_atomic = kind != Kind::Atomic && conflicts(cell->atomic);
        if (after_write || after_atomic || (write && conflicts(cell->reader))) {
            const Access& other = after_write ? cell->writer : after_atomic ? cell->atomic : cell->reader;
            std::string who = other.block == block ? name_of(other) : "another block";
            const char* before = after_write || after_atomic ? "written" : "read";
            r->fail("%s: data race: %s of %s memory by thread %d, %s by %s without a barrier in between", at().c_str(),
                    what, is_shared ? "shared" : "device", thread, before, who.c_str());
        }
        if (kind == Kind::Volatile) continue;
        if (kind == Kind::Atomic) add_reader(cell->atomic, block, thread, epoch, warp_epoch);
        else if (write) cell->writer = {block, thread, epoch, warp_epoch};
        else add_reader(cell->reader, block, thread, epoch, warp_epoch);
    }
}

float from_bf16(unsigned bits) {
    unsigned word = bits << 16;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

float from_tf32(unsigned bits) {
    unsigned word = bits & 0xffffe000u;
    float x;
    memcpy(&x, &word, sizeof x);
    return x;
}

// Entry of every fiber.
void fiber_main() {
    Runner* r = runner;
    Fiber& self = *r->current;
    r->grid.launch.kernel->call(r->grid.args.data());
    self.state = State::Done;
    r->yield();
    abort();
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
    uint64_t x = launch.grid.x, y = launch.grid.y, blocks = x * y * launch.grid.z;
    while (!grid.failed) {
        // With a seed, blocks begin in an order of their own, too: from a random one on.
        uint64_t next = grid.next_block++;
        if (next >= blocks) break;
        block = (next + (grid.seed ? grid.seed % blocks : 0)) % blocks;
        block_index = {unsigned(block % x), unsigned(block / x % y), unsigned(block / x / y)};
        run_block();
    }
    runner = nullptr;
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

// Does what the lanes of the current warp have called together.
void Runner::complete(EmulatorOperation operation) {
    std::string site = std::string(current->file) + ":" + std::to_string(current->line);
    switch (operation) {
        case EMULATOR_SYNC:
            for (unsigned i = 0; i < WARP; i++)
                if (current->mask >> i & 1) lane(i).warp_epoch++;
            break;
        case EMULATOR_SHUFFLE: {
            uint64_t values[WARP] = {};
            for (unsigned i = 0; i < WARP; i++)
                if (current->mask >> i & 1) values[i] = static_cast<EmulatorShuffle*>(lane(i).data)->value;
            for (unsigned i = 0; i < WARP; i++) {
                if (!(current->mask >> i & 1)) continue;
                auto& call = *static_cast<EmulatorShuffle*>(lane(i).data);
                if (call.from < 0 || call.from >= int(WARP)) continue;
                if (!(current->mask >> call.from & 1))
                    fail("%s: shuffle from a lane that does not take part", site.c_str());
                call.value = values[call.from];
            }
            break;
        }
        case EMULATOR_LDMATRIX:
        case EMULATOR_LDMATRIX_TRANSPOSED: {
            uint16_t elements[WARP][8];
            Fiber* self = current;
            for (unsigned i = 0; i < WARP; i++) {
                const void* row = static_cast<EmulatorMatrix*>(lane(i).data)->row;
                auto address = reinterpret_cast<uintptr_t>(row);
                if (!shared_at(address))
                    fail("%s: ldmatrix from memory that is not shared", site.c_str());
                // The access is that of the lane which gave the address.
                current = &fibers[number_of(*self) / WARP * WARP + i];
                access(address, 16, false, Kind::Plain, nullptr, site.c_str());
                current = self;
                memcpy(elements[i], row, 16);
            }
            for (unsigned i = 0; i < WARP; i++)
                for (unsigned m = 0; m < 4; m++) {
                    unsigned row = i / 4, column = i % 4 * 2;
                    bool transposed = operation == EMULATOR_LDMATRIX_TRANSPOSED;
                    unsigned low = transposed ? elements[8 * m + column][row] : elements[8 * m + row][column];
                    unsigned high = transposed ? elements[8 * m + column + 1][row] : elements[8 * m + row][column + 1];
                    static_cast<EmulatorMatrix*>(lane(i).data)->x[m] = high << 16 | low;
                }
            break;
        }
        case EMULATOR_MMA_BF16:
        case EMULATOR_MMA_TF32: {
            // Lane 4 g + t; see "Matrix Fragments for mma.m16n8k16" and "mma.m16n8k8" in the PTX ISA.
            bool is_bf16 = operation == EMULATOR_MMA_BF16;
            unsigned depth = is_bf16 ? 16 : 8;
            float a[16][16] = {}, b[16][8] = {};
            for (unsigned i = 0; i < WARP; i++) {
                auto& call = *static_cast<EmulatorMma*>(lane(i).data);
                unsigned g = i / 4, t = i % 4;
                for (unsigned j = 0; j < 4; j++) {
                    unsigned row = g + j % 2 * 8;
                    if (is_bf16) {
                        unsigned column = 2 * t + j / 2 * 8;
                        a[row][column] = from_bf16(call.a[j] & 0xffff);
                        a[row][column + 1] = from_bf16(call.a[j] >> 16);
                    } else {
                        a[row][t + j / 2 * 4] = from_tf32(call.a[j]);
                    }
                }
                for (unsigned j = 0; j < 2; j++) {
                    if (is_bf16) {
                        b[2 * t + j * 8][g] = from_bf16(call.b[j] & 0xffff);
                        b[2 * t + j * 8 + 1][g] = from_bf16(call.b[j] >> 16);
                    } else {
                        b[t + j * 4][g] = from_tf32(call.b[j]);
                    }
                }
            }
            for (unsigned i = 0; i < WARP; i++) {
                auto& call = *static_cast<EmulatorMma*>(lane(i).data);
                for (unsigned j = 0; j < 4; j++) {
                    unsigned row = i / 4 + j / 2 * 8, column = i % 4 * 2 + j % 2;
                    float sum = call.c[j];
                    for (unsigned k = 0; k < depth; k++) sum += a[row][k] * b[k][column];
                    call.c[j] = sum;
                }
            }
            break;
        }
    }
}

void Runner::copy(const Copy& copy) {
    memset(copy.to, 0, 16);
    memcpy(copy.to, copy.from, copy.bytes);
    auto address = reinterpret_cast<uintptr_t>(copy.to);
    SharedMemory& shared = *shared_at(address);
    memset(&shared.written[address - shared.begin], 1, 16);
}

std::atomic<uint32_t> launches{0};
std::mutex one_launch;

}  // namespace

std::string run(const Launch& launch) {
    std::lock_guard<std::mutex> guard(one_launch);
    const char* seed = getenv("EMULATOR_SEED");
    uint64_t blocks = uint64_t(launch.grid.x) * launch.grid.y * launch.grid.z;
    unsigned threads = launch.block.x * launch.block.y * launch.block.z;
    if (threads == 0 || threads > MAX_THREADS) return "a block has " + std::to_string(threads) + " threads";
    if (threads % WARP && threads != 1) return "a block of " + std::to_string(threads) + " threads is not whole warps";
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
unsigned emulator_linear_thread() { return runner->number_of(*runner->current); }
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

void emulator_warp(EmulatorOperation operation, unsigned mask, void* data, const char* file, int line) {
    Runner& r = *runner;
    Fiber& self = *r.current;
    self.state = State::InWarp, self.operation = operation, self.mask = mask, self.data = data;
    self.file = file, self.line = line;
    unsigned first = r.number_of(self) / WARP * WARP;
    bool all = true;
    for (unsigned i = 0; i < WARP; i++) {
        if (!(mask >> i & 1)) continue;
        const Fiber& other = r.fibers[first + i];
        if (first + i >= r.count || other.state == State::Done)
            r.fail("%s:%d: lane %u of the mask does not take part: it has returned or does not exist", file, line, i);
        all = all && other.state == State::InWarp && other.operation == operation && other.mask == mask &&
              other.line == line && !strcmp(other.file, file);
    }
    if (!all) return r.yield();
    r.complete(operation);
    for (unsigned i = 0; i < WARP; i++)
        if (mask >> i & 1) r.fibers[first + i].state = State::Ready;
}

void emulator_fence() { runner->fenced = true; }

void emulator_written_alike(const void* p, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(p);
    if (find(address, bytes).place != Place::Device) return;
    for (Cell *cell = cell_of(address), *end = cell + bytes / 2; cell < end; cell++) {
        if (cell->launch != runner->grid.number) *cell = {runner->grid.number, false, {}, {}, {}};
        cell->alike = true;
    }
}

void emulator_copy_async(void* to, const void* from, unsigned bytes) {
    Runner& r = *runner;
    void* pc = __builtin_return_address(0);
    auto address = reinterpret_cast<uintptr_t>(to);
    access(reinterpret_cast<uintptr_t>(from), bytes, false, Kind::Plain, pc);
    access(address, 16, true, Kind::Plain, pc);
    SharedMemory* shared = r.shared_at(address);
    if (!shared) r.fail("%s: cp.async to memory that is not shared", source_of(pc).c_str());
    // Until the wait, what is there is not known.
    memset(&shared->written[address - shared->begin], 0, 16);
    r.current->copies.back().push_back({to, from, bytes});
}

void emulator_commit_copies() { runner->current->copies.emplace_back(); }

void emulator_wait_copies(unsigned later) {
    auto& groups = runner->current->copies;
    while (groups.size() > later + 1) {
        for (const Copy& copy : groups.front()) runner->copy(copy);
        groups.erase(groups.begin());
    }
}

// What the compiler calls for -fsanitize=thread.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define HOOK(name, size, write, kind) \
    void __tsan_##name(void* p) {                                                                    \
        access(reinterpret_cast<uintptr_t>(p), size, write, kind, __builtin_return_address(0)); \
    }
#define HOOKS(size)                                         \
    HOOK(read##size, size, false, Kind::Plain)              \
    HOOK(write##size, size, true, Kind::Plain)              \
    HOOK(unaligned_read##size, size, false, Kind::Plain)    \
    HOOK(unaligned_write##size, size, true, Kind::Plain)    \
    HOOK(volatile_read##size, size, false, Kind::Volatile)  \
    HOOK(volatile_write##size, size, true, Kind::Volatile)
HOOKS(1)
HOOKS(2)
HOOKS(4)
HOOKS(8)
HOOKS(16)
void __tsan_read_range(void* p, size_t size) {
    access(reinterpret_cast<uintptr_t>(p), size, false, Kind::Plain, __builtin_return_address(0));
}
void __tsan_write_range(void* p, size_t size) {
    access(reinterpret_cast<uintptr_t>(p), size, true, Kind::Plain, __builtin_return_address(0));
}

static void atomic(volatile void* p, size_t size, void* pc) {
    if (!runner || !runner->current) return;
    Runner& r = *runner;
    auto address = reinterpret_cast<uintptr_t>(p);
    access(address, size, true, Kind::Atomic, pc);
    if (r.shared_at(address)) return;
    uint64_t now = ++r.grid.clock;
    if (r.fenced) r.grid.released[r.block] = now;
    r.grid.acquired[r.block] = now;
}
#define ATOMIC(name, type, size, function)                         \
    type __tsan_atomic##name(volatile type* p, type x, int) {      \
        atomic(p, size, __builtin_return_address(0));              \
        return function(p, x, __ATOMIC_SEQ_CST);                   \
    }
ATOMIC(32_fetch_add, uint32_t, 4, __atomic_fetch_add)
ATOMIC(64_fetch_add, uint64_t, 8, __atomic_fetch_add)
ATOMIC(32_fetch_or, uint32_t, 4, __atomic_fetch_or)
ATOMIC(32_exchange, uint32_t, 4, __atomic_exchange_n)

// What it calls for -fsanitize=undefined: the first field of each description is where.
struct Where {
    const char* file;
    unsigned line, column;
};
static void undefined(const Where* where, const char* what) {
    if (runner && runner->current) runner->fail("%s:%u: %s", where->file, where->line, what);
}
#define UNDEFINED(name, what, ...) \
    void __ubsan_handle_##name(const Where* where, ##__VA_ARGS__) { undefined(where, what); }
UNDEFINED(add_overflow, "an addition overflows", void*, void*)
UNDEFINED(sub_overflow, "a subtraction overflows", void*, void*)
UNDEFINED(mul_overflow, "a multiplication overflows", void*, void*)
UNDEFINED(negate_overflow, "a negation overflows", void*)
UNDEFINED(divrem_overflow, "a division by zero, or one that overflows", void*, void*)
UNDEFINED(shift_out_of_bounds, "a shift is as wide as its type, or wider", void*, void*)
UNDEFINED(out_of_bounds, "an index is outside of its array", void*)
UNDEFINED(type_mismatch_v1, "an access at an address that is not aligned to its type", void*)
UNDEFINED(pointer_overflow, "the address of an access overflows", void*, void*)
}
