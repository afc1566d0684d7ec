/* Inside of the NVML emulator: a script of values by name, faults that a control file switches, NVML's own symbols. */
#ifndef WARPWATCH_NVML_EMULATOR_H
#define WARPWATCH_NVML_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvml_abi.h"

#define MAX_GPUS 16
#define TEXT_SIZE 96

/* How a value goes on between two points of the script. */
enum value_kind { GAUGE, COUNTER };

/* Every value that a script can give for a GPU: identifier, name in the script, kind. A new value is one line here. */
#define VALUES(X)                                                                                                      \
    X(UTILIZATION_GPU, "utilization_gpu_percent", GAUGE)                                                               \
    X(UTILIZATION_MEMORY, "utilization_memory_percent", GAUGE)                                                         \
    X(MEMORY_TOTAL, "memory_total_bytes", GAUGE)                                                                       \
    X(MEMORY_RESERVED, "memory_reserved_bytes", GAUGE)                                                                 \
    X(MEMORY_USED, "memory_used_bytes", GAUGE)                                                                         \
    X(POWER, "power_milliwatts", GAUGE)                                                                                \
    X(POWER_LIMIT, "power_limit_milliwatts", GAUGE)                                                                    \
    X(ENERGY, "energy_millijoules", COUNTER)                                                                           \
    X(SM_CLOCK, "sm_clock_megahertz", GAUGE)                                                                           \
    X(SM_CLOCK_MAX, "sm_clock_max_megahertz", GAUGE)                                                                   \
    X(MEMORY_CLOCK, "memory_clock_megahertz", GAUGE)                                                                   \
    X(MEMORY_CLOCK_MAX, "memory_clock_max_megahertz", GAUGE)                                                           \
    X(TEMPERATURE, "temperature_celsius", GAUGE)                                                                       \
    X(MEMORY_TEMPERATURE, "memory_temperature_celsius", GAUGE)                                                         \
    X(EVENT_REASONS, "event_reasons_bits", GAUGE)                                                                      \
    X(POWER_CAP_TIME, "power_cap_nanoseconds", COUNTER)                                                                \
    X(THERMAL_TIME, "thermal_nanoseconds", COUNTER)                                                                    \
    X(PCIE_TX, "pcie_transmit_bytes", COUNTER)                                                                         \
    X(PCIE_RX, "pcie_receive_bytes", COUNTER)                                                                          \
    X(NVLINK_TX, "nvlink_transmit_kibibytes", COUNTER)                                                                 \
    X(NVLINK_RX, "nvlink_receive_kibibytes", COUNTER)                                                                  \
    X(STATUS, "status_code", GAUGE) /* return code of every call on this GPU: 0, 15 lost, 16 reset required */         \
    X(HANG, "hang", GAUGE)          /* calls on this GPU block while this is not 0 */

#define VALUE_ENUM(id, name, kind) VALUE_##id,
enum value_id { VALUES(VALUE_ENUM) VALUE_COUNT };
#undef VALUE_ENUM

/* Points of one value, in order of time. */
struct series {
    double *times;
    double *values;
    size_t size;
    size_t capacity;
};

/* A list of compute processes from one moment on: "pid:bytes,pid:bytes" or "" for none. */
struct process_point {
    double time;
    char *text;
};

struct gpu {
    char uuid[TEXT_SIZE];
    char name[TEXT_SIZE];
    char pci_bus_id[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
    unsigned minor;
    unsigned nvlink_links;      /* links that the per-link scopes answer for */
    unsigned pcie_counter_bits; /* 64, or 32 for boards whose counter wraps */
    struct series series[VALUE_COUNT];
    struct process_point *processes;
    size_t process_points;
};

struct script {
    char driver_version[TEXT_SIZE];
    double speed;
    double length_s; /* time of the last point */
    bool loops;
    unsigned gpu_count;
    struct gpu gpus[MAX_GPUS];
};

extern const char *const value_names[VALUE_COUNT];
extern const enum value_kind value_kinds[VALUE_COUNT];

/* script.c: returns false after a message on stderr. */
bool script_load(struct script *script, const char *path);
void script_free(struct script *script);
int value_by_name(const char *name);

/* timeline.c: false where the script never gives the value. */
bool timeline_value(const struct script *script, const struct gpu *gpu, enum value_id id, double elapsed, double *value);
const char *timeline_processes(const struct script *script, const struct gpu *gpu, double elapsed);

/* control.c: faults from the control file, read again when the file changes. Call with the lock held. */
void control_refresh(const char *path);
nvmlReturn_t control_fault(int gpu, const char *call);
double control_hang(int gpu, const char *call);
bool control_override(int gpu, enum value_id id, double *value);
bool control_frozen_at(double *elapsed);
bool control_vanished(int gpu);

/* state.c: one call on the system or on a GPU. Each refreshes the control file, blocks where a hang is set, and returns the
 * code that the call has to return, NVML_SUCCESS to go on. */
nvmlReturn_t enter_system(const char *call);
nvmlReturn_t enter_gpu(nvmlDevice_t handle, const char *call, int *gpu);
nvmlReturn_t gpu_value(int gpu, enum value_id id, double *value);
nvmlReturn_t gpu_fault(int gpu, const char *call);
const struct gpu *gpu_identity(int gpu);
void copy_processes(int gpu, char *text, size_t size);
const char *driver_version(void);
unsigned visible_count(void);
nvmlReturn_t handle_by_index(unsigned index, nvmlDevice_t *handle);
nvmlReturn_t handle_by_uuid(const char *uuid, nvmlDevice_t *handle);
nvmlReturn_t visible_index(int gpu, unsigned *index);

/* Values as the C types of the interface; too large goes to the type's maximum, as the driver's "not available" does. */
uint64_t to_u64(double value);
uint32_t to_u32(double value);

#endif
