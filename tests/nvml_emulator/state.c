/* What the library remembers between calls: the script, who initialised it, which GPUs that client sees, and the time. */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static struct script script;
static unsigned references;
static unsigned generation; /* a handle of an earlier nvmlInit is no longer valid */
static struct timespec started;
static bool has_started;
static int visible[MAX_GPUS];
static unsigned visible_size;

static double seconds_since(const struct timespec *then) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)(now.tv_sec - then->tv_sec) + (double)(now.tv_nsec - then->tv_nsec) / 1e9;
}

static double elapsed_s(void) {
    double elapsed;
    return control_frozen_at(&elapsed) ? elapsed : seconds_since(&started) * script.speed;
}

static bool script_hangs(int gpu) {
    double value;
    return gpu >= 0 && timeline_value(&script, &script.gpus[gpu], VALUE_HANG, elapsed_s(), &value) && value != 0;
}

/* Blocks while a hang is set for the call. Called with the lock held, sleeps without it. */
static void hang(int gpu, const char *call) {
    struct timespec since;
    clock_gettime(CLOCK_MONOTONIC, &since);
    while (seconds_since(&since) < control_hang(gpu, call) || script_hangs(gpu)) {
        pthread_mutex_unlock(&lock);
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        pthread_mutex_lock(&lock);
        control_refresh(getenv("WARPWATCH_NVML_CONTROL"));
    }
}

static nvmlReturn_t enter(int gpu, const char *call) {
    control_refresh(getenv("WARPWATCH_NVML_CONTROL"));
    hang(gpu, call);
    nvmlReturn_t code = control_fault(gpu, call);
    double status;
    if (code == NVML_SUCCESS && gpu >= 0 &&
        timeline_value(&script, &script.gpus[gpu], VALUE_STATUS, elapsed_s(), &status)) {
        code = (nvmlReturn_t)status;
    }
    return code;
}

static nvmlReturn_t load(void) {
    const char *path = getenv("WARPWATCH_NVML_SCRIPT");
    script_free(&script);
    if (path == NULL || !script_load(&script, path)) {
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (!has_started) {
        clock_gettime(CLOCK_MONOTONIC, &started);
        has_started = true;
    }
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlInitWithFlags(unsigned int flags) {
    (void)flags;
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = enter(-1, "nvmlInit");
    if (code == NVML_SUCCESS && references == 0) {
        code = load();
        if (code == NVML_SUCCESS) {
            generation++;
            visible_size = 0;
            for (unsigned gpu = 0; gpu < script.gpu_count; gpu++) {
                if (!control_vanished((int)gpu)) {
                    visible[visible_size++] = (int)gpu;
                }
            }
        }
    }
    references += code == NVML_SUCCESS;
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t nvmlInit_v2(void) {
    return nvmlInitWithFlags(0);
}

nvmlReturn_t nvmlShutdown(void) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = references > 0 ? enter(-1, "nvmlShutdown") : NVML_ERROR_UNINITIALIZED;
    references -= code == NVML_SUCCESS;
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t enter_system(const char *call) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = references > 0 ? enter(-1, call) : NVML_ERROR_UNINITIALIZED;
    pthread_mutex_unlock(&lock);
    return code;
}

/* A handle holds the generation and the number of the GPU; it is never followed as a pointer. */
static nvmlDevice_t make_handle(int gpu) {
    return (nvmlDevice_t)(uintptr_t)((uintptr_t)generation << 8 | ((uintptr_t)gpu + 1));
}

nvmlReturn_t enter_gpu(nvmlDevice_t handle, const char *call, int *gpu) {
    uintptr_t bits = (uintptr_t)handle;
    nvmlReturn_t code;
    pthread_mutex_lock(&lock);
    *gpu = (int)(bits & 0xff) - 1;
    if (references == 0) {
        code = NVML_ERROR_UNINITIALIZED;
    } else if (bits >> 8 != generation || *gpu < 0 || *gpu >= (int)script.gpu_count) {
        code = NVML_ERROR_INVALID_ARGUMENT;
    } else {
        code = enter(*gpu, call);
    }
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t gpu_fault(int gpu, const char *call) {
    pthread_mutex_lock(&lock);
    nvmlReturn_t code = control_fault(gpu, call);
    pthread_mutex_unlock(&lock);
    return code;
}

nvmlReturn_t gpu_value(int gpu, enum value_id id, double *value) {
    pthread_mutex_lock(&lock);
    bool is_known = control_override(gpu, id, value) ||
                    timeline_value(&script, &script.gpus[gpu], id, elapsed_s(), value);
    pthread_mutex_unlock(&lock);
    return is_known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

void copy_processes(int gpu, char *text, size_t size) {
    pthread_mutex_lock(&lock);
    const char *processes = timeline_processes(&script, &script.gpus[gpu], elapsed_s());
    snprintf(text, size, "%s", processes != NULL ? processes : "-");
    pthread_mutex_unlock(&lock);
}

const struct gpu *gpu_identity(int gpu) {
    return &script.gpus[gpu];
}

const char *driver_version(void) {
    return script.driver_version;
}

/* The driver counts its GPUs when it is initialised and answers with that, but a control file may take one away at once. */
unsigned visible_count(void) {
    pthread_mutex_lock(&lock);
    unsigned count = 0;
    for (unsigned index = 0; index < visible_size; index++) {
        count += !control_vanished(visible[index]);
    }
    pthread_mutex_unlock(&lock);
    return count;
}

nvmlReturn_t handle_by_index(unsigned index, nvmlDevice_t *handle) {
    if (index >= visible_size) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *handle = make_handle(visible[index]);
    int gpu;
    return enter_gpu(*handle, "nvmlDeviceGetHandleByIndex_v2", &gpu);
}

nvmlReturn_t handle_by_uuid(const char *uuid, nvmlDevice_t *handle) {
    for (unsigned index = 0; index < visible_size; index++) {
        if (strcmp(script.gpus[visible[index]].uuid, uuid) == 0) {
            *handle = make_handle(visible[index]);
            int gpu;
            return enter_gpu(*handle, "nvmlDeviceGetHandleByUUID", &gpu);
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t visible_index(int gpu, unsigned *index) {
    for (*index = 0; *index < visible_size; (*index)++) {
        if (visible[*index] == gpu) {
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

uint64_t to_u64(double value) {
    if (value < 0) {
        return (uint64_t)(int64_t)value;
    }
    return value >= 18446744073709551615.0 ? UINT64_MAX : (uint64_t)value;
}

uint32_t to_u32(double value) {
    if (value < 0) {
        return (uint32_t)(int32_t)value;
    }
    return value >= 4294967295.0 ? UINT32_MAX : (uint32_t)value;
}
