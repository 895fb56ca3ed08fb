/* Records how many bytes of each regular file have been synced to disk, in a file next to it with the suffix .synced.
 * It is preloaded into redis-server, so that a test can kill the server and cut its files to that length, as a power
 * cut would. POWERCUT_SLOW_MS makes each sync take that many milliseconds longer, as on a busy disk. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <limits.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <time.h>
#include <unistd.h>

typedef int (*sync_call)(int);

static long long length_of(int fd) {
    struct stat about;
    return fstat(fd, &about) == 0 && S_ISREG(about.st_mode) ? (long long)about.st_size : -1;
}

static void note(int fd, long long synced) {
    char link[64], path[PATH_MAX + 16], text[32];
    snprintf(link, sizeof link, "/proc/self/fd/%d", fd);
    ssize_t length = readlink(link, path, PATH_MAX);
    if (length <= 0) return;
    strcpy(path + length, ".synced");
    int out = open(path, O_WRONLY | O_CREAT, 0600);
    if (out < 0) return;
    int size = snprintf(text, sizeof text, "%020lld", synced);
    if (pwrite(out, text, size, 0) != size) unlink(path);
    close(out);
}

static int synced_by(const char *name, int fd) {
    long long length = length_of(fd); /* what is written while it syncs may not be on the disk */
    const char *slow = getenv("POWERCUT_SLOW_MS");
    long milliseconds = slow ? atol(slow) : 0;
    struct timespec pause = {milliseconds / 1000, milliseconds % 1000 * 1000000};
    if (milliseconds > 0 && length >= 0) nanosleep(&pause, NULL);
    int result = ((sync_call)dlsym(RTLD_NEXT, name))(fd);
    if (result == 0 && length >= 0) note(fd, length);
    return result;
}

int fsync(int fd) { return synced_by("fsync", fd); }
int fdatasync(int fd) { return synced_by("fdatasync", fd); }
