/* Lets time go faster in a process, so that a day of a node fits into half an hour.
 *
 * Preloaded (LD_PRELOAD), it makes every clock run WARPWATCH_CLOCK_SPEED times as fast, and every wait of the C library as
 * much shorter. CLOCK_REALTIME goes on from WARPWATCH_CLOCK_BASE (seconds since 1970), so that whoever started the process
 * knows its time: base + (now - base) * speed. CPU times are left alone. Without the variables nothing changes.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <poll.h>
#include <pthread.h>
#include <semaphore.h>
#include <stddef.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/epoll.h>
#include <sys/select.h>
#include <sys/time.h>
#include <time.h>

#define BILLION 1000000000LL

static int (*real_gettime)(clockid_t, struct timespec *);
static int (*real_nanosleep)(clockid_t, int, const struct timespec *, struct timespec *);
static int (*real_sem_clockwait)(sem_t *, clockid_t, const struct timespec *);
static int (*real_sem_timedwait)(sem_t *, const struct timespec *);
static int (*real_cond_timedwait)(pthread_cond_t *, pthread_mutex_t *, const struct timespec *);
static int (*real_cond_clockwait)(pthread_cond_t *, pthread_mutex_t *, clockid_t, const struct timespec *);
static int (*real_poll)(struct pollfd *, nfds_t, int);
static int (*real_epoll_wait)(int, struct epoll_event *, int, int);
static int (*real_select)(int, fd_set *, fd_set *, fd_set *, struct timeval *);

static double speed = 1.0;
static int64_t base_realtime, base_monotonic, base_boottime;

static int64_t count(const struct timespec *time)
{
    return (int64_t)time->tv_sec * BILLION + time->tv_nsec;
}

static struct timespec spec(int64_t nanoseconds)
{
    return (struct timespec){.tv_sec = nanoseconds / BILLION, .tv_nsec = nanoseconds % BILLION};
}

static int64_t now(clockid_t clock)
{
    struct timespec time;
    real_gettime(clock, &time);
    return count(&time);
}

#define FIND(name, symbol) *(void **)&name = dlsym(RTLD_NEXT, symbol)

__attribute__((constructor)) static void load(void)
{
    const char *factor = getenv("WARPWATCH_CLOCK_SPEED"), *base = getenv("WARPWATCH_CLOCK_BASE");
    if (real_gettime != NULL)
        return;
    FIND(real_gettime, "clock_gettime");
    FIND(real_nanosleep, "clock_nanosleep");
    FIND(real_sem_clockwait, "sem_clockwait");
    FIND(real_sem_timedwait, "sem_timedwait");
    FIND(real_cond_clockwait, "pthread_cond_clockwait");
    FIND(real_poll, "poll");
    FIND(real_epoll_wait, "epoll_wait");
    FIND(real_select, "select");
    /* Of two versions of this one the older is for programs of before 2002. */
    *(void **)&real_cond_timedwait = dlvsym(RTLD_NEXT, "pthread_cond_timedwait", "GLIBC_2.3.2");
    if (real_cond_timedwait == NULL)
        FIND(real_cond_timedwait, "pthread_cond_timedwait");
    base_monotonic = now(CLOCK_MONOTONIC);
    base_boottime = now(CLOCK_BOOTTIME);
    base_realtime = base != NULL ? (int64_t)(atof(base) * 1e9) : now(CLOCK_REALTIME);
    if (factor != NULL && atof(factor) > 0)
        speed = atof(factor);
}

static const int64_t *base_of(clockid_t clock)
{
    switch (clock) {
    case CLOCK_REALTIME:
    case CLOCK_REALTIME_COARSE:
        return &base_realtime;
    case CLOCK_MONOTONIC:
    case CLOCK_MONOTONIC_COARSE:
    case CLOCK_MONOTONIC_RAW:
        return &base_monotonic;
    case CLOCK_BOOTTIME:
        return &base_boottime;
    default:
        return NULL;
    }
}

int clock_gettime(clockid_t clock, struct timespec *time)
{
    load();
    int result = real_gettime(clock, time);
    const int64_t *base = base_of(clock);
    if (result == 0 && base != NULL)
        *time = spec(*base + (int64_t)((double)(count(time) - *base) * speed));
    return result;
}

/* The machine's time of a moment of the fast clock. */
static struct timespec machine_time(clockid_t clock, const struct timespec *deadline)
{
    const int64_t *base = base_of(clock);
    load();
    return base == NULL ? *deadline : spec(*base + (int64_t)((double)(count(deadline) - *base) / speed));
}

int gettimeofday(struct timeval *restrict time, void *restrict zone)
{
    struct timespec moment;
    (void)zone;
    clock_gettime(CLOCK_REALTIME, &moment);
    time->tv_sec = moment.tv_sec;
    time->tv_usec = moment.tv_nsec / 1000;
    return 0;
}

time_t time(time_t *result)
{
    struct timespec moment;
    clock_gettime(CLOCK_REALTIME, &moment);
    if (result != NULL)
        *result = moment.tv_sec;
    return moment.tv_sec;
}

int clock_nanosleep(clockid_t clock, int flags, const struct timespec *wanted, struct timespec *left)
{
    struct timespec shorter = flags & TIMER_ABSTIME ? machine_time(clock, wanted) : spec((int64_t)(count(wanted) / speed));
    return real_nanosleep(clock, flags, &shorter, left);
}

int nanosleep(const struct timespec *wanted, struct timespec *left)
{
    struct timespec shorter = spec((int64_t)(count(wanted) / speed));
    return real_nanosleep(CLOCK_MONOTONIC, 0, &shorter, left) == 0 ? 0 : -1;
}

int sem_clockwait(sem_t *restrict semaphore, clockid_t clock, const struct timespec *restrict deadline)
{
    struct timespec sooner = machine_time(clock, deadline);
    return real_sem_clockwait(semaphore, clock, &sooner);
}

int sem_timedwait(sem_t *restrict semaphore, const struct timespec *restrict deadline)
{
    struct timespec sooner = machine_time(CLOCK_REALTIME, deadline);
    return real_sem_timedwait(semaphore, &sooner);
}

int pthread_cond_clockwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex, clockid_t clock,
                           const struct timespec *restrict deadline)
{
    struct timespec sooner = machine_time(clock, deadline);
    return real_cond_clockwait(condition, mutex, clock, &sooner);
}

int pthread_cond_timedwait(pthread_cond_t *restrict condition, pthread_mutex_t *restrict mutex,
                           const struct timespec *restrict deadline)
{
    /* Which clock a condition has is not told; no machine has been up for thirty years. */
    struct timespec sooner = machine_time(deadline->tv_sec > BILLION ? CLOCK_REALTIME : CLOCK_MONOTONIC, deadline);
    return real_cond_timedwait(condition, mutex, &sooner);
}

static int shorter_ms(int milliseconds)
{
    return milliseconds <= 0 ? milliseconds : 1 + (int)(milliseconds / speed);
}

int poll(struct pollfd *files, nfds_t number, int milliseconds)
{
    load();
    return real_poll(files, number, shorter_ms(milliseconds));
}

int epoll_wait(int descriptor, struct epoll_event *events, int most, int milliseconds)
{
    load();
    return real_epoll_wait(descriptor, events, most, shorter_ms(milliseconds));
}

int select(int number, fd_set *restrict in, fd_set *restrict out, fd_set *restrict exceptional,
           struct timeval *restrict wait)
{
    load();
    if (wait == NULL)
        return real_select(number, in, out, exceptional, NULL);
    struct timespec shorter = spec((int64_t)(((double)wait->tv_sec * 1e9 + (double)wait->tv_usec * 1e3) / speed));
    struct timeval machine = {.tv_sec = shorter.tv_sec, .tv_usec = shorter.tv_nsec / 1000};
    return real_select(number, in, out, exceptional, &machine);
}
