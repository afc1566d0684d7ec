/* The compute processes of a GPU. */
#include <limits.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define MAX_TEXT 8192

/* A process without ":BYTES" is one whose memory the driver does not tell. */
static nvmlProcessInfo_t parse_process(const char *word) {
    char *end;
    nvmlProcessInfo_t info = {.gpuInstanceId = UINT_MAX, .computeInstanceId = UINT_MAX};
    info.pid = (unsigned int)strtoul(word, &end, 10);
    info.usedGpuMemory = *end == ':' ? strtoull(end + 1, NULL, 10) : ULLONG_MAX;
    return info;
}

static nvmlReturn_t read_processes(nvmlDevice_t device, const char *call, unsigned int *count, nvmlProcessInfo_t *infos) {
    int gpu;
    char text[MAX_TEXT];
    nvmlReturn_t code = enter_gpu(device, call, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    copy_processes(gpu, text, sizeof(text));
    if (strcmp(text, "-") == 0) {
        return NVML_ERROR_NOT_SUPPORTED;
    }
    unsigned int room = infos != NULL ? *count : 0;
    unsigned int found = 0;
    char *rest = text;
    for (char *word; (word = strtok_r(rest, ",", &rest)) != NULL; found++) {
        if (found < room) {
            infos[found] = parse_process(word);
        }
    }
    *count = found;
    return found <= room ? NVML_SUCCESS : NVML_ERROR_INSUFFICIENT_SIZE;
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v2(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    return read_processes(device, __func__, count, infos);
}

nvmlReturn_t nvmlDeviceGetComputeRunningProcesses_v3(nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos) {
    return read_processes(device, __func__, count, infos);
}
