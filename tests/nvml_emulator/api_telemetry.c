/* Symbols that answer one value, or one small struct of values, of a GPU. */
#include <stdio.h>
#include <time.h>

#include "emulator.h"

static nvmlReturn_t read_value(nvmlDevice_t device, enum value_id id, double *value) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    return code == NVML_SUCCESS ? gpu_value(gpu, id, value) : code;
}

static nvmlReturn_t read_u32(nvmlDevice_t device, enum value_id id, unsigned int *target) {
    double value;
    nvmlReturn_t code = read_value(device, id, &value);
    if (code == NVML_SUCCESS) {
        *target = to_u32(value);
    }
    return code;
}

static nvmlReturn_t read_u64(nvmlDevice_t device, enum value_id id, unsigned long long *target) {
    double value;
    nvmlReturn_t code = read_value(device, id, &value);
    if (code == NVML_SUCCESS) {
        *target = to_u64(value);
    }
    return code;
}

/* Neither a GPU in MIG mode nor a MIG device has a utilisation. */
API(nvmlDeviceGetUtilizationRates)(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    int gpu;
    double busy = 0;
    double memory = 0;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS) {
        code = is_mig_enabled(gpu) ? NVML_ERROR_NOT_SUPPORTED : gpu_value(gpu, VALUE_UTILIZATION_GPU, &busy);
    }
    if (code == NVML_SUCCESS) {
        gpu_value(gpu, VALUE_UTILIZATION_MEMORY, &memory);
        utilization->gpu = to_u32(busy);
        utilization->memory = to_u32(memory);
    }
    return code;
}

static nvmlReturn_t read_coder(nvmlDevice_t device, unsigned int *percent, unsigned int *period_us) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS && is_mig_enabled(gpu)) {
        code = NVML_ERROR_NOT_SUPPORTED;
    }
    if (code == NVML_SUCCESS) {
        *percent = 0;
        *period_us = 167000;
    }
    return code;
}

API(nvmlDeviceGetEncoderUtilization)(nvmlDevice_t device, unsigned int *first, unsigned int *second) {
    return read_coder(device, first, second);
}

API(nvmlDeviceGetDecoderUtilization)(nvmlDevice_t device, unsigned int *first, unsigned int *second) {
    return read_coder(device, first, second);
}

/* An instance without values of its own has the memory that its profile names ("1g.10gb"), and none used. */
static double memory_of_profile(const char *profile) {
    unsigned slices = 0;
    unsigned gibibytes = 0;
    unsigned compute;
    if (sscanf(profile, "%uc.%ug.%ugb", &compute, &slices, &gibibytes) != 3) {
        sscanf(profile, "%ug.%ugb", &slices, &gibibytes);
    }
    return gibibytes * 1073741824.0;
}

static nvmlReturn_t read_memory(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    struct target target;
    double total = 0;
    double used = 0;
    double reserved = 0;
    nvmlReturn_t code = enter_device(device, &target);
    if (code != NVML_SUCCESS) {
        return code;
    }
    code = unit_value(target.gpu, target.gi, VALUE_MEMORY_TOTAL, &total);
    if (code != NVML_SUCCESS && target.gi == WHOLE) {
        return code;
    }
    if (code != NVML_SUCCESS) {
        total = memory_of_profile(target.instance.profile);
    }
    unit_value(target.gpu, target.gi, VALUE_MEMORY_USED, &used);
    unit_value(target.gpu, target.gi, VALUE_MEMORY_RESERVED, &reserved);
    memory->total = to_u64(total);
    memory->reserved = to_u64(reserved);
    memory->used = to_u64(used);
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

API(nvmlDeviceGetMemoryInfo_v2)(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (memory->version != NVML_MEMORY_V2) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return read_memory(device, memory);
}

/* The first version counts what the driver reserves as used. */
API(nvmlDeviceGetMemoryInfo)(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlMemory_v2_t values;
    nvmlReturn_t code = read_memory(device, &values);
    if (code == NVML_SUCCESS) {
        memory->total = values.total;
        memory->free = values.free;
        memory->used = values.used + values.reserved;
    }
    return code;
}

API(nvmlDeviceGetBAR1MemoryInfo)(nvmlDevice_t device, nvmlBAR1Memory_t *memory) {
    struct target target;
    nvmlReturn_t code = enter_device(device, &target);
    if (code == NVML_SUCCESS) {
        memory->bar1Total = 1ULL << 37;
        memory->bar1Used = 1ULL << 20;
        memory->bar1Free = memory->bar1Total - memory->bar1Used;
    }
    return code;
}

API(nvmlDeviceGetPowerUsage)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_POWER, value);
}

API(nvmlDeviceGetEnforcedPowerLimit)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_POWER_LIMIT, value);
}

API(nvmlDeviceGetPowerManagementLimit)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_POWER_LIMIT, value);
}

API(nvmlDeviceGetTotalEnergyConsumption)(nvmlDevice_t device, unsigned long long *millijoules) {
    return read_u64(device, VALUE_ENERGY, millijoules);
}

/* The graphics clock follows the SM clock, as on the boards of data centres. */
API(nvmlDeviceGetClockInfo)(nvmlDevice_t device, unsigned int type, unsigned int *megahertz) {
    if (type > NVML_CLOCK_MEM) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return read_u32(device, type == NVML_CLOCK_MEM ? VALUE_MEMORY_CLOCK : VALUE_SM_CLOCK, megahertz);
}

API(nvmlDeviceGetMaxClockInfo)(nvmlDevice_t device, unsigned int type, unsigned int *megahertz) {
    if (type > NVML_CLOCK_MEM) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return read_u32(device, type == NVML_CLOCK_MEM ? VALUE_MEMORY_CLOCK_MAX : VALUE_SM_CLOCK_MAX, megahertz);
}

API(nvmlDeviceGetTemperature)(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius) {
    if (sensor != NVML_TEMPERATURE_GPU) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return read_u32(device, VALUE_TEMPERATURE, celsius);
}

API(nvmlDeviceGetTemperatureV)(nvmlDevice_t device, nvmlTemperature_v1_t *temperature) {
    if (temperature->version != NVML_TEMPERATURE_V1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (temperature->sensorType != NVML_TEMPERATURE_GPU) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    double value;
    nvmlReturn_t code = read_value(device, VALUE_TEMPERATURE, &value);
    if (code == NVML_SUCCESS) {
        temperature->temperature = (int)value;
    }
    return code;
}

API(nvmlDeviceGetCurrentClocksEventReasons)(nvmlDevice_t device, unsigned long long *reasons) {
    return read_u64(device, VALUE_EVENT_REASONS, reasons);
}

API(nvmlDeviceGetCurrentClocksThrottleReasons)(nvmlDevice_t device, unsigned long long *reasons) {
    return read_u64(device, VALUE_EVENT_REASONS, reasons);
}

API(nvmlDeviceGetCurrPcieLinkGeneration)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_PCIE_GENERATION, value);
}

API(nvmlDeviceGetMaxPcieLinkGeneration)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_PCIE_GENERATION_MAX, value);
}

API(nvmlDeviceGetGpuMaxPcieLinkGeneration)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_PCIE_GENERATION_MAX, value);
}

API(nvmlDeviceGetCurrPcieLinkWidth)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_PCIE_WIDTH, value);
}

API(nvmlDeviceGetMaxPcieLinkWidth)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_PCIE_WIDTH_MAX, value);
}

API(nvmlDeviceGetPcieReplayCounter)(nvmlDevice_t device, unsigned int *value) {
    return read_u32(device, VALUE_PCIE_REPLAYS, value);
}

/* Blocks for the 20 ms that it measures over; KB/s. Counter 0 is what the GPU sends, 1 what it receives. */
API(nvmlDeviceGetPcieThroughput)(nvmlDevice_t device, unsigned int counter, unsigned int *kilobytes) {
    int gpu;
    double before;
    double after;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    enum value_id id = counter == 0 ? VALUE_PCIE_TX : VALUE_PCIE_RX;
    if (code == NVML_SUCCESS) {
        code = counter > 1 ? NVML_ERROR_INVALID_ARGUMENT : gpu_value(gpu, id, &before);
    }
    if (code != NVML_SUCCESS) {
        return code;
    }
    nanosleep(&(struct timespec){.tv_nsec = 20000000}, NULL);
    code = gpu_value(gpu, id, &after);
    if (code == NVML_SUCCESS) {
        *kilobytes = to_u32(after > before ? (after - before) / 1000 / 0.02 : 0);
    }
    return code;
}
