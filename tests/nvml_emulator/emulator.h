/* Inside of the NVML emulator: a script of values by name, faults that a control file switches, NVML's own symbols. */
#ifndef WARPWATCH_NVML_EMULATOR_H
#define WARPWATCH_NVML_EMULATOR_H

#include <stdbool.h>
#include <stddef.h>
#include <stdint.h>

#include "nvml_abi.h"
#include "values.h"

#define MAX_GPUS 16
#define MAX_GI 16        /* GPU instance ids are below this */
#define MAX_INSTANCES 8  /* MIG instances of a GPU */
#define MAX_LINKS 36
#define TEXT_SIZE 96
#define WHOLE (-1)       /* in place of a GPU instance id: the GPU itself */
#define SYSTEM (-2)      /* in place of a GPU: calls that name none */

enum architecture { KEPLER = 2, MAXWELL, PASCAL, VOLTA, TURING, AMPERE, ADA, HOPPER, BLACKWELL };

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

/* What is measured: a GPU, or one GPU instance on it. */
struct unit {
    struct series series[VALUE_COUNT];
    struct process_point *processes;
    size_t process_points;
};

struct instance {
    unsigned gi; /* GPU instance id */
    unsigned ci; /* compute instance id: how many of the same GPU instance come before it */
    char profile[32];
    char uuid[TEXT_SIZE];
};

struct layout {
    bool enabled;
    unsigned count;
    struct instance instances[MAX_INSTANCES];
};

struct gpu {
    char uuid[TEXT_SIZE];
    char name[TEXT_SIZE];
    char pci_bus_id[NVML_DEVICE_PCI_BUS_ID_BUFFER_SIZE];
    unsigned minor;
    unsigned nvlink_links;      /* links that the per-link scopes answer for */
    unsigned nvlink_version;    /* 5: bytes and errors in the fields from 201 on, no error counters of before */
    unsigned pcie_counter_bits; /* 64, or 32 for boards whose counter wraps */
    unsigned architecture;      /* 0: by the name */
    unsigned brand;
    unsigned ring_period_ms; /* of nvmlDeviceGetSamples; 0: not offered */
    unsigned ring_size;
    unsigned long long event_types; /* of nvmlDeviceGetSupportedEventTypes */
    struct layout layout;
    struct unit whole;
    struct unit instances[MAX_GI];
};

struct script {
    char driver_version[TEXT_SIZE];
    double speed;
    double length_s; /* time of the last point */
    bool loops;
    unsigned gpu_count;
    struct gpu gpus[MAX_GPUS];
};

/* What a handle stands for. */
struct target {
    int gpu;
    int gi; /* WHOLE for the GPU itself */
    struct instance instance;
};

/* Something that happened once, by its number in the control file. */
struct happening {
    enum { HAPPENED_RELOAD, HAPPENED_RESET, HAPPENED_EVENT } kind;
    unsigned long long first; /* number; an event of `count` has as many, one after the other */
    unsigned long long count;
    int gpu;
    int gi;
    enum value_id value;          /* of a reset */
    unsigned long long type;      /* of an event */
    unsigned long long data;      /* of an event: the XID */
    char text[TEXT_SIZE];         /* of a reload: the new driver version, or "" */
};

extern const char *const value_names[VALUE_COUNT];
extern const enum value_kind value_kinds[VALUE_COUNT];

/* script.c, script_identity.c: false after a message on stderr. */
bool script_load(struct script *script, const char *path);
void script_free(struct script *script);
int value_by_name(const char *name);
bool parse_identity(struct gpu *gpu, const char *key, char *rest);
bool layout_add(struct layout *layout, char *words); /* "enabled", or "GI_ID PROFILE UUID" */
unsigned architecture_of(const struct gpu *gpu);
bool parse_who(const char *word, int *gpu, int *gi); /* "3", "3:1", "*", "system" */
void copy_text(char *target, size_t size, const char *source);
#define EVERY_GPU (-1)

/* timeline.c: false where the script never gives the value. */
bool timeline_value(const struct script *script, const struct unit *unit, enum value_id id, double elapsed,
                    double *value);
const char *timeline_processes(const struct script *script, const struct unit *unit, double elapsed);

/* control.c, control_parse.c: faults from the control file, read again when the file changes. Call with the lock held. */
bool control_refresh(const char *path); /* whether the file has changed */
nvmlReturn_t control_fault(int gpu, int gi, const char *call);
double control_hang(int gpu, int gi, const char *call);
double control_latency(int gpu, int gi, const char *call, bool *burns);
bool control_override(int gpu, int gi, enum value_id id, double *value);
double control_shift(int gpu, int gi, enum value_id id);
int control_wrap_bits(int gpu, int gi, enum value_id id); /* 0 for none */
bool control_frozen_at(double *elapsed);
bool control_vanished(int gpu);
bool control_logs(void); /* without the lock */
const struct layout *control_layout(int gpu); /* NULL: the script's */
size_t control_happenings(const struct happening **happenings);

/* state.c: the start of a call. The control file is read, hangs and delays are lived through; the result is the code that
 * the call has to return, NVML_SUCCESS to go on. */
nvmlReturn_t enter_system(void);
nvmlReturn_t enter_device(nvmlDevice_t handle, struct target *target); /* a GPU or a MIG device */
nvmlReturn_t enter_gpu(nvmlDevice_t handle, int *gpu);                 /* a GPU; NOT_SUPPORTED on a MIG device */
nvmlReturn_t enter_target(int gpu, int gi);
nvmlReturn_t enter_part(int gpu, int gi, const char *part); /* "field:83", "gpm:2" within a call */
bool is_usable(void);                                       /* reads the control file */
double gpm_clock_s(void);                                   /* seconds, or the script's moment while it stands still */
unsigned long long last_happening(void);
bool next_event(unsigned long long after, const unsigned long long types[MAX_GPUS],
                const unsigned long long since[MAX_GPUS], struct happening *event, unsigned long long *number);

/* values.c: values of a GPU or of a GPU instance on it, after what the control file sets. */
nvmlReturn_t unit_value(int gpu, int gi, enum value_id id, double *value);
nvmlReturn_t unit_value_before(int gpu, int gi, enum value_id id, double age_s, double *value);
nvmlReturn_t gpu_value(int gpu, enum value_id id, double *value);
void start_counter_again(int gpu, int gi, enum value_id id); /* with the lock held */
void copy_processes(int gpu, int gi, char *text, size_t size); /* "-" where they are not supported */
void copy_layout(int gpu, struct layout *layout);
bool is_mig_enabled(int gpu);
const struct gpu *gpu_identity(int gpu);
void copy_driver_version(char *text, size_t size);
bool driver_is_at_least(int major, int minor);
uint64_t share_of_link(double sum, unsigned link, unsigned links);

/* handles.c */
nvmlDevice_t gpu_handle(int gpu);
nvmlDevice_t mig_handle(int gpu, const struct instance *instance);
nvmlReturn_t find_target(nvmlDevice_t handle, struct target *target); /* with the lock held */
unsigned visible_count(void);
nvmlReturn_t handle_by_index(unsigned index, nvmlDevice_t *handle);
nvmlReturn_t handle_by_uuid(const char *uuid, nvmlDevice_t *handle);
nvmlReturn_t handle_by_bus_id(const char *bus_id, nvmlDevice_t *handle);
nvmlReturn_t visible_index(int gpu, unsigned *index);

/* What state.c, values.c and handles.c share, under the lock. */
struct state {
    struct script script;
    _Atomic unsigned generation; /* a handle of an earlier nvmlInit is no longer valid */
    int visible[MAX_GPUS];
    unsigned visible_size;
    double bases[MAX_GPUS][MAX_GI + 1][VALUE_COUNT]; /* what a counter had when it started again */
    char reloaded_version[TEXT_SIZE];                /* of a driver that came by a reload, or "" */
};
extern struct state state;
void state_lock(void);
void state_unlock(void);
double elapsed_s(void);
const struct layout *layout_of(int gpu);

/* call_log.c */
struct call {
    const char *symbol;
    int gpu; /* SYSTEM until the handle is known */
    int gi;
    double began_s;
    char detail[240];
};
extern _Thread_local struct call current_call;
void call_begin(const char *symbol);
nvmlReturn_t call_end(nvmlReturn_t code);
void call_detail(const char *format, ...) __attribute__((format(printf, 1, 2)));

/* Values as the C types of the interface; too large goes to the type's maximum, as the driver's "not available" does. */
uint64_t to_u64(double value);
uint32_t to_u32(double value);

#endif
