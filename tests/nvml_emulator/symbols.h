/* Every symbol that the library answers: name, parameters, arguments. symbols.c makes the exported function of each, with
 * the call log around it; the function itself is defined as API(name). */
#ifndef WARPWATCH_NVML_SYMBOLS_H
#define WARPWATCH_NVML_SYMBOLS_H

#define API(name) nvmlReturn_t answer_##name

#define U32_OF_DEVICE(X, name) X(name, (nvmlDevice_t device, unsigned int *value), (device, value))
#define TWO_OF_DEVICE(X, name)                                                                                         \
    X(name, (nvmlDevice_t device, unsigned int *first, unsigned int *second), (device, first, second))
#define TEXT_OF_DEVICE(X, name)                                                                                        \
    X(name, (nvmlDevice_t device, char *text, unsigned int size), (device, text, size))
#define PROCESSES_OF_DEVICE(X, name)                                                                                   \
    X(name, (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_t *infos), (device, count, infos))
#define COUNT_PARAMETERS (unsigned int *count)

#define SYMBOLS(X)                                                                                                     \
    X(nvmlInitWithFlags, (unsigned int flags), (flags))                                                                \
    X(nvmlInit_v2, (void), ())                                                                                         \
    X(nvmlInit, (void), ())                                                                                            \
    X(nvmlShutdown, (void), ())                                                                                        \
    X(nvmlSystemGetDriverVersion, (char *text, unsigned int size), (text, size))                                       \
    X(nvmlSystemGetNVMLVersion, (char *text, unsigned int size), (text, size))                                         \
    X(nvmlSystemGetCudaDriverVersion, (int *version), (version))                                                       \
    X(nvmlSystemGetCudaDriverVersion_v2, (int *version), (version))                                                    \
    X(nvmlSystemGetProcessName, (unsigned int pid, char *text, unsigned int size), (pid, text, size))                  \
    X(nvmlDeviceGetCount, COUNT_PARAMETERS, (count))                                                                   \
    X(nvmlDeviceGetCount_v2, COUNT_PARAMETERS, (count))                                                                \
    X(nvmlDeviceGetHandleByIndex_v2, (unsigned int index, nvmlDevice_t *device), (index, device))                      \
    X(nvmlDeviceGetHandleByUUID, (const char *uuid, nvmlDevice_t *device), (uuid, device))                             \
    X(nvmlDeviceGetHandleByPciBusId_v2, (const char *bus_id, nvmlDevice_t *device), (bus_id, device))                  \
    U32_OF_DEVICE(X, nvmlDeviceGetIndex)                                                                               \
    TEXT_OF_DEVICE(X, nvmlDeviceGetUUID)                                                                               \
    TEXT_OF_DEVICE(X, nvmlDeviceGetName)                                                                               \
    TEXT_OF_DEVICE(X, nvmlDeviceGetSerial)                                                                             \
    TEXT_OF_DEVICE(X, nvmlDeviceGetVbiosVersion)                                                                       \
    X(nvmlDeviceGetPciInfo_v3, (nvmlDevice_t device, nvmlPciInfo_t *pci), (device, pci))                               \
    U32_OF_DEVICE(X, nvmlDeviceGetMinorNumber)                                                                         \
    U32_OF_DEVICE(X, nvmlDeviceGetArchitecture)                                                                        \
    U32_OF_DEVICE(X, nvmlDeviceGetBrand)                                                                               \
    X(nvmlDeviceGetCudaComputeCapability, (nvmlDevice_t device, int *major, int *minor), (device, major, minor))       \
    U32_OF_DEVICE(X, nvmlDeviceGetDisplayActive)                                                                       \
    U32_OF_DEVICE(X, nvmlDeviceGetDisplayMode)                                                                         \
    U32_OF_DEVICE(X, nvmlDeviceGetPersistenceMode)                                                                     \
    U32_OF_DEVICE(X, nvmlDeviceGetComputeMode)                                                                         \
    U32_OF_DEVICE(X, nvmlDeviceGetPerformanceState)                                                                    \
    U32_OF_DEVICE(X, nvmlDeviceGetFanSpeed)                                                                            \
    U32_OF_DEVICE(X, nvmlDeviceGetNumGpuCores)                                                                         \
    TWO_OF_DEVICE(X, nvmlDeviceGetDriverModel)                                                                         \
    TWO_OF_DEVICE(X, nvmlDeviceGetDriverModel_v2)                                                                      \
    X(nvmlDeviceGetUtilizationRates, (nvmlDevice_t device, nvmlUtilization_t *utilization), (device, utilization))     \
    TWO_OF_DEVICE(X, nvmlDeviceGetEncoderUtilization)                                                                  \
    TWO_OF_DEVICE(X, nvmlDeviceGetDecoderUtilization)                                                                  \
    X(nvmlDeviceGetMemoryInfo, (nvmlDevice_t device, nvmlMemory_t *memory), (device, memory))                          \
    X(nvmlDeviceGetMemoryInfo_v2, (nvmlDevice_t device, nvmlMemory_v2_t *memory), (device, memory))                    \
    X(nvmlDeviceGetBAR1MemoryInfo, (nvmlDevice_t device, nvmlBAR1Memory_t *memory), (device, memory))                  \
    U32_OF_DEVICE(X, nvmlDeviceGetPowerUsage)                                                                          \
    U32_OF_DEVICE(X, nvmlDeviceGetEnforcedPowerLimit)                                                                  \
    U32_OF_DEVICE(X, nvmlDeviceGetPowerManagementLimit)                                                                \
    X(nvmlDeviceGetTotalEnergyConsumption, (nvmlDevice_t device, unsigned long long *millijoules),                     \
      (device, millijoules))                                                                                           \
    X(nvmlDeviceGetClockInfo, (nvmlDevice_t device, unsigned int type, unsigned int *megahertz),                       \
      (device, type, megahertz))                                                                                       \
    X(nvmlDeviceGetMaxClockInfo, (nvmlDevice_t device, unsigned int type, unsigned int *megahertz),                    \
      (device, type, megahertz))                                                                                       \
    X(nvmlDeviceGetTemperature, (nvmlDevice_t device, unsigned int sensor, unsigned int *celsius),                     \
      (device, sensor, celsius))                                                                                       \
    X(nvmlDeviceGetTemperatureV, (nvmlDevice_t device, nvmlTemperature_v1_t *temperature), (device, temperature))      \
    X(nvmlDeviceGetCurrentClocksEventReasons, (nvmlDevice_t device, unsigned long long *reasons), (device, reasons))   \
    X(nvmlDeviceGetCurrentClocksThrottleReasons, (nvmlDevice_t device, unsigned long long *reasons),                   \
      (device, reasons))                                                                                               \
    X(nvmlDeviceGetFieldValues, (nvmlDevice_t device, int count, nvmlFieldValue_t *values), (device, count, values))   \
    X(nvmlDeviceGetSamples,                                                                                            \
      (nvmlDevice_t device, unsigned int type, unsigned long long since, unsigned int *value_type,                     \
       unsigned int *count, nvmlSample_t *samples),                                                                    \
      (device, type, since, value_type, count, samples))                                                               \
    X(nvmlDeviceGetComputeRunningProcesses,                                                                            \
      (nvmlDevice_t device, unsigned int *count, nvmlProcessInfo_v1_t *infos), (device, count, infos))                 \
    PROCESSES_OF_DEVICE(X, nvmlDeviceGetComputeRunningProcesses_v2)                                                    \
    PROCESSES_OF_DEVICE(X, nvmlDeviceGetComputeRunningProcesses_v3)                                                    \
    PROCESSES_OF_DEVICE(X, nvmlDeviceGetGraphicsRunningProcesses_v3)                                                   \
    PROCESSES_OF_DEVICE(X, nvmlDeviceGetMPSComputeRunningProcesses_v3)                                                 \
    X(nvmlDeviceGetProcessUtilization,                                                                                 \
      (nvmlDevice_t device, nvmlProcessUtilizationSample_t *samples, unsigned int *count, unsigned long long since),   \
      (device, samples, count, since))                                                                                 \
    X(nvmlDeviceGetRunningProcessDetailList, (nvmlDevice_t device, nvmlProcessDetailList_v1_t *list), (device, list))  \
    TWO_OF_DEVICE(X, nvmlDeviceGetEccMode)                                                                             \
    X(nvmlDeviceGetTotalEccErrors,                                                                                     \
      (nvmlDevice_t device, unsigned int type, unsigned int counter, unsigned long long *errors),                      \
      (device, type, counter, errors))                                                                                 \
    X(nvmlDeviceGetMemoryErrorCounter,                                                                                 \
      (nvmlDevice_t device, unsigned int type, unsigned int counter, unsigned int location,                            \
       unsigned long long *errors),                                                                                    \
      (device, type, counter, location, errors))                                                                       \
    X(nvmlDeviceGetRemappedRows,                                                                                       \
      (nvmlDevice_t device, unsigned int *correctable, unsigned int *uncorrectable, unsigned int *pending,             \
       unsigned int *failure),                                                                                         \
      (device, correctable, uncorrectable, pending, failure))                                                          \
    U32_OF_DEVICE(X, nvmlDeviceGetCurrPcieLinkGeneration)                                                              \
    U32_OF_DEVICE(X, nvmlDeviceGetMaxPcieLinkGeneration)                                                               \
    U32_OF_DEVICE(X, nvmlDeviceGetGpuMaxPcieLinkGeneration)                                                            \
    U32_OF_DEVICE(X, nvmlDeviceGetCurrPcieLinkWidth)                                                                   \
    U32_OF_DEVICE(X, nvmlDeviceGetMaxPcieLinkWidth)                                                                    \
    U32_OF_DEVICE(X, nvmlDeviceGetPcieReplayCounter)                                                                   \
    X(nvmlDeviceGetPcieThroughput, (nvmlDevice_t device, unsigned int counter, unsigned int *kilobytes),               \
      (device, counter, kilobytes))                                                                                    \
    X(nvmlDeviceGetNvLinkState, (nvmlDevice_t device, unsigned int link, unsigned int *active),                        \
      (device, link, active))                                                                                          \
    X(nvmlDeviceGetNvLinkVersion, (nvmlDevice_t device, unsigned int link, unsigned int *version),                     \
      (device, link, version))                                                                                         \
    X(nvmlDeviceGetNvLinkErrorCounter,                                                                                 \
      (nvmlDevice_t device, unsigned int link, unsigned int counter, unsigned long long *errors),                      \
      (device, link, counter, errors))                                                                                 \
    X(nvmlDeviceGetGpuFabricInfo, (nvmlDevice_t device, nvmlGpuFabricInfo_t *info), (device, info))                    \
    X(nvmlDeviceGetGpuFabricInfoV, (nvmlDevice_t device, nvmlGpuFabricInfoV_t *info), (device, info))                  \
    X(nvmlGpmQueryDeviceSupport, (nvmlDevice_t device, nvmlGpmSupport_t *support), (device, support))                  \
    X(nvmlGpmSampleAlloc, (nvmlGpmSample_t *sample), (sample))                                                         \
    X(nvmlGpmSampleFree, (nvmlGpmSample_t sample), (sample))                                                           \
    X(nvmlGpmSampleGet, (nvmlDevice_t device, nvmlGpmSample_t sample), (device, sample))                               \
    X(nvmlGpmMigSampleGet, (nvmlDevice_t device, unsigned int gi, nvmlGpmSample_t sample), (device, gi, sample))       \
    X(nvmlGpmMetricsGet, (nvmlGpmMetricsGet_t *metrics), (metrics))                                                    \
    X(nvmlDeviceIsMigDeviceHandle, (nvmlDevice_t device, unsigned int *is_mig), (device, is_mig))                      \
    TWO_OF_DEVICE(X, nvmlDeviceGetMigMode)                                                                             \
    U32_OF_DEVICE(X, nvmlDeviceGetMaxMigDeviceCount)                                                                   \
    X(nvmlDeviceGetMigDeviceHandleByIndex, (nvmlDevice_t device, unsigned int index, nvmlDevice_t *mig),               \
      (device, index, mig))                                                                                            \
    X(nvmlDeviceGetDeviceHandleFromMigDeviceHandle, (nvmlDevice_t mig, nvmlDevice_t *device), (mig, device))           \
    U32_OF_DEVICE(X, nvmlDeviceGetGpuInstanceId)                                                                       \
    U32_OF_DEVICE(X, nvmlDeviceGetComputeInstanceId)                                                                   \
    X(nvmlDeviceGetAttributes_v2, (nvmlDevice_t device, nvmlDeviceAttributes_t *attributes), (device, attributes))     \
    X(nvmlDeviceGetGpuInstanceById, (nvmlDevice_t device, unsigned int id, nvmlGpuInstance_t *instance),               \
      (device, id, instance))                                                                                          \
    X(nvmlDeviceGetGpuInstances,                                                                                       \
      (nvmlDevice_t device, unsigned int profile, nvmlGpuInstance_t *instances, unsigned int *count),                  \
      (device, profile, instances, count))                                                                             \
    X(nvmlGpuInstanceGetInfo, (nvmlGpuInstance_t instance, nvmlGpuInstanceInfo_t *info), (instance, info))             \
    X(nvmlDeviceGetGpuInstanceProfileInfo,                                                                             \
      (nvmlDevice_t device, unsigned int profile, nvmlGpuInstanceProfileInfo_t *info), (device, profile, info))        \
    X(nvmlDeviceGetGpuInstanceProfileInfoV,                                                                            \
      (nvmlDevice_t device, unsigned int profile, nvmlGpuInstanceProfileInfo_v2_t *info), (device, profile, info))     \
    X(nvmlDeviceGetSupportedEventTypes, (nvmlDevice_t device, unsigned long long *types), (device, types))             \
    X(nvmlDeviceRegisterEvents, (nvmlDevice_t device, unsigned long long types, nvmlEventSet_t set),                   \
      (device, types, set))                                                                                            \
    X(nvmlEventSetCreate, (nvmlEventSet_t *set), (set))                                                                \
    X(nvmlEventSetFree, (nvmlEventSet_t set), (set))                                                                   \
    X(nvmlEventSetWait, (nvmlEventSet_t set, nvmlEventData_v1_t *data, unsigned int timeout_ms),                       \
      (set, data, timeout_ms))                                                                                         \
    X(nvmlEventSetWait_v2, (nvmlEventSet_t set, nvmlEventData_t *data, unsigned int timeout_ms),                       \
      (set, data, timeout_ms))

#define DECLARE(name, parameters, arguments) API(name) parameters;
SYMBOLS(DECLARE)
#undef DECLARE

#endif
