/* Life of the library: who initialised it, what time it is in the script, what happens at the start of each call. */
#include <pthread.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

struct state state;

static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;
static unsigned references;
static bool is_stale;      /* the driver was loaded anew: nothing works until the next nvmlInit */
static bool is_mismatched; /* and it is another version: nothing works in this process any more */
static unsigned long long last_number;
static struct timespec started;
static char script_path[4096];
static char control_path[4096];

void state_lock(void) {
    pthread_mutex_lock(&lock);
}

void state_unlock(void) {
    pthread_mutex_unlock(&lock);
}

static double seconds_since(clockid_t clock, const struct timespec *then) {
    struct timespec now;
    clock_gettime(clock, &now);
    return (double)(now.tv_sec - then->tv_sec) + (double)(now.tv_nsec - then->tv_nsec) / 1e9;
}

double elapsed_s(void) {
    double elapsed;
    return control_frozen_at(&elapsed) ? elapsed : seconds_since(CLOCK_MONOTONIC, &started) * state.script.speed;
}

double gpm_clock_s(void) {
    double elapsed;
    state_lock();
    if (!control_frozen_at(&elapsed)) {
        elapsed = seconds_since(CLOCK_MONOTONIC, &started);
    }
    state_unlock();
    return elapsed;
}

/* Where the control file is another one, this is a new host: all that its file says has happened is past. */
static void begin_host(void) {
    is_stale = false;
    is_mismatched = false;
    last_number = 0;
    memset(state.bases, 0, sizeof(state.bases));
    state.reloaded_version[0] = '\0';
}

static void reload_driver(const char *version, bool is_past) {
    if (version[0] != '\0') {
        copy_text(state.reloaded_version, sizeof(state.reloaded_version), version);
        is_mismatched = is_mismatched || !is_past;
    }
    if (is_past) {
        return;
    }
    is_stale = references > 0;
    for (int gpu = 0; gpu < (int)state.script.gpu_count; gpu++) {
        for (int gi = WHOLE; gi < MAX_GI; gi++) {
            for (int id = 0; id < VALUE_COUNT; id++) {
                start_counter_again(gpu, gi, (enum value_id)id);
            }
        }
    }
}

static void happen(const struct happening *happening, bool is_past) {
    if (happening->kind == HAPPENED_RELOAD) {
        reload_driver(happening->text, is_past);
    } else if (happening->kind == HAPPENED_RESET && !is_past) {
        for (int gpu = 0; gpu < (int)state.script.gpu_count; gpu++) {
            if (happening->gpu == gpu || happening->gpu == EVERY_GPU) {
                start_counter_again(gpu, happening->gi, happening->value);
            }
        }
    }
}

static void refresh(void) {
    const char *path = getenv("WARPWATCH_NVML_CONTROL");
    path = path != NULL ? path : "";
    bool is_new = strcmp(path, control_path) != 0;
    if (is_new) {
        copy_text(control_path, sizeof(control_path), path);
        begin_host();
    }
    if (!control_refresh(path) && !is_new) {
        return;
    }
    const struct happening *happenings;
    size_t count = control_happenings(&happenings);
    unsigned long long before = last_number;
    for (size_t index = 0; index < count; index++) {
        unsigned long long last = happenings[index].first + happenings[index].count - 1;
        if (happenings[index].first > before) {
            happen(&happenings[index], is_new);
        }
        last_number = last > last_number ? last : last_number;
    }
}

static bool script_hangs(int gpu) {
    double value;
    return gpu >= 0 &&
           timeline_value(&state.script, &state.script.gpus[gpu].whole, VALUE_HANG, elapsed_s(), &value) && value != 0;
}

/* Blocks while a hang is set for the call. Called with the lock held, sleeps without it. */
static void hang(int gpu, int gi, const char *call) {
    struct timespec since;
    clock_gettime(CLOCK_MONOTONIC, &since);
    while (seconds_since(CLOCK_MONOTONIC, &since) < control_hang(gpu, gi, call) || script_hangs(gpu)) {
        state_unlock();
        nanosleep(&(struct timespec){.tv_nsec = 5000000}, NULL);
        state_lock();
        refresh();
    }
}

/* Takes the time that a slow call takes. Called with the lock held, spends it without. */
static void delay(int gpu, int gi, const char *call) {
    bool burns;
    double seconds = control_latency(gpu, gi, call, &burns);
    if (seconds <= 0) {
        return;
    }
    state_unlock();
    if (burns) {
        struct timespec since;
        clock_gettime(CLOCK_THREAD_CPUTIME_ID, &since);
        while (seconds_since(CLOCK_THREAD_CPUTIME_ID, &since) < seconds) {
        }
    } else {
        long long nanoseconds = (long long)(seconds * 1e9);
        nanosleep(&(struct timespec){.tv_sec = nanoseconds / 1000000000, .tv_nsec = nanoseconds % 1000000000}, NULL);
    }
    state_lock();
}

static nvmlReturn_t enter(int gpu, int gi) {
    const char *call = current_call.symbol;
    current_call.gpu = gpu;
    current_call.gi = gi;
    hang(gpu, gi, call);
    delay(gpu, gi, call);
    nvmlReturn_t code = control_fault(gpu, gi, call);
    double status;
    if (code == NVML_SUCCESS && gpu >= 0 &&
        timeline_value(&state.script, &state.script.gpus[gpu].whole, VALUE_STATUS, elapsed_s(), &status)) {
        code = (nvmlReturn_t)status;
    }
    return code;
}

static nvmlReturn_t load(void) {
    const char *path = getenv("WARPWATCH_NVML_SCRIPT");
    script_free(&state.script);
    if (path == NULL || !script_load(&state.script, path)) {
        return NVML_ERROR_DRIVER_NOT_LOADED;
    }
    if (strcmp(path, script_path) != 0) {
        copy_text(script_path, sizeof(script_path), path);
        clock_gettime(CLOCK_MONOTONIC, &started);
    }
    state.generation++;
    state.visible_size = 0;
    for (unsigned gpu = 0; gpu < state.script.gpu_count; gpu++) {
        if (!control_vanished((int)gpu)) {
            state.visible[state.visible_size++] = (int)gpu;
        }
    }
    is_stale = false;
    return NVML_SUCCESS;
}

static nvmlReturn_t initialise(void) {
    state_lock();
    refresh();
    nvmlReturn_t code = enter(SYSTEM, WHOLE);
    if (code == NVML_SUCCESS && is_mismatched) {
        code = NVML_ERROR_LIB_RM_VERSION_MISMATCH;
    }
    if (code == NVML_SUCCESS && (references == 0 || is_stale)) {
        code = load();
    }
    references += code == NVML_SUCCESS;
    state_unlock();
    return code;
}

API(nvmlInitWithFlags)(unsigned int flags) {
    (void)flags;
    return initialise();
}

API(nvmlInit_v2)(void) {
    return initialise();
}

API(nvmlInit)(void) {
    return initialise();
}

API(nvmlShutdown)(void) {
    state_lock();
    refresh();
    nvmlReturn_t code = references > 0 ? enter(SYSTEM, WHOLE) : NVML_ERROR_UNINITIALIZED;
    references -= code == NVML_SUCCESS && references > 0;
    state_unlock();
    return code;
}

bool is_usable(void) {
    state_lock();
    refresh();
    bool is_fine = references > 0 && !is_stale;
    state_unlock();
    return is_fine;
}

nvmlReturn_t enter_target(int gpu, int gi) {
    state_lock();
    refresh();
    nvmlReturn_t code = references > 0 && !is_stale ? enter(gpu, gi) : NVML_ERROR_UNINITIALIZED;
    state_unlock();
    return code;
}

nvmlReturn_t enter_system(void) {
    return enter_target(SYSTEM, WHOLE);
}

nvmlReturn_t enter_device(nvmlDevice_t handle, struct target *target) {
    state_lock();
    refresh();
    nvmlReturn_t code = NVML_ERROR_UNINITIALIZED;
    if (references > 0 && !is_stale) {
        code = find_target(handle, target);
        code = code == NVML_SUCCESS ? enter(target->gpu, target->gi) : code;
    }
    state_unlock();
    return code;
}

nvmlReturn_t enter_gpu(nvmlDevice_t handle, int *gpu) {
    struct target target = {.gpu = 0, .gi = WHOLE};
    nvmlReturn_t code = enter_device(handle, &target);
    *gpu = target.gpu;
    return code == NVML_SUCCESS && target.gi != WHOLE ? NVML_ERROR_NOT_SUPPORTED : code;
}

nvmlReturn_t enter_part(int gpu, int gi, const char *part) {
    state_lock();
    hang(gpu, gi, part);
    delay(gpu, gi, part);
    nvmlReturn_t code = control_fault(gpu, gi, part);
    state_unlock();
    return code;
}

unsigned long long last_happening(void) {
    state_lock();
    refresh();
    unsigned long long number = last_number;
    state_unlock();
    return number;
}

bool next_event(unsigned long long after, const unsigned long long types[MAX_GPUS],
                const unsigned long long since[MAX_GPUS], struct happening *event, unsigned long long *number) {
    bool is_found = false;
    state_lock();
    refresh();
    const struct happening *happenings;
    size_t count = control_happenings(&happenings);
    for (size_t index = 0; index < count && !is_found; index++) {
        const struct happening *candidate = &happenings[index];
        if (candidate->kind != HAPPENED_EVENT || candidate->gpu < 0 || (types[candidate->gpu] & candidate->type) == 0) {
            continue;
        }
        unsigned long long later = after > since[candidate->gpu] ? after : since[candidate->gpu];
        *number = candidate->first > later ? candidate->first : later + 1;
        is_found = *number < candidate->first + candidate->count;
        *event = *candidate;
    }
    state_unlock();
    return is_found;
}
