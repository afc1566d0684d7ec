/* nvmlDeviceGetFieldValues. Which value a field id names is in field_table.c, for it depends on the driver's version. */
#include <limits.h>
#include <stdio.h>
#include <time.h>

#include "emulator.h"
#include "fields.h"

/* A link has its share; a field of one link is that link's by its id. */
static nvmlReturn_t scale_to_scope(const struct field *field, const struct gpu *gpu, unsigned int scope, double *number) {
    unsigned link = field->scope == ONE_LINK ? field->link : scope;
    if (field->scope == NO_SCOPE || (field->scope == LINKS_OR_SUM && scope == UINT_MAX)) {
        return NVML_SUCCESS;
    }
    if (gpu->nvlink_links == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    if (link >= gpu->nvlink_links) {
        return field->scope == ONE_LINK ? NVML_ERROR_NOT_SUPPORTED : NVML_ERROR_INVALID_ARGUMENT;
    }
    *number = (double)share_of_link(*number, link, gpu->nvlink_links);
    return NVML_SUCCESS;
}

static nvmlReturn_t read_number(int gpu, const struct field *field, double *number) {
    if (field->is_constant) {
        *number = field->constant;
        return NVML_SUCCESS;
    }
    nvmlReturn_t code = gpu_value(gpu, field->value, number);
    *number *= field->factor;
    return code;
}

static void read_field(int gpu, nvmlFieldValue_t *target) {
    struct field field = {0};
    char part[32];
    double number = 0;
    snprintf(part, sizeof(part), "field:%u", target->fieldId);
    call_detail("%s%u", current_call.detail[0] != '\0' ? "," : "", target->fieldId);
    nvmlReturn_t code = enter_part(gpu, WHOLE, part);
    if (code == NVML_SUCCESS) {
        code = find_field(gpu_identity(gpu), target->fieldId, &field) ? read_number(gpu, &field, &number)
                                                                       : NVML_ERROR_NOT_SUPPORTED;
    }
    if (code == NVML_SUCCESS) {
        code = scale_to_scope(&field, gpu_identity(gpu), target->scopeId, &number);
    }
    target->nvmlReturn = code;
    if (code != NVML_SUCCESS) {
        target->value.ullVal = 0x5a5a5a5a5a5a5a5aULL; /* whoever reads a failed field sees nonsense, not zero */
        return;
    }
    bool is_pcie = field.value == VALUE_PCIE_TX || field.value == VALUE_PCIE_RX;
    bool is_short = is_pcie && gpu_identity(gpu)->pcie_counter_bits == 32;
    target->valueType = is_short ? NVML_VALUE_TYPE_UNSIGNED_INT : field.type;
    target->value.ullVal = is_short ? 0xdead000000000000ULL : 0; /* the other half of the union is undefined */
    if (is_short) {
        target->value.uiVal = (uint32_t)to_u64(number);
    } else if (target->valueType == NVML_VALUE_TYPE_UNSIGNED_INT) {
        target->value.uiVal = to_u32(number);
    } else {
        target->value.ullVal = to_u64(number);
    }
}

API(nvmlDeviceGetFieldValues)(nvmlDevice_t device, int count, nvmlFieldValue_t *values) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
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
