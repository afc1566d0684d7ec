/* nvmlDeviceGetSamples: the driver's rings of power and utilisation, where the script offers them ("power_ring"). Samples
 * lie on a fixed grid of wall time, so that one is the same in every call that shows it. */
#include <time.h>

#include "emulator.h"

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

API(nvmlDeviceGetSamples)(nvmlDevice_t device, unsigned int type, unsigned long long since, unsigned int *value_type,
                          unsigned int *count, nvmlSample_t *samples) {
    int gpu;
    double value;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    enum value_id id = type == NVML_TOTAL_POWER_SAMPLES ? VALUE_POWER_INSTANT : VALUE_UTILIZATION_GPU;
    unsigned ring_size = gpu_identity(gpu)->ring_size;
    unsigned long long period = (unsigned long long)gpu_identity(gpu)->ring_period_ms * 1000;
    bool is_hidden = type == NVML_GPU_UTILIZATION_SAMPLES && is_mig_enabled(gpu);
    if (type > NVML_GPU_UTILIZATION_SAMPLES || ring_size == 0 || period == 0 || is_hidden ||
        gpu_value(gpu, id, &value) != NVML_SUCCESS) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    unsigned long long now = now_us();
    unsigned long long newest = now / period * period;
    unsigned long long oldest = newest - period * (ring_size - 1);
    if (since >= oldest) {
        oldest = (since / period + 1) * period;
    }
    if (oldest > newest) {
        return NVML_ERROR_NOT_FOUND;
    }
    *value_type = NVML_VALUE_TYPE_UNSIGNED_INT;
    if (samples == NULL) {
        *count = ring_size;
        return NVML_SUCCESS;
    }
    unsigned int filled = 0;
    for (unsigned long long moment = oldest; moment <= newest && filled < *count; moment += period, filled++) {
        unit_value_before(gpu, WHOLE, id, (double)(now - moment) / 1e6, &value);
        samples[filled].timeStamp = moment;
        samples[filled].sampleValue.ullVal = 0;
        samples[filled].sampleValue.uiVal = to_u32(value);
    }
    *count = filled;
    return NVML_SUCCESS;
}
