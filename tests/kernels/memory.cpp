#include "memory.h"

#include <sys/mman.h>

#include <cstring>
#include <deque>
#include <map>
#include <mutex>

namespace emulator {

namespace {

constexpr int POISON = 0xff;  // a NaN, and an index that is far away
// Larger allocations are zeroed instead, because poisoning would take the same amount of host memory.
constexpr size_t MOST_POISON = size_t(1) << 30;

uint8_t* reserve_lazily(size_t bytes) {
    void* p = mmap(nullptr, bytes, PROT_READ | PROT_WRITE, MAP_PRIVATE | MAP_ANONYMOUS | MAP_NORESERVE, -1, 0);
    return p == MAP_FAILED ? nullptr : static_cast<uint8_t*>(p);
}

// Freed buffers of at most this size are kept, and reused once so many others were freed after them: their pages exist.
// Until then they cannot be accessed.
constexpr size_t LARGEST_KEPT = size_t(4) << 20, MOST_KEPT = size_t(32) << 20, REUSED_AFTER = 32;
struct Freed {
    uintptr_t address;
    size_t size;
};
std::deque<Freed> kept;
size_t kept_bytes = 0;

std::mutex lock;
uintptr_t next_offset = PAGE;
size_t total = 0;
std::map<uintptr_t, size_t> allocations, host_ranges;

uintptr_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

// Returns the size of the range for a buffer: one of few sizes if the range is kept, up to an eighth larger.
size_t range_for(size_t bytes) {
    size_t step = PAGE;
    if (bytes <= LARGEST_KEPT)
        while (bytes > 8 * step) step *= 2;
    return round_up(bytes, step);
}

void discard(uintptr_t address, size_t size) {
    size_t offset = address - arena.base;
    madvise(reinterpret_cast<void*>(address), size, MADV_DONTNEED);
    madvise(arena.written + offset, size, MADV_DONTNEED);
    madvise(arena.cells + offset / 2, size / 2 * sizeof(Cell), MADV_DONTNEED);
}

// Makes the pages of cells that kernels will use. A page that is first read is one of zeros for all, and the write that
// follows would interrupt all cores. Fails on an old system, where pages are made on their first use.
void make_cells(uintptr_t address, size_t size) {
    (void)madvise(cell_of(address), size / 2 * sizeof(Cell), MADV_POPULATE_WRITE);
}

// Ends the allocation at this address. Returns its size, or 0 if there is none.
size_t end_allocation(uintptr_t address) {
    auto found = allocations.find(address);
    if (found == allocations.end()) return 0;
    size_t bytes = found->second;
    for (uintptr_t page = address; page < address + bytes; page += PAGE) arena.ends[(page - arena.base) / PAGE] = 0;
    total -= bytes;
    allocations.erase(found);
    return bytes;
}

// Returns a kept range of this size, as one that was never written; 0 if there is none.
uintptr_t take_kept(size_t size) {
    std::lock_guard<std::mutex> guard(lock);
    for (size_t i = 0; i + REUSED_AFTER < kept.size(); i++) {
        if (kept[i].size != size) continue;
        uintptr_t address = kept[i].address;
        kept.erase(kept.begin() + long(i)), kept_bytes -= size;
        memset(written_of(address), 0, size);
        return address;
    }
    return 0;
}

}  // namespace

const Arena arena = {
    reinterpret_cast<uintptr_t>(reserve_lazily(ARENA)),
    reserve_lazily(ARENA),
    reinterpret_cast<Cell*>(reserve_lazily(ARENA / 2 * sizeof(Cell))),
    reinterpret_cast<std::atomic<uintptr_t>*>(reserve_lazily(ARENA / PAGE * 8)),
};

uintptr_t reserve(size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    const Arena& a = arena;
    // An unused page remains between two ranges.
    size_t size = round_up(bytes, PAGE) + PAGE;
    if (!a.base || !a.written || !a.cells || !a.ends || next_offset + size > ARENA) return 0;
    uintptr_t address = a.base + next_offset;
    next_offset += size;
    return address;
}

void map(uintptr_t address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    const Arena& a = arena;
    uintptr_t end = address + bytes;
    for (uintptr_t page = address; page < end; page += PAGE) a.ends[(page - a.base) / PAGE] = end;
    if (bytes <= MOST_POISON) memset(reinterpret_cast<void*>(address), POISON, bytes);
    allocations[address] = bytes;
    total += bytes;
}

void unmap(uintptr_t address) {
    std::lock_guard<std::mutex> guard(lock);
    if (size_t bytes = end_allocation(address)) discard(address, round_up(bytes, PAGE));
}

uintptr_t allocate(size_t bytes) {
    if (allocated_bytes() + bytes > TOTAL_BYTES) return 0;
    size_t size = range_for(bytes);
    uintptr_t address = take_kept(size);
    if (!address) {
        address = reserve(size);
        if (address && size <= LARGEST_KEPT) make_cells(address, size);
    }
    if (address) map(address, bytes);
    return address;
}

void deallocate(uintptr_t address) {
    std::lock_guard<std::mutex> guard(lock);
    size_t bytes = end_allocation(address);
    if (!bytes) return;
    size_t size = range_for(bytes);
    if (bytes > LARGEST_KEPT) return discard(address, size);
    kept.push_back({address, size}), kept_bytes += size;
    for (; kept_bytes > MOST_KEPT; kept.pop_front()) {
        discard(kept.front().address, kept.front().size);
        kept_bytes -= kept.front().size;
    }
}

size_t allocated_bytes() {
    std::lock_guard<std::mutex> guard(lock);
    return total;
}

void register_host(uintptr_t address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    host_ranges[address] = bytes;
}

void unregister_host(uintptr_t address) {
    std::lock_guard<std::mutex> guard(lock);
    host_ranges.erase(address);
}

bool host_range_contains(uintptr_t address, size_t bytes) {
    std::lock_guard<std::mutex> guard(lock);
    // The last range that begins before the end must end before the address, or contain both.
    auto after = host_ranges.lower_bound(address + bytes);
    if (after == host_ranges.begin()) return true;
    auto range = std::prev(after);
    uintptr_t end = range->first + range->second;
    return end <= address || (range->first <= address && address + bytes <= end);
}

bool host_writes(uintptr_t address, size_t bytes) {
    if (!bytes) return true;
    Range range = find(address, bytes);
    if (range.place != Place::Device || bytes > range.end - address) return false;
    memset(written_of(address), 1, bytes);
    return true;
}

bool host_reads(uintptr_t address, size_t bytes) {
    Range range = find(address, bytes);
    return !bytes || (range.place == Place::Device && bytes <= range.end - address);
}

Range find(uintptr_t address, size_t bytes) {
    const Arena& a = arena;
    if (a.contains(address)) {
        uintptr_t end = a.end_of(address);
        if (address >= end) return {Place::Nowhere, 0};
        // Mappings of one reserved range may be adjacent.
        while (end - address < bytes && end % PAGE == 0) {
            uintptr_t next = a.end_of(end);
            if (next <= end) break;
            end = next;
        }
        return {Place::Device, end};
    }
    std::lock_guard<std::mutex> guard(lock);
    auto after = host_ranges.upper_bound(address);
    if (after == host_ranges.begin()) return {Place::Nowhere, 0};
    auto range = std::prev(after);
    uintptr_t end = range->first + range->second;
    return address < end ? Range{Place::Host, end} : Range{Place::Nowhere, 0};
}

}  // namespace emulator
