// Barriers in shared memory, and copies of boxes that arrive at them, as called by the functions of hopper.cuh.
//
// A copy is done as late as a GPU may do it: when no thread can continue without it. Until then, the bytes that it
// writes are undefined.

#include <algorithm>
#include <cstring>

#include "hopper.h"
#include "runner.h"

namespace emulator {

namespace {

constexpr uint32_t MOST_ARRIVALS = (1 << 20) - 1;

void merge(Clock& to, const Clock& from) {
    for (size_t i = 0; i < to.size(); i++) to[i] = std::max(to[i], from[i]);
}

// For each row of a box: its number, and elements `begin` to `end` of it that are in the tensor, starting at this
// address.
template <typename F>
void for_rows(const BoxCopy& copy, F f) {
    const TensorMap& map = copy.map;
    auto size = [&](int i) { return int64_t(map.sizes[i]); };
    int64_t begin = std::max<int64_t>(0, -copy.at[0]);
    int64_t end = std::min<int64_t>(map.box[0], size(0) - copy.at[0]);
    for (int64_t row = 0; row < int64_t(map.box[1]) * map.box[2]; row++) {
        int64_t y = copy.at[1] + row % map.box[1], z = copy.at[2] + row / map.box[1];
        bool inside = begin < end && y >= 0 && y < size(1) && z >= 0 && z < size(2);
        int64_t offset = map.element * (copy.at[0] + begin) + y * int64_t(map.strides[1]) + z * int64_t(map.strides[2]);
        if (inside) f(row, begin, end, map.address + uintptr_t(offset));
        else f(row, 0, 0, 0);
    }
}

}  // namespace

void require_warps_of_32(const Site& site) {
    if (WARP != 32)
        runner->fail("%s: the instruction is one of warps of 32 threads, here they have %u", source_of(site).c_str(),
                     WARP);
}

Mbarrier& Runner::barrier_at(uintptr_t address, const Site& site) {
    if (!shared_at(address)) fail("%s: barrier that is not in shared memory", source_of(site).c_str());
    auto found = async.barriers.find(address);
    if (found == async.barriers.end()) fail("%s: use of a barrier that was not initialised", source_of(site).c_str());
    // The access must be ordered after the initialisation; otherwise it is a data race with it.
    access(address, 8, false, Kind::Plain, nullptr, &site);
    return found->second;
}

// Ends the phase if nothing is missing. Returns whether threads may continue.
bool Runner::end_phase(uintptr_t address, const Site& site) {
    Mbarrier& barrier = async.barriers[address];
    if (!barrier.pending && barrier.bytes < 0)
        report(source_of(site) + ": a barrier receives " + std::to_string(-barrier.bytes) +
               " more bytes than its phase expects");
    if (barrier.pending || barrier.bytes) return false;
    if (!barrier.observed)
        report(source_of(site) + ": too many arrivals at a barrier: phase " + std::to_string(barrier.phase) +
               " ends before a thread has waited for phase " + std::to_string(barrier.phase - 1));
    merge(barrier.released, barrier.arrived);
    barrier.pending = barrier.arrivals, barrier.phase++, barrier.observed = false;
    for (unsigned i = 0; i < count; i++) {
        Fiber& fiber = fibers[i];
        if (fiber.state != State::AtMbarrier || fiber.barrier != address || fiber.parity == barrier.phase % 2) continue;
        fiber.state = State::Ready;
        barrier.observed = true;
    }
    return true;
}

// Performs one of the requested copies, if there is any. Without a seed, it is the first one.
bool Runner::deliver_copy() {
    auto& copies = async.copies;
    if (copies.empty()) return false;
    auto it = copies.begin() + (grid.seed ? random.below(unsigned(copies.size())) : 0);
    BoxCopy copy = *it;
    copies.erase(it);
    if (copy.from) memcpy(reinterpret_cast<void*>(copy.to), reinterpret_cast<void*>(copy.from), copy.bytes);
    else for_rows(copy, [&](int64_t row, int64_t begin, int64_t end, uintptr_t from) {
        char elements[ROW_BYTES] = {};
        int64_t size = copy.map.element;
        if (end > begin)
            memcpy(elements + size * begin, reinterpret_cast<void*>(from), size_t(size * (end - begin)));
        for (unsigned i = 0; i < ROW_BYTES; i += 16)
            memcpy(reinterpret_cast<void*>(swizzled(copy.to + size_t(row) * ROW_BYTES + i)), elements + i, 16);
    });
    SharedMemory& shared = *shared_at(copy.to);
    size_t offset = copy.to - shared.begin;
    memset(&shared.written[offset], 1, copy.bytes);
    // From now on, the barrier orders accesses after the copy.
    for (size_t i = offset / 2; i < (offset + copy.bytes) / 2; i++)
        shared.cells[i].writer = shared.cells[i].reader = {};
    async.barriers[copy.barrier].bytes -= int64_t(copy.bytes);
    end_phase(copy.barrier, copy.site);
    return true;
}

void Runner::count_arrival() {
    if (async.accessed_before.empty()) async.accessed_before.assign((dynamic.end - dynamic.begin + 15) / 16, {});
    unsigned warp = warp_of(number_of(*current));
    current->completed[ARRIVALS + warp] = ++async.arrivals[warp];
}

void Runner::start_copy(const BoxCopy& copy) {
    SharedMemory* shared = shared_at(copy.to);
    if (!shared) fail("%s: TMA copy to memory that is not shared", source_of(copy.site).c_str());
    for (const BoxCopy& other : async.copies)
        if (copy.to < other.to + other.bytes && other.to < copy.to + copy.bytes)
            fail("%s: TMA copy to shared memory that another copy is still writing", source_of(copy.site).c_str());
    // Accesses by other warps are ordered before the copy by arrivals that this thread knows of; writes also need a
    // fence before the arrival.
    unsigned own = warp_of(number_of(*current));
    for (uintptr_t at = copy.to; at < copy.to + copy.bytes && !async.accessed_before.empty(); at += 16) {
        const auto& accesses = async.accessed_before[(at - dynamic.begin) / 16];
        const auto& clock = current->completed;
        bool known = true;
        for (unsigned warp = 0; warp < accesses.size(); warp++)
            known = known && (!accesses[warp] || (warp != own && accesses[warp] <= clock[ARRIVALS + warp]));
        for (size_t i = (at - dynamic.begin) / 2; known && i < (at - dynamic.begin) / 2 + 8; i++) {
            Cell& cell = dynamic.cells[i];
            cell.reader = {};
            bool is_written = cell.time == dynamic.time && cell.writer.block && !async.published_by.empty();
            if (is_written && async.published_by[i] <= clock[FENCES + warp_of(cell.writer.thread)]) cell.writer = {};
        }
    }
    access(copy.to, copy.bytes, true, Kind::Plain, nullptr, &copy.site);
    // Until the copy is done, these bytes are undefined.
    memset(&shared->written[copy.to - shared->begin], 0, copy.bytes);
    async.copies.push_back(copy);
}

void Runner::check_copies_done() {
    if (async.copies.empty()) return;
    report(source_of(async.copies[0].site) + ": the kernel ends before this TMA copy is complete");
}

// Describes the threads that wait for barriers in shared memory; empty if there are none.
std::string Runner::describe_waits() {
    std::string text;
    const Fiber* first = nullptr;
    for (unsigned i = 0; i < count; i++) {
        const Fiber& fiber = fibers[i];
        if (fiber.state != State::AtMbarrier || (first && fiber.barrier == first->barrier)) continue;
        const Mbarrier& barrier = async.barriers[fiber.barrier];
        std::string at = source_of(Site{fiber.file, fiber.line, fiber.callers});
        if (first) return text + "; thread " + std::to_string(i) + " waits at " + at;
        first = &fiber;
        text = at + ": thread " + std::to_string(i) + " waits for a barrier that never completes: phase " +
               std::to_string(barrier.phase) + " is missing " + std::to_string(barrier.pending) + " of " +
               std::to_string(barrier.arrivals) + " arrivals and " + std::to_string(barrier.bytes) + " bytes";
    }
    return text;
}

// Called after a barrier of these threads.
void Runner::join_clocks(unsigned first, unsigned threads, uint64_t mask) {
    if (!async.multiplies) return;
    Clock joined{};
    auto takes_part = [&](unsigned i) { return threads > MAX_WARP || mask >> i & 1; };
    for (unsigned i = 0; i < threads; i++)
        if (takes_part(i)) merge(joined, fibers[first + i].completed);
    for (unsigned i = 0; i < threads; i++)
        if (takes_part(i)) fibers[first + i].completed = joined;
}

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_barrier_init(void* barrier, unsigned arrivals, const char* file, int line) {
    const Site site = SITE;
    Runner& r = *runner;
    require_warps_of_32(site);
    auto address = reinterpret_cast<uintptr_t>(barrier);
    if (!r.shared_at(address)) r.fail("%s: barrier that is not in shared memory", source_of(site).c_str());
    if (!arrivals || arrivals > MOST_ARRIVALS)
        r.fail("%s: barrier with %u arrivals per phase", source_of(site).c_str(), arrivals);
    access(address, 8, true, Kind::Plain, nullptr, &site);
    Mbarrier& to = r.async.barriers[address] = {};
    to.arrivals = to.pending = arrivals;
    to.initialised_by = r.number_of(*r.current);
}

void emulator_fence_barriers() {
    for (auto& barrier : runner->async.barriers)
        if (barrier.second.initialised_by == runner->number_of(*runner->current)) barrier.second.fenced = true;
}

void emulator_barrier_arrive(void* barrier, unsigned bytes, const char* file, int line) {
    const Site site = SITE;
    Runner& r = *runner;
    require_warps_of_32(site);
    auto address = reinterpret_cast<uintptr_t>(barrier);
    Mbarrier& to = r.barrier_at(address, site);
    if (!to.pending)
        r.fail("%s: too many arrivals at a barrier: phase %u has all %u of them and is only missing bytes",
               source_of(site).c_str(), to.phase, to.arrivals);
    to.bytes += bytes, to.pending--;
    r.count_arrival();
    merge(to.arrived, r.current->completed);
    // Threads that continue may overtake this one.
    if (r.end_phase(address, site) || r.grid.failed) r.yield();
}

void emulator_barrier_wait(void* barrier, unsigned parity, const char* file, int line) {
    const Site site = SITE;
    Runner& r = *runner;
    Fiber& self = *r.current;
    require_warps_of_32(site);
    auto address = reinterpret_cast<uintptr_t>(barrier);
    Mbarrier& from = r.barrier_at(address, site);
    if (parity > 1) r.fail("%s: barrier parity %u is neither 0 nor 1", source_of(site).c_str(), parity);
    while (from.phase % 2 == parity) {
        self.state = State::AtMbarrier, self.barrier = address, self.parity = parity;
        self.file = file, self.line = line, self.callers = site.callers;
        r.yield();
    }
    from.observed = true;
    merge(self.completed, from.released);
}

void emulator_copy_box(void* to, const void* map, void* barrier, int x, int y, int z, const char* file, int line) {
    const Site site = SITE;
    Runner& r = *runner;
    require_warps_of_32(site);
    BoxCopy copy = {0, {}, {x, y, z}, reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(barrier), 0, site};
    memcpy(&copy.map, map, sizeof copy.map);
    if (!r.barrier_at(copy.barrier, site).fenced)
        r.fail("%s: TMA copy to a barrier without a fence after its initialisation", source_of(site).c_str());
    if (copy.map.magic != TensorMap::MAGIC)
        r.fail("%s: tensor map that was not encoded by cuTensorMapEncodeTiled", source_of(site).c_str());
    if (copy.to % 1024)
        r.fail("%s: TMA copy to an address that is not aligned to 1024 bytes", source_of(site).c_str());
    // Seen on an H200: "illegal instruction".
    if (int64_t(copy.map.element) * x % 16)
        r.fail("%s: TMA copy of a box that begins in the middle of 16 bytes", source_of(site).c_str());
    copy.bytes = size_t(copy.map.box[0]) * copy.map.box[1] * copy.map.box[2] * copy.map.element;
    for_rows(copy, [&](int64_t, int64_t begin, int64_t end, uintptr_t from) {
        access(from, copy.map.element * size_t(end - begin), false, Kind::Plain, nullptr, &site);
    });
    r.start_copy(copy);
}

void emulator_copy_bytes(void* to, const void* from, unsigned bytes, void* barrier, const char* file, int line) {
    const Site site = SITE;
    Runner& r = *runner;
    require_warps_of_32(site);
    BoxCopy copy = {reinterpret_cast<uintptr_t>(from), {}, {}, reinterpret_cast<uintptr_t>(to),
                    reinterpret_cast<uintptr_t>(barrier), bytes, site};
    if (!r.barrier_at(copy.barrier, site).fenced)
        r.fail("%s: TMA copy to a barrier without a fence after its initialisation", source_of(site).c_str());
    if ((copy.to | copy.from | bytes) % 16)
        r.fail("%s: TMA copy whose addresses or length are not multiples of 16 bytes", source_of(site).c_str());
    access(copy.from, bytes, false, Kind::Plain, nullptr, &site);
    r.start_copy(copy);
}

void emulator_group_barrier(int number, unsigned threads, bool wait, const char* file, int line) {
    const Site site = SITE;
    Runner& r = *runner;
    Fiber& self = *r.current;
    require_warps_of_32(site);
    if (number < 1 || number > 15 || !threads || threads % 32)
        r.fail("%s: barrier %d of %u threads does not exist", source_of(site).c_str(), number, threads);
    // Such barriers are named by their number, which is the address of no other barrier.
    auto address = uintptr_t(number);
    auto [found, is_new] = r.async.barriers.try_emplace(address);
    Mbarrier& barrier = found->second;
    if (is_new) barrier.arrivals = barrier.pending = threads;
    if (barrier.arrivals != threads)
        r.fail("%s: barrier of %u threads, which was one of %u threads before", source_of(site).c_str(), threads,
               barrier.arrivals);
    uint32_t phase = barrier.phase;
    barrier.pending--;
    barrier.observed = true;
    r.count_arrival();
    merge(barrier.arrived, self.completed);
    bool ended = r.end_phase(address, site);
    if (wait) {
        while (barrier.phase == phase) {
            self.state = State::AtMbarrier, self.barrier = address, self.parity = phase % 2;
            self.file = file, self.line = line, self.callers = site.callers;
            r.yield();
        }
        merge(self.completed, barrier.released);
    }
    // Threads that continue may overtake this one.
    if (ended) r.yield();
}
}
