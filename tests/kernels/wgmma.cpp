// Multiplications by warpgroups, as called by the functions of hopper.cuh.
//
// A multiplication is done as late as a GPU may do it: at the wait for its group. Until then, the contents of its
// registers are undefined, and its inputs must not change.

#include <algorithm>
#include <cmath>
#include <cstring>

#include "hopper.h"
#include "runner.h"

namespace emulator {

namespace {

constexpr unsigned ROWS = Operands::ROWS;

unsigned size_of(EmulatorElement element) { return element == EMULATOR_BF16 ? 2 : 1; }

// Number of elements of k that a multiplication sums.
unsigned depth_of(EmulatorElement element) { return 32 / size_of(element); }

// For each 16 bytes of an operand with `rows` rows, or columns: address, row, element of k. They are elements of k, or
// eight rows if `across`. Tiles consist of groups of 8 x 128 bytes.
template <typename F>
void for_operand(const char* p, unsigned rows, bool across, EmulatorElement element, F f) {
    auto base = reinterpret_cast<uintptr_t>(p);
    unsigned size = size_of(element), depth = depth_of(element);
    if (across) {
        for (unsigned k = 0; k < depth; k++)
            for (unsigned row = 0; row < rows; row += 8)
                f(swizzled(base + k * ROW_BYTES + row / 64 * 64 * ROW_BYTES + row % 64 * 2), row, k);
    } else {
        for (unsigned row = 0; row < rows; row++)
            for (unsigned k = 0; k < depth; k += 16 / size) f(swizzled(base + row * ROW_BYTES + k * size), row, k);
    }
}

float from_fp8(uint8_t code, bool e5m2) {
    int mantissa_bits = e5m2 ? 2 : 3, bias = e5m2 ? 15 : 7;
    int exponent = (code & 0x7f) >> mantissa_bits, mantissa = code & ((1 << mantissa_bits) - 1);
    bool is_nan = e5m2 ? exponent == 31 && mantissa : (code & 0x7f) == 0x7f;
    float x = is_nan                   ? NAN
              : e5m2 && exponent == 31 ? INFINITY
              : exponent               ? ldexpf(float(mantissa | 1 << mantissa_bits), exponent - bias - mantissa_bits)
                                       : ldexpf(float(mantissa), 1 - bias - mantissa_bits);
    return code & 0x80 ? -x : x;
}

// Unpacks to (depth, rows).
void unpack(const char* p, unsigned rows, bool across, EmulatorElement element, float* to) {
    for_operand(p, rows, across, element, [&](uintptr_t address, unsigned row, unsigned k) {
        if (element != EMULATOR_BF16) {
            uint8_t codes[16];
            memcpy(codes, reinterpret_cast<void*>(address), sizeof codes);
            for (unsigned i = 0; i < 16; i++) to[(k + i) * rows + row] = from_fp8(codes[i], element == EMULATOR_E5M2);
            return;
        }
        uint16_t elements[8];
        memcpy(elements, reinterpret_cast<void*>(address), sizeof elements);
        for (unsigned i = 0; i < 8; i++) {
            uint32_t bits = uint32_t(elements[i]) << 16;
            memcpy(across ? &to[k * rows + row + i] : &to[(k + i) * rows + row], &bits, sizeof bits);
        }
    });
}

// The same, from the registers of a warpgroup: as those of mma.m16n8k16, with 16 rows per warp.
void unpack_registers(const Multiplication& m, float* to) {
    for (unsigned thread = 0; thread < WARPGROUP; thread++)
        for (unsigned i = 0; i < 8; i++) {
            unsigned row = thread / 32 * 16 + thread % 32 / 4 + i / 2 % 2 * 8;
            unsigned k = thread % 4 * 2 + i % 2 + i / 4 * 8;
            uint32_t bits = m.registers[thread].second[i / 2] >> 16 * (i % 2) << 16;
            memcpy(&to[k * ROWS + row], &bits, sizeof bits);
        }
}

void multiply(const Multiplication& m, Operands& operands) {
    float *a = operands.a, *b = operands.b;
    unsigned n = m.to->n;
    if (m.a) unpack(m.a, ROWS, m.a_across, m.element, a);
    else unpack_registers(m, a);
    unpack(m.b, n, m.b_across, m.element == EMULATOR_BF16 ? EMULATOR_BF16 : EMULATOR_E4M3, b);
    float* __restrict sums = m.to->sums.data();
    if (!m.add) std::fill_n(sums, ROWS * n, 0.0f);
    for (unsigned row = 0; row < ROWS; row++, sums += n)
        for (unsigned k = 0; k < depth_of(m.element); k += 4) {
            const float *left = &a[k * ROWS + row], *b0 = &b[k * n], *b1 = b0 + n, *b2 = b1 + n, *b3 = b2 + n;
            float a0 = left[0], a1 = left[ROWS], a2 = left[2 * ROWS], a3 = left[3 * ROWS];
            // Only with plain pointers does the compiler use vectors.
            for (unsigned column = 0; column < n; column++)
                sums[column] = sums[column] + a0 * b0[column] + a1 * b1[column] + a2 * b2[column] + a3 * b3[column];
        }
}

// For each register of a warpgroup that has (64, n): thread, number, and element.
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

// Waits for the other threads of the warpgroup. Returns true for the last one, which performs the operation for all of
// them.
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

// Performs the operation that the threads of the current warpgroup have called.
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
            !other.registers != !own.registers ||
            other.a_across != own.a_across || other.b_across != own.b_across || other.element != own.element)
            fail("%s: divergence: threads 0 and %u of the warpgroup pass different operands to wgmma",
                 source_of(site).c_str(), i);
    }
    if (!async.multiplies) async.readers.assign((dynamic.end - dynamic.begin + 15) / 16, {});
    async.multiplies = true;
    uint32_t number = ++group.issued;
    // What all threads of the warpgroup know.
    Clock known = fibers[index * WARPGROUP].completed;
    for (unsigned i = 1; i < WARPGROUP; i++)
        for (size_t j = 0; j < known.size(); j++)
            known[j] = std::min(known[j], fibers[index * WARPGROUP + i].completed[j]);
    auto check = [&](const void* p, unsigned rows, bool across) {
        if (reinterpret_cast<uintptr_t>(p) % 16)
            fail("%s: wgmma operand that is not aligned to 16 bytes", source_of(site).c_str());
        for_operand(static_cast<const char*>(p), rows, across, own.element, [&](uintptr_t address, unsigned, unsigned) {
            size_t offset = address - dynamic.begin;
            if (!dynamic.contains(address) || !dynamic.contains(address + 15))
                fail("%s: wgmma reads outside of dynamic shared memory", source_of(site).c_str());
            if (memchr(&dynamic.written[offset], 0, 16))
                fail("%s: wgmma reads shared memory that nothing has written", source_of(site).c_str());
            check_published(known, address, 16, site);
            async.readers[offset / 16][index] = number;
        });
    };
    if (own.a) check(own.a, ROWS, own.a_across);
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
    if (!to || own.registers)
        for (unsigned i = 0; i < WARPGROUP; i++)
            if (!fibers[index * WARPGROUP + i].fenced)
                fail("%s: wgmma uses registers without a wgmma_fence before it", source_of(site).c_str());
    if (!to) {
        group.accumulators.emplace_back(to = new Accumulator{own.n, {}, std::vector<float>(ROWS * own.n)});
        for (unsigned i = 0; i < WARPGROUP; i++) to->d[i] = call(i).d;
        for_registers(to->n, [&](unsigned thread, unsigned i, unsigned element) {
            to->sums[element] = to->d[thread][i];
            to->d[thread][i] = NAN;
        });
    }
    to->users++;
    group.pending.push_back({to, static_cast<const char*>(own.a), static_cast<const char*>(own.b), own.add,
                             own.a_across, own.b_across, own.element, {}, number, group.committed, site});
    if (!own.registers) return;
    for (unsigned i = 0; i < WARPGROUP; i++) {
        std::array<unsigned, 4> words;
        memcpy(words.data(), call(i).registers, sizeof words);
        group.pending.back().registers.emplace_back(call(i).registers, words);
    }
}

// Completes all but the `later` newest ones of the current warpgroup.
void Runner::finish_groups(unsigned later) {
    unsigned index = number_of(*current) / WARPGROUP;
    Warpgroup& group = async.warpgroups[index];
    auto& pending = group.pending;
    size_t done = 0;
    for (; done < pending.size() && pending[done].group + later < group.committed; done++) {
        for (auto& [at, words] : pending[done].registers)
            if (memcmp(at, words.data(), sizeof words))
                fail("%s: a register of the left operand is written before this wgmma was waited for",
                     source_of(pending[done].site).c_str());
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

// Fails unless the writes of these bytes were followed by fences that are known.
void Runner::check_published(const Clock& known, uintptr_t address, size_t size, const Site& site) {
    // A delivered copy has no writer any more.
    for (size_t i = (address - dynamic.begin) / 2; i < (address - dynamic.begin + size) / 2; i++) {
        const Cell& cell = dynamic.cells[i];
        if (cell.time != dynamic.time || !cell.writer.block) continue;
        uint32_t fence = async.published_by.empty() ? 1 : async.published_by[i];
        if (known[FENCES + warp_of(cell.writer.thread)] < fence)
            fail("%s: wgmma reads shared memory that thread %u has written, without fence_async and a barrier in "
                 "between", source_of(site).c_str(), cell.writer.thread);
    }
}

// Called at the end of the current thread.
void Runner::finish_multiplications() {
    const auto& pending = async.warpgroups[number_of(*current) / WARPGROUP].pending;
    if (!pending.empty())
        fail("%s: a thread ends without waiting for this wgmma", source_of(pending[0].site).c_str());
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

void emulator_fence_async() {
    Async& async = runner->async;
    const SharedMemory& shared = runner->dynamic;
    if (!async.multiplies) async.readers.assign((shared.end - shared.begin + 15) / 16, {});
    async.multiplies = true;
    if (async.published_by.empty()) async.published_by.assign((shared.end - shared.begin) / 2 + 1, 1);
    runner->current->completed[FENCES + warp_of(runner->number_of(*runner->current))]++;
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
