/* Makes the directory DRIVE look like one on a file system that lacks some operations, as those of cloud drives and
 * virtual machines do: symbolic links, sockets, locks, syncing of directories. Loaded by LD_PRELOAD. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/un.h>
#include <unistd.h>

static int is_on_drive(const char *path) {
    const char *drive = getenv("DRIVE");
    return drive && !strncmp(path, drive, strlen(drive));
}

static int fail(int error) {
    errno = error;
    return -1;
}

int symlink(const char *target, const char *path) {
    int (*real)(const char *, const char *) = dlsym(RTLD_NEXT, "symlink");
    return is_on_drive(path) ? fail(EPERM) : real(target, path);
}

int bind(int socket, const struct sockaddr *address, socklen_t length) {
    int (*real)(int, const struct sockaddr *, socklen_t) = dlsym(RTLD_NEXT, "bind");
    const struct sockaddr_un *name = (const struct sockaddr_un *)address;
    int fails = address->sa_family == AF_UNIX && is_on_drive(name->sun_path);
    return fails ? fail(EOPNOTSUPP) : real(socket, address, length);
}

int flock(int file, int operation) {
    int (*real)(int, int) = dlsym(RTLD_NEXT, "flock");
    char link[32], path[PATH_MAX] = "";
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    int is_known = readlink(link, path, sizeof path - 1) > 0;
    return is_known && is_on_drive(path) ? fail(ENOSYS) : real(file, operation);
}

int fsync(int file) {
    int (*real)(int) = dlsym(RTLD_NEXT, "fsync");
    struct stat found;
    return !fstat(file, &found) && S_ISDIR(found.st_mode) ? fail(EINVAL) : real(file);
}
