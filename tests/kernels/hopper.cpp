// Barriers in shared memory, copies of boxes and multiplications of warpgroups, as functions of hopper.cuh call them.
//
// Copies and multiplications are done as late as a GPU may do them: a copy when no thread can go on without it, a
// multiplication at the wait for its group. Until then, what they write is unknown and what they read must not change.

#include "hopper.h"

#include <algorithm>
#include <cmath>
#include <cstring>

#include "runner.h"

namespace emulator {

namespace {

constexpr unsigned ROW_BYTES = 128, DEPTH = Operands::DEPTH, ROWS = Operands::ROWS;
constexpr uint32_t MOST_ARRIVALS = (1 << 20) - 1;

uintptr_t swizzled(uintptr_t address) { return address ^ (address >> 7 & 7) << 4; }

void merge(Clock& to, const Clock& from) {
    for (size_t i = 0; i < to.size(); i++) to[i] = std::max(to[i], from[i]);
}

// For each row of a box: its number, and elements `begin` to `end` of it that are in the tensor, from this address on.
template <typename F>
void for_rows(const BoxCopy& copy, F f) {
    const TensorMap& map = copy.map;
    auto size = [&](int i) { return int64_t(map.sizes[i]); };
    int64_t begin = std::max<int64_t>(0, -copy.at[0]);
    int64_t end = std::min<int64_t>(map.box[0], size(0) - copy.at[0]);
    for (int64_t row = 0; row < int64_t(map.box[1]) * map.box[2]; row++) {
        int64_t y = copy.at[1] + row % map.box[1], z = copy.at[2] + row / map.box[1];
        bool inside = begin < end && y >= 0 && y < size(1) && z >= 0 && z < size(2);
        int64_t offset = 2 * (copy.at[0] + begin) + y * int64_t(map.strides[1]) + z * int64_t(map.strides[2]);
        if (inside) f(row, begin, end, map.address + uintptr_t(offset));
        else f(row, 0, 0, 0);
    }
}

// For each 16 bytes of an operand with `rows` rows, or columns: address, row, element of k. They are eight elements of
// k, or eight rows if `across`. Tiles have groups of 8 x 128 bytes.
template <typename F>
void for_operand(const char* p, unsigned rows, bool across, F f) {
    auto base = reinterpret_cast<uintptr_t>(p);
    if (across) {
        for (unsigned k = 0; k < DEPTH; k++)
            for (unsigned row = 0; row < rows; row += 8)
                f(swizzled(base + k * ROW_BYTES + row / 64 * 64 * ROW_BYTES + row % 64 * 2), row, k);
    } else {
        for (unsigned row = 0; row < rows; row++)
            for (unsigned k = 0; k < DEPTH; k += 8) f(swizzled(base + row * ROW_BYTES + k * 2), row, k);
    }
}

// To (16, rows).
void unpack(const char* p, unsigned rows, bool across, float* to) {
    for_operand(p, rows, across, [&](uintptr_t address, unsigned row, unsigned k) {
        uint16_t elements[8];
        memcpy(elements, reinterpret_cast<void*>(address), sizeof elements);
        for (unsigned i = 0; i < 8; i++) {
            uint32_t bits = uint32_t(elements[i]) << 16;
            memcpy(across ? &to[k * rows + row + i] : &to[(k + i) * rows + row], &bits, sizeof bits);
        }
    });
}

void multiply(const Multiplication& m, Operands& operands) {
    float *a = operands.a, *b = operands.b;
    unsigned n = m.to->n;
    unpack(m.a, ROWS, m.a_across, a);
    unpack(m.b, n, m.b_across, b);
    float* sums = m.to->sums.data();
    if (!m.add) std::fill_n(sums, ROWS * n, 0.0f);
    for (unsigned row = 0; row < ROWS; row++, sums += n)
        for (unsigned k = 0; k < DEPTH; k += 4)
            for (unsigned column = 0; column < n; column++) {
                float sum = sums[column];
                for (unsigned i = k; i < k + 4; i++) sum += a[i * ROWS + row] * b[i * n + column];
                sums[column] = sum;
            }
}

// For each register of a warpgroup that has (64, n): thread, number, and its element.
template <typename F>
void for_registers(unsigned n, F f) {
    for (unsigned thread = 0; thread < WARPGROUP; thread++)
        for (unsigned i = 0; i < n / 2; i++) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            unsigned column = i / 4 * 8 + thread % 4 * 2 + i % 2;
            f(thread, i, row * n + column);
        }
}

}  // namespace

Mbarrier& Runner::barrier_at(uintptr_t address, const Site& site) {
    if (!shared_at(address)) fail("%s: barrier that is not in shared memory", source_of(site).c_str());
    auto found = async.barriers.find(address);
    if (found == async.barriers.end()) fail("%s: use of a barrier that was not initialised", source_of(site).c_str());
    // Ordered after the initialisation, or else a data race with it.
    access(address, 8, false, Kind::Plain, nullptr, &site);
    return found->second;
}

// Ends the phase if it lacks nothing. Returns whether threads may go on.
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

// Does one of the copies that were asked for, if any. The first one without a seed.
bool Runner::deliver_copy() {
    auto& copies = async.copies;
    if (copies.empty()) return false;
    auto it = copies.begin() + (grid.seed ? random.below(unsigned(copies.size())) : 0);
    BoxCopy copy = *it;
    copies.erase(it);
    for_rows(copy, [&](int64_t row, int64_t begin, int64_t end, uintptr_t from) {
        char elements[ROW_BYTES] = {};
        if (end > begin) memcpy(elements + 2 * begin, reinterpret_cast<void*>(from), size_t(2 * (end - begin)));
        for (unsigned i = 0; i < ROW_BYTES; i += 16)
            memcpy(reinterpret_cast<void*>(swizzled(copy.to + size_t(row) * ROW_BYTES + i)), elements + i, 16);
    });
    SharedMemory& shared = *shared_at(copy.to);
    size_t offset = copy.to - shared.begin;
    memset(&shared.written[offset], 1, copy.bytes);
    // From now on the barrier orders accesses after the copy.
    for (size_t i = offset / 2; i < (offset + copy.bytes) / 2; i++)
        shared.cells[i].writer = shared.cells[i].reader = {};
    async.barriers[copy.barrier].bytes -= int64_t(copy.bytes);
    end_phase(copy.barrier, copy.site);
    return true;
}

void Runner::check_copies_done() {
    if (async.copies.empty()) return;
    report(source_of(async.copies[0].site) + ": the kernel ends before this TMA copy is complete");
}

// Of threads that wait for barriers in shared memory; empty if there are none.
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

// Waits for the other threads of the warpgroup. True for the last one, which does for all of them what they called.
bool Runner::gather_warpgroup(void* data, const Site& site) {
    Fiber& self = *current;
    unsigned first = number_of(self) / WARPGROUP * WARPGROUP;
    unsigned& awaited = async.warpgroups[first / WARPGROUP].awaited;
    self.state = State::InWarpgroup, self.data = data;
    self.file = site.file, self.line = site.line, self.callers = site.callers;
    for (unsigned looked = 0; looked < WARPGROUP; looked++, awaited = (awaited + 1) % WARPGROUP) {
        const Fiber& other = fibers[first + awaited];
        if (first + awaited >= count || other.state == State::Done)
            fail("%s: thread %u of the warpgroup does not take part: it has returned or does not exist",
                 source_of(site).c_str(), awaited);
        if (other.state != State::InWarpgroup || other.line != site.line || strcmp(other.file, site.file))
            return yield(), false;
    }
    return true;
}

void Runner::release_warpgroup() {
    unsigned first = number_of(*current) / WARPGROUP * WARPGROUP;
    for (unsigned i = first; i < first + WARPGROUP; i++) fibers[i].state = State::Ready;
}

// What the threads of the current warpgroup have called.
void Runner::start_multiplication(const Site& site) {
    unsigned index = number_of(*current) / WARPGROUP;
    Warpgroup& group = async.warpgroups[index];
    auto call = [&](unsigned i) -> EmulatorWgmma& {
        return *static_cast<EmulatorWgmma*>(fibers[index * WARPGROUP + i].data);
    };
    const EmulatorWgmma& own = call(0);
    for (unsigned i = 1; i < WARPGROUP; i++) {
        const EmulatorWgmma& other = call(i);
        if (other.a != own.a || other.b != own.b || other.n != own.n || other.add != own.add ||
            other.a_across != own.a_across || other.b_across != own.b_across)
            fail("%s: divergence: threads 0 and %u of the warpgroup pass different operands to wgmma",
                 source_of(site).c_str(), i);
    }
    if (!async.multiplies) async.readers.assign((dynamic.end - dynamic.begin + 15) / 16, {});
    async.multiplies = true;
    uint32_t number = ++group.issued;
    auto check = [&](const void* p, unsigned rows, bool across) {
        if (reinterpret_cast<uintptr_t>(p) % 16)
            fail("%s: wgmma operand that is not aligned to 16 bytes", source_of(site).c_str());
        for_operand(static_cast<const char*>(p), rows, across, [&](uintptr_t address, unsigned, unsigned) {
            size_t offset = address - dynamic.begin;
            if (!dynamic.contains(address) || !dynamic.contains(address + 15))
                fail("%s: wgmma reads outside of dynamic shared memory", source_of(site).c_str());
            if (memchr(&dynamic.written[offset], 0, 16))
                fail("%s: wgmma reads shared memory that nothing has written", source_of(site).c_str());
            // wgmma does not see what threads write. A delivered copy has no writer any more.
            for (size_t i = offset / 2; i < offset / 2 + 8; i++) {
                const Cell& cell = dynamic.cells[i];
                if (cell.time == dynamic.time && cell.writer.block)
                    fail("%s: wgmma reads shared memory that thread %u has written: only TMA copies are ordered before "
                         "it", source_of(site).c_str(), cell.writer.thread);
            }
            async.readers[offset / 16][index] = number;
        });
    };
    check(own.a, ROWS, own.a_across);
    check(own.b, own.n, own.b_across);
    Accumulator* to = nullptr;
    for (auto& accumulator : group.accumulators)
        for (unsigned i = 0; i < WARPGROUP; i++) {
            float *d = call(i).d, *other = accumulator->d[i];
            bool same = d == other && own.n == accumulator->n;
            bool apart = d + own.n / 2 <= other || other + accumulator->n / 2 <= d;
            if (same && i == 0) to = accumulator.get();
            if (same ? to != accumulator.get() : !apart || to == accumulator.get())
                fail("%s: wgmma shares only some of its registers with one that was not waited for",
                     source_of(site).c_str());
        }
    if (!to) {
        for (unsigned i = 0; i < WARPGROUP; i++)
            if (!fibers[index * WARPGROUP + i].fenced)
                fail("%s: wgmma uses registers without a wgmma_fence before it", source_of(site).c_str());
        group.accumulators.emplace_back(to = new Accumulator{own.n, {}, std::vector<float>(ROWS * own.n)});
        for (unsigned i = 0; i < WARPGROUP; i++) to->d[i] = call(i).d;
        for_registers(to->n, [&](unsigned thread, unsigned i, unsigned element) {
            to->sums[element] = to->d[thread][i];
            to->d[thread][i] = NAN;
        });
    }
    to->users++;
    group.pending.push_back({to, static_cast<const char*>(own.a), static_cast<const char*>(own.b), own.add,
                             own.a_across, own.b_across, number, group.committed, site});
}

// All but the `later` newest ones of the current warpgroup.
void Runner::finish_groups(unsigned later) {
    unsigned index = number_of(*current) / WARPGROUP;
    Warpgroup& group = async.warpgroups[index];
    auto& pending = group.pending;
    size_t done = 0;
    for (; done < pending.size() && pending[done].group + later < group.committed; done++) {
        multiply(pending[done], async.operands);
        pending[done].to->users--;
    }
    if (!done) return;
    for (unsigned i = index * WARPGROUP; i < (index + 1) * WARPGROUP; i++)
        fibers[i].completed[warp_of(i)] = pending[done - 1].number;
    pending.erase(pending.begin(), pending.begin() + long(done));
    auto& accumulators = group.accumulators;
    for (size_t i = accumulators.size(); i-- > 0;) {
        const Accumulator& from = *accumulators[i];
        if (from.users) continue;
        for_registers(from.n, [&](unsigned thread, unsigned j, unsigned element) {
            from.d[thread][j] = from.sums[element];
        });
        for (unsigned j = 0; j < WARPGROUP; j++) fibers[index * WARPGROUP + j].fenced = false;
        accumulators.erase(accumulators.begin() + long(i));
    }
}

// At the end of the current thread.
void Runner::finish_multiplications() {
    const auto& pending = async.warpgroups[number_of(*current) / WARPGROUP].pending;
    if (!pending.empty())
        fail("%s: a thread ends without waiting for this wgmma", source_of(pending[0].site).c_str());
}

// After a barrier of these threads.
void Runner::join_clocks(unsigned first, unsigned threads, uint64_t mask) {
    if (!async.multiplies) return;
    Clock joined{};
    auto takes_part = [&](unsigned i) { return threads > MAX_WARP || mask >> i & 1; };
    for (unsigned i = 0; i < threads; i++)
        if (takes_part(i)) merge(joined, fibers[first + i].completed);
    for (unsigned i = 0; i < threads; i++)
        if (takes_part(i)) fibers[first + i].completed = joined;
}

void Runner::check_registers(uintptr_t address, size_t size, const char* what, const Site& site) {
    unsigned thread = number_of(*current);
    for (const auto& accumulator : async.warpgroups[thread / WARPGROUP].accumulators) {
        auto begin = reinterpret_cast<uintptr_t>(accumulator->d[thread % WARPGROUP]);
        if (address < begin + accumulator->n / 2 * sizeof(float) && begin < address + size)
            fail("%s: %s of registers of a wgmma that was not waited for", source_of(site).c_str(), what);
    }
}

void Runner::check_operands(uintptr_t address, size_t size, const Site& site) {
    if (!dynamic.contains(address)) return;
    for (size_t i = (address - dynamic.begin) / 16; i <= (address + size - 1 - dynamic.begin) / 16; i++)
        for (unsigned warp = 0; warp < (count + 31) / 32; warp++)
            if (async.readers[i][warp / WARPS_OF_GROUP] > current->completed[warp])
                fail("%s: write of shared memory that wgmma of warp %u reads, without a barrier after its wgmma_wait",
                     source_of(site).c_str(), warp);
}

}  // namespace emulator

using namespace emulator;

extern "C" {

// Where the function of hopper.cuh was called that calls the emulator.
#define SITE {file, line, {__builtin_return_address(0), __builtin_return_address(1)}}

static void require_warps_of_32(const Site& site) {
    if (WARP != 32)
        runner->fail("%s: the instruction is one of warps of 32 threads, here they have %u", source_of(site).c_str(),
                     WARP);
}

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
    merge(to.arrived, r.current->completed);
    // Threads that go on may overtake this one.
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
    BoxCopy copy = {{}, {x, y, z}, reinterpret_cast<uintptr_t>(to), reinterpret_cast<uintptr_t>(barrier), 0, site};
    memcpy(&copy.map, map, sizeof copy.map);
    if (!r.barrier_at(copy.barrier, site).fenced)
        r.fail("%s: TMA copy to a barrier without a fence after its initialisation", source_of(site).c_str());
    SharedMemory* shared = r.shared_at(copy.to);
    if (copy.map.magic != TensorMap::MAGIC)
        r.fail("%s: tensor map that was not encoded by cuTensorMapEncodeTiled", source_of(site).c_str());
    if (!shared) r.fail("%s: TMA copy to memory that is not shared", source_of(site).c_str());
    if (copy.to % 1024)
        r.fail("%s: TMA copy to an address that is not aligned to 1024 bytes", source_of(site).c_str());
    copy.bytes = size_t(copy.map.box[0]) * copy.map.box[1] * copy.map.box[2] * 2;
    for (const BoxCopy& other : r.async.copies)
        if (copy.to < other.to + other.bytes && other.to < copy.to + copy.bytes)
            r.fail("%s: TMA copy to shared memory that another copy is still writing", source_of(site).c_str());
    for_rows(copy, [&](int64_t, int64_t begin, int64_t end, uintptr_t from) {
        access(from, size_t(2 * (end - begin)), false, Kind::Plain, nullptr, &site);
    });
    access(copy.to, copy.bytes, true, Kind::Plain, nullptr, &site);
    // Until the copy is done, what is there is not known.
    memset(&shared->written[copy.to - shared->begin], 0, copy.bytes);
    r.async.copies.push_back(copy);
}

void emulator_wgmma_fence() { runner->current->fenced = true; }

void emulator_wgmma(EmulatorWgmma* call, const char* file, int line) {
    const Site site = SITE;
    require_warps_of_32(site);
    if (!runner->gather_warpgroup(call, site)) return;
    runner->start_multiplication(site);
    runner->release_warpgroup();
}

void emulator_wgmma_commit(const char* file, int line) {
    const Site site = SITE;
    require_warps_of_32(site);
    if (!runner->gather_warpgroup(nullptr, site)) return;
    runner->async.warpgroups[runner->number_of(*runner->current) / WARPGROUP].committed++;
    runner->release_warpgroup();
}

void emulator_wgmma_wait(unsigned later, const char* file, int line) {
    const Site site = SITE;
    require_warps_of_32(site);
    if (!runner->gather_warpgroup(nullptr, site)) return;
    runner->finish_groups(later);
    runner->release_warpgroup();
}
}
