/* Preloaded into a process, makes its disk fail: the first letter of the file $FAULTS says how, none is a healthy disk.
 *   r  reads fail with EIO          w  writes fail with EIO
 *   s  reads and writes are short   l  writes of more than a page say that all is well and write zeros at the end
 *   h  reads hang until the letter changes                  f  writes fail with ENOSPC
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdlib.h>
#include <string.h>
#include <sys/uio.h>
#include <unistd.h>

#define PAGE 4096

static int mode(void) {
    static ssize_t (*next)(int, void *, size_t);
    if (!next) next = dlsym(RTLD_NEXT, "read");
    const char *path = getenv("FAULTS");
    int fd = path ? open(path, O_RDONLY | O_CLOEXEC) : -1;
    char letter = 0;
    if (fd < 0) return 0;
    if (next(fd, &letter, 1) != 1) letter = 0;
    close(fd);
    return letter;
}

ssize_t preadv64v2(int fd, const struct iovec *parts, int count, off64_t at, int flags) {
    static ssize_t (*next)(int, const struct iovec *, int, off64_t, int);
    if (!next) next = dlsym(RTLD_NEXT, "preadv64v2");
    while (mode() == 'h') usleep(1000);
    if (mode() == 'r') { errno = EIO; return -1; }
    if (mode() == 's' && parts[0].iov_len > PAGE) {
        struct iovec first = { parts[0].iov_base, PAGE };
        return next(fd, &first, 1, at, flags);
    }
    return next(fd, parts, count, at, flags);
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    static ssize_t (*next)(int, const void *, size_t, off64_t);
    if (!next) next = dlsym(RTLD_NEXT, "pwrite64");
    if (mode() == 'w') { errno = EIO; return -1; }
    if (mode() == 'f') { errno = ENOSPC; return -1; }
    if (mode() == 's' && size > PAGE) return next(fd, data, PAGE, at);
    if (mode() == 'l' && size > PAGE) {
        void *copy;
        if (posix_memalign(&copy, PAGE, size)) return -1;
        memcpy(copy, data, size);
        memset((char *)copy + size - 64, 0, 64);
        ssize_t done = next(fd, copy, size, at);
        free(copy);
        return done;
    }
    return next(fd, data, size, at);
}
