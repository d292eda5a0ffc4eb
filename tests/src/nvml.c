/* A simulated NVML. The file `gpus` next to this library has one line per GPU:
 *
 *     UUID ERRORS [PID ...]
 *
 * ERRORS is the number of uncorrected memory errors. The processes, as far as they exist, use the GPU. Types and error
 * codes are those of nvml.h. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <signal.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

enum { SUCCESS = 0, INVALID = 2, UNSUPPORTED = 3, INSUFFICIENT_SIZE = 7 };
/* Limit of GPUs, and of processes per GPU. */
enum { MAX = 16 };

struct gpu {
    char uuid[64];
    unsigned long long errors;
    unsigned pids[MAX], processes;
};

struct process {
    unsigned pid;
    unsigned long long memory;
    unsigned instance, compute;
};

struct memory {
    unsigned version;
    unsigned long long total, reserved, free, used;
};

static unsigned read_gpus(struct gpu *gpus) {
    Dl_info library;
    char path[1024] = "", line[1024];
    if (dladdr((void *)read_gpus, &library)) {
        const char *name = strrchr(library.dli_fname, '/');
        snprintf(path, sizeof path, "%.*s/gpus", name ? (int)(name - library.dli_fname) : 0, library.dli_fname);
    }
    FILE *file = fopen(path, "r");
    unsigned count = 0;
    while (file && count < MAX && fgets(line, sizeof line, file)) {
        struct gpu *gpu = &gpus[count];
        int at = 0, next = 0, pid = 0;
        memset(gpu, 0, sizeof *gpu);
        if (sscanf(line, "%63s %llu%n", gpu->uuid, &gpu->errors, &at) < 2) continue;
        while (gpu->processes < MAX && sscanf(line + at, "%d%n", &pid, &next) == 1) {
            if (kill(pid, 0) == 0) gpu->pids[gpu->processes++] = (unsigned)pid;
            at += next;
        }
        count++;
    }
    if (file) fclose(file);
    return count;
}

/* A device handle is the GPU's index plus one: NULL is invalid. */
static int find(void *device, struct gpu *found) {
    struct gpu gpus[MAX];
    uintptr_t number = (uintptr_t)device;
    if (number == 0 || number > read_gpus(gpus)) return INVALID;
    *found = gpus[number - 1];
    return SUCCESS;
}

int nvmlInit_v2(void) { return SUCCESS; }
int nvmlShutdown(void) { return SUCCESS; }

int nvmlDeviceGetCount_v2(unsigned *count) {
    struct gpu gpus[MAX];
    *count = read_gpus(gpus);
    return SUCCESS;
}

int nvmlDeviceGetHandleByIndex_v2(unsigned index, void **device) {
    struct gpu gpu;
    *device = (void *)(uintptr_t)(index + 1);
    return find(*device, &gpu);
}

int nvmlDeviceGetUUID(void *device, char *uuid, unsigned length) {
    struct gpu gpu;
    int code = find(device, &gpu);
    if (code == SUCCESS) snprintf(uuid, length, "%s", gpu.uuid);
    return code;
}

int nvmlDeviceGetName(void *device, char *name, unsigned length) {
    (void)device;
    snprintf(name, length, "Test GPU");
    return SUCCESS;
}

int nvmlDeviceGetTotalEccErrors(void *device, int kind, int counter, unsigned long long *errors) {
    struct gpu gpu;
    int code = find(device, &gpu);
    (void)kind, (void)counter;
    if (code == SUCCESS) *errors = gpu.errors;
    return code;
}

int nvmlDeviceGetMemoryInfo_v2(void *device, struct memory *memory) {
    (void)device;
    memory->total = 80ull << 30;
    memory->used = 1ull << 30;
    memory->free = memory->total - memory->used;
    return SUCCESS;
}

int nvmlDeviceGetComputeRunningProcesses_v3(void *device, unsigned *count, struct process *processes) {
    struct gpu gpu;
    unsigned capacity = *count;
    int code = find(device, &gpu);
    if (code != SUCCESS) return code;
    *count = gpu.processes;
    if (gpu.processes > 0 && (!processes || capacity < gpu.processes)) return INSUFFICIENT_SIZE;
    for (unsigned at = 0; at < gpu.processes; at++) {
        processes[at] = (struct process){.pid = gpu.pids[at], .memory = 1ull << 30};
    }
    return SUCCESS;
}

int nvmlDeviceGetPowerUsage(void *device, unsigned *milliwatts) {
    (void)device;
    *milliwatts = 123456;
    return SUCCESS;
}
