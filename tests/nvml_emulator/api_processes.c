/* The compute processes of a GPU or of a MIG instance. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>

#include "emulator.h"

#define MAX_TEXT 8192
#define MAX_PROCESSES 512

struct process_list {
    unsigned int size;
    nvmlProcessInfo_t infos[MAX_PROCESSES];
};

/* A process without ":BYTES" is one whose memory the driver does not tell. */
static void add_processes(struct process_list *list, char *text, unsigned int gi, unsigned int ci) {
    char *rest = text;
    for (char *word; (word = strtok_r(rest, ",", &rest)) != NULL && list->size < MAX_PROCESSES; list->size++) {
        char *end;
        nvmlProcessInfo_t *info = &list->infos[list->size];
        memset(info, 0, sizeof(*info));
        info->pid = (unsigned int)strtoul(word, &end, 10);
        info->usedGpuMemory = *end == ':' ? strtoull(end + 1, NULL, 10) : ULLONG_MAX;
        info->gpuInstanceId = gi;
        info->computeInstanceId = ci;
    }
}

/* A GPU in MIG mode lists the processes of its instances too. False where processes are not supported. */
static bool list_processes(const struct target *target, struct process_list *list) {
    char text[MAX_TEXT];
    struct layout layout;
    list->size = 0;
    copy_layout(target->gpu, &layout);
    copy_processes(target->gpu, WHOLE, text, sizeof(text));
    bool is_offered = strcmp(text, "-") != 0 || layout.enabled;
    if (target->gi == WHOLE && strcmp(text, "-") != 0) {
        add_processes(list, text, UINT_MAX, UINT_MAX);
    }
    for (unsigned index = 0; index < layout.count; index++) {
        const struct instance *instance = &layout.instances[index];
        if (instance->ci > 0 || (target->gi != WHOLE && target->gi != (int)instance->gi)) {
            continue; /* the processes of a GPU instance are those of its first compute instance */
        }
        copy_processes(target->gpu, (int)instance->gi, text, sizeof(text));
        if (strcmp(text, "-") != 0 && (target->gi == WHOLE || target->instance.ci == 0)) {
            add_processes(list, text, instance->gi, instance->ci);
        }
    }
    return is_offered;
}

static nvmlReturn_t read_processes(nvmlDevice_t device, unsigned int *count, void *infos, bool is_first_version) {
    struct target target;
    nvmlReturn_t code = enter_device(device, &target);
    if (code != NVML_SUCCESS) {
        return code;
    }
    struct process_list *list = malloc(sizeof(*list));
    if (list == NULL) {
        return NVML_ERROR_MEMORY;
    }
    code = list_processes(&target, list) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    unsigned int room = infos != NULL ? *count : 0;
    for (unsigned int index = 0; code == NVML_SUCCESS && index < list->size && index < room; index++) {
        if (is_first_version) {
            ((nvmlProcessInfo_v1_t *)infos)[index] =
                (nvmlProcessInfo_v1_t){list->infos[index].pid, list->infos[index].usedGpuMemory};
        } else {
            ((nvmlProcessInfo_t *)infos)[index] = list->infos[index];
        }
    }
    if (code == NVML_SUCCESS) {
        *count = list->size;
        code = list->size <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
    }
    free(list);
    return code;
}

API(nvmlDeviceGetComputeRunningProcesses)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos) {
    return read_processes(device, count, infos, true);
}

API(nvmlDeviceGetComputeRunningProcesses_v2)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    return read_processes(device, count, infos, false);
}

API(nvmlDeviceGetComputeRunningProcesses_v3)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    return read_processes(device, count, infos, false);
}

static nvmlReturn_t no_processes(nvmlDevice_t device, unsigned int *count) {
    struct target target;
    nvmlReturn_t code = enter_device(device, &target);
    if (code == NVML_SUCCESS) {
        *count = 0;
    }
    return code;
}

API(nvmlDeviceGetGraphicsRunningProcesses_v3)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    (void)infos;
    return no_processes(device, count);
}

API(nvmlDeviceGetMPSComputeRunningProcesses_v3)(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    (void)infos;
    return no_processes(device, count);
}

API(nvmlDeviceGetRunningProcessDetailList)(nvmlDevice_t device, nvmlProcessDetailList_v1_t *list) {
    struct target target;
    if (list->version != NVML_PROCESS_DETAIL_LIST_V1) {
        return NVML_ERROR_ARGUMENT_VERSION_MISMATCH;
    }
    nvmlReturn_t code = enter_device(device, &target);
    struct process_list *found = code == NVML_SUCCESS ? malloc(sizeof(*found)) : NULL;
    if (found == NULL) {
        return code == NVML_SUCCESS ? NVML_ERROR_MEMORY : code;
    }
    code = list_processes(&target, found) ? NVML_SUCCESS : NVML_ERROR_NOT_SUPPORTED;
    if (list->mode != NVML_PROCESS_MODE_COMPUTE && list->mode != NVML_PROCESS_MODE_ALL) {
        found->size = 0; /* neither graphics nor MPS */
    }
    unsigned int room = list->procArray != NULL ? list->numProcArrayEntries : 0;
    for (unsigned int index = 0; code == NVML_SUCCESS && index < found->size && index < room; index++) {
        list->procArray[index] = (nvmlProcessDetail_v1_t){
            .pid = found->infos[index].pid,
            .usedGpuMemory = found->infos[index].usedGpuMemory,
            .gpuInstanceId = found->infos[index].gpuInstanceId,
            .computeInstanceId = found->infos[index].computeInstanceId,
        };
    }
    if (code == NVML_SUCCESS) {
        list->numProcArrayEntries = found->size;
        code = found->size <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
    }
    free(found);
    return code;
}

static unsigned long long now_us(void) {
    struct timespec now;
    clock_gettime(CLOCK_REALTIME, &now);
    return (unsigned long long)now.tv_sec * 1000000 + (unsigned long long)now.tv_nsec / 1000;
}

/* One sample for each process, the utilisation in equal parts; none while the GPU is idle. */
static nvmlReturn_t read_utilization(int gpu, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
                                     unsigned long long since) {
    char text[MAX_TEXT];
    double busy = 0;
    double memory = 0;
    double age_s = 0;
    unsigned int room = samples != NULL ? *count : 0;
    struct process_list *list = malloc(sizeof(*list));
    if (list == NULL) {
        return NVML_ERROR_MEMORY;
    }
    list->size = 0;
    copy_processes(gpu, WHOLE, text, sizeof(text));
    gpu_value(gpu, VALUE_UTILIZATION_GPU, &busy);
    gpu_value(gpu, VALUE_UTILIZATION_MEMORY, &memory);
    gpu_value(gpu, VALUE_PROCESS_USE_AGE, &age_s);
    unsigned long long time_us = now_us() - (unsigned long long)(age_s * 1e6);
    if (strcmp(text, "-") != 0 && busy > 0 && since < time_us) {
        add_processes(list, text, UINT_MAX, UINT_MAX);
    }
    *count = list->size;
    for (unsigned int index = 0; index < list->size && index < room; index++) {
        samples[index] = (nvmlProcessUtilizationSample_t){
            .pid = list->infos[index].pid,
            .timeStamp = time_us,
            .smUtil = to_u32(busy) / list->size,
            .memUtil = to_u32(memory) / list->size,
        };
    }
    nvmlReturn_t code = list->size <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
    code = list->size == 0 ? NVML_ERROR_NOT_FOUND : code;
    free(list);
    return code;
}

API(nvmlDeviceGetProcessUtilization)(nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count,
                                     unsigned long long since) {
    int gpu;
    double busy;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS &&
        (is_mig_enabled(gpu) || gpu_value(gpu, VALUE_UTILIZATION_GPU, &busy) != NVML_SUCCESS)) {
        code = NVML_ERROR_NOT_SUPPORTED;
    }
    return code == NVML_SUCCESS ? read_utilization(gpu, samples, count, since) : code;
}
