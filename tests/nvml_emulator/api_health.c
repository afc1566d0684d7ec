/* Symbols of errors and links: ECC, row remapping, NVLink, fabric. */
#include <string.h>

#include "emulator.h"

#define MEMORY_DRAM 2
#define MEMORY_LOCATIONS 8
#define ERROR_TYPES 2
#define COUNTER_TYPES 2

static const enum value_id ecc_values[ERROR_TYPES][COUNTER_TYPES] = {
    {VALUE_ECC_CORRECTED_VOLATILE, VALUE_ECC_CORRECTED_AGGREGATE},
    {VALUE_ECC_UNCORRECTED_VOLATILE, VALUE_ECC_UNCORRECTED_AGGREGATE},
};

static bool has_ecc(int gpu) {
    double value;
    for (int index = 0; index < ERROR_TYPES * COUNTER_TYPES; index++) {
        if (gpu_value(gpu, ecc_values[index / COUNTER_TYPES][index % COUNTER_TYPES], &value) == NVML_SUCCESS) {
            return true;
        }
    }
    return false;
}

API(nvmlDeviceGetEccMode)(nvmlDevice_t device, unsigned int *first, unsigned int *second) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS && !has_ecc(gpu)) {
        code = NVML_ERROR_NOT_SUPPORTED;
    }
    if (code == NVML_SUCCESS) {
        *first = 1;
        *second = 1;
    }
    return code;
}

static nvmlReturn_t read_ecc(nvmlDevice_t device, unsigned int type, unsigned int counter, unsigned long long *errors) {
    int gpu;
    double value;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS && (type >= ERROR_TYPES || counter >= COUNTER_TYPES)) {
        code = NVML_ERROR_INVALID_ARGUMENT;
    }
    if (code == NVML_SUCCESS) {
        code = gpu_value(gpu, ecc_values[type][counter], &value);
    }
    if (code == NVML_SUCCESS) {
        *errors = to_u64(value);
    }
    return code;
}

API(nvmlDeviceGetTotalEccErrors)(nvmlDevice_t device, unsigned int type, unsigned int counter,
                                 unsigned long long *errors) {
    return read_ecc(device, type, counter, errors);
}

/* All errors are the device memory's; the other places have none. */
API(nvmlDeviceGetMemoryErrorCounter)(nvmlDevice_t device, unsigned int type, unsigned int counter, unsigned int location,
                                     unsigned long long *errors) {
    nvmlReturn_t code = read_ecc(device, type, counter, errors);
    if (code == NVML_SUCCESS && location >= MEMORY_LOCATIONS) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    if (code == NVML_SUCCESS && location != MEMORY_DRAM) {
        *errors = 0;
    }
    return code;
}

API(nvmlDeviceGetRemappedRows)(nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable,
                               unsigned int *pending, unsigned int *failure) {
    static const enum value_id ids[] = {VALUE_REMAPPED_CORRECTABLE, VALUE_REMAPPED_UNCORRECTABLE, VALUE_REMAP_PENDING,
                                        VALUE_REMAP_FAILURE};
    unsigned int *const targets[] = {correctable, uncorrectable, pending, failure};
    bool is_offered = false;
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    for (int index = 0; code == NVML_SUCCESS && index < 4; index++) {
        double value = 0;
        is_offered = gpu_value(gpu, ids[index], &value) == NVML_SUCCESS || is_offered;
        *targets[index] = to_u32(value);
    }
    return code == NVML_SUCCESS && !is_offered ? NVML_ERROR_NOT_SUPPORTED : code;
}

static nvmlReturn_t enter_link(nvmlDevice_t device, unsigned int link, int *gpu) {
    nvmlReturn_t code = enter_gpu(device, gpu);
    if (code == NVML_SUCCESS && gpu_identity(*gpu)->nvlink_links == 0) {
        code = NVML_ERROR_NOT_SUPPORTED;
    }
    return code == NVML_SUCCESS && link >= gpu_identity(*gpu)->nvlink_links ? NVML_ERROR_INVALID_ARGUMENT : code;
}

API(nvmlDeviceGetNvLinkState)(nvmlDevice_t device, unsigned int link, unsigned int *active) {
    int gpu;
    double inactive = 0;
    nvmlReturn_t code = enter_link(device, link, &gpu);
    if (code == NVML_SUCCESS) {
        gpu_value(gpu, VALUE_NVLINK_INACTIVE, &inactive);
        *active = link + to_u32(inactive) < gpu_identity(gpu)->nvlink_links;
    }
    return code;
}

API(nvmlDeviceGetNvLinkVersion)(nvmlDevice_t device, unsigned int link, unsigned int *version) {
    int gpu;
    nvmlReturn_t code = enter_link(device, link, &gpu);
    if (code == NVML_SUCCESS) {
        *version = gpu_identity(gpu)->nvlink_version;
    }
    return code;
}

/* Counters 0 replay, 1 recovery, 2 CRC of flits, 3 CRC of data, 4 ECC of data. The sum of CRC errors is counter 2's. */
API(nvmlDeviceGetNvLinkErrorCounter)(nvmlDevice_t device, unsigned int link, unsigned int counter,
                                     unsigned long long *errors) {
    static const enum value_id ids[] = {VALUE_NVLINK_REPLAYS, VALUE_NVLINK_RECOVERIES, VALUE_NVLINK_CRC};
    int gpu;
    double sum = 0;
    nvmlReturn_t code = enter_link(device, link, &gpu);
    if (code == NVML_SUCCESS && (counter > 4 || gpu_identity(gpu)->nvlink_version >= 5)) {
        code = counter > 4 ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_NOT_SUPPORTED;
    }
    if (code == NVML_SUCCESS) {
        code = gpu_value(gpu, counter < 3 ? ids[counter] : VALUE_NVLINK_CRC, &sum);
    }
    if (code == NVML_SUCCESS) {
        *errors = counter < 3 ? share_of_link(sum, link, gpu_identity(gpu)->nvlink_links) : 0;
    }
    return code;
}

API(nvmlDeviceGetGpuFabricInfo)(nvmlDevice_t device, nvmlGpuFabricInfo_t *info) {
    int gpu;
    double fabric_state;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    code = code == NVML_SUCCESS ? gpu_value(gpu, VALUE_FABRIC_STATE, &fabric_state) : code;
    if (code == NVML_SUCCESS) {
        memset(info, 0, sizeof(*info));
        info->state = to_u32(fabric_state);
    }
    return code;
}

API(nvmlDeviceGetGpuFabricInfoV)(nvmlDevice_t device, nvmlGpuFabricInfoV_t *info) {
    int gpu;
    double value;
    double health = 0;
    unsigned int version = info->version;
    if (version != NVML_GPU_FABRIC_V2 && version != NVML_GPU_FABRIC_V3) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t code = enter_gpu(device, &gpu);
    code = code == NVML_SUCCESS ? gpu_value(gpu, VALUE_FABRIC_STATE, &value) : code;
    if (code == NVML_SUCCESS) {
        gpu_value(gpu, VALUE_FABRIC_HEALTH, &health);
        memset(info, 0, version & 0xffff);
        info->version = version;
        info->state = to_u32(value);
        info->healthMask = to_u32(health);
    }
    return code;
}
