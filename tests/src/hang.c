/* Makes a worker of the trainer hang or fail, for tests. Loaded by LD_PRELOAD; see hang.rs.
 *
 * Acts in the worker of rank HANG_RANK, in its first attempt, once the file HANG_TRIGGER exists. HANG_MODE:
 *
 *     spin    the training thread loops forever at the beginning of phase HANG_PHASE
 *     slow    the training thread sleeps for 10 ms at the beginning of phase HANG_PHASE
 *     read    another thread, the data loader, never returns from reading a file
 *     kernel  at the beginning of phase HANG_PHASE the training thread starts a kernel that occupies its GPU forever
 *     fault   at the beginning of phase HANG_PHASE the training thread starts a kernel storing to an illegal address
 *     sockets at the beginning of phase HANG_PHASE the process shuts its TCP connections down
 *
 * The training thread writes a record of 48 bytes at each change of its phase, with the phase's number at byte 4. */

#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <netinet/in.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/syscall.h>
#include <sys/types.h>
#include <time.h>
#include <unistd.h>

static int is(const char *name, const char *value) {
    const char *found = getenv(name);
    return found && value && !strcmp(found, value);
}

static int active(const char *mode) {
    const char *trigger = getenv("HANG_TRIGGER");
    return is("HANG_MODE", mode) && is("RANK", getenv("HANG_RANK")) && is("XLAUNCH_ATTEMPT", "0") && trigger &&
           !access(trigger, F_OK);
}

static int is_main_thread(void) { return syscall(SYS_gettid) == getpid(); }

/* The types of cuda.h are pointers and integers. */
static const char KERNELS[] =
    ".version 7.0\n.target sm_70\n.address_size 64\n"
    ".visible .entry endless() { again: bra again; }\n"
    ".visible .entry fault() {\n"
    "  .reg .b64 %nowhere;\n"
    "  mov.u64 %nowhere, 0;\n"
    "  st.global.u64 [%nowhere], %nowhere;\n"
    "  ret;\n"
    "}\n";

/* Enough threads to occupy the whole GPU. */
static void start_kernel(const char *name) {
    enum { THREADS = 1024, BLOCKS_PER_PROCESSOR = 2, PROCESSOR_COUNT = 16 };
    void *cuda = dlopen("libcuda.so.1", RTLD_NOW), *module, *function, *stream;
    int device, processors;
    int (*get_device)(int *) = dlsym(cuda, "cuCtxGetDevice");
    int (*get_attribute)(int *, int, int) = dlsym(cuda, "cuDeviceGetAttribute");
    int (*load)(void **, const void *) = dlsym(cuda, "cuModuleLoadData");
    int (*get_function)(void **, void *, const char *) = dlsym(cuda, "cuModuleGetFunction");
    int (*new_stream)(void **, unsigned) = dlsym(cuda, "cuStreamCreate");
    int (*launch)(void *, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, unsigned, void *, void **,
                  void **) = dlsym(cuda, "cuLaunchKernel");
    const unsigned non_blocking = 1;
    if (get_device(&device) || get_attribute(&processors, PROCESSOR_COUNT, device) || load(&module, KERNELS) ||
        get_function(&function, module, name) || new_stream(&stream, non_blocking) ||
        launch(function, processors * BLOCKS_PER_PROCESSOR, 1, 1, THREADS, 1, 1, 0, stream, NULL, NULL))
        abort();
}

static void shut_connections_down(void) {
    int count = 0;
    DIR *open = opendir("/proc/self/fd");
    if (!open) abort();
    for (struct dirent *entry; (entry = readdir(open));) {
        int fd = atoi(entry->d_name), type;
        struct sockaddr_storage peer;
        socklen_t type_size = sizeof type, peer_size = sizeof peer;
        /* Skip other descriptors, the connection to the agent, and listening sockets. */
        if (!getsockopt(fd, SOL_SOCKET, SO_TYPE, &type, &type_size) && type == SOCK_STREAM &&
            !getpeername(fd, (struct sockaddr *)&peer, &peer_size) &&
            (peer.ss_family == AF_INET || peer.ss_family == AF_INET6))
            count += !shutdown(fd, SHUT_RDWR);
    }
    closedir(open);
    fprintf(stderr, "%d connections shut down\n", count);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    static ssize_t (*real)(int, const void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pwrite64");
    ssize_t written = real(fd, data, size, offset);
    const char *phase = getenv("HANG_PHASE");
    uint32_t current;
    if (size == 48 && phase && is_main_thread()) {
        memcpy(&current, (const char *)data + 4, sizeof current);
        if (current == (uint32_t)atoi(phase)) {
            if (active("spin")) for (;;) __asm__ volatile("");
            static int done;
            int kernel = active("kernel"), fault = active("fault"), sockets = active("sockets");
            if (!done && (kernel || fault || sockets)) {
                done = 1;
                if (kernel) start_kernel("endless");
                if (fault) start_kernel("fault");
                if (sockets) shut_connections_down();
            }
            struct timespec pause = {0, 10 * 1000 * 1000};
            if (active("slow")) nanosleep(&pause, NULL);
        }
    }
    return written;
}

ssize_t pread64(int fd, void *data, size_t size, off64_t offset) {
    static ssize_t (*real)(int, void *, size_t, off64_t);
    if (!real) real = dlsym(RTLD_NEXT, "pread64");
    if (!is_main_thread() && active("read")) for (;;) pause();
    return real(fd, data, size, offset);
}
