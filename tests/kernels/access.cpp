// Checks every load and store of a kernel. The compiler calls these functions in place of its sanitizers' libraries.

#include <dlfcn.h>

#include <atomic>
#include <cstdio>
#include <cstring>
#include <mutex>
#include <thread>

#include "runner.h"

namespace emulator {

namespace {

// Returns whether an access is ordered before that of another thread of the block.
bool ordered(const Access& a, uint16_t a_warp_epoch, uint16_t thread, uint16_t epoch, uint16_t warp_epoch) {
    if (a.epoch != epoch || a.thread == thread) return true;
    unsigned warp = a.thread & WHOLE_WARP ? a.thread & ~WHOLE_WARP : warp_of(a.thread);
    return a.thread != MANY_THREADS && warp == warp_of(thread) && a_warp_epoch != warp_epoch;
}

// Returns whether arrivals at barriers, which the current thread knows of, order an access of dynamic shared memory by
// another warp before its own.
bool ordered_by_arrivals(const Runner& r, uintptr_t address, const Access& a, uint16_t thread) {
    if (a.thread == MANY_THREADS || r.async.accessed_before.empty()) return false;
    unsigned warp = a.thread & WHOLE_WARP ? a.thread & ~WHOLE_WARP : warp_of(a.thread);
    uint32_t arrival = r.async.accessed_before[(address - r.dynamic.begin) / 16][warp];
    return warp != warp_of(thread) && arrival && arrival <= r.current->completed[ARRIVALS + warp];
}

// Adds a reader to those after which a later writer must be ordered.
void add_reader(Access& a, uint16_t& a_warp_epoch, const Access& reader, uint16_t warp_epoch) {
    if (a.block && a.block != reader.block) {
        a.block = MANY_BLOCKS;
    } else if (!a.block || a.epoch != reader.epoch) {
        a = reader, a_warp_epoch = warp_epoch;
    } else if (a.thread != MANY_THREADS) {
        unsigned warp = warp_of(reader.thread) | WHOLE_WARP;
        unsigned other = a.thread & WHOLE_WARP ? a.thread : warp_of(a.thread) | WHOLE_WARP;
        if (other != warp) a.thread = MANY_THREADS;
        else if (a_warp_epoch != warp_epoch) a = reader, a_warp_epoch = warp_epoch;
        else if (a.thread != reader.thread) a.thread = static_cast<uint16_t>(warp);
    }
}

std::string name_of(const Access& a) {
    char text[64];
    if (a.thread == MANY_THREADS) return "several threads";
    if (a.thread & WHOLE_WARP) snprintf(text, sizeof text, "threads of warp %d", a.thread & ~WHOLE_WARP);
    else snprintf(text, sizeof text, "thread %d", a.thread);
    return text;
}

// Blocks run on several OS threads, which share the cells of device memory. This holds one group of neighbouring cells
// at a time. It is not held while a fiber is given up.
class CellLock {
public:
    ~CellLock() { release(); }
    void hold(const Cell* cell) {
        auto& wanted = locks[reinterpret_cast<uintptr_t>(cell) / GROUP_BYTES % COUNT];
        if (held == &wanted) return;
        release();
        while (wanted.test_and_set(std::memory_order_acquire)) std::this_thread::yield();
        held = &wanted;
    }
    void release() {
        if (held) held->clear(std::memory_order_release);
        held = nullptr;
    }

private:
    static constexpr size_t COUNT = 4096, GROUP_BYTES = 16 * sizeof(Cell);
    static std::atomic_flag locks[COUNT];
    std::atomic_flag* held = nullptr;
};
std::atomic_flag CellLock::locks[COUNT];

}  // namespace

std::string source_of(const Site& site) {
    for (void* pc : {site.callers.own, site.callers.outer}) {
        std::string found = pc ? source_of(pc, site.file) : "?";
        if (found != "?") return found;
    }
    return site.file + (":" + std::to_string(site.line));
}

std::string source_of(void* address, const char* header) {
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
        if (header && text.find(header + std::string(":")) != std::string::npos) continue;
        if (found == "?" && text.find("device.h:") == std::string::npos) found = text;
    }
    if (pipe) pclose(pipe);
    return found;
}

// Returns whether all of these flags, each 0 or 1, are 1.
static bool all_set(const uint8_t* flags, size_t count) {
    if (count == 4) {
        uint32_t word;
        memcpy(&word, flags, 4);
        return word == 0x01010101;
    }
    if (count == 8 || count == 16) {
        constexpr uint64_t ALL = 0x0101010101010101;
        uint64_t low, high;
        memcpy(&low, flags, 8), memcpy(&high, flags + count - 8, 8);
        return low == ALL && high == ALL;
    }
    return count == 2 ? flags[0] & flags[1] : !memchr(flags, 0, count);
}

static void set_all(uint8_t* flags, size_t count) {
    if (count == 4) memset(flags, 1, 4);
    else if (count == 2) memset(flags, 1, 2);
    else memset(flags, 1, count);
}

template <typename T>
static bool same(const T& a, const T& b) {
    return !memcmp(&a, &b, sizeof a);
}

// Whether an access is one of a local variable that needs no check. Most accesses are.
static inline __attribute__((always_inline)) bool is_local(uintptr_t address) {
#ifdef __x86_64__
    // In place of the frame's address, for which each hook would need a frame.
    uintptr_t stack;
    asm("movq %%rsp, %0" : "=r"(stack));
#else
    auto stack = reinterpret_cast<uintptr_t>(__builtin_frame_address(0));
#endif
    if ((address ^ stack) >= STACK_BYTES) return false;
    Runner* r = runner;
    return !r || !r->async.multiplies || !r->current || !r->has_registers_in_use();
}

// Returns whether a read has no conflict and changes nothing, as most do: it follows one of the same thread, or those
// of other threads after which a writer must be ordered anyway.
static inline bool is_known_reader(const Cell& cell, uint32_t time, const Access& own, uint16_t warp_epoch) {
    const Access &writer = cell.writer, &reader = cell.reader;
    if (cell.time != time) return false;
    bool is_ordered = !writer.block || (writer.block == own.block &&
                                        ordered(writer, cell.writer_warp_epoch, own.thread, own.epoch, warp_epoch));
    if (!is_ordered) return false;
    if (reader.block != own.block || reader.epoch != own.epoch) return reader.block == MANY_BLOCKS;
    if (reader.thread == MANY_THREADS) return true;
    bool is_same = reader.thread == own.thread || reader.thread == (warp_of(own.thread) | WHOLE_WARP);
    return is_same && cell.reader_warp_epoch == warp_epoch;
}

// Checks and records a plain access without conflict, as nearly all are. Returns false if `access` must look at it,
// which repeats everything: the access is a mistake, or rarer than it is worth here.
template <size_t SIZE, bool WRITE>
static inline __attribute__((always_inline)) bool is_common(uintptr_t address) {
    Runner* r = runner;
    if (!r || !r->current || address % SIZE) return false;
    const Fiber& self = *r->current;
    uint16_t thread = r->number_of(self), epoch = r->epoch, warp_epoch = self.warp_epoch;
    Access own{1, thread, epoch};
    Cell* cells;
    uint8_t* written;
    uint32_t time;
    bool is_contended = false;
    if (SharedMemory* shared = r->shared_at(address)) {
        if (shared->end - address < SIZE || !shared->atomics.empty()) return false;
        size_t offset = address - shared->begin;
        auto& accessed_before = r->async.accessed_before;
        if (WRITE) {
            if (r->async.multiplies || !accessed_before.empty()) return false;
        } else if (shared == &r->dynamic && !accessed_before.empty()) {
            unsigned warp = warp_of(thread);
            accessed_before[offset / 16][warp] = r->async.arrivals[warp] + 1;
        }
        cells = &shared->cells[offset / 2], written = &shared->written[offset], time = shared->time;
    } else {
        if (!arena.contains(address)) return false;
        uintptr_t end = arena.end_of(address);
        if (address >= end || end - address < SIZE) return false;
        cells = cell_of(address), written = written_of(address), time = r->grid.number;
        own.block = static_cast<uint32_t>(r->block + 1);
        is_contended = r->grid.is_parallel;
    }
    if (WRITE) set_all(written, SIZE);
    else if (!all_set(written, SIZE)) return false;
    auto follows = [&](const Access& other, uint16_t other_warp_epoch) {
        return !other.block ||
               (other.block == own.block && ordered(other, other_warp_epoch, thread, epoch, warp_epoch));
    };
    CellLock lock;
    for (size_t i = 0; i < (SIZE + 1) / 2; i++) {
        Cell& cell = cells[i];
        if (is_contended) lock.hold(&cell);
        if (cell.time != time) {
            cell = {time, 0, uint16_t(WRITE ? warp_epoch : 0), uint16_t(WRITE ? 0 : warp_epoch), {}, {}};
            (WRITE ? cell.writer : cell.reader) = own;
        } else if (WRITE) {
            if (!follows(cell.writer, cell.writer_warp_epoch) || !follows(cell.reader, cell.reader_warp_epoch))
                return false;
            cell.writer = own, cell.writer_warp_epoch = warp_epoch;
        } else if (!is_known_reader(cell, time, own, warp_epoch)) {
            if (!follows(cell.writer, cell.writer_warp_epoch)) return false;
            add_reader(cell.reader, cell.reader_warp_epoch, own, warp_epoch);
        }
    }
    return true;
}

void access(uintptr_t address, size_t size, bool write, Kind kind, void* pc, const Site* site) {
    Runner* r = runner;
    if (!r || !r->current) return;
    Fiber& self = *r->current;
    uintptr_t stack = reinterpret_cast<uintptr_t>(self.stack);
    const char* what = write ? "write" : "read";
    if (address - stack < STACK_BYTES || !size) {
        if (r->async.multiplies) r->check_registers(address, size, what, site ? *site : Site{"?", 0, {pc, nullptr}});
        return;
    }
    auto at = [=] { return site ? source_of(*site) : source_of(pc); };
    Cell* cells;
    AtomicAccess* atomics = nullptr;
    uint8_t* written;
    bool is_shared = false;
    SharedMemory* shared = r->shared_at(address);
    if (shared) {
        if (size > shared->end - address) r->fail("%s: %s past the end of shared memory", at().c_str(), what);
        cells = &shared->cells[(address - shared->begin) / 2];
        if (kind == Kind::Atomic && shared->atomics.empty())
            shared->atomics.assign((shared->end - shared->begin) / 2 + 1, {});
        if (!shared->atomics.empty()) atomics = &shared->atomics[(address - shared->begin) / 2];
        written = &shared->written[address - shared->begin];
        is_shared = true;
        if (write && r->async.multiplies) r->check_operands(address, size, site ? *site : Site{"?", 0, {pc, nullptr}});
        // A copy has no address in the program. Its barrier orders what follows it.
        if ((!write || pc) && shared == &r->dynamic && !r->async.accessed_before.empty())
            for (size_t i = (address - shared->begin) / 16; i <= (address + size - 1 - shared->begin) / 16; i++) {
                unsigned warp = warp_of(r->number_of(self));
                r->async.accessed_before[i][warp] = r->async.arrivals[warp] + 1;
            }
        if (write && shared == &r->dynamic && !r->async.published_by.empty())
            for (size_t i = (address - shared->begin) / 2; i <= (address + size - 1 - shared->begin) / 2; i++)
                r->async.published_by[i] = self.completed[FENCES + warp_of(r->number_of(self))] + 1;
    } else {
        Range range = find(address, size);
        if (range.place == Place::Nowhere) {
            Dl_info info;
            // These are constants and counters of the kernel's own library.
            if ((!write || kind == Kind::Atomic) && pc && dladdr(reinterpret_cast<void*>(address), &info)) {
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
    if ((!write || kind == Kind::Atomic) && !all_set(written, size))
        r->fail("%s: %s of %s memory that nothing has written", at().c_str(), what, is_shared ? "shared" : "device");
    if (write) set_all(written, size);
    if ((kind == Kind::Atomic && !is_shared) || (kind == Kind::Volatile && write)) return;
    uint16_t thread = r->number_of(self), epoch = r->epoch, warp_epoch = self.warp_epoch;
    // Each block has its own shared memory.
    uint32_t block = is_shared ? 1 : static_cast<uint32_t>(r->block + 1);
    uint32_t time = is_shared ? shared->time : r->grid.number;
    bool is_contended = !is_shared && r->grid.is_parallel;
    const Access own{block, thread, epoch};
    CellLock lock;
    // Neighbouring cells are often in the same state, with the same result.
    Cell before, after;
    bool has_result = false;
    for (Cell *cell = cells, *end = cells + (size + address % 2 + 1) / 2; cell < end; cell++) {
        if (is_contended) lock.hold(cell);
        if (!write && !atomics && is_known_reader(*cell, time, own, warp_epoch)) continue;
        if (has_result && same(*cell, before)) {
            *cell = after;
            continue;
        }
        before = *cell;
        Cell now = refreshed(before, time);
        AtomicAccess* atomic = atomics ? atomics + (cell - cells) : nullptr;
        auto conflicts = [&](const Access& other, uint16_t other_warp_epoch) {
            if (!other.block) return false;
            if (other.block == block && shared == &r->dynamic &&
                ordered_by_arrivals(*r, address + (cell - cells) * 2, other, thread))
                return false;
            if (other.block == block) return !ordered(other, other_warp_epoch, thread, epoch, warp_epoch);
            if (now.alike) return false;
            if (other.block == MANY_BLOCKS) return true;
            uint64_t released = r->grid.released[other.block - 1], acquired = r->grid.acquired[r->block];
            return !(released && released < acquired);
        };
        bool after_write = conflicts(now.writer, now.writer_warp_epoch);
        bool after_atomic = atomic && kind != Kind::Atomic && conflicts(atomic->access, atomic->warp_epoch);
        if (after_write || after_atomic || (write && conflicts(now.reader, now.reader_warp_epoch))) {
            Access other = after_write ? now.writer : after_atomic ? atomic->access : now.reader;
            lock.release();
            std::string who = other.block == block ? name_of(other) : "another block";
            const char* before = after_write || after_atomic ? "written" : "read";
            r->fail("%s: data race: %s of %s memory by thread %d, %s by %s without a barrier in between", at().c_str(),
                    what, is_shared ? "shared" : "device", thread, before, who.c_str());
        }
        if (kind == Kind::Atomic) add_reader(atomic->access, atomic->warp_epoch, own, warp_epoch);
        else if (kind == Kind::Plain && write) now.writer = own, now.writer_warp_epoch = warp_epoch;
        else if (kind == Kind::Plain) add_reader(now.reader, now.reader_warp_epoch, own, warp_epoch);
        *cell = after = now;
        has_result = !atomics;
    }
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_fence() { runner->fenced = true; }

void emulator_written_alike(const void* p, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(p);
    if (find(address, bytes).place != Place::Device) return;
    CellLock lock;
    for (Cell *cell = cell_of(address), *end = cell + bytes / 2; cell < end; cell++) {
        lock.hold(cell);
        *cell = refreshed(*cell, runner->grid.number);
        cell->alike = 1;
    }
}

// Functions that the compiler calls for -fsanitize=thread.
void __tsan_init() {}
void __tsan_func_entry(void*) {}
void __tsan_func_exit() {}
#define HOOK(name, size, write, kind, is_checked)                                                     \
    void __tsan_##name(void* p) {                                                                     \
        auto address = reinterpret_cast<uintptr_t>(p);                                                \
        if (is_local(address) || is_checked) return;                                                  \
        access(address, size, write, kind, __builtin_return_address(0));                              \
    }
#define COMMON(size, write) is_common<size, write>(address)
#define HOOKS(size)                                                                   \
    HOOK(read##size, size, false, Kind::Plain, COMMON(size, false))                   \
    HOOK(write##size, size, true, Kind::Plain, COMMON(size, true))                    \
    HOOK(unaligned_read##size, size, false, Kind::Plain, COMMON(size, false))         \
    HOOK(unaligned_write##size, size, true, Kind::Plain, COMMON(size, true))          \
    HOOK(volatile_read##size, size, false, Kind::Volatile, false)                     \
    HOOK(volatile_write##size, size, true, Kind::Volatile, false)
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

// Clang calls this to copy a struct. Before version 15 it called memcpy itself, which the linker replaces.
#define COPIES(prefix)                                                                          \
    void* prefix##memcpy(void* to, const void* from, size_t size) {                             \
        void* pc = __builtin_return_address(0);                                                 \
        access(reinterpret_cast<uintptr_t>(from), size, false, Kind::Plain, pc);                \
        access(reinterpret_cast<uintptr_t>(to), size, true, Kind::Plain, pc);                   \
        return memcpy(to, from, size);                                                          \
    }                                                                                           \
    void* prefix##memset(void* p, int value, size_t size) {                                     \
        access(reinterpret_cast<uintptr_t>(p), size, true, Kind::Plain, __builtin_return_address(0)); \
        return memset(p, value, size);                                                          \
    }
COPIES(__tsan_)
COPIES(__wrap_)

// Checks an atomic access. An access to device memory happens while the result is held, so that times are in its order.
static std::unique_lock<std::mutex> atomic(volatile void* p, size_t size, void* pc) {
    if (!runner || !runner->current) return {};
    Runner& r = *runner;
    auto address = reinterpret_cast<uintptr_t>(p);
    access(address, size, true, Kind::Atomic, pc);
    if (r.shared_at(address)) return {};
    std::unique_lock<std::mutex> turn(r.grid.atomics);
    uint64_t now = ++r.grid.clock;
    unsigned warp = warp_of(r.number_of(*r.current));
    // A later release by another warp must not hide this one, because data of its own warp may have been read after it.
    if (r.fenced && (!r.grid.released[r.block] || r.releaser == warp)) {
        r.grid.released[r.block] = now;
        r.releaser = warp;
    }
    r.grid.acquired[r.block] = now;
    return turn;
}
#define ATOMIC(name, type, size, function)                         \
    type __tsan_atomic##name(volatile type* p, type x, int) {      \
        auto turn = atomic(p, size, __builtin_return_address(0));  \
        return function(p, x, __ATOMIC_SEQ_CST);                   \
    }
ATOMIC(32_fetch_add, uint32_t, 4, __atomic_fetch_add)
ATOMIC(64_fetch_add, uint64_t, 8, __atomic_fetch_add)
ATOMIC(32_fetch_or, uint32_t, 4, __atomic_fetch_or)
ATOMIC(32_exchange, uint32_t, 4, __atomic_exchange_n)

void emulator_add_async(float* p, const float* x, unsigned count) {
    auto turn = atomic(p, count * sizeof *p, __builtin_return_address(0));
    for (unsigned i = 0; i < count; i++) p[i] += x[i];
}

unsigned emulator_atomic_max(unsigned* p, unsigned x) {
    auto turn = atomic(p, sizeof x, __builtin_return_address(0));
    unsigned old = __atomic_load_n(p, __ATOMIC_SEQ_CST);
    while (old < x && !__atomic_compare_exchange_n(p, &old, x, false, __ATOMIC_SEQ_CST, __ATOMIC_SEQ_CST)) continue;
    return old;
}

// Functions that the compiler calls for -fsanitize=undefined. The first field of each description is the location.
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
