/* Has calls of libc fail, for tests; loaded by LD_PRELOAD, and told by inject() which.
 *
 * A call is open, write, sync, rename, unlink, mkdir, truncate or read of a file under a prefix whose path has
 * a part; or socket, accept, connect, send or recv. So many in a process succeed, and then so many fail (-1:
 * all). As the first one fails, a file is made. With the call "*" none fails, and each is a line in that file. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdatomic.h>
#include <stdio.h>
#include <string.h>
#include <sys/socket.h>
#include <sys/stat.h>
#include <sys/syscall.h>
#include <sys/uio.h>
#include <unistd.h>

static int error, after, many, record = -1;
static char call[16], prefix[4096], part[256], mark[4096];
static atomic_int seen;

void inject(int errno_, const char *what, int after_, int many_, const char *under, const char *has, const char *made) {
  after = after_, many = many_, seen = 0;
  snprintf(call, sizeof call, "%s", what);
  snprintf(prefix, sizeof prefix, "%s", under);
  snprintf(part, sizeof part, "%s", has);
  snprintf(mark, sizeof mark, "%s", made);
  if (!strcmp(what, "*")) record = syscall(SYS_openat, AT_FDCWD, mark, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0600);
  error = errno_;
}

static void note(const char *what, const char *path) {
  char line[5000];
  int n = snprintf(line, sizeof line, "%s %s\n", what, path);
  syscall(SYS_write, record, line, n);
}

static int fails_at(const char *what, const char *path) {
  char whole[8192];
  if (!path || (!error && record < 0)) return 0;
  if (path[0] != '/' && getcwd(whole, 4096)) path = strncat(strcat(whole, "/"), path, 4000);
  if (strncmp(path, prefix, strlen(prefix))) return 0;
  if (record >= 0) return note(what, path), 0;
  if (strcmp(what, call) || !strstr(path, part)) return 0;
  int number = atomic_fetch_add(&seen, 1) - after;
  if (number < 0 || (many >= 0 && number >= many)) return 0;
  if (!number) {
    int fd = syscall(SYS_openat, AT_FDCWD, mark, O_WRONLY | O_CREAT | O_CLOEXEC, 0600);
    if (fd >= 0) syscall(SYS_close, fd);
  }
  errno = error;
  return 1;
}

static int fails(const char *what, int fd) {
  char link[64], path[4096];
  if (!error && record < 0) return 0;
  snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
  ssize_t length = readlink(link, path, sizeof path - 1);
  if (length <= 0 || path[0] != '/') return 0;
  path[length] = 0;
  return fails_at(what, path);
}

static int fails_in(const char *what, int dir, const char *path) {
  return dir == AT_FDCWD || path[0] == '/' ? fails_at(what, path) : fails(what, dir);
}

static int fails_on(const char *what, int fd) { /* a socket of the network; fd -1: a new one */
  int domain = AF_INET;
  socklen_t length = sizeof domain;
  if (!error && record < 0) return 0;
  if (fd >= 0 && (getsockopt(fd, SOL_SOCKET, SO_DOMAIN, &domain, &length) || (domain != AF_INET && domain != AF_INET6))) return 0;
  if (record >= 0) return note(what, "socket"), 0;
  return fails_at(what, prefix);
}

#define REAL(name) static __typeof__(&name) real; if (!real) real = dlsym(RTLD_NEXT, #name)
#define MODE int mode = 0; if (flags & (O_CREAT | O_TMPFILE)) { va_list a; va_start(a, flags); mode = va_arg(a, int); va_end(a); }

int open(const char *path, int flags, ...) { MODE REAL(open); return fails_at("open", path) ? -1 : real(path, flags, mode); }
int open64(const char *path, int flags, ...) { MODE REAL(open64); return fails_at("open", path) ? -1 : real(path, flags, mode); }
int openat(int dir, const char *path, int flags, ...) { MODE REAL(openat); return fails_in("open", dir, path) ? -1 : real(dir, path, flags, mode); }
int openat64(int dir, const char *path, int flags, ...) { MODE REAL(openat64); return fails_in("open", dir, path) ? -1 : real(dir, path, flags, mode); }
ssize_t write(int fd, const void *b, size_t n) { REAL(write); return fails("write", fd) ? -1 : real(fd, b, n); }
ssize_t pwrite(int fd, const void *b, size_t n, off_t at) { REAL(pwrite); return fails("write", fd) ? -1 : real(fd, b, n, at); }
ssize_t pwrite64(int fd, const void *b, size_t n, off64_t at) { REAL(pwrite64); return fails("write", fd) ? -1 : real(fd, b, n, at); }
ssize_t writev(int fd, const struct iovec *v, int n) { REAL(writev); return fails("write", fd) ? -1 : real(fd, v, n); }
ssize_t read(int fd, void *b, size_t n) { REAL(read); return fails("read", fd) ? -1 : real(fd, b, n); }
ssize_t pread(int fd, void *b, size_t n, off_t at) { REAL(pread); return fails("read", fd) ? -1 : real(fd, b, n, at); }
ssize_t pread64(int fd, void *b, size_t n, off64_t at) { REAL(pread64); return fails("read", fd) ? -1 : real(fd, b, n, at); }
int fsync(int fd) { REAL(fsync); return fails("sync", fd) ? -1 : real(fd); }
int fdatasync(int fd) { REAL(fdatasync); return fails("sync", fd) ? -1 : real(fd); }
int ftruncate(int fd, off_t n) { REAL(ftruncate); return fails("truncate", fd) ? -1 : real(fd, n); }
int ftruncate64(int fd, off64_t n) { REAL(ftruncate64); return fails("truncate", fd) ? -1 : real(fd, n); }
int rename(const char *from, const char *to) { REAL(rename); return fails_at("rename", to) ? -1 : real(from, to); }
int unlink(const char *path) { REAL(unlink); return fails_at("unlink", path) ? -1 : real(path); }
int mkdir(const char *path, mode_t mode) { REAL(mkdir); return fails_at("mkdir", path) ? -1 : real(path, mode); }

int socket(int domain, int type, int protocol) { REAL(socket); return (domain == AF_INET || domain == AF_INET6) && fails_on("socket", -1) ? -1 : real(domain, type, protocol); }
int accept(int fd, struct sockaddr *a, socklen_t *n) { REAL(accept); return fails_on("accept", fd) ? -1 : real(fd, a, n); }
int accept4(int fd, struct sockaddr *a, socklen_t *n, int flags) { REAL(accept4); return fails_on("accept", fd) ? -1 : real(fd, a, n, flags); }
int connect(int fd, const struct sockaddr *a, socklen_t n) { REAL(connect); return fails_on("connect", fd) ? -1 : real(fd, a, n); }
ssize_t sendmsg(int fd, const struct msghdr *m, int flags) { REAL(sendmsg); return fails_on("send", fd) ? -1 : real(fd, m, flags); }
ssize_t send(int fd, const void *b, size_t n, int flags) { REAL(send); return fails_on("send", fd) ? -1 : real(fd, b, n, flags); }
ssize_t recvmsg(int fd, struct msghdr *m, int flags) { REAL(recvmsg); return fails_on("recv", fd) ? -1 : real(fd, m, flags); }
ssize_t recv(int fd, void *b, size_t n, int flags) { REAL(recv); return fails_on("recv", fd) ? -1 : real(fd, b, n, flags); }
