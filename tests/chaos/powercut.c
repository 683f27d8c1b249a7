/* A disk that forgets: LD_PRELOAD=powercut.so POWERCUT_ROOT=/folder POWERCUT_LOG=/elsewhere/log ...

Every change below POWERCUT_ROOT is written to POWERCUT_LOG as well, in order and with its data, and
every fsync as a barrier. `powercut.py` builds from a prefix of the log a folder that a power cut
could have left: what no barrier covers may be there, be torn, or be missing, in any order.

POWERCUT_FAULT names a file: while it exists, everything that would take room below the root fails
with the errno that it holds (28: no space left; 30: read-only, where nothing may change at all).

A record: kind (1 byte), length of the path (4), of the data (8), offset (8), path, data. For a file
that is created or synced the offset is its inode: by it `powercut.py` knows what a library renamed by
a system call of its own.
*/
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

#define NEXT(name) __typeof__(&name) next = (__typeof__(&name))dlsym(RTLD_NEXT, #name)

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static int log_fd = -1;

static const char *root(void) { return getenv("POWERCUT_ROOT"); }

static int below(const char *path) {
    const char *top = root();
    size_t n = top ? strlen(top) : 0;
    return n && !strncmp(path, top, n) && (path[n] == '/' || !path[n]);
}

/* The absolute path of `path` at `dir`, without following its last part. */
static int absolute(int dir, const char *path, char *out) {
    if (path[0] == '/') {
        snprintf(out, PATH_MAX, "%s", path);
    } else {
        char link[64], base[PATH_MAX];
        ssize_t n;
        if (dir == AT_FDCWD)
            snprintf(link, sizeof link, "/proc/self/cwd");
        else
            snprintf(link, sizeof link, "/proc/self/fd/%d", dir);
        n = readlink(link, base, sizeof base - 1);
        if (n < 0) return 0;
        base[n] = 0;
        if ((size_t)snprintf(out, PATH_MAX, "%s/%s", base, path) >= PATH_MAX) return 0;
    }
    return below(out);
}

static int of_fd(int fd, char *out) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t n = root() ? readlink(link, out, PATH_MAX - 1) : -1;
    if (n < 0) return 0;
    out[n] = 0;
    return below(out);
}

static void record(char kind, const char *path, const void *data, uint64_t size, uint64_t offset) {
    const char *to = getenv("POWERCUT_LOG");
    int kept = errno;
    if (!to) return;
    pthread_mutex_lock(&lock);
    if (log_fd < 0) {
        NEXT(open);
        log_fd = next(to, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
    }
    uint32_t length = strlen(path);
    struct iovec parts[] = {{&kind, 1}, {&length, 4}, {&size, 8}, {&offset, 8},
                            {(void *)path, length}, {(void *)data, data ? size : 0}};
    NEXT(writev);
    if (log_fd >= 0) next(log_fd, parts, 6); /* one call: whole, whoever is killed */
    pthread_mutex_unlock(&lock);
    errno = kept;
}

/* The errno that the fault file holds; 0: no fault. */
static int fault(void) {
    const char *path = getenv("POWERCUT_FAULT");
    char text[16] = "";
    if (!path) return 0;
    int kept = errno;
    NEXT(open);
    int fd = next(path, O_RDONLY | O_CLOEXEC);
    if (fd >= 0) {
        if (read(fd, text, sizeof text - 1) < 0) text[0] = 0;
        close(fd);
    }
    errno = kept;
    return atoi(text);
}

static int refuse(int taking) {
    int number = fault();
    if (!number || (number != EROFS && !taking)) return 0;
    errno = number;
    return 1;
}

/* Whether a write makes the file longer: what it has already is overwritten on a full disk, too. */
static int longer(int fd, off_t at, size_t size) {
    struct stat what;
    return fstat(fd, &what) || at + (off_t)size > what.st_size;
}

static ssize_t wrote(int fd, const void *data, ssize_t n, off_t at) {
    char path[PATH_MAX];
    if (n > 0 && of_fd(fd, path)) /* 'W': LMDB writes its meta page through O_DSYNC */
        record(fcntl(fd, F_GETFL) & O_DSYNC ? 'W' : 'w', path, data, n, at);
    return n;
}

ssize_t pwrite64(int fd, const void *data, size_t size, off64_t at) {
    NEXT(pwrite64);
    char path[PATH_MAX];
    if (of_fd(fd, path) && refuse(longer(fd, at, size))) return -1;
    return wrote(fd, data, next(fd, data, size, at), at);
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t at) { return pwrite64(fd, data, size, at); }

__attribute__((noinline)) static ssize_t write_file(int fd, const void *data, size_t size) {
    NEXT(write);
    char path[PATH_MAX];
    if (!of_fd(fd, path)) return next(fd, data, size);
    int flags = fcntl(fd, F_GETFL);
    off_t at = flags & O_APPEND ? lseek(fd, 0, SEEK_END) : lseek(fd, 0, SEEK_CUR);
    if (refuse(longer(fd, at, size))) return -1;
    return wrote(fd, data, next(fd, data, size), at);
}
/* A signal's handler writes to a pipe. Its stack has no room for paths. */
ssize_t write(int fd, const void *data, size_t size) {
    NEXT(write);
    struct stat what;
    return fstat(fd, &what) || S_ISREG(what.st_mode) ? write_file(fd, data, size) : next(fd, data, size);
}

static ssize_t vector(int fd, const struct iovec *parts, int count, ssize_t n, off_t at) {
    ssize_t left = n;
    for (int i = 0; i < count && left > 0; i++) {
        ssize_t part = left < (ssize_t)parts[i].iov_len ? left : (ssize_t)parts[i].iov_len;
        wrote(fd, parts[i].iov_base, part, at);
        at += part;
        left -= part;
    }
    return n;
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t at) {
    NEXT(pwritev);
    char path[PATH_MAX];
    if (of_fd(fd, path) && refuse(1)) return -1;
    return vector(fd, parts, count, next(fd, parts, count, at), at);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    NEXT(writev);
    char path[PATH_MAX];
    if (!of_fd(fd, path)) return next(fd, parts, count);
    if (refuse(1)) return -1;
    off_t at = lseek(fd, 0, SEEK_CUR);
    return vector(fd, parts, count, next(fd, parts, count), at);
}

static uint64_t inode(int fd) {
    struct stat what;
    return fstat(fd, &what) ? 0 : what.st_ino;
}

static int synced(int fd, int result) {
    char path[PATH_MAX];
    if (!result && of_fd(fd, path)) record('s', path, NULL, 0, inode(fd));
    return result;
}
int fsync(int fd) {
    NEXT(fsync);
    char path[PATH_MAX];
    if (of_fd(fd, path) && refuse(0)) return -1;
    return synced(fd, next(fd));
}
int fdatasync(int fd) {
    NEXT(fdatasync);
    char path[PATH_MAX];
    if (of_fd(fd, path) && refuse(0)) return -1;
    return synced(fd, next(fd));
}

int ftruncate64(int fd, off64_t size) {
    NEXT(ftruncate64);
    char path[PATH_MAX];
    int ours = of_fd(fd, path);
    if (ours && refuse(0)) return -1;
    int result = next(fd, size);
    if (!result && ours) record('t', path, NULL, 0, size);
    return result;
}
int ftruncate(int fd, off_t size) { return ftruncate64(fd, size); }

static int opened(int dir, const char *name, int flags, mode_t mode, int (*next)(int, const char *, int, ...)) {
    char path[PATH_MAX];
    int ours = (flags & (O_CREAT | O_TRUNC | O_WRONLY | O_RDWR)) && absolute(dir, name, path);
    struct stat before;
    int there = ours && !lstat(path, &before);
    if (ours && (there ? fault() == EROFS : refuse(flags & O_CREAT))) {
        errno = fault();
        return -1;
    }
    int fd = next(dir, name, flags, mode);
    if (fd >= 0 && ours && !there && (flags & O_CREAT)) record('c', path, NULL, 0, inode(fd));
    if (fd >= 0 && there && (flags & O_TRUNC)) record('t', path, NULL, 0, 0);
    return fd;
}
#define MODE_OF(flags) mode_t mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list rest; va_start(rest, flags); mode = va_arg(rest, mode_t); va_end(rest); }
int openat64(int dir, const char *name, int flags, ...) { MODE_OF(flags) NEXT(openat64); return opened(dir, name, flags, mode, (int (*)(int, const char *, int, ...))next); }
int openat(int dir, const char *name, int flags, ...) { MODE_OF(flags) NEXT(openat); return opened(dir, name, flags, mode, (int (*)(int, const char *, int, ...))next); }
static int at_cwd(int dir, const char *name, int flags, ...) { (void)dir; MODE_OF(flags) NEXT(open); return next(name, flags, mode); }
int open64(const char *name, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, name, flags, mode, at_cwd); }
int open(const char *name, int flags, ...) { MODE_OF(flags) return opened(AT_FDCWD, name, flags, mode, at_cwd); }

#define CHANGES(ours, taking) if (ours && refuse(taking)) return -1
int mkdirat(int dir, const char *name, mode_t mode) {
    NEXT(mkdirat);
    char path[PATH_MAX];
    int ours = absolute(dir, name, path);
    CHANGES(ours, 1);
    int result = next(dir, name, mode);
    if (!result && ours) record('d', path, NULL, 0, mode);
    return result;
}
int mkdir(const char *name, mode_t mode) {
    NEXT(mkdir);
    char path[PATH_MAX];
    int ours = absolute(AT_FDCWD, name, path);
    CHANGES(ours, 1);
    int result = next(name, mode);
    if (!result && ours) record('d', path, NULL, 0, mode);
    return result;
}
int renameat(int from_dir, const char *from, int to_dir, const char *to) {
    NEXT(renameat);
    char path[PATH_MAX], target[PATH_MAX];
    int ours = absolute(from_dir, from, path) & absolute(to_dir, to, target);
    CHANGES(ours, 0);
    int result = next(from_dir, from, to_dir, to);
    if (!result && ours) record('r', path, target, strlen(target), 0);
    return result;
}
int rename(const char *from, const char *to) { return renameat(AT_FDCWD, from, AT_FDCWD, to); }
int symlinkat(const char *target, int dir, const char *name) {
    NEXT(symlinkat);
    char path[PATH_MAX];
    int ours = absolute(dir, name, path);
    CHANGES(ours, 1);
    int result = next(target, dir, name);
    if (!result && ours) record('l', path, target, strlen(target), 0);
    return result;
}
int symlink(const char *target, const char *name) { return symlinkat(target, AT_FDCWD, name); }
int unlinkat(int dir, const char *name, int flags) {
    NEXT(unlinkat);
    char path[PATH_MAX];
    int ours = absolute(dir, name, path);
    CHANGES(ours, 0);
    int result = next(dir, name, flags);
    if (!result && ours) record('u', path, NULL, 0, 0);
    return result;
}
int unlink(const char *name) { return unlinkat(AT_FDCWD, name, 0); }
int rmdir(const char *name) { return unlinkat(AT_FDCWD, name, AT_REMOVEDIR); }
int remove(const char *name) {
    struct stat what;
    if (lstat(name, &what)) return -1;
    return S_ISDIR(what.st_mode) ? rmdir(name) : unlink(name);
}
