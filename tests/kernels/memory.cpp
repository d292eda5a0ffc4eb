#include "memory.h"

#include <sys/mman.h>

#include <cstring>
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

std::mutex lock;
uintptr_t next_offset = PAGE;
size_t total = 0;
std::map<uintptr_t, size_t> allocations, host_ranges;

uintptr_t round_up(size_t bytes, size_t to) { return (bytes + to - 1) / to * to; }

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
    const Arena& a = arena;
    auto found = allocations.find(address);
    if (found == allocations.end()) return;
    size_t bytes = found->second;
    for (uintptr_t page = address; page < address + bytes; page += PAGE) a.ends[(page - a.base) / PAGE] = 0;
    size_t offset = address - a.base, whole = round_up(bytes, PAGE);
    madvise(reinterpret_cast<void*>(address), whole, MADV_DONTNEED);
    madvise(a.written + offset, whole, MADV_DONTNEED);
    madvise(a.cells + offset / 2, whole / 2 * sizeof(Cell), MADV_DONTNEED);
    total -= bytes;
    allocations.erase(found);
}

uintptr_t allocate(size_t bytes) {
    uintptr_t address = allocated_bytes() + bytes <= TOTAL_BYTES ? reserve(bytes) : 0;
    if (address) map(address, bytes);
    return address;
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
