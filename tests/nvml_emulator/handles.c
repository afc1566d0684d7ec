/* Handles: numbers that look like pointers and are never followed.
 *
 *     bits 0-7    number of the GPU, plus 1
 *     bits 8-31   0 for the GPU itself, or a hash of the MIG instance's UUID
 *     bits 32-    which nvmlInit it is of */
#include <stdint.h>
#include <string.h>

#include "emulator.h"

static uintptr_t hash_of(const char *uuid) {
    uintptr_t hash = 2166136261U;
    for (; *uuid != '\0'; uuid++) {
        hash = ((hash ^ (unsigned char)*uuid) * 16777619U) & 0xffffffffU;
    }
    return (hash & 0xffffffU) | 1;
}

static nvmlDevice_t make_handle(int gpu, uintptr_t hash) {
    return (nvmlDevice_t)((uintptr_t)state.generation << 32 | hash << 8 | ((uintptr_t)gpu + 1));
}

nvmlDevice_t gpu_handle(int gpu) {
    return make_handle(gpu, 0);
}

nvmlDevice_t mig_handle(int gpu, const struct instance *instance) {
    return make_handle(gpu, hash_of(instance->uuid));
}

nvmlReturn_t find_target(nvmlDevice_t handle, struct target *target) {
    uintptr_t bits = (uintptr_t)handle;
    uintptr_t hash = bits >> 8 & 0xffffff;
    int gpu = (int)(bits & 0xff) - 1;
    if (bits >> 32 != state.generation || gpu < 0 || gpu >= (int)state.script.gpu_count) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    target->gpu = gpu;
    target->gi = WHOLE;
    if (hash == 0) {
        return NVML_SUCCESS;
    }
    const struct layout *layout = layout_of(gpu);
    for (unsigned index = 0; index < layout->count; index++) {
        if (hash_of(layout->instances[index].uuid) == hash) {
            target->gi = (int)layout->instances[index].gi;
            target->instance = layout->instances[index];
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_INVALID_ARGUMENT; /* the instance is gone */
}

/* The driver counts its GPUs when it is initialised and answers with that, but a control file may take one away at once. */
unsigned visible_count(void) {
    state_lock();
    unsigned count = 0;
    for (unsigned index = 0; index < state.visible_size; index++) {
        count += !control_vanished(state.visible[index]);
    }
    state_unlock();
    return count;
}

static nvmlReturn_t give(int gpu, nvmlDevice_t *handle) {
    *handle = gpu_handle(gpu);
    return enter_target(gpu, WHOLE);
}

/* Which GPU has a place, -1 past the last one. */
static int gpu_at(unsigned index) {
    state_lock();
    int gpu = index < state.visible_size ? state.visible[index] : -1;
    state_unlock();
    return gpu;
}

nvmlReturn_t handle_by_index(unsigned index, nvmlDevice_t *handle) {
    int gpu = gpu_at(index);
    return gpu >= 0 ? give(gpu, handle) : NVML_ERROR_INVALID_ARGUMENT;
}

static nvmlReturn_t mig_handle_by_uuid(int gpu, const char *uuid, nvmlDevice_t *handle) {
    struct layout layout;
    copy_layout(gpu, &layout);
    for (unsigned index = 0; index < layout.count; index++) {
        if (strcmp(layout.instances[index].uuid, uuid) == 0) {
            *handle = mig_handle(gpu, &layout.instances[index]);
            return enter_target(gpu, (int)layout.instances[index].gi);
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t handle_by_uuid(const char *uuid, nvmlDevice_t *handle) {
    int gpu;
    for (unsigned index = 0; (gpu = gpu_at(index)) >= 0; index++) {
        if (strcmp(gpu_identity(gpu)->uuid, uuid) == 0) {
            return give(gpu, handle);
        }
        nvmlReturn_t code = mig_handle_by_uuid(gpu, uuid, handle);
        if (code != NVML_ERROR_NOT_FOUND) {
            return code;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t handle_by_bus_id(const char *bus_id, nvmlDevice_t *handle) {
    int gpu;
    for (unsigned index = 0; (gpu = gpu_at(index)) >= 0; index++) {
        if (strcmp(gpu_identity(gpu)->pci_bus_id, bus_id) == 0) {
            return give(gpu, handle);
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

nvmlReturn_t visible_index(int gpu, unsigned *index) {
    int found;
    for (*index = 0; (found = gpu_at(*index)) >= 0; (*index)++) {
        if (found == gpu) {
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}
