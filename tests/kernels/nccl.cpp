// A stand-in for libnccl.so.2, for ranks on one machine: collectives through a file that all ranks map. Device pointers
// are host pointers, and a collective is complete when the call returns; streams are ignored.
//
// It contains the functions that the communicator calls. Sums are computed in fp32 in the order of ranks and rounded
// once. Collectives that read unwritten memory fail, as do those that write outside device memory.
//
// At its end, rank 0 writes the number of operations to the file NCCL_OPERATIONS, if that is set: collectives outside
// of groups, and groups. Those of communicators that were split from another one do not count.
#include <fcntl.h>
#include <sched.h>
#include <sys/mman.h>
#include <unistd.h>

#include <algorithm>
#include <atomic>
#include <cstdint>
#include <cstdio>
#include <cstdlib>
#include <cstring>
#include <string>
#include <utility>

// Functions of libcuda.so. The first returns whether a range is device memory that has been written entirely; the
// second marks a range as written.
extern "C" bool emulator_device_reads(const void* p, size_t bytes);
extern "C" bool emulator_device_writes(void* p, size_t bytes);

namespace {

// Values of nccl.h.
enum Result { SUCCESS = 0, SYSTEM_ERROR = 2, INVALID_ARGUMENT = 4, REMOTE_ERROR = 6 };
enum Type { UINT8 = 1, FLOAT32 = 7, BFLOAT16 = 9 };
constexpr int SUM = 0;

// The file of a communicator: a barrier, and the data that each rank sends.
constexpr size_t CHUNK = 1 << 20;
constexpr int MAX_RANKS = 8;
struct Shared {
    std::atomic<int> arrived, phase, aborted;
    alignas(64) char sent[MAX_RANKS][CHUNK];
};

struct Id {
    char path[128];
};

struct Communicator {
    int rank, ranks;
    Shared* shared;
    // Whether it was split from another one.
    bool part = false;
    int operations = 0;

    // Waits for all ranks. Returns false after an abort.
    bool meet() {
        int phase = shared->phase;
        if (shared->arrived.fetch_add(1) + 1 == ranks) {
            shared->arrived = 0;
            shared->phase++;
        }
        while (shared->phase == phase) {
            if (shared->aborted) return false;
            sched_yield();
        }
        return true;
    }
};

std::string last_error;
int open_groups = 0;
// Collectives in the open group; only one communicator at a time has any.
Communicator* grouped = nullptr;

void count(Communicator& c) {
    if (open_groups)
        grouped = &c;
    else
        c.operations++;
}

Result failed(Result result, const char* reason) {
    last_error = reason;
    return result;
}

float widen(uint16_t x) {
    uint32_t bits = uint32_t(x) << 16;
    float value;
    memcpy(&value, &bits, sizeof value);
    return value;
}

// Rounds to nearest, ties to even.
uint16_t narrow(float x) {
    uint32_t bits;
    memcpy(&bits, &x, sizeof bits);
    if (x != x) return uint16_t(bits >> 16 | 0x40);
    return uint16_t((bits + 0x7fff + (bits >> 16 & 1)) >> 16);
}

size_t size_of(int type) { return type == UINT8 ? 1 : type == BFLOAT16 ? 2 : 4; }

// Returns the sum of the values that ranks have sent at this offset.
void add(const Communicator& c, size_t offset, char* to, size_t count, int type) {
    for (size_t i = 0; i < count; i++) {
        float sum = 0;
        for (int rank = 0; rank < c.ranks; rank++) {
            const char* from = c.shared->sent[rank] + offset;
            sum += type == FLOAT32 ? reinterpret_cast<const float*>(from)[i]
                                   : widen(reinterpret_cast<const uint16_t*>(from)[i]);
        }
        if (type == FLOAT32)
            reinterpret_cast<float*>(to)[i] = sum;
        else
            reinterpret_cast<uint16_t*>(to)[i] = narrow(sum);
    }
}

// Calls `send`; when all ranks have done so, calls `receive` with each part (offset, elements) of all elements.
template <class Send, class Receive>
Result in_parts(Communicator& c, size_t elements, size_t most, Send send, Receive receive) {
    count(c);
    for (size_t at = 0; at < elements; at += most) {
        size_t now = std::min(most, elements - at);
        send(at, now);
        if (!c.meet()) return failed(REMOTE_ERROR, "aborted");
        receive(at, now);
        if (!c.meet()) return failed(REMOTE_ERROR, "aborted");
    }
    return SUCCESS;
}

Result check(const void* from, size_t read, void* to, size_t written) {
    if (!emulator_device_reads(from, read))
        return failed(INVALID_ARGUMENT, "a collective reads memory that nothing has written");
    if (!emulator_device_writes(to, written))
        return failed(INVALID_ARGUMENT, "a collective writes outside of an allocation");
    return SUCCESS;
}

bool can_add(int type, int operation) { return (type == FLOAT32 || type == BFLOAT16) && operation == SUM; }

}  // namespace

extern "C" {

int ncclGetUniqueId(Id* id) {
    const char* directory = getenv("TMPDIR");
    snprintf(id->path, sizeof id->path, "%s/nccl-XXXXXX", directory ? directory : "/tmp");
    int file = mkstemp(id->path);
    bool made = file >= 0 && ftruncate(file, sizeof(Shared)) == 0;
    if (file >= 0) close(file);
    return made ? SUCCESS : failed(SYSTEM_ERROR, "cannot make a file");
}

int ncclCommInitRank(Communicator** result, int ranks, Id id, int rank) {
    if (ranks > MAX_RANKS) return failed(INVALID_ARGUMENT, "too many ranks");
    int file = open(id.path, O_RDWR);
    if (file < 0) return failed(SYSTEM_ERROR, "cannot open the file of the id");
    void* mapped = mmap(nullptr, sizeof(Shared), PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    if (mapped == MAP_FAILED) return failed(SYSTEM_ERROR, "cannot map the file of the id");
    *result = new Communicator{rank, ranks, static_cast<Shared*>(mapped)};
    if (!(*result)->meet()) return failed(REMOTE_ERROR, "aborted");
    if (rank == 0) unlink(id.path);
    return SUCCESS;
}

int ncclCommSplit(Communicator* c, int color, int key, Communicator** result, void*) {
    struct Place {
        int color, key;
        Id id;
    };
    auto place = [&](int rank) { return reinterpret_cast<Place*>(c->shared->sent[rank]); };
    *place(c->rank) = {color, key, {}};
    if (!c->meet()) return failed(REMOTE_ERROR, "aborted");
    int rank = 0, ranks = 0, first = c->rank;
    for (int other = 0; other < c->ranks; other++) {
        if (place(other)->color != color) continue;
        ranks++, rank += place(other)->key < key;
        if (place(other)->key < place(first)->key) first = other;
    }
    if (rank == 0)
        if (int bad = ncclGetUniqueId(&place(c->rank)->id)) return bad;
    if (!c->meet()) return failed(REMOTE_ERROR, "aborted");
    Id id = place(first)->id;
    if (!c->meet()) return failed(REMOTE_ERROR, "aborted");
    if (int bad = ncclCommInitRank(result, ranks, id, rank)) return bad;
    (*result)->part = true;
    return SUCCESS;
}

int ncclAllReduce(const char* from, char* to, size_t count, int type, int operation, Communicator* c, void*) {
    size_t size = size_of(type);
    if (!can_add(type, operation)) return failed(INVALID_ARGUMENT, "only sums of bf16 and fp32");
    if (Result bad = check(from, count * size, to, count * size)) return bad;
    return in_parts(
        *c, count, CHUNK / size,
        [&](size_t at, size_t now) { memcpy(c->shared->sent[c->rank], from + at * size, now * size); },
        [&](size_t at, size_t now) { add(*c, 0, to + at * size, now, type); });
}

// `count` elements for each rank; those for one rank follow those for another.
int ncclReduceScatter(const char* from, char* to, size_t count, int type, int operation, Communicator* c, void*) {
    size_t size = size_of(type), most = CHUNK / MAX_RANKS / size;
    if (!can_add(type, operation)) return failed(INVALID_ARGUMENT, "only sums of bf16 and fp32");
    if (Result bad = check(from, c->ranks * count * size, to, count * size)) return bad;
    auto send = [&](size_t at, size_t now) {
        for (int rank = 0; rank < c->ranks; rank++)
            memcpy(c->shared->sent[c->rank] + rank * most * size, from + (rank * count + at) * size, now * size);
    };
    auto receive = [&](size_t at, size_t now) { add(*c, c->rank * most * size, to + at * size, now, type); };
    return in_parts(*c, count, most, send, receive);
}

int ncclReduce(
    const char* from, char* to, size_t count, int type, int operation, int root, Communicator* c, void*
) {
    size_t size = size_of(type);
    bool receives = c->rank == root;
    if (!can_add(type, operation)) return failed(INVALID_ARGUMENT, "only sums of bf16 and fp32");
    if (Result bad = check(from, count * size, to, receives ? count * size : 0)) return bad;
    return in_parts(
        *c, count, CHUNK / size,
        [&](size_t at, size_t now) { memcpy(c->shared->sent[c->rank], from + at * size, now * size); },
        [&](size_t at, size_t now) {
            if (receives) add(*c, 0, to + at * size, now, type);
        });
}

int ncclAllGather(const char* from, char* to, size_t count, int type, Communicator* c, void*) {
    size_t bytes = count * size_of(type);
    if (Result bad = check(from, bytes, to, c->ranks * bytes)) return bad;
    auto receive = [&](size_t at, size_t now) {
        for (int rank = 0; rank < c->ranks; rank++) memcpy(to + rank * bytes + at, c->shared->sent[rank], now);
    };
    return in_parts(
        *c, bytes, CHUNK, [&](size_t at, size_t now) { memcpy(c->shared->sent[c->rank], from + at, now); }, receive);
}

int ncclBroadcast(const char* from, char* to, size_t count, int type, int root, Communicator* c, void*) {
    size_t bytes = count * size_of(type);
    bool sends = c->rank == root;
    if (Result bad = check(from, sends ? bytes : 0, to, bytes)) return bad;
    return in_parts(
        *c, bytes, CHUNK,
        [&](size_t at, size_t now) {
            if (sends) memcpy(c->shared->sent[root], from + at, now);
        },
        [&](size_t at, size_t now) { memcpy(to + at, c->shared->sent[root], now); });
}

// Collectives are complete when their calls return, inside and outside a group.
int ncclGroupStart() {
    open_groups++;
    return SUCCESS;
}
int ncclGroupEnd() {
    open_groups--;
    if (grouped) count(*std::exchange(grouped, nullptr));
    return SUCCESS;
}

int ncclCommGetAsyncError(Communicator*, int* result) { return *result = SUCCESS; }
int ncclCommFinalize(Communicator* c) { return c->meet() ? SUCCESS : failed(REMOTE_ERROR, "aborted"); }
int ncclCommDestroy(Communicator* c) {
    const char* path = c->rank == 0 && !c->part ? getenv("NCCL_OPERATIONS") : nullptr;
    if (FILE* file = path ? fopen(path, "w") : nullptr) {
        fprintf(file, "%d\n", c->operations);
        fclose(file);
    }
    munmap(c->shared, sizeof(Shared));
    delete c;
    return SUCCESS;
}
// The memory stays mapped: another thread may be in a collective.
int ncclCommAbort(Communicator* c) {
    c->shared->aborted = 1;
    return SUCCESS;
}
const char* ncclGetErrorString(int) { return "the stand-in for NCCL has failed"; }
const char* ncclGetLastError(Communicator*) { return last_error.c_str(); }

}  // extern "C"
