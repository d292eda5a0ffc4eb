// libcuda.so: the part of the CUDA driver API that the engine and the pool use, for one device whose threads are fibers
// on this machine's cores. Everything is complete when it is enqueued. Numbers are those of cuda.h.

#include <dlfcn.h>
#include <elf.h>
#include <unistd.h>

#include <chrono>
#include <cstdlib>
#include <cstring>
#include <map>
#include <memory>
#include <mutex>
#include <string>

#include "hopper.h"
#include "launch.h"
#include "memory.h"

using namespace emulator;

namespace {

enum Result {
    SUCCESS = 0,
    INVALID_VALUE = 1,
    OUT_OF_MEMORY = 2,
    INVALID_IMAGE = 200,
    INVALID_HANDLE = 400,
    NOT_FOUND = 500,
    LAUNCH_FAILED = 719,
    NOT_SUPPORTED = 801,
};

// Values of CUdevice_attribute.
enum Attribute {
    WARP_SIZE = 10,
    MULTIPROCESSORS = 16,
    CAPABILITY_MAJOR = 75,
    CAPABILITY_MINOR = 76,
    MAX_SHARED = 97,
    VIRTUAL_MEMORY = 102,
};

constexpr int SHARED_PER_BLOCK = 232448, DEFAULT_SHARED = 48 << 10, SHARED_LIMIT_ATTRIBUTE = 8;
constexpr unsigned MAX_GRID_YZ = 65535;
constexpr int DEVICES = 8;

struct Function {
    std::string name;
    const EmulatorKernel* kernel;
    size_t shared_limit = DEFAULT_SHARED;
};

struct Event {
    std::chrono::steady_clock::time_point time = std::chrono::steady_clock::now();
};

struct LaunchConfig {
    unsigned grid_x, grid_y, grid_z, block_x, block_y, block_z, shared;
    void* stream;
    void* attributes;
    unsigned attribute_count;
};

// For operands that are too large to be computed entirely: a number of multiprocessors with which no block has a second
// turn in a grid-stride loop, and kernels that are not run ($EMULATOR_MULTIPROCESSORS, $EMULATOR_SKIP).
const int multiprocessors = [] {
    const char* text = getenv("EMULATOR_MULTIPROCESSORS");
    return text ? atoi(text) : 3;
}();
const char* const skipped = getenv("EMULATOR_SKIP");

// The last failure, as reported by cuGetErrorString.
std::mutex lock;
std::string last_problem;
int context, stream;

int failed(Result result, std::string problem) {
    std::lock_guard<std::mutex> guard(lock);
    last_problem = std::move(problem);
    return result;
}

// Returns the size of a library file in memory: its section headers are at the end.
size_t image_bytes(const void* image) {
    auto header = static_cast<const Elf64_Ehdr*>(image);
    if (memcmp(header->e_ident, ELFMAG, SELFMAG)) return 0;
    return header->e_shoff + size_t(header->e_shnum) * header->e_shentsize;
}

int copy(uintptr_t to, uintptr_t from, size_t bytes, bool to_device, bool from_device) {
    if (from_device && !host_reads(from, bytes)) return failed(INVALID_VALUE, "a copy reads outside of an allocation");
    if (to_device && !host_writes(to, bytes)) return failed(INVALID_VALUE, "a copy writes outside of an allocation");
    memcpy(reinterpret_cast<void*>(to), reinterpret_cast<void*>(from), bytes);
    return SUCCESS;
}

}  // namespace

extern "C" {

int cuInit(unsigned) { return SUCCESS; }
// Each rank of a job has its own device. Within a process, all devices are the same.
int cuDeviceGet(int* device, int ordinal) {
    *device = 0;
    return ordinal >= 0 && ordinal < DEVICES ? SUCCESS : 101;  // CUDA_ERROR_INVALID_DEVICE
}
int cuDeviceGetCount(int* count) { return *count = DEVICES, SUCCESS; }
int cuDeviceGetName(char* name, int bytes, int) {
    strncpy(name, "CPU threads", size_t(bytes));
    return SUCCESS;
}
int cuDeviceGetUuid(char* uuid, int) { return memset(uuid, 0, 16), SUCCESS; }
int cuDeviceGetUuid_v2(char* uuid, int device) { return cuDeviceGetUuid(uuid, device); }
int cuDeviceTotalMem_v2(size_t* bytes, int) { return *bytes = TOTAL_BYTES, SUCCESS; }
int cuDeviceGetAttribute(int* value, int attribute, int) {
    switch (attribute) {
        case WARP_SIZE: *value = int(WARP); break;
        case MULTIPROCESSORS: *value = multiprocessors; break;
        case CAPABILITY_MAJOR: *value = 9; break;
        case CAPABILITY_MINOR: *value = 0; break;
        case MAX_SHARED: *value = SHARED_PER_BLOCK; break;
        case VIRTUAL_MEMORY: *value = 1; break;
        default: *value = 0;
    }
    return SUCCESS;
}
int cuDevicePrimaryCtxRetain(void** result, int) { return *result = &context, SUCCESS; }
int cuDevicePrimaryCtxRelease_v2(int) { return SUCCESS; }
int cuCtxGetCurrent(void** result) { return *result = &context, SUCCESS; }
int cuCtxSetCurrent(void*) { return SUCCESS; }
int cuCtxSynchronize() { return SUCCESS; }
int cuCtxGetStreamPriorityRange(int* least, int* greatest) { return *least = *greatest = 0, SUCCESS; }
int cuGetErrorName(int, const char** name) { return *name = "CUDA_ERROR", SUCCESS; }
int cuGetErrorString(int, const char** text) {
    static thread_local std::string copy;
    std::lock_guard<std::mutex> guard(lock);
    copy = last_problem;
    return *text = copy.c_str(), SUCCESS;
}

int cuStreamCreate(void** result, unsigned) { return *result = &stream, SUCCESS; }
int cuStreamCreateWithPriority(void** result, unsigned, int) { return *result = &stream, SUCCESS; }
int cuStreamDestroy_v2(void*) { return SUCCESS; }
int cuStreamSynchronize(void*) { return SUCCESS; }
int cuStreamWaitEvent(void*, void*, unsigned) { return SUCCESS; }
int cuStreamIsCapturing(void*, int* status) { return *status = 0, SUCCESS; }
int cuStreamBeginCapture_v2(void*, int) { return failed(NOT_SUPPORTED, "graphs are not supported on CPU threads"); }

int cuEventCreate(Event** event, unsigned) { return *event = new Event, SUCCESS; }
int cuEventDestroy_v2(Event* event) { return delete event, SUCCESS; }
int cuEventRecord(Event* event, void*) { return *event = Event(), SUCCESS; }
int cuEventSynchronize(Event*) { return SUCCESS; }
int cuEventQuery(Event*) { return SUCCESS; }
int cuEventElapsedTime(float* ms, Event* begin, Event* end) {
    *ms = std::chrono::duration<float, std::milli>(end->time - begin->time).count();
    return SUCCESS;
}
int cuEventElapsedTime_v2(float* ms, Event* begin, Event* end) { return cuEventElapsedTime(ms, begin, end); }

int cuMemGetInfo_v2(size_t* free, size_t* total) {
    *total = TOTAL_BYTES, *free = TOTAL_BYTES - allocated_bytes();
    return SUCCESS;
}
int cuMemAlloc_v2(uintptr_t* address, size_t bytes) {
    *address = allocate(bytes);
    return *address ? SUCCESS : failed(OUT_OF_MEMORY, "out of memory");
}
int cuMemFree_v2(uintptr_t address) { return deallocate(address), SUCCESS; }
int cuMemHostAlloc(void** address, size_t bytes, unsigned) {
    *address = aligned_alloc(4096, (bytes + 4095) / 4096 * 4096);
    if (!*address) return failed(OUT_OF_MEMORY, "out of memory");
    register_host(reinterpret_cast<uintptr_t>(*address), bytes);
    return SUCCESS;
}
int cuMemFreeHost(void* address) {
    unregister_host(reinterpret_cast<uintptr_t>(address));
    free(address);
    return SUCCESS;
}
int cuMemHostRegister_v2(void* address, size_t bytes, unsigned) {
    return register_host(reinterpret_cast<uintptr_t>(address), bytes), SUCCESS;
}
int cuMemHostUnregister(void* address) { return unregister_host(reinterpret_cast<uintptr_t>(address)), SUCCESS; }
int cuMemHostGetDevicePointer_v2(uintptr_t* device, void* host, unsigned) {
    return *device = reinterpret_cast<uintptr_t>(host), SUCCESS;
}

int cuMemGetAllocationGranularity(size_t* bytes, const void*, int) { return *bytes = 2 << 20, SUCCESS; }
int cuMemAddressReserve(uintptr_t* address, size_t bytes, size_t, uintptr_t, unsigned long long) {
    *address = reserve(bytes);
    return *address ? SUCCESS : failed(OUT_OF_MEMORY, "no addresses are left");
}
// Memory is allocated when it is mapped, so handles are sizes.
int cuMemCreate(unsigned long long* handle, size_t bytes, const void*, unsigned long long) {
    if (allocated_bytes() + bytes > TOTAL_BYTES) return failed(OUT_OF_MEMORY, "out of memory");
    return *handle = bytes, SUCCESS;
}
int cuMemMap(uintptr_t address, size_t bytes, size_t, unsigned long long, unsigned long long) {
    return map(address, bytes), SUCCESS;
}
int cuMemSetAccess(uintptr_t, size_t, const void*, size_t) { return SUCCESS; }
int cuMemUnmap(uintptr_t address, size_t) { return unmap(address), SUCCESS; }
int cuMemRelease(unsigned long long) { return SUCCESS; }

int cuMemcpyHtoDAsync_v2(uintptr_t to, const void* from, size_t bytes, void*) {
    return copy(to, reinterpret_cast<uintptr_t>(from), bytes, true, false);
}
int cuMemcpyDtoHAsync_v2(void* to, uintptr_t from, size_t bytes, void*) {
    if (!host_range_contains(reinterpret_cast<uintptr_t>(to), bytes))
        return failed(INVALID_VALUE, "a copy writes to host memory that is not all in one pinned range");
    return copy(reinterpret_cast<uintptr_t>(to), from, bytes, false, true);
}
int cuMemcpyDtoDAsync_v2(uintptr_t to, uintptr_t from, size_t bytes, void*) {
    return copy(to, from, bytes, true, true);
}
int cuMemsetD8Async(uintptr_t to, unsigned char value, size_t bytes, void*) {
    if (!host_writes(to, bytes)) return failed(INVALID_VALUE, "a memset writes outside of an allocation");
    memset(reinterpret_cast<void*>(to), value, bytes);
    return SUCCESS;
}

// Functions for the stand-in of cuBLASLt.
bool emulator_device_reads(const void* p, size_t bytes) {
    auto address = reinterpret_cast<uintptr_t>(p);
    return host_reads(address, bytes) && !memchr(written_of(address), 0, bytes);
}
bool emulator_device_writes(void* p, size_t bytes) { return host_writes(reinterpret_cast<uintptr_t>(p), bytes); }

// An image is a library made by nvrtc.cpp.
int cuModuleLoadData(void** library, const void* image) {
    char path[] = "/tmp/kernel-XXXXXX";
    size_t bytes = image_bytes(image);
    int file = bytes ? mkstemp(path) : -1;
    if (file < 0) return failed(INVALID_IMAGE, "not a library with kernels, or no temporary file");
    bool written = write(file, image, bytes) == ssize_t(bytes);
    close(file);
    *library = written ? dlopen(path, RTLD_NOW | RTLD_LOCAL) : nullptr;
    if (!*library) {
        unlink(path);
        return failed(INVALID_IMAGE, written ? dlerror() : "the temporary file has no room");
    }
    // The file remains until the process ends, because it maps code to source lines.
    static struct Files {
        std::vector<std::string> paths;
        ~Files() {
            for (const auto& path : paths) unlink(path.c_str());
        }
    } files;
    std::lock_guard<std::mutex> guard(lock);
    files.paths.push_back(path);
    return SUCCESS;
}
int cuModuleUnload(void*) { return SUCCESS; }
int cuModuleGetFunction(Function** result, void* library, const char* name) {
    auto kernel = dlsym(library, ("emulator_kernel_" + std::string(name)).c_str());
    if (!kernel) return failed(NOT_FOUND, "there is no kernel of this name");
    *result = new Function{name, static_cast<const EmulatorKernel*>(kernel)};
    return SUCCESS;
}
int cuFuncSetAttribute(Function* function, int attribute, int value) {
    if (attribute == SHARED_LIMIT_ATTRIBUTE) function->shared_limit = size_t(value);
    return value <= SHARED_PER_BLOCK ? SUCCESS : failed(INVALID_VALUE, "more shared memory than a block can have");
}
// Supports tensors of three dimensions, of bf16 or of bytes, in boxes whose rows have the 128-byte swizzle.
int cuTensorMapEncodeTiled(TensorMap* map, int type, unsigned rank, void* address, const uint64_t* sizes,
                           const uint64_t* strides, const unsigned* box, const unsigned* element_strides,
                           int interleave, int swizzle, int, int fill) {
    constexpr int UINT8 = 0, BFLOAT16 = 9, NONE = 0, SWIZZLE_128B = 3;
    constexpr unsigned ROW_BYTES = 128, MOST_BOX = 256;
    constexpr uint64_t MOST_SIZE = uint64_t(1) << 32, STRIDE_LIMIT = uint64_t(1) << 40;
    if ((type != BFLOAT16 && type != UINT8) || rank != 3 || interleave != NONE || swizzle != SWIZZLE_128B || fill != NONE)
        return failed(NOT_SUPPORTED, "this kind of tensor map is not emulated");
    if (reinterpret_cast<uintptr_t>(map) % 64 || reinterpret_cast<uintptr_t>(address) % 16)
        return failed(INVALID_VALUE, "the tensor map or the address of the tensor is not aligned");
    const unsigned size = type == UINT8 ? 1 : 2;
    TensorMap result = {TensorMap::MAGIC, reinterpret_cast<uintptr_t>(address), {}, {size}, {}, size};
    for (unsigned i = 0; i < rank; i++) {
        if (!sizes[i] || sizes[i] > MOST_SIZE || !box[i] || box[i] > MOST_BOX || element_strides[i] != 1)
            return failed(INVALID_VALUE, "a size, box or element stride of a tensor map is out of range");
        if (i > 0 && (strides[i - 1] % 16 || strides[i - 1] >= STRIDE_LIMIT))
            return failed(INVALID_VALUE, "a stride of a tensor map is not a multiple of 16 bytes, or too large");
        result.sizes[i] = sizes[i], result.box[i] = box[i];
        if (i > 0) result.strides[i] = strides[i - 1];
    }
    if (box[0] * size > ROW_BYTES || box[0] * size % 16)
        return failed(INVALID_VALUE, "a box is wider than its swizzle, or its width is not a multiple of 16 bytes");
    if (box[0] * size < ROW_BYTES)
        return failed(NOT_SUPPORTED, "boxes narrower than the swizzle are not emulated");
    memset(map, 0, 128);
    memcpy(map, &result, sizeof result);
    return SUCCESS;
}

int cuLaunchKernelEx(const LaunchConfig* config, Function* function, void** args, void**) {
    if (config->shared > function->shared_limit)
        return failed(INVALID_VALUE, "more dynamic shared memory than the kernel's limit");
    if (!config->grid_x || !config->grid_y || !config->grid_z || config->grid_x > INT32_MAX ||
        config->grid_y > MAX_GRID_YZ || config->grid_z > MAX_GRID_YZ)
        return failed(INVALID_VALUE, "a grid of no blocks, or of too many in one dimension");
    if (skipped && function->name == skipped) return SUCCESS;
    Launch launch{function->name.c_str(),
                  function->kernel,
                  {config->grid_x, config->grid_y, config->grid_z},
                  {config->block_x, config->block_y, config->block_z},
                  config->shared,
                  {}};
    for (unsigned i = 0; i < function->kernel->args; i++)
        launch.args.emplace_back(args[i], function->kernel->sizes[i]);
    std::string problem = run(launch);
    return problem.empty() ? SUCCESS : failed(LAUNCH_FAILED, problem);
}
}
