/* Reads the script. One statement a line, words parted by spaces:
 *
 *     driver VERSION                  speed FACTOR              end hold|loop
 *     gpu N KEY VALUE...              identity of GPU N, keys in script_identity.c
 *     @ SECONDS                       what follows holds from this moment on
 *     N NAME=VALUE ...                values of GPU N, names from values.h; processes=PID:BYTES,PID:BYTES
 *     N:GI NAME=VALUE ...             values of the GPU instance GI on it
 *
 * A line that begins with # is a comment. */
#include <errno.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>

#include "emulator.h"

#define VALUE_NAME(id, name, kind) name,
const char *const value_names[VALUE_COUNT] = {VALUES(VALUE_NAME)};
#undef VALUE_NAME
#define VALUE_KIND(id, name, kind) kind,
const enum value_kind value_kinds[VALUE_COUNT] = {VALUES(VALUE_KIND)};
#undef VALUE_KIND

int value_by_name(const char *name) {
#define VALUE_ALIAS(id, alias)                                                                                         \
    if (strcmp(alias, name) == 0) {                                                                                    \
        return VALUE_##id;                                                                                             \
    }
    VALUE_ALIASES(VALUE_ALIAS)
#undef VALUE_ALIAS
    for (int id = 0; id < VALUE_COUNT; id++) {
        if (strcmp(value_names[id], name) == 0) {
            return id;
        }
    }
    return -1;
}

void copy_text(char *target, size_t size, const char *source) {
    snprintf(target, size, "%s", source);
}

static void add_point(struct series *series, double time, double value) {
    if (series->size == series->capacity) {
        series->capacity = series->capacity ? series->capacity * 2 : 8;
        series->times = realloc(series->times, series->capacity * sizeof(double));
        series->values = realloc(series->values, series->capacity * sizeof(double));
        if (series->times == NULL || series->values == NULL) {
            abort();
        }
    }
    series->times[series->size] = time;
    series->values[series->size] = value;
    series->size++;
}

static void add_processes(struct unit *unit, double time, const char *text) {
    unit->processes = realloc(unit->processes, (unit->process_points + 1) * sizeof(struct process_point));
    if (unit->processes == NULL) {
        abort();
    }
    unit->processes[unit->process_points].time = time;
    unit->processes[unit->process_points].text = strdup(text);
    unit->process_points++;
}

bool parse_who(const char *word, int *gpu, int *gi) {
    char *end;
    *gi = WHOLE;
    *gpu = strcmp(word, "*") == 0 ? EVERY_GPU : SYSTEM;
    if (strcmp(word, "*") == 0 || strcmp(word, "system") == 0) {
        return true;
    }
    unsigned long number = strtoul(word, &end, 10);
    if (end == word || number >= MAX_GPUS) {
        return false;
    }
    *gpu = (int)number;
    if (*end == ':') {
        const char *instance = end + 1;
        number = strtoul(instance, &end, 10);
        if (end == instance || number >= MAX_GI) {
            return false;
        }
        *gi = (int)number;
    }
    return *end == '\0';
}

static bool gpu_number(struct script *script, const char *word, struct gpu **gpu, int *gi) {
    int number;
    if (!parse_who(word, &number, gi) || number < 0) {
        return false;
    }
    if ((unsigned)number >= script->gpu_count) {
        script->gpu_count = (unsigned)number + 1;
    }
    *gpu = &script->gpus[number];
    return true;
}

static bool parse_gpu(struct script *script, char *rest) {
    char *number = strtok_r(rest, " ", &rest);
    char *key = strtok_r(rest, " ", &rest);
    struct gpu *gpu;
    int gi;
    if (number == NULL || key == NULL || rest == NULL || !gpu_number(script, number, &gpu, &gi) || gi != WHOLE) {
        return false;
    }
    return parse_identity(gpu, key, rest);
}

static bool parse_values(struct script *script, const char *first, char *rest, double time) {
    struct gpu *gpu;
    int gi;
    if (!gpu_number(script, first, &gpu, &gi)) {
        return false;
    }
    struct unit *unit = gi == WHOLE ? &gpu->whole : &gpu->instances[gi];
    for (char *word; (word = strtok_r(rest, " ", &rest)) != NULL;) {
        char *value = strchr(word, '=');
        if (value == NULL) {
            return false;
        }
        *value++ = '\0';
        if (strcmp(word, "processes") == 0) {
            add_processes(unit, time, value);
            continue;
        }
        int id = value_by_name(word);
        char *end;
        double number = strtod(value, &end);
        if (id < 0 || *value == '\0' || *end != '\0') {
            return false;
        }
        add_point(&unit->series[id], time, number);
    }
    return true;
}

static bool parse_line(struct script *script, char *line, double *time) {
    char *rest = line;
    char *word = strtok_r(rest, " ", &rest);
    if (word == NULL || word[0] == '#') {
        return true;
    }
    if (strcmp(word, "@") == 0) {
        *time = strtod(rest, NULL);
        if (*time > script->length_s) {
            script->length_s = *time;
        }
        return true;
    }
    if (strcmp(word, "gpu") == 0) {
        return parse_gpu(script, rest);
    }
    if (strcmp(word, "driver") == 0) {
        copy_text(script->driver_version, sizeof(script->driver_version), rest);
        return true;
    }
    if (strcmp(word, "speed") == 0) {
        script->speed = strtod(rest, NULL);
        return script->speed > 0;
    }
    if (strcmp(word, "end") == 0) {
        script->loops = strcmp(rest, "loop") == 0;
        return script->loops || strcmp(rest, "hold") == 0;
    }
    return parse_values(script, word, rest, *time);
}

static void set_defaults(struct script *script) {
    memset(script, 0, sizeof(*script));
    script->speed = 1.0;
    copy_text(script->driver_version, sizeof(script->driver_version), "580.95.05");
    for (unsigned number = 0; number < MAX_GPUS; number++) {
        struct gpu *gpu = &script->gpus[number];
        snprintf(gpu->uuid, sizeof(gpu->uuid), "GPU-00000000-0000-4000-8000-%012u", number);
        snprintf(gpu->pci_bus_id, sizeof(gpu->pci_bus_id), "00000000:%02X:00.0", 16 + number);
        copy_text(gpu->name, sizeof(gpu->name), "NVIDIA H100 80GB HBM3");
        gpu->minor = number;
        gpu->nvlink_links = 18;
        gpu->nvlink_version = 4;
        gpu->brand = 14;          /* NVML_BRAND_NVIDIA */
        gpu->event_types = 0x1f; /* ECC errors, P-state, XID, clock */
        gpu->pcie_counter_bits = 64;
    }
}

bool script_load(struct script *script, const char *path) {
    set_defaults(script);
    FILE *file = fopen(path, "r");
    if (file == NULL) {
        fprintf(stderr, "nvml emulator: cannot read the script %s: %s\n", path, strerror(errno));
        return false;
    }
    char *line = NULL;
    size_t capacity = 0;
    double time = 0;
    bool fine = true;
    for (unsigned number = 1; fine && getline(&line, &capacity, file) >= 0; number++) {
        line[strcspn(line, "\n")] = '\0';
        fine = parse_line(script, line, &time);
        if (!fine) {
            fprintf(stderr, "nvml emulator: %s: line %u is no statement\n", path, number);
        }
    }
    free(line);
    fclose(file);
    return fine;
}

static void free_unit(struct unit *unit) {
    for (int id = 0; id < VALUE_COUNT; id++) {
        free(unit->series[id].times);
        free(unit->series[id].values);
    }
    for (size_t point = 0; point < unit->process_points; point++) {
        free(unit->processes[point].text);
    }
    free(unit->processes);
}

void script_free(struct script *script) {
    for (unsigned number = 0; number < MAX_GPUS; number++) {
        free_unit(&script->gpus[number].whole);
        for (int gi = 0; gi < MAX_GI; gi++) {
            free_unit(&script->gpus[number].instances[gi]);
        }
    }
    memset(script, 0, sizeof(*script));
}
