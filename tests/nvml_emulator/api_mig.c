/* Multi-instance GPU: MIG devices and GPU instances of the layout that holds now. */
#include <stdio.h>
#include <string.h>

#include "emulator.h"

#define MAX_MIG_DEVICES 7
#define MEBIBYTE 1048576.0
#define SMS_OF_SLICE 16

/* The profiles of an 80 GB board: number of nvml.h, its id, slices, eighths of the memory. */
static const struct profile {
    unsigned int number;
    unsigned int id;
    unsigned int slices;
    unsigned int eighths;
} profiles[] = {{0, 19, 1, 1}, {1, 14, 2, 2}, {2, 9, 3, 4}, {3, 5, 4, 4}, {4, 0, 7, 8}, {9, 15, 1, 2}};

#define PROFILE_COUNT (sizeof(profiles) / sizeof(profiles[0]))

static bool is_capable(int gpu) {
    unsigned architecture = architecture_of(gpu_identity(gpu));
    return (architecture >= AMPERE && architecture != ADA) || is_mig_enabled(gpu);
}

/* "1g.10gb" or "1c.3g.40gb": compute slices, slices, memory. */
static void parse_profile(const char *text, unsigned *compute, unsigned *slices, unsigned *gibibytes) {
    *compute = *slices = *gibibytes = 0;
    if (sscanf(text, "%uc.%ug.%ugb", compute, slices, gibibytes) != 3) {
        *compute = *slices = *gibibytes = 0;
        sscanf(text, "%ug.%ugb", slices, gibibytes);
        *compute = *slices;
    }
}

API(nvmlDeviceIsMigDeviceHandle)(nvmlDevice_t device, unsigned int *is_mig) {
    struct target target;
    nvmlReturn_t code = enter_device(device, &target);
    if (code == NVML_SUCCESS) {
        *is_mig = target.gi != WHOLE;
    }
    return code;
}

API(nvmlDeviceGetMigMode)(nvmlDevice_t device, unsigned int *first, unsigned int *second) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS && !is_capable(gpu)) {
        code = NVML_ERROR_NOT_SUPPORTED;
    }
    if (code == NVML_SUCCESS) {
        *first = *second = is_mig_enabled(gpu);
    }
    return code;
}

API(nvmlDeviceGetMaxMigDeviceCount)(nvmlDevice_t device, unsigned int *value) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS) {
        *value = is_mig_enabled(gpu) ? MAX_MIG_DEVICES : 0;
    }
    return code;
}

API(nvmlDeviceGetMigDeviceHandleByIndex)(nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig) {
    int gpu;
    struct layout layout;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    copy_layout(gpu, &layout);
    if (!layout.enabled) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (index >= MAX_MIG_DEVICES) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (index >= layout.count) {
        return NVML_ERROR_NOT_FOUND;
    }
    *mig = mig_handle(gpu, &layout.instances[index]);
    return NVML_SUCCESS;
}

static nvmlReturn_t enter_mig(nvmlDevice_t device, struct target *target) {
    nvmlReturn_t code = enter_device(device, target);
    return code == NVML_SUCCESS && target->gi == WHOLE ? NVML_ERROR_INVALID_ARGUMENT : code;
}

API(nvmlDeviceGetDeviceHandleFromMigDeviceHandle)(nvmlDevice_t mig, nvmlDevice_t *device) {
    struct target target;
    nvmlReturn_t code = enter_mig(mig, &target);
    if (code == NVML_SUCCESS) {
        *device = gpu_handle(target.gpu);
    }
    return code;
}

API(nvmlDeviceGetGpuInstanceId)(nvmlDevice_t device, unsigned int *value) {
    struct target target;
    nvmlReturn_t code = enter_mig(device, &target);
    if (code == NVML_SUCCESS) {
        *value = target.instance.gi;
    }
    return code;
}

API(nvmlDeviceGetComputeInstanceId)(nvmlDevice_t device, unsigned int *value) {
    struct target target;
    nvmlReturn_t code = enter_mig(device, &target);
    if (code == NVML_SUCCESS) {
        *value = target.instance.ci;
    }
    return code;
}

API(nvmlDeviceGetAttributes_v2)(nvmlDevice_t device, nvmlDeviceAttributes_t *attributes) {
    struct target target;
    unsigned compute = 0;
    unsigned slices = 7;
    unsigned gibibytes = 0;
    double memory = 0;
    nvmlReturn_t code = enter_device(device, &target);
    if (code != NVML_SUCCESS) {
        return code;
    }
    if (target.gi != WHOLE) {
        parse_profile(target.instance.profile, &compute, &slices, &gibibytes);
    }
    bool is_given = unit_value(target.gpu, target.gi, VALUE_MEMORY_TOTAL, &memory) == NVML_SUCCESS;
    memset(attributes, 0, sizeof(*attributes));
    attributes->multiprocessorCount = slices * SMS_OF_SLICE;
    attributes->sharedCopyEngineCount = slices;
    attributes->gpuInstanceSliceCount = target.gi == WHOLE ? 0 : slices;
    attributes->computeInstanceSliceCount = target.gi == WHOLE ? 0 : compute;
    attributes->memorySizeMB = is_given ? to_u64(memory / MEBIBYTE) : gibibytes * 1024ULL;
    return NVML_SUCCESS;
}

/* A GPU instance is named by a number with its top bit set. */
static nvmlGpuInstance_t instance_handle(int gpu, unsigned gi) {
    return (nvmlGpuInstance_t)((uintptr_t)1 << 63 | (uintptr_t)(gpu + 1) << 8 | gi);
}

static const struct profile *profile_of(const char *text) {
    unsigned compute;
    unsigned slices;
    unsigned gibibytes;
    parse_profile(text, &compute, &slices, &gibibytes);
    for (size_t index = 0; index < PROFILE_COUNT; index++) {
        if (profiles[index].slices == slices) {
            return &profiles[index];
        }
    }
    return NULL;
}

API(nvmlDeviceGetGpuInstanceById)(nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance) {
    int gpu;
    struct layout layout;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    copy_layout(gpu, &layout);
    for (unsigned index = 0; index < layout.count; index++) {
        if (layout.instances[index].gi == id) {
            *instance = instance_handle(gpu, id);
            return NVML_SUCCESS;
        }
    }
    return layout.enabled ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

API(nvmlDeviceGetGpuInstances)(nvmlDevice_t device, unsigned int profile, nvmlGpuInstance_t *instances,
                               unsigned int *count) {
    int gpu;
    struct layout layout;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    copy_layout(gpu, &layout);
    *count = 0;
    for (unsigned index = 0; index < layout.count; index++) {
        const struct profile *its_profile = profile_of(layout.instances[index].profile);
        if (layout.instances[index].ci == 0 && its_profile != NULL && its_profile->id == profile) {
            instances[(*count)++] = instance_handle(gpu, layout.instances[index].gi);
        }
    }
    return layout.enabled ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
}

API(nvmlGpuInstanceGetInfo)(nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info) {
    uintptr_t bits = (uintptr_t)instance;
    int gpu = (int)(bits >> 8 & 0xff) - 1;
    struct layout layout;
    nvmlReturn_t code = bits >> 63 == 1 && gpu >= 0 && gpu < MAX_GPUS ? enter_target(gpu, WHOLE)
                                                                       : NVML_ERROR_INVALID_ARGUMENT;
    if (code != NVML_SUCCESS) {
        return code;
    }
    copy_layout(gpu, &layout);
    for (unsigned index = 0; index < layout.count; index++) {
        if (layout.instances[index].gi == (bits & 0xff)) {
            const struct profile *profile = profile_of(layout.instances[index].profile);
            memset(info, 0, sizeof(*info));
            info->device = gpu_handle(gpu);
            info->id = layout.instances[index].gi;
            info->profileId = profile != NULL ? profile->id : 0;
            info->placement.start = index;
            info->placement.size = profile != NULL ? profile->slices : 1;
            return NVML_SUCCESS;
        }
    }
    return NVML_ERROR_NOT_FOUND;
}

static nvmlReturn_t read_profile(nvmlDevice_t device, unsigned int number, nvmlGpuInstanceProfileInfo_v2_t *info) {
    int gpu;
    double memory = 80.0 * 1024 * MEBIBYTE;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS || !is_mig_enabled(gpu)) {
        return code != NVML_SUCCESS ? code : NVML_ERROR_NOT_SUPPORTED;
    }
    gpu_value(gpu, VALUE_MEMORY_TOTAL, &memory);
    for (size_t index = 0; index < PROFILE_COUNT; index++) {
        const struct profile *profile = &profiles[index];
        if (profile->number != number) {
            continue;
        }
        unsigned gibibytes = (unsigned)(memory * profile->eighths / 8 / 1024 / MEBIBYTE + 0.5);
        memset(info, 0, sizeof(*info));
        info->id = profile->id;
        info->sliceCount = profile->slices;
        info->instanceCount = MAX_MIG_DEVICES / profile->slices;
        info->multiprocessorCount = profile->slices * SMS_OF_SLICE;
        info->copyEngineCount = profile->slices;
        info->memorySizeMB = to_u64(memory * profile->eighths / 8 / MEBIBYTE);
        snprintf(info->name, sizeof(info->name), "MIG %ug.%ugb", profile->slices, gibibytes);
        return NVML_SUCCESS;
    }
    return NVML_ERROR_NOT_SUPPORTED;
}

API(nvmlDeviceGetGpuInstanceProfileInfo)(nvmlDevice_t device, unsigned int profile,
                                         nvmlGpuInstanceProfileInfo_t *info) {
    nvmlGpuInstanceProfileInfo_v2_t full;
    nvmlReturn_t code = read_profile(device, profile, &full);
    if (code == NVML_SUCCESS) {
        memset(info, 0, sizeof(*info));
        info->id = full.id;
        info->sliceCount = full.sliceCount;
        info->instanceCount = full.instanceCount;
        info->multiprocessorCount = full.multiprocessorCount;
        info->copyEngineCount = full.copyEngineCount;
        info->memorySizeMB = full.memorySizeMB;
    }
    return code;
}

API(nvmlDeviceGetGpuInstanceProfileInfoV)(nvmlDevice_t device, unsigned int profile,
                                          nvmlGpuInstanceProfileInfo_v2_t *info) {
    if (info->version != NVML_GPU_INSTANCE_PROFILE_INFO_V2) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t code = read_profile(device, profile, info);
    info->version = NVML_GPU_INSTANCE_PROFILE_INFO_V2;
    return code;
}
