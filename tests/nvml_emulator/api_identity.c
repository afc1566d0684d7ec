/* Symbols that name the driver and its GPUs. */
#include <stdio.h>
#include <string.h>

#include "emulator.h"

static nvmlReturn_t give_text(const char *text, char *target, unsigned int size) {
    if (strlen(text) >= size) {
        return NVML_ERROR_INSUFFICIENT_SIZE;
    }
    copy_text(target, size, text);
    return NVML_SUCCESS;
}

API(nvmlSystemGetDriverVersion)(char *text, unsigned int size) {
    char version[TEXT_SIZE];
    nvmlReturn_t code = enter_system();
    copy_driver_version(version, sizeof(version));
    return code == NVML_SUCCESS ? give_text(version, text, size) : code;
}

API(nvmlSystemGetNVMLVersion)(char *text, unsigned int size) {
    char version[TEXT_SIZE + 4];
    char driver[TEXT_SIZE];
    nvmlReturn_t code = enter_system();
    copy_driver_version(driver, sizeof(driver));
    snprintf(version, sizeof(version), "%s.%s", driver_is_at_least(580, 0) ? "13" : "12", driver);
    return code == NVML_SUCCESS ? give_text(version, text, size) : code;
}

static nvmlReturn_t give_cuda_version(int *version) {
    nvmlReturn_t code = enter_system();
    if (code == NVML_SUCCESS) {
        *version = driver_is_at_least(580, 0) ? 13000 : 12080;
    }
    return code;
}

API(nvmlSystemGetCudaDriverVersion)(int *version) {
    return give_cuda_version(version);
}

API(nvmlSystemGetCudaDriverVersion_v2)(int *version) {
    return give_cuda_version(version);
}

API(nvmlSystemGetProcessName)(unsigned int pid, char *text, unsigned int size) {
    char name[32];
    snprintf(name, sizeof(name), "process-%u", pid);
    nvmlReturn_t code = enter_system();
    return code == NVML_SUCCESS ? give_text(name, text, size) : code;
}

static nvmlReturn_t give_count(unsigned int *count) {
    nvmlReturn_t code = enter_system();
    if (code == NVML_SUCCESS) {
        *count = visible_count();
    }
    return code;
}

API(nvmlDeviceGetCount)(unsigned int *count) {
    return give_count(count);
}

API(nvmlDeviceGetCount_v2)(unsigned int *count) {
    return give_count(count);
}

API(nvmlDeviceGetHandleByIndex_v2)(unsigned int index, nvmlDevice_t *device) {
    nvmlReturn_t code = enter_system();
    return code == NVML_SUCCESS ? handle_by_index(index, device) : code;
}

API(nvmlDeviceGetHandleByUUID)(const char *uuid, nvmlDevice_t *device) {
    nvmlReturn_t code = enter_system();
    return code == NVML_SUCCESS ? handle_by_uuid(uuid, device) : code;
}

API(nvmlDeviceGetHandleByPciBusId_v2)(const char *bus_id, nvmlDevice_t *device) {
    nvmlReturn_t code = enter_system();
    return code == NVML_SUCCESS ? handle_by_bus_id(bus_id, device) : code;
}

API(nvmlDeviceGetIndex)(nvmlDevice_t device, unsigned int *value) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    return code == NVML_SUCCESS ? visible_index(gpu, value) : code;
}

API(nvmlDeviceGetUUID)(nvmlDevice_t device, char *text, unsigned int size) {
    struct target target;
    nvmlReturn_t code = enter_device(device, &target);
    if (code != NVML_SUCCESS) {
        return code;
    }
    return give_text(target.gi == WHOLE ? gpu_identity(target.gpu)->uuid : target.instance.uuid, text, size);
}

/* A MIG device is named after its GPU and its profile. */
API(nvmlDeviceGetName)(nvmlDevice_t device, char *text, unsigned int size) {
    struct target target;
    char name[TEXT_SIZE + 40];
    nvmlReturn_t code = enter_device(device, &target);
    if (code != NVML_SUCCESS) {
        return code;
    }
    copy_text(name, sizeof(name), gpu_identity(target.gpu)->name);
    if (target.gi != WHOLE) {
        snprintf(name, sizeof(name), "%s MIG %s", gpu_identity(target.gpu)->name, target.instance.profile);
    }
    return give_text(name, text, size);
}

API(nvmlDeviceGetSerial)(nvmlDevice_t device, char *text, unsigned int size) {
    int gpu;
    char serial[24];
    nvmlReturn_t code = enter_gpu(device, &gpu);
    snprintf(serial, sizeof(serial), "%013d", gpu);
    return code == NVML_SUCCESS ? give_text(serial, text, size) : code;
}

API(nvmlDeviceGetVbiosVersion)(nvmlDevice_t device, char *text, unsigned int size) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    return code == NVML_SUCCESS ? give_text("00.00.00.00.00", text, size) : code;
}

API(nvmlDeviceGetPciInfo_v3)(nvmlDevice_t device, nvmlPciInfo_t *pci) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code != NVML_SUCCESS) {
        return code;
    }
    const char *bus_id = gpu_identity(gpu)->pci_bus_id;
    memset(pci, 0, sizeof(*pci));
    copy_text(pci->busId, sizeof(pci->busId), bus_id);
    sscanf(bus_id, "%x:%x:%x", &pci->domain, &pci->bus, &pci->device);
    snprintf(pci->busIdLegacy, sizeof(pci->busIdLegacy), "%04X:%02X:%02X.0", pci->domain & 0xffff, pci->bus & 0xff,
             pci->device & 0xff);
    return NVML_SUCCESS;
}

static nvmlReturn_t give_number(nvmlDevice_t device, unsigned int (*number_of)(const struct gpu *), unsigned int *value) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS) {
        *value = number_of(gpu_identity(gpu));
    }
    return code;
}

static unsigned int minor_of(const struct gpu *gpu) {
    return gpu->minor;
}

static unsigned int brand_of(const struct gpu *gpu) {
    return gpu->brand;
}

static unsigned int off(const struct gpu *gpu) {
    (void)gpu;
    return 0;
}

static unsigned int on(const struct gpu *gpu) {
    (void)gpu;
    return 1;
}

API(nvmlDeviceGetMinorNumber)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, minor_of, value);
}

API(nvmlDeviceGetArchitecture)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, architecture_of, value);
}

API(nvmlDeviceGetBrand)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, brand_of, value);
}

API(nvmlDeviceGetCudaComputeCapability)(nvmlDevice_t device, int *major, int *minor) {
    static const struct {
        int major;
        int minor;
    } capabilities[] = {[KEPLER] = {3, 5}, [MAXWELL] = {5, 2}, [PASCAL] = {6, 0}, [VOLTA] = {7, 0},     [TURING] = {7, 5},
                        [AMPERE] = {8, 0}, [ADA] = {8, 9},     [HOPPER] = {9, 0}, [BLACKWELL] = {10, 0}};
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS) {
        *major = capabilities[architecture_of(gpu_identity(gpu))].major;
        *minor = capabilities[architecture_of(gpu_identity(gpu))].minor;
    }
    return code;
}

/* What programs ask at their start, of a server without a display. */
API(nvmlDeviceGetDisplayActive)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, off, value);
}

API(nvmlDeviceGetDisplayMode)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, off, value);
}

API(nvmlDeviceGetPersistenceMode)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, on, value);
}

API(nvmlDeviceGetComputeMode)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, off, value);
}

API(nvmlDeviceGetPerformanceState)(nvmlDevice_t device, unsigned int *value) {
    return give_number(device, off, value);
}

API(nvmlDeviceGetFanSpeed)(nvmlDevice_t device, unsigned int *value) {
    int gpu;
    (void)value;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    return code == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : code;
}

/* Of Windows. */
static nvmlReturn_t no_driver_model(nvmlDevice_t device) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    return code == NVML_SUCCESS ? NVML_ERROR_NOT_SUPPORTED : code;
}

API(nvmlDeviceGetDriverModel)(nvmlDevice_t device, unsigned int *first, unsigned int *second) {
    (void)first;
    (void)second;
    return no_driver_model(device);
}

API(nvmlDeviceGetDriverModel_v2)(nvmlDevice_t device, unsigned int *first, unsigned int *second) {
    (void)first;
    (void)second;
    return no_driver_model(device);
}

API(nvmlDeviceGetNumGpuCores)(nvmlDevice_t device, unsigned int *value) {
    int gpu;
    nvmlReturn_t code = enter_gpu(device, &gpu);
    if (code == NVML_SUCCESS) {
        *value = 16896;
    }
    return code;
}
