/* Symbols that name the driver and its GPUs. */
#include <stdio.h>
#include <string.h>

#include "emulator.h"

const char *nvmlErrorString(nvmlReturn_t code) {
    static _Thread_local char text[32];
    snprintf(text, sizeof(text), "emulated error %d", code);
    return code == NVML_SUCCESS ? "Success" : text;
}

static nvmlReturn_t give_text(const char *text, char *target, unsigned int size) {
    if (strlen(text) >= size) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    snprintf(target, size, "%s", text);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlSystemGetDriverVersion(char *version, unsigned int size) {
    nvmlReturn_t code = enter_system(__func__);
    return code == NVML_SUCCESS ? give_text(driver_version(), version, size) : code;
}

nvmlReturn_t nvmlSystemGetNVMLVersion(char *version, unsigned int size) {
    nvmlReturn_t code = enter_system(__func__);
    return code == NVML_SUCCESS ? give_text("13.580.95", version, size) : code;
}

nvmlReturn_t nvmlDeviceGetCount_v2(unsigned int *count) {
    nvmlReturn_t code = enter_system(__func__);
    if (code == NVML_SUCCESS) {
        *count = visible_count();
    }
    return code;
}

nvmlReturn_t nvmlDeviceGetHandleByIndex_v2(unsigned int index, nvmlDevice_t *device) {
    nvmlReturn_t code = enter_system(__func__);
    return code == NVML_SUCCESS ? handle_by_index(index, device) : code;
}

nvmlReturn_t nvmlDeviceGetHandleByUUID(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t code = enter_system(__func__);
    return code == NVML_SUCCESS ? handle_by_uuid(uuid, device) : code;
}

nvmlReturn_t nvmlDeviceGetIndex(nvmlDevice_t device, unsigned int *index) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    return code == NVML_SUCCESS ? visible_index(gpu, index) : code;
}

nvmlReturn_t nvmlDeviceGetUUID(nvmlDevice_t device, char *uuid, unsigned int size) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    return code == NVML_SUCCESS ? give_text(gpu_identity(gpu)->uuid, uuid, size) : code;
}

nvmlReturn_t nvmlDeviceGetName(nvmlDevice_t device, char *name, unsigned int size) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    return code == NVML_SUCCESS ? give_text(gpu_identity(gpu)->name, name, size) : code;
}

nvmlReturn_t nvmlDeviceGetPciInfo_v3(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    const char *bus_id = gpu_identity(gpu)->pci_bus_id;
    memset(pci, 0, sizeof(*pci));
    snprintf(pci->busId, sizeof(pci->busId), "%s", bus_id);
    sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return NVML_SUCCESS;
}

nvmlReturn_t nvmlDeviceGetMinorNumber(nvmlDevice_t device, unsigned int *minor) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, __func__, &gpu);
    if (code == NVML_SUCCESS) {
        *minor = gpu_identity(gpu)->minor;
    }
    return code;
}
