/* Symbols that answer one value, or one small struct of values, of a GPU. */
#include "emulator.h"

static nvmlReturn_t read_value(nvmlDevice_t device, const char *call, enum value_id id, double *value) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, call, &gpu);
    return code == NVML_SUCCESS ? gpu_value(gpu, id, value) : code;
}

static nvmlReturn_t read_u32(nvmlDevice_t device, const char *call, enum value_id id, unsigned int *target) {
    double value;
    nvmlReturn_t code = read_value(device, call, id, &value);
    if (code == NVML_SUCCESS) {
        *target = to_u32(value);
    }
    return code;
}

static nvmlReturn_t read_u64(nvmlDevice_t device, const char *call, enum value_id id, unsigned long long *target) {
    double value;
    nvmlReturn_t code = read_value(device, call, id, &value);
    if (code == NVML_SUCCESS) {
        *target = to_u64(value);
    }
    return code;
}

nvmlReturn_t nvmlDeviceGetUtilizationRates(nvmlDevice_t device, nvmlUtilization_t *utilization) {
    int gpu;
    double busy = 0;
    double memory = 0;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    if (code == NVML_SUCCESS) {
        code = gpu_value(gpu, VALUE_UTILIZATION_GPU, &busy);
    }
    if (code == NVML_SUCCESS) {
        gpu_value(gpu, VALUE_UTILIZATION_MEMORY, &memory);
        utilization->gpu = to_u32(busy);
        utilization->memory = to_u32(memory);
    }
    return code;
}

static nvmlReturn_t read_memory(nvmlDevice_t device, const char *call, nvmlMemory_v2_t *memory) {
    int gpu;
    double total = 0;
    double used = 0;
    double reserved = 0;
    nvmlReturn_t code = enter_gpu(device, call, &gpu);
    if (code == NVML_SUCCESS) {
        code = gpu_value(gpu, VALUE_MEMORY_TOTAL, &total);
    }
    if (code != NVML_SUCCESS) {
        return code;
    }
    gpu_value(gpu, VALUE_MEMORY_USED, &used);
    gpu_value(gpu, VALUE_MEMORY_RESERVED, &reserved);
    memory->total = to_u64(total);
    memory->reserved = to_u64(reserved);
    memory->used = to_u64(used);
    memory->free = memory->total - memory->reserved - memory->used;
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMemoryInfo_v2(nvmlDevice_t device, nvmlMemory_v2_t *memory) {
    if (memory->version != NVML_MEMORY_V2) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    return read_memory(device, __func__, memory);
}

/* The first version counts what the driver reserves as used. */
nvmlReturn_t nvmlDeviceGetMemoryInfo(nvmlDevice_t device, nvmlMemory_t *memory) {
    nvmlMemory_v2_t values;
    nvmlReturn_t code = read_memory(device, __func__, &values);
    if (code == NVML_SUCCESS) {
        memory->total = values.total;
        memory->free = values.free;
        memory->used = values.used + values.reserved;
    }
    return code;
}

nvmlReturn_t nvmlDeviceGetPowerUsage(nvmlDevice_t device, unsigned int *milliwatts) {
    return read_u32(device, __func__, VALUE_POWER, milliwatts);
}

nvmlReturn_t nvmlDeviceGetEnforcedPowerLimit(nvmlDevice_t device, unsigned int *milliwatts) {
    return read_u32(device, __func__, VALUE_POWER_LIMIT, milliwatts);
}

nvmlReturn_t nvmlDeviceGetTotalEnergyConsumption(nvmlDevice_t device, unsigned long long *millijoules) {
    return read_u64(device, __func__, VALUE_ENERGY, millijoules);
}

/* The graphics clock follows the SM clock, as on the boards of data centres. */
nvmlReturn_t nvmlDeviceGetClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *megahertz) {
    if (type > NVML_CLOCK_MEM) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return read_u32(device, __func__, type == NVML_CLOCK_MEM ? VALUE_MEMORY_CLOCK : VALUE_SM_CLOCK, megahertz);
}

nvmlReturn_t nvmlDeviceGetMaxClockInfo(nvmlDevice_t device, unsigned int type, unsigned int *megahertz) {
    if (type > NVML_CLOCK_MEM) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    return read_u32(device, __func__, type == NVML_CLOCK_MEM ? VALUE_MEMORY_CLOCK_MAX : VALUE_SM_CLOCK_MAX, megahertz);
}

nvmlReturn_t nvmlDeviceGetTemperature(nvmlDevice_t device, unsigned int sensor, unsigned int *celsius) {
    if (sensor != NVML_TEMPERATURE_GPU) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    return read_u32(device, __func__, VALUE_TEMPERATURE, celsius);
}

nvmlReturn_t nvmlDeviceGetTemperatureV(nvmlDevice_t device, nvmlTemperature_v1_t *temperature) {
    if (temperature->version != NVML_TEMPERATURE_V1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (temperature->sensorType != NVML_TEMPERATURE_GPU) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    double value;
    nvmlReturn_t code = read_value(device, __func__, VALUE_TEMPERATURE, &value);
    if (code == NVML_SUCCESS) {
        temperature->temperature = (int)value;
    }
    return code;
}

nvmlReturn_t nvmlDeviceGetCurrentClocksEventReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return read_u64(device, __func__, VALUE_EVENT_REASONS, reasons);
}

nvmlReturn_t nvmlDeviceGetCurrentClocksThrottleReasons(nvmlDevice_t device, unsigned long long *reasons) {
    return read_u64(device, __func__, VALUE_EVENT_REASONS, reasons);
}
