/* Shifts the clocks that a process sees, for tests of clock steps and suspends.
 *
 * Preloaded (LD_PRELOAD), it adds two offsets to what the C library returns: the first to CLOCK_REALTIME, the second to
 * CLOCK_BOOTTIME. Both are signed 64-bit counts of nanoseconds, native byte order, in the file that WARPWATCH_CLOCK_SHIM
 * names; the file is mapped, so that a write to it takes effect at once. CLOCK_MONOTONIC is left alone: like the real
 * one, it neither steps nor goes on in a suspend. Without the variable nothing is shifted.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <fcntl.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

#define BILLION 1000000000LL

typedef int clock_gettime_function(clockid_t, struct timespec *);

static clock_gettime_function *real_clock_gettime;
static const volatile int64_t *offsets;

__attribute__((constructor)) static void load(void)
{
    const char *path = getenv("WARPWATCH_CLOCK_SHIM");
    real_clock_gettime = (clock_gettime_function *)dlsym(RTLD_NEXT, "clock_gettime");
    if (path == NULL)
        return;
    int file = open(path, O_RDONLY | O_CLOEXEC);
    if (file < 0)
        return;
    void *page = mmap(NULL, 2 * sizeof(int64_t), PROT_READ, MAP_SHARED, file, 0);
    close(file);
    if (page != MAP_FAILED)
        offsets = page;
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    if (real_clock_gettime == NULL)
        real_clock_gettime = (clock_gettime_function *)dlsym(RTLD_NEXT, "clock_gettime");
    int result = real_clock_gettime(clock, time);
    if (result != 0 || offsets == NULL)
        return result;
    int64_t shift = 0;
    if (clock == CLOCK_REALTIME || clock == CLOCK_REALTIME_COARSE)
        shift = offsets[0];
    else if (clock == CLOCK_BOOTTIME)
        shift = offsets[1];
    int64_t total = (int64_t)time->tv_sec * BILLION + time->tv_nsec + shift;
    time->tv_sec = total / BILLION;
    time->tv_nsec = total % BILLION;
    return 0;
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    struct timespec now;
    (void)zone;
    if (clock_gettime(CLOCK_REALTIME, &now) != 0)
        return -1;
    time->tv_sec = now.tv_sec;
    time->tv_usec = now.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    if (result != NULL)
        *result = now.tv_sec;
    return now.tv_sec;
}
