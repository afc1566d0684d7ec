/* Event sets. An event of the control file goes once to each set that was registered for its GPU and type before it. */
#include <limits.h>
#include <pthread.h>
#include <stdlib.h>
#include <time.h>

#include "emulator.h"

#define MAX_SETS 64
/* Looks at the control file while a call waits: a driver sleeps in the kernel, which costs nothing. */
#define POLL_NS 100000000

struct event_set {
    bool is_used;
    unsigned long long types[MAX_GPUS]; /* registered for a GPU, 0 for none */
    unsigned long long since[MAX_GPUS]; /* number of the last happening before that */
    unsigned long long after;           /* number of the event given last */
};

static pthread_mutex_t sets_lock = PTHREAD_MUTEX_INITIALIZER;
static struct event_set sets[MAX_SETS];

/* A set is named by its place; with the lock of sets held. */
static struct event_set *find_set(nvmlEventSet_t set) {
    uintptr_t number = (uintptr_t)set;
    return number >= 1 && number <= MAX_SETS && sets[number - 1].is_used ? &sets[number - 1] : NULL;
}

API(nvmlEventSetCreate)(nvmlEventSet_t *set) {
    nvmlReturn_t code = enter_system();
    if (code != NVML_SUCCESS) {
        return code;
    }
    code = NVML_ERROR_MEMORY;
    pthread_mutex_lock(&sets_lock);
    for (uintptr_t place = 0; place < MAX_SETS; place++) {
        if (!sets[place].is_used) {
            sets[place] = (struct event_set){.is_used = true};
            *set = (nvmlEventSet_t)(place + 1);
            code = NVML_SUCCESS;
            break;
        }
    }
    pthread_mutex_unlock(&sets_lock);
    return code;
}

API(nvmlEventSetFree)(nvmlEventSet_t set) {
    pthread_mutex_lock(&sets_lock);
    struct event_set *found = find_set(set);
    if (found != NULL) {
        found->is_used = false;
    }
    pthread_mutex_unlock(&sets_lock);
    return found != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

API(nvmlDeviceGetSupportedEventTypes)(nvmlDevice_t device, unsigned long long *types) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS) {
        *types = gpu_identity(gpu)->event_types;
    }
    return code;
}

API(nvmlDeviceRegisterEvents)(nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS && (types & ~gpu_identity(gpu)->event_types) != 0) {
        code = NVML_ERROR_NOT_SUPPORTED;
    }
    if (code != NVML_SUCCESS) {
        return code;
    }
    unsigned long long now = last_happening();
    pthread_mutex_lock(&sets_lock);
    struct event_set *found = find_set(set);
    if (found != NULL) {
        found->since[gpu] = found->types[gpu] == 0 ? now : found->since[gpu];
        found->types[gpu] |= types;
    }
    pthread_mutex_unlock(&sets_lock);
    return found != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t take_event(nvmlEventSet_t set, nvmlEventData_t *data) {
    struct happening event;
    unsigned long long number;
    pthread_mutex_lock(&sets_lock);
    struct event_set *found = find_set(set);
    nvmlReturn_t code = found != NULL ? NVML_ERROR_TIMEOUT : NVML_ERROR_INVALID_ARGUMENT;
    if (found != NULL && next_event(found->after, found->types, found->since, &event, &number)) {
        found->after = number;
        data->device = gpu_handle(event.gpu);
        data->eventType = event.type;
        data->eventData = event.data;
        data->gpuInstanceId = event.gi == WHOLE ? UINT_MAX : (unsigned int)event.gi;
        data->computeInstanceId = event.gi == WHOLE ? UINT_MAX : 0;
        code = NVML_SUCCESS;
    }
    pthread_mutex_unlock(&sets_lock);
    return code;
}

static double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

static nvmlReturn_t wait_for_event(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    double end_s = monotonic_s() + timeout_ms / 1000.0;
    nvmlReturn_t code = enter_system();
    if (code != NVML_SUCCESS) {
        return code;
    }
    for (;;) {
        if (!is_usable()) {
            return NVML_ERROR_UNINITIALIZED;
        }
        code = take_event(set, data);
        double left_s = end_s - monotonic_s();
        if (code != NVML_ERROR_TIMEOUT || left_s <= 0) {
            return code;
        }
        long nanoseconds = left_s * 1e9 < POLL_NS ? (long)(left_s * 1e9) : POLL_NS;
        nanosleep(&(struct timespec){.tv_nsec = nanoseconds}, NULL);
    }
}

API(nvmlEventSetWait)(nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned int timeout_ms) {
    nvmlEventData_t full;
    nvmlReturn_t code = wait_for_event(set, &full, timeout_ms);
    if (code == NVML_SUCCESS) {
        *data = (nvmlEventData_v1_t){full.device, full.eventType, full.eventData};
    }
    return code;
}

API(nvmlEventSetWait_v2)(nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms) {
    return wait_for_event(set, data, timeout_ms);
}
