/* GPU performance monitoring: two samples, and what was measured between them. A metric has the script's value at the later
 * sample. The time between samples is the clock's, or that of the script while it stands still ("at"). */
#include <pthread.h>
#include <stdio.h>
#include <stdlib.h>

#include "emulator.h"

#define MAX_SAMPLES 1024
#define MIN_DISTANCE_S 0.1

struct sample {
    int gpu; /* SYSTEM until it is filled */
    int gi;
    double time_s;
};

struct metric {
    enum value_id value;
    char *name;
    char *unit;
};

static const struct metric metrics[] = {
    [2] = {VALUE_GPM_SM_ACTIVE, "SM Util", "%"},
    [3] = {VALUE_GPM_SM_OCCUPANCY, "SM Occupancy", "%"},
    [5] = {VALUE_GPM_ANY_TENSOR, "Any Tensor Util", "%"},
    [6] = {VALUE_GPM_DFMA_TENSOR, "DFMA Tensor Util", "%"},
    [7] = {VALUE_GPM_HMMA_TENSOR, "HMMA Tensor Util", "%"},
    [9] = {VALUE_GPM_IMMA_TENSOR, "IMMA Tensor Util", "%"},
    [10] = {VALUE_GPM_DRAM, "DRAM BW Util", "%"},
    [11] = {VALUE_GPM_FP64, "FP64 Util", "%"},
    [12] = {VALUE_GPM_FP32, "FP32 Util", "%"},
    [13] = {VALUE_GPM_FP16, "FP16 Util", "%"},
    [20] = {VALUE_GPM_PCIE_TX, "PCIe TX", "MiB/s"},
    [21] = {VALUE_GPM_PCIE_RX, "PCIe RX", "MiB/s"},
    [60] = {VALUE_GPM_NVLINK_RX, "NVLink RX", "MiB/s"},
    [61] = {VALUE_GPM_NVLINK_TX, "NVLink TX", "MiB/s"},
};

static pthread_mutex_t samples_lock = PTHREAD_MUTEX_INITIALIZER;
static struct sample *samples[MAX_SAMPLES];

/* Where a pointer is kept, or NULL; a pointer that is none of ours is never followed. */
static struct sample **find_sample(const void *sample) {
    for (int index = 0; index < MAX_SAMPLES; index++) {
        if (samples[index] == sample) {
            return &samples[index];
        }
    }
    return NULL;
}

static bool copy_sample(const void *sample, struct sample *copy) {
    pthread_mutex_lock(&samples_lock);
    struct sample **place = sample != NULL ? find_sample(sample) : NULL;
    if (place != NULL) {
        *copy = **place;
    }
    pthread_mutex_unlock(&samples_lock);
    return place != NULL;
}

API(nvmlGpmSampleAlloc)(nvmlGpmSample_t *sample) {
    nvmlReturn_t code = enter_system();
    if (code != NVML_SUCCESS) {
        return code;
    }
    struct sample *made = calloc(1, sizeof(struct sample));
    pthread_mutex_lock(&samples_lock);
    struct sample **place = find_sample(NULL);
    if (made != NULL && place != NULL) {
        made->gpu = SYSTEM;
        *place = made;
        *sample = made;
    } else {
        free(made);
        code = NVML_ERROR_MEMORY;
    }
    pthread_mutex_unlock(&samples_lock);
    return code;
}

/* Works after nvmlShutdown too, so that nothing is left behind. */
API(nvmlGpmSampleFree)(nvmlGpmSample_t sample) {
    pthread_mutex_lock(&samples_lock);
    struct sample **place = sample != NULL ? find_sample(sample) : NULL;
    if (place != NULL) {
        free(*place);
        *place = NULL;
    }
    pthread_mutex_unlock(&samples_lock);
    return place != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

/* GPM came with Hopper; the script offers it by any of its values. */
static bool is_offered(int gpu) {
    double value;
    if (architecture_of(gpu_identity(gpu)) < HOPPER) {
        return false;
    }
    for (int id = FIRST_GPM_VALUE; id <= LAST_GPM_VALUE; id++) {
        for (int gi = WHOLE; gi < MAX_GI; gi++) {
            if (unit_value(gpu, gi, (enum value_id)id, &value) == NVML_SUCCESS) {
                return true;
            }
        }
    }
    return false;
}

API(nvmlGpmQueryDeviceSupport)(nvmlDevice_t device, nvmlGpmSupport_t *support) {
    struct target target;
    if (support->version != NVML_GPM_SUPPORT_V1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t code = enter_device(device, &target);
    if (code == NVML_SUCCESS) {
        support->isSupportedDevice = is_offered(target.gpu);
    }
    return code;
}

static nvmlReturn_t fill_sample(int gpu, int gi, const void *sample) {
    struct sample taken = {.gpu = gpu, .gi = gi, .time_s = gpm_clock_s()};
    if (!is_offered(gpu)) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    pthread_mutex_lock(&samples_lock);
    struct sample **place = sample != NULL ? find_sample(sample) : NULL;
    if (place != NULL) {
        **place = taken;
    }
    pthread_mutex_unlock(&samples_lock);
    return place != NULL ? NVML_SUCCESS : NVML_ERROR_INVALID_ARGUMENT;
}

API(nvmlGpmSampleGet)(nvmlDevice_t device, nvmlGpmSample_t sample) {
    struct target target;
    nvmlReturn_t code = enter_device(device, &target);
    return code == NVML_SUCCESS ? fill_sample(target.gpu, target.gi, sample) : code;
}

API(nvmlGpmMigSampleGet)(nvmlDevice_t device, unsigned int gi, nvmlGpmSample_t sample) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    struct layout layout;
    copy_layout(gpu, &layout);
    for (unsigned index = 0; index < layout.count; index++) {
        if (layout.instances[index].gi == gi) {
            current_call.gi = (int)gi;
            return fill_sample(gpu, (int)gi, sample);
        }
    }
    return layout.enabled ? NVML_ERROR_NOT_FOUND : NVML_ERROR_NOT_SUPPORTED;
}

static void read_metric(int gpu, int gi, nvmlGpmMetric_t *target) {
    unsigned int id = target->metricId;
    char part[32];
    double value = 0;
    bool is_known = id < sizeof(metrics) / sizeof(metrics[0]) && metrics[id].name != NULL;
    snprintf(part, sizeof(part), "gpm:%u", id);
    call_detail("%s%u", current_call.detail[0] != '\0' ? "," : "", id);
    nvmlReturn_t code = enter_part(gpu, gi, part);
    if (code == NVML_SUCCESS) {
        code = is_known ? unit_value(gpu, gi, metrics[id].value, &value) : NVML_ERROR_NOT_SUPPORTED;
    }
    target->nvmlReturn = code;
    target->value = code == NVML_SUCCESS ? value : -1; /* whoever reads a failed metric sees nonsense, not zero */
    target->metricInfo.shortName = is_known ? metrics[id].name : NULL;
    target->metricInfo.longName = is_known ? metrics[id].name : NULL;
    target->metricInfo.unit = is_known ? metrics[id].unit : NULL;
}

API(nvmlGpmMetricsGet)(nvmlGpmMetricsGet_t *request) {
    struct sample first;
    struct sample second;
    if (request->version != NVML_GPM_METRICS_GET_V1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    if (!copy_sample(request->sample1, &first) || !copy_sample(request->sample2, &second) || first.gpu < 0 ||
        second.gpu < 0 || request->numMetrics == 0 || request->numMetrics > NVML_GPM_METRIC_MAX) {
        return is_usable() ? NVML_ERROR_INVALID_ARGUMENT : NVML_ERROR_UNINITIALIZED;
    }
    nvmlReturn_t code = enter_target(second.gpu, second.gi);
    if (code != NVML_SUCCESS) {
        return code;
    }
    /* 1 ms less, for the clock and the caller's own timer need not agree to the last digit */
    if (first.gpu != second.gpu || first.gi != second.gi || second.time_s - first.time_s < MIN_DISTANCE_S - 0.001) {
        return NVML_ERROR_INVALID_ARGUMENT;
    }
    for (unsigned int index = 0; index < request->numMetrics; index++) {
        read_metric(second.gpu, second.gi, &request->metrics[index]);
    }
    return NVML_SUCCESS;
}
