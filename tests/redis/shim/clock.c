/* Adds an offset to the wall clock of redis-server, into which it is preloaded, so that a test can set the clock. The
 * file CLOCK_OFFSET contains the offset in nanoseconds. The monotonic clock stays as it is. */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

static int64_t offset(void) {
    static volatile int64_t *shared;
    if (!shared) {
        int file = open(getenv("CLOCK_OFFSET"), O_RDONLY | O_CLOEXEC);
        shared = mmap(NULL, sizeof *shared, PROT_READ, MAP_SHARED, file, 0);
        close(file);
    }
    return *shared;
}

int clock_gettime(clockid_t id, struct timespec *at) {
    static int (*real)(clockid_t, struct timespec *);
    if (!real) real = dlsym(RTLD_NEXT, "clock_gettime");
    int result = real(id, at);
    if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE) {
        int64_t nanoseconds = at->tv_sec * 1000000000LL + at->tv_nsec + offset();
        at->tv_sec = nanoseconds / 1000000000;
        at->tv_nsec = nanoseconds % 1000000000;
    }
    return result;
}

int gettimeofday(struct timeval *at, void *zone) {
    struct timespec now;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &now);
    at->tv_sec = now.tv_sec;
    at->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *at) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (at) *at = now.tv_sec;
    return now.tv_sec;
}
