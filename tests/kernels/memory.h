// Device memory, and the state that is tracked for every byte of it.
//
// Device memory is a range of addresses of this process. Allocations are far apart, and their addresses are not reused
// soon, so that every access outside an allocation is detected. For each byte, the emulator knows whether it was
// written; for each pair of bytes, which thread last wrote and read it during the current launch.
#pragma once

#include <atomic>
#include <cstddef>
#include <cstdint>

namespace emulator {

// Threads are numbered within their block. Accesses are ordered if a barrier of the block (epoch), or of the warp
// (the warp epoch next to it, for threads of the same warp), lies between them.
struct Access {
    uint32_t block;  // number + 1; 0: none; MANY_BLOCKS: several
    uint16_t thread;  // or a warp or all, see below
    uint16_t epoch;
};
constexpr uint32_t MANY_BLOCKS = 0xffffffff;
constexpr uint16_t WHOLE_WARP = 0x8000, MANY_THREADS = 0xffff;

// State of two bytes. Small, because cells are most of the memory that an access touches.
struct Cell {
    // The launch (device memory) or block (shared memory) that this describes; older state is forgotten.
    uint32_t time : 31;
    uint32_t alike : 1;  // blocks write the same
    uint16_t writer_warp_epoch, reader_warp_epoch;
    Access writer, reader;
};
static_assert(sizeof(Cell) == 24);

// Allocates device memory. Returns 0 if there is no room.
uintptr_t reserve(size_t bytes);
void map(uintptr_t address, size_t bytes);
void unmap(uintptr_t address);
uintptr_t allocate(size_t bytes);
void deallocate(uintptr_t address);
size_t allocated_bytes();
constexpr size_t TOTAL_BYTES = size_t(80) << 30;

// Host memory that kernels may access.
void register_host(uintptr_t address, size_t bytes);
void unregister_host(uintptr_t address);
// Returns whether these bytes lie within one registered range or touch none. A driver refuses any other copy.
bool host_range_contains(uintptr_t address, size_t bytes);

// Records a copy or memset of the host; returns false if it leaves its allocation.
bool host_writes(uintptr_t address, size_t bytes);
bool host_reads(uintptr_t address, size_t bytes);

// The kind of memory at an address, and the end of the range: at least `bytes` later if the range is that long.
enum class Place { Nowhere, Device, Host };
struct Range {
    Place place;
    uintptr_t end;
};
Range find(uintptr_t address, size_t bytes);

constexpr size_t PAGE = 4096, ARENA = size_t(96) << 30;

// All of it is reserved at once; pages exist once they are touched. Defined here because every access needs it.
struct Arena {
    uintptr_t base;
    uint8_t* written;
    Cell* cells;
    // End of the allocation that contains this page; 0 if none.
    std::atomic<uintptr_t>* ends;

    bool contains(uintptr_t address) const { return address - base < ARENA; }
    uintptr_t end_of(uintptr_t address) const {
        return ends[(address - base) / PAGE].load(std::memory_order_relaxed);
    }
};
extern __attribute__((visibility("hidden"))) const Arena arena;

inline Cell* cell_of(uintptr_t address) { return arena.cells + (address - arena.base) / 2; }
inline uint8_t* written_of(uintptr_t address) { return arena.written + (address - arena.base); }

}  // namespace emulator
