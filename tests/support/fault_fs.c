/* A library to preload: it counts, logs and fails the calls that change files below a folder.
 *
 * fault_fs.py builds and controls it. It calls the kernel itself, since an allocator that is
 * preloaded with it opens files before dlsym can be called. Calls inside libc (fopen, mkstemp) do
 * not pass through it. Environment:
 *   FAULT_FS_ROOT     the folder, without links in its path
 *   FAULT_FS_CONTROL  a file of six int64 that processes share, see `control`
 *   FAULT_FS_LOG      a folder for `calls` and what files held when they were synced, or unset
 */
#define _GNU_SOURCE
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

enum kind { OPEN, WRITE, TRUNCATE, RENAME, LINK, UNLINK, MKDIR, SYNC };
static const char *const NAMES[] = {"open", "write",  "truncate", "rename",
                                    "link", "unlink", "mkdir",    "sync"};

/* calls: of the kinds (bits; 0: all) so far. Call number fail_at (0: none), and with sticky all
 * after it, fail with error; where that is negative, the process gets the signal of this number
 * before the call. failed: how many have. */
struct control {
    int64_t calls, fail_at, error, sticky, kinds, failed;
};

typedef char Path[PATH_MAX];

static struct control *control;
static const char *root, *log_folder;
static int log_file = -1;
static pthread_mutex_t one_at_a_time = PTHREAD_MUTEX_INITIALIZER; /* the log's order is the disk's */

static void hold(void) { pthread_mutex_lock(&one_at_a_time); }
static void let_go(void) { pthread_mutex_unlock(&one_at_a_time); }
static int sys_open(int folder, const char *path, int flags, mode_t mode) {
    return syscall(SYS_openat, folder, path, flags, mode);
}

__attribute__((constructor)) static void start(void) {
    const char *file = getenv("FAULT_FS_CONTROL");
    if (!getenv("FAULT_FS_ROOT") || !file) return;
    int fd = sys_open(AT_FDCWD, file, O_RDWR | O_CLOEXEC, 0);
    if (fd < 0) abort();
    void *shared = mmap(NULL, sizeof *control, PROT_READ | PROT_WRITE, MAP_SHARED, fd, 0);
    if (shared == MAP_FAILED) abort();
    close(fd);
    if ((log_folder = getenv("FAULT_FS_LOG"))) {
        Path path;
        snprintf(path, sizeof path, "%s/calls", log_folder);
        log_file = sys_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
        if (log_file < 0) abort();
    }
    pthread_atfork(hold, let_go, let_go);
    control = shared;
    root = getenv("FAULT_FS_ROOT");
}

static int below_root(const char *path) {
    size_t length = strlen(root);
    return !strncmp(path, root, length) && (path[length] == '/' || !path[length]);
}

static int of_descriptor(int fd, char *place) {
    char link[64];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, place, PATH_MAX - 2);
    place[length < 0 ? 0 : length] = 0;
    return length > 0;
}

static int watched_descriptor(int fd, char *place) {
    int saved = errno;
    int found = root && of_descriptor(fd, place) && below_root(place);
    errno = saved;
    return found;
}

/* place: the path without links but for its last part. */
static int watched_path(int folder, const char *path, char *place) {
    if (!root || !path || !*path || strlen(path) >= PATH_MAX) return 0;
    Path parent, name;
    strcpy(parent, path);
    for (size_t end = strlen(parent); end > 1 && parent[end - 1] == '/';) parent[--end] = 0;
    char *slash = strrchr(parent, '/');
    strcpy(name, slash ? slash + 1 : parent);
    if (!slash) strcpy(parent, ".");
    else slash[slash == parent] = 0;
    int saved = errno, found = 0;
    int fd = sys_open(folder, parent, O_PATH | O_DIRECTORY | O_CLOEXEC, 0);
    if (fd >= 0) {
        found = of_descriptor(fd, place) && below_root(place);
        strncat(strcat(place, "/"), name, PATH_MAX - strlen(place) - 2);
        syscall(SYS_close, fd);
    }
    errno = saved;
    return found;
}

/* The errno that this call is to fail with, or 0. */
static int fault(enum kind kind) {
    if (control->kinds && !(control->kinds >> kind & 1)) return 0;
    int64_t call = __sync_add_and_fetch(&control->calls, 1), at = control->fail_at;
    if (!at || call < at || (call > at && !control->sticky)) return 0;
    __sync_add_and_fetch(&control->failed, 1);
    if (control->error < 0) kill(getpid(), -control->error);
    return control->error;
}

/* Copies what a file holds into the log's folder, by the number of the copy. */
static void keep_content(int fd, char *name) {
    static int64_t copies;
    Path path;
    char part[65536];
    struct stat about;
    if (fstat(fd, &about) || !S_ISREG(about.st_mode)) return;
    sprintf(name, "%d-%ld", (int)getpid(), (long)++copies);
    snprintf(path, sizeof path, "/proc/self/fd/%d", fd);
    int from = sys_open(AT_FDCWD, path, O_RDONLY | O_CLOEXEC, 0);
    snprintf(path, sizeof path, "%s/%s", log_folder, name);
    int to = sys_open(AT_FDCWD, path, O_WRONLY | O_CREAT | O_EXCL | O_CLOEXEC, 0644);
    if (from < 0 || to < 0) abort();
    for (ssize_t got; (got = read(from, part, sizeof part)) > 0;)
        if (syscall(SYS_write, to, part, got) != got) abort();
    syscall(SYS_close, from);
    syscall(SYS_close, to);
}

/* One line: kind, path, another path (where it came from, or the name of the copy of its content),
 * flags of an opening, errno. */
static void log_call(enum kind kind, const char *path, const char *other, int flags, int error) {
    char line[2 * PATH_MAX + 100];
    int length = snprintf(line, sizeof line, "%s\t%s\t%s\t%d\t%d\n", NAMES[kind], path, other,
                          flags, error);
    if (syscall(SYS_write, log_file, line, length) != length) abort();
}

/* Does a call below the root, or fails it, and logs it. */
#define WATCHED(kind, place, other, fd, flags, call)                                      \
    do {                                                                                  \
        if (log_file >= 0) hold();                                                        \
        int wrong = fault(kind), saved = errno;                                           \
        long result = -1;                                                                 \
        if (wrong) errno = wrong;                                                         \
        else if ((result = (call)) < 0) wrong = errno;                                    \
        if (log_file >= 0) {                                                              \
            char copy[32] = "";                                                           \
            if (kind == SYNC && !wrong) keep_content(fd, copy);                           \
            log_call(kind, place, kind == SYNC ? copy : other, flags, wrong);             \
            errno = wrong ? wrong : saved;                                                \
            let_go();                                                                     \
        }                                                                                 \
        return result;                                                                    \
    } while (0)

#define ON_DESCRIPTOR(kind, fd, call)                                                     \
    do {                                                                                  \
        Path place;                                                                       \
        if (!watched_descriptor(fd, place)) return (call);                                \
        WATCHED(kind, place, "", fd, 0, call);                                            \
    } while (0)

#define ON_PATH(kind, folder, path, other, flags, call)                                   \
    do {                                                                                  \
        Path place;                                                                       \
        if (!watched_path(folder, path, place)) return (call);                            \
        WATCHED(kind, place, other, -1, flags, call);                                     \
    } while (0)

/* Opening changes files where it makes or empties one. */
static int open_watched(int folder, const char *path, int flags, mode_t mode) {
    if (!(flags & (O_CREAT | O_TRUNC))) return sys_open(folder, path, flags, mode);
    ON_PATH(OPEN, folder, path, "", flags, sys_open(folder, path, flags, mode));
}

#define MODE(flags, mode)                                                                 \
    mode_t mode = 0;                                                                      \
    if (flags & (O_CREAT | (O_TMPFILE & ~O_DIRECTORY))) {                                 \
        va_list rest;                                                                     \
        va_start(rest, flags);                                                            \
        mode = va_arg(rest, int);                                                         \
        va_end(rest);                                                                     \
    }

int open(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_watched(AT_FDCWD, path, flags, mode);
}
int open64(const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_watched(AT_FDCWD, path, flags, mode);
}
int openat(int folder, const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_watched(folder, path, flags, mode);
}
int openat64(int folder, const char *path, int flags, ...) {
    MODE(flags, mode)
    return open_watched(folder, path, flags, mode);
}
int creat(const char *path, mode_t mode) {
    return open_watched(AT_FDCWD, path, O_WRONLY | O_CREAT | O_TRUNC, mode);
}

ssize_t write(int fd, const void *data, size_t size) {
    ON_DESCRIPTOR(WRITE, fd, syscall(SYS_write, fd, data, size));
}
ssize_t pwrite(int fd, const void *data, size_t size, off_t offset) {
    ON_DESCRIPTOR(WRITE, fd, syscall(SYS_pwrite64, fd, data, size, offset));
}
ssize_t pwrite64(int fd, const void *data, size_t size, off64_t offset) {
    return pwrite(fd, data, size, offset);
}
ssize_t writev(int fd, const struct iovec *parts, int count) {
    ON_DESCRIPTOR(WRITE, fd, syscall(SYS_writev, fd, parts, count));
}
ssize_t pwritev(int fd, const struct iovec *parts, int count, off_t offset) {
    ON_DESCRIPTOR(WRITE, fd, syscall(SYS_pwritev, fd, parts, count, offset, 0));
}
ssize_t pwritev64(int fd, const struct iovec *parts, int count, off64_t offset) {
    return pwritev(fd, parts, count, offset);
}
ssize_t sendfile(int to, int from, off_t *offset, size_t size) {
    ON_DESCRIPTOR(WRITE, to, syscall(SYS_sendfile, to, from, offset, size));
}
ssize_t sendfile64(int to, int from, off64_t *offset, size_t size) {
    return sendfile(to, from, offset, size);
}
ssize_t copy_file_range(int from, off64_t *at, int to, off64_t *there, size_t size, unsigned flags) {
    ON_DESCRIPTOR(WRITE, to,
                  syscall(SYS_copy_file_range, from, at, to, there, size, flags));
}

int ftruncate(int fd, off_t size) {
    ON_DESCRIPTOR(TRUNCATE, fd, syscall(SYS_ftruncate, fd, size));
}
int ftruncate64(int fd, off64_t size) { return ftruncate(fd, size); }
int truncate(const char *path, off_t size) {
    ON_PATH(TRUNCATE, AT_FDCWD, path, "", 0, syscall(SYS_truncate, path, size));
}
int truncate64(const char *path, off64_t size) { return truncate(path, size); }

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    Path source;
    if (!watched_path(from, old, source)) source[0] = 0;
    ON_PATH(RENAME, to, new, source, 0,
            syscall(SYS_renameat2, from, old, to, new, flags));
}
int renameat(int from, const char *old, int to, const char *new) {
    return renameat2(from, old, to, new, 0);
}
int rename(const char *old, const char *new) { return renameat2(AT_FDCWD, old, AT_FDCWD, new, 0); }

int linkat(int from, const char *old, int to, const char *new, int flags) {
    Path source;
    if (!watched_path(from, old, source)) source[0] = 0;
    ON_PATH(LINK, to, new, source, 0, syscall(SYS_linkat, from, old, to, new, flags));
}
int link(const char *old, const char *new) { return linkat(AT_FDCWD, old, AT_FDCWD, new, 0); }
int symlinkat(const char *target, int folder, const char *path) {
    ON_PATH(LINK, folder, path, "", 0, syscall(SYS_symlinkat, target, folder, path));
}
int symlink(const char *target, const char *path) { return symlinkat(target, AT_FDCWD, path); }

int unlinkat(int folder, const char *path, int flags) {
    ON_PATH(UNLINK, folder, path, "", 0, syscall(SYS_unlinkat, folder, path, flags));
}
int unlink(const char *path) { return unlinkat(AT_FDCWD, path, 0); }
int rmdir(const char *path) { return unlinkat(AT_FDCWD, path, AT_REMOVEDIR); }

int mkdirat(int folder, const char *path, mode_t mode) {
    ON_PATH(MKDIR, folder, path, "", 0, syscall(SYS_mkdirat, folder, path, mode));
}
int mkdir(const char *path, mode_t mode) { return mkdirat(AT_FDCWD, path, mode); }

int fsync(int fd) { ON_DESCRIPTOR(SYNC, fd, syscall(SYS_fsync, fd)); }
int fdatasync(int fd) { ON_DESCRIPTOR(SYNC, fd, syscall(SYS_fdatasync, fd)); }
