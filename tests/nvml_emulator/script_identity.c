/* Identity of a GPU in the script, "gpu N KEY VALUE...":
 *
 *     uuid|name|pci_bus_id TEXT       minor|brand NUMBER
 *     architecture NAME               kepler ... blackwell; by the name where it is not given
 *     nvlink_links COUNT              nvlink_version 4|5
 *     pcie_counter_bits 64|32         event_types BITS
 *     power_ring MILLISECONDS COUNT   offers nvmlDeviceGetSamples with so many samples at this distance
 *     mig GI_ID PROFILE UUID          a MIG instance, in their order; "mig enabled" for MIG mode without one */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <strings.h>

#include "emulator.h"

static const char *const architectures[] = {"kepler", "maxwell", "pascal", "volta", "turing", "ampere", "ada", "hopper",
                                            "blackwell"};

/* The first that is part of the name decides. */
static const struct {
    const char *part;
    enum architecture architecture;
} names[] = {
    {"GB200", BLACKWELL}, {"GB300", BLACKWELL}, {"B200", BLACKWELL}, {"B300", BLACKWELL}, {"RTX 50", BLACKWELL},
    {"GH200", HOPPER},    {"H100", HOPPER},     {"H200", HOPPER},    {"H800", HOPPER},    {"H20", HOPPER},
    {"L40", ADA},         {"L4", ADA},          {"RTX 40", ADA},     {"A100", AMPERE},    {"A800", AMPERE},
    {"A40", AMPERE},      {"A30", AMPERE},      {"A10", AMPERE},     {"RTX 30", AMPERE},  {"T4", TURING},
    {"RTX 20", TURING},   {"V100", VOLTA},      {"P100", PASCAL},    {"GTX 10", PASCAL},  {"M60", MAXWELL},
    {"K80", KEPLER},
};

unsigned architecture_of(const struct gpu *gpu) {
    if (gpu->architecture != 0) {
        return gpu->architecture;
    }
    for (size_t index = 0; index < sizeof(names) / sizeof(names[0]); index++) {
        if (strstr(gpu->name, names[index].part) != NULL) {
            return names[index].architecture;
        }
    }
    return HOPPER;
}

static bool parse_architecture(struct gpu *gpu, const char *word) {
    for (unsigned index = 0; index < sizeof(architectures) / sizeof(architectures[0]); index++) {
        if (strcasecmp(architectures[index], word) == 0) {
            gpu->architecture = KEPLER + index;
            return true;
        }
    }
    return false;
}

bool layout_add(struct layout *layout, char *words) {
    char *rest = words;
    char *gi = strtok_r(rest, " ", &rest);
    char *profile = strtok_r(rest, " ", &rest);
    char *uuid = strtok_r(rest, " ", &rest);
    if (gi == NULL) {
        return false;
    }
    layout->enabled = true;
    if (profile == NULL) {
        return strcmp(gi, "enabled") == 0;
    }
    if (uuid == NULL || strtoul(gi, NULL, 10) >= MAX_GI || layout->count == MAX_INSTANCES) {
        return false;
    }
    struct instance *instance = &layout->instances[layout->count];
    instance->gi = (unsigned)strtoul(gi, NULL, 10);
    instance->ci = 0;
    for (unsigned index = 0; index < layout->count; index++) {
        instance->ci += layout->instances[index].gi == instance->gi;
    }
    copy_text(instance->profile, sizeof(instance->profile), profile);
    copy_text(instance->uuid, sizeof(instance->uuid), uuid);
    layout->count++;
    return true;
}

static bool parse_number(struct gpu *gpu, const char *key, const char *word) {
    const struct {
        const char *key;
        unsigned *target;
    } numbers[] = {
        {"minor", &gpu->minor},
        {"brand", &gpu->brand},
        {"nvlink_links", &gpu->nvlink_links},
        {"nvlink_version", &gpu->nvlink_version},
        {"pcie_counter_bits", &gpu->pcie_counter_bits},
    };
    for (size_t index = 0; index < sizeof(numbers) / sizeof(numbers[0]); index++) {
        if (strcmp(key, numbers[index].key) == 0) {
            *numbers[index].target = (unsigned)strtoul(word, NULL, 0);
            return gpu->nvlink_links <= MAX_LINKS;
        }
    }
    return false;
}

bool parse_identity(struct gpu *gpu, const char *key, char *rest) {
    if (strcmp(key, "uuid") == 0) {
        copy_text(gpu->uuid, sizeof(gpu->uuid), rest);
    } else if (strcmp(key, "name") == 0) {
        copy_text(gpu->name, sizeof(gpu->name), rest);
    } else if (strcmp(key, "pci_bus_id") == 0) {
        copy_text(gpu->pci_bus_id, sizeof(gpu->pci_bus_id), rest);
    } else if (strcmp(key, "architecture") == 0) {
        return parse_architecture(gpu, rest);
    } else if (strcmp(key, "event_types") == 0) {
        gpu->event_types = strtoull(rest, NULL, 0);
    } else if (strcmp(key, "power_ring") == 0) {
        return sscanf(rest, "%u %u", &gpu->ring_period_ms, &gpu->ring_size) == 2 && gpu->ring_period_ms > 0;
    } else if (strcmp(key, "mig") == 0) {
        return layout_add(&gpu->layout, rest);
    } else {
        return parse_number(gpu, key, rest);
    }
    return true;
}
