/* nvmlDeviceGetFieldValues: a table of field ids, each with its value, type and meaning of the scope. */
#include <limits.h>
#include <stdio.h>
#include <time.h>

#include "emulator.h"

enum scope { NO_SCOPE, LINKS };

struct field {
    unsigned int id;
    enum value_id value;
    unsigned int type;
    enum scope scope;
};

static const struct field fields[] = {
    {74, VALUE_POWER_CAP_TIME, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NO_SCOPE},
    {75, VALUE_THERMAL_TIME, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NO_SCOPE},
    {82, VALUE_MEMORY_TEMPERATURE, NVML_VALUE_TYPE_UNSIGNED_INT, NO_SCOPE},
    {83, VALUE_ENERGY, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NO_SCOPE},
    {138, VALUE_NVLINK_TX, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, LINKS},
    {139, VALUE_NVLINK_RX, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, LINKS},
    {186, VALUE_POWER, NVML_VALUE_TYPE_UNSIGNED_INT, NO_SCOPE},
    {197, VALUE_PCIE_TX, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NO_SCOPE},
    {198, VALUE_PCIE_RX, NVML_VALUE_TYPE_UNSIGNED_LONG_LONG, NO_SCOPE},
};

static const struct field *find_field(unsigned int id) {
    for (size_t index = 0; index < sizeof(fields) / sizeof(fields[0]); index++) {
        if (fields[index].id == id) {
            return &fields[index];
        }
    }
    return NULL;
}

/* The scope of a link field is a link, each with its share, or UINT_MAX for the sum. */
static nvmlReturn_t scale_to_scope(const struct field *field, const struct gpu *gpu, unsigned int scope, double *number) {
    if (field->scope == NO_SCOPE || scope == UINT_MAX) {
        return NVML_SUCCESS;
    }
    if (scope >= gpu->nvlink_links) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    *number /= gpu->nvlink_links;
    return NVML_SUCCESS;
}

static void read_field(int gpu, nvmlFieldValue_t *target) {
    const struct field *field = find_field(target->fieldId);
    char call[32];
    double number = 0;
    snprintf(call, sizeof(call), "field:%u", target->fieldId);
    nvmlReturn_t code = gpu_fault(gpu, call);
    if (code == NVML_SUCCESS) {
        code = field != NULL ? gpu_value(gpu, field->value, &number) : NVML_ERROR_NOT_SUPPORTED;
    }
    if (code == NVML_SUCCESS) {
        code = scale_to_scope(field, gpu_identity(gpu), target->scopeId, &number);
    }
    target->nvmlReturn = code;
    if (code != NVML_SUCCESS) {
        target->value.ullVal = 0x5a5a5a5a5a5a5a5aULL; /* whoever reads a failed field sees nonsense, not zero */
        return;
    }
    bool is_pcie = field->value == VALUE_PCIE_TX || field->value == VALUE_PCIE_RX;
    bool is_short = is_pcie && gpu_identity(gpu)->pcie_counter_bits == 32;
    target->valueType = is_short ? NVML_VALUE_TYPE_UNSIGNED_INT : field->type;
    target->value.ullVal = is_short ? 0xdead000000000000ULL : 0; /* the other half of the union is undefined */
    if (is_short) {
        target->value.uiVal = (uint32_t)to_u64(number);
    } else if (target->valueType == NVML_VALUE_TYPE_UNSIGNED_INT) {
        target->value.uiVal = to_u32(number);
    } else {
        target->value.ullVal = to_u64(number);
    }
}

nvmlReturn_t nvmlDeviceGetFieldValues(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    for (int index = 0; index < count; index++) {
        values[index].timestamp = (long long)now.tv_sec * 1000000 + now.tv_nsec / 1000;
        values[index].latencyUsec = 1;
        read_field(gpu, &values[index]);
    }
    return NVML_SUCCESS;
}
