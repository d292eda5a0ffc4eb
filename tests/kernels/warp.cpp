// Joint operations of the lanes of a warp, and copies from device to shared memory.

#include <cstdlib>
#include <cstring>

#include "runner.h"

namespace emulator {

namespace {

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

}  // namespace

const unsigned WARP = [] {
    const char* text = getenv("EMULATOR_WARP");
    return text ? unsigned(strtoul(text, nullptr, 10)) : 32u;
}();
const unsigned WARP_BITS = unsigned(__builtin_ctz(WARP));

// Performs the operation that the lanes of the current warp have called together.
void Runner::complete(EmulatorOperation operation) {
    const Site site = {current->file, current->line, {}};
    switch (operation) {
        case EMULATOR_SYNC:
            for (unsigned i = 0; i < WARP; i++)
                if (current->mask >> i & 1) lane(i).warp_epoch++;
            join_clocks(number_of(lane(0)), WARP, current->mask);
            break;
        case EMULATOR_SHUFFLE: {
            uint64_t values[MAX_WARP] = {};
            for (unsigned i = 0; i < WARP; i++)
                if (current->mask >> i & 1) values[i] = static_cast<EmulatorShuffle*>(lane(i).data)->value;
            for (unsigned i = 0; i < WARP; i++) {
                if (!(current->mask >> i & 1)) continue;
                auto& call = *static_cast<EmulatorShuffle*>(lane(i).data);
                if (call.from < 0 || call.from >= int(WARP)) continue;
                if (!(current->mask >> call.from & 1))
                    fail("%s:%d: shuffle from a lane that does not take part", site.file, site.line);
                call.value = values[call.from];
            }
            break;
        }
        case EMULATOR_LDMATRIX:
        case EMULATOR_LDMATRIX_TRANSPOSED: {
            uint16_t elements[MAX_WARP][8];
            Fiber* self = current;
            for (unsigned i = 0; i < WARP; i++) {
                const void* row = static_cast<EmulatorMatrix*>(lane(i).data)->row;
                auto address = reinterpret_cast<uintptr_t>(row);
                if (!shared_at(address))
                    fail("%s:%d: ldmatrix from memory that is not shared", site.file, site.line);
                // The access belongs to the lane that supplied the address.
                current = &fibers[warp_of(number_of(*self)) * WARP + i];
                access(address, 16, false, Kind::Plain, nullptr, &site);
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
            float a[16][16] = {}, b[16][8] = {}, c[16][8];
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
                for (unsigned j = 0; j < 4; j++) c[i / 4 + j / 2 * 8][i % 4 * 2 + j % 2] = call.c[j];
            }
            for (unsigned row = 0; row < 16; row++)
                for (unsigned k = 0; k < depth; k++)
                    for (unsigned column = 0; column < 8; column++) c[row][column] += a[row][k] * b[k][column];
            for (unsigned i = 0; i < WARP; i++) {
                auto& call = *static_cast<EmulatorMma*>(lane(i).data);
                for (unsigned j = 0; j < 4; j++) call.c[j] = c[i / 4 + j / 2 * 8][i % 4 * 2 + j % 2];
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

}  // namespace emulator

using namespace emulator;

extern "C" {

void emulator_warp(EmulatorOperation operation, uint64_t mask, void* data, const char* file, int line) {
    Runner& r = *runner;
    Fiber& self = *r.current;
    self.state = State::InWarp, self.operation = operation, self.mask = mask, self.data = data;
    self.file = file, self.line = line;
    if (operation >= EMULATOR_LDMATRIX && WARP != 32)
        r.fail("%s:%d: the instruction is one of warps of 32 threads, here they have %u", file, line, WARP);
    unsigned warp = warp_of(r.number_of(self)), first = warp * WARP;
    // Begins with the lane that was missing last. Most lanes then look at only one other lane, and the last lane looks
    // at all.
    unsigned& awaited = r.awaited[warp];
    for (unsigned looked = 0; looked < WARP; looked++, awaited = (awaited + 1) % WARP) {
        if (!(mask >> awaited & 1)) continue;
        const Fiber& other = r.fibers[first + awaited];
        if (first + awaited >= r.count || other.state == State::Done)
            r.fail("%s:%d: lane %u of the mask does not take part: it has returned or does not exist", file, line,
                   awaited);
        bool has_arrived = other.state == State::InWarp && other.operation == operation && other.mask == mask &&
                           other.line == line && (other.file == file || !strcmp(other.file, file));
        if (!has_arrived) return r.yield();
    }
    r.complete(operation);
    for (unsigned i = 0; i < WARP; i++)
        if (mask >> i & 1) r.fibers[first + i].state = State::Ready;
}

void emulator_copy_async(void* to, const void* from, unsigned bytes) {
    Runner& r = *runner;
    void* pc = __builtin_return_address(0);
    auto address = reinterpret_cast<uintptr_t>(to);
    access(reinterpret_cast<uintptr_t>(from), bytes, false, Kind::Plain, pc);
    access(address, 16, true, Kind::Plain, pc);
    SharedMemory* shared = r.shared_at(address);
    if (!shared) r.fail("%s: cp.async to memory that is not shared", source_of(pc).c_str());
    // Until the wait, these bytes are undefined.
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
}
