/* Values at this moment: the script's, or what the control file sets in their place. */
#include <math.h>
#include <stdio.h>
#include <string.h>

#include "emulator.h"

static const struct unit *unit_of(int gpu, int gi) {
    const struct gpu *owner = &state.script.gpus[gpu];
    return gi == WHOLE ? &owner->whole : &owner->instances[gi];
}

static double *base_of(int gpu, int gi, enum value_id id) {
    return &state.bases[gpu][gi + 1][id];
}

void start_counter_again(int gpu, int gi, enum value_id id) {
    double now;
    if (value_kinds[id] != GAUGE && timeline_value(&state.script, unit_of(gpu, gi), id, elapsed_s(), &now)) {
        *base_of(gpu, gi, id) = now;
    }
}

static bool value_at(int gpu, int gi, enum value_id id, double elapsed, double *value) {
    if (control_override(gpu, gi, id, value)) {
        return true;
    }
    if (!timeline_value(&state.script, unit_of(gpu, gi), id, elapsed, value)) {
        return id == VALUE_POWER_INSTANT && value_at(gpu, gi, VALUE_POWER, elapsed, value);
    }
    *value += control_shift(gpu, gi, id);
    if (value_kinds[id] != GAUGE) {
        *value = fmax(*value - *base_of(gpu, gi, id), 0);
    }
    return true;
}

nvmlReturn_t unit_value_before(int gpu, int gi, enum value_id id, double age_s, double *value) {
    state_lock();
    double moment = elapsed_s() - age_s * state.script.speed;
    bool is_known = value_at(gpu, gi, id, moment > 0 ? moment : 0, value);
    int bits = control_wrap_bits(gpu, gi, id);
    if (is_known && bits > 0) {
        *value = fmod(*value, ldexp(1, bits));
    }
    state_unlock();
    return is_known ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

nvmlReturn_t unit_value(int gpu, int gi, enum value_id id, double *value) {
    return unit_value_before(gpu, gi, id, 0, value);
}

nvmlReturn_t gpu_value(int gpu, enum value_id id, double *value) {
    return unit_value(gpu, WHOLE, id, value);
}

void copy_processes(int gpu, int gi, char *text, size_t size) {
    state_lock();
    const char *processes = timeline_processes(&state.script, unit_of(gpu, gi), elapsed_s());
    copy_text(text, size, processes != NULL ? processes : "-");
    state_unlock();
}

const struct layout *layout_of(int gpu) {
    const struct layout *switched = control_layout(gpu);
    return switched != NULL ? switched : &state.script.gpus[gpu].layout;
}

void copy_layout(int gpu, struct layout *layout) {
    state_lock();
    *layout = *layout_of(gpu);
    state_unlock();
}

bool is_mig_enabled(int gpu) {
    struct layout layout;
    copy_layout(gpu, &layout);
    return layout.enabled;
}

const struct gpu *gpu_identity(int gpu) {
    return &state.script.gpus[gpu];
}

void copy_driver_version(char *text, size_t size) {
    state_lock();
    copy_text(text, size, state.reloaded_version[0] != '\0' ? state.reloaded_version : state.script.driver_version);
    state_unlock();
}

bool driver_is_at_least(int major, int minor) {
    char version[TEXT_SIZE];
    int its_major = 0;
    int its_minor = 0;
    copy_driver_version(version, sizeof(version));
    sscanf(version, "%d.%d", &its_major, &its_minor);
    return its_major > major || (its_major == major && its_minor >= minor);
}

/* A sum in equal parts, whole numbers, the remainder with the first links. */
uint64_t share_of_link(double sum, unsigned link, unsigned links) {
    uint64_t whole = to_u64(sum);
    return links > 0 ? whole / links + (link < whole % links) : 0;
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
