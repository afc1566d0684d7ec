/* Faults, switched while the emulator runs through a small file. One statement a line:
 *
 *     fail WHO CALL CODE              the call returns the code; CALL is a symbol with or without its _vN, "field:ID",
 *                                     "gpm:ID", or *
 *     hang WHO CALL SECONDS           the call blocks so long, or until the line is gone
 *     latency WHO CALL SECONDS MODE   the call takes so much longer: CPU time of its thread (burn), or sleep (wait)
 *     value WHO NAME NUMBER           in place of the script's value
 *     shift WHO NAME AMOUNT           added to the script's value; a counter goes no lower than 0
 *     wrap WHO NAME BITS              the value counts modulo 2**BITS
 *     gone WHO                        the GPU is no longer enumerated after the next nvmlInit
 *     mig GPU off|enabled             MIG mode of this GPU, in place of the script's, and its instances in their order
 *     mig GPU GI_ID PROFILE UUID
 *     at SECONDS                      the script stands still at this moment
 *     log                             calls are written to the call log
 *
 * and what happens once, when a process first sees the number (numbers only rise; a process that starts later takes what
 * it finds as past):
 *
 *     reload NUMBER [VERSION]         the driver is loaded anew; with a VERSION, by another than the library belongs to
 *     reset NUMBER WHO NAME           this counter starts again at 0
 *     event NUMBER WHO TYPE DATA COUNT   so many events, with the numbers from NUMBER on; TYPE 8 is an XID, DATA its code
 *
 * WHO is the number of a GPU in the script, N:GI for a GPU instance on it, * for every GPU, or "system" for calls that
 * name none (nvmlInit with any suffix is "nvmlInit"). The file is replaced by a rename, so a change shows in its inode,
 * size or time. */
#include <math.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "emulator.h"

#define MAX_STATEMENTS 256
#define MAX_HAPPENINGS 1024

enum verb { FAIL, HANG, LATENCY, OVERRIDE, SHIFT, WRAP, GONE };

struct statement {
    enum verb verb;
    int gpu;
    int gi;
    char call[64];
    double number;
    bool burns;
};

static struct statement statements[MAX_STATEMENTS];
static size_t statement_count;
static struct happening happenings[MAX_HAPPENINGS];
static size_t happening_count;
static struct layout layouts[MAX_GPUS];
static bool has_layout[MAX_GPUS];
static bool frozen;
static _Atomic bool logs = true; /* until a control file without "log" is seen */
static double frozen_at;
static struct stat seen;
static char seen_path[4096];

static bool is_about_value(enum verb verb) {
    return verb == OVERRIDE || verb == SHIFT || verb == WRAP;
}

static bool parse_statement(const char *line) {
    static const struct {
        const char *word;
        enum verb verb;
        int words;
    } verbs[] = {{"fail", FAIL, 4},      {"hang", HANG, 4}, {"latency", LATENCY, 5},
                 {"value", OVERRIDE, 4}, {"wrap", WRAP, 4}, {"shift", SHIFT, 4},
                 {"gone", GONE, 2}};
    char verb[16] = "";
    char who[16] = "";
    char mode[8] = "";
    struct statement statement = {.verb = GONE};
    int words = sscanf(line, "%15s %15s %63s %lf %7s", verb, who, statement.call, &statement.number, mode);
    for (size_t index = 0; index < sizeof(verbs) / sizeof(verbs[0]); index++) {
        if (strcmp(verb, verbs[index].word) != 0) {
            continue;
        }
        statement.verb = verbs[index].verb;
        statement.burns = strcmp(mode, "burn") == 0;
        bool is_value = is_about_value(statement.verb);
        if (words != verbs[index].words || !parse_who(who, &statement.gpu, &statement.gi) ||
            (is_value && value_by_name(statement.call) < 0) || statement_count == MAX_STATEMENTS) {
            return false;
        }
        if (is_value) { /* by its first spelling */
            copy_text(statement.call, sizeof(statement.call), value_names[value_by_name(statement.call)]);
        }
        statements[statement_count++] = statement;
        return true;
    }
    return false;
}

static bool parse_mig(const char *line) {
    char words[192];
    int gpu;
    if (sscanf(line, "mig %d %191[^\n]", &gpu, words) != 2 || gpu < 0 || gpu >= MAX_GPUS) {
        return false;
    }
    if (!has_layout[gpu]) {
        memset(&layouts[gpu], 0, sizeof(layouts[gpu]));
        has_layout[gpu] = true;
    }
    return strcmp(words, "off") == 0 || layout_add(&layouts[gpu], words);
}

static bool parse_happening(const char *line) {
    struct happening happening = {.kind = HAPPENED_RELOAD, .count = 1};
    char who[16];
    char name[64];
    unsigned long long numbers[4];
    if (happening_count == MAX_HAPPENINGS) {
        return false;
    }
    if (sscanf(line, "event %llu %15s %lli %lli %llu", &numbers[0], who, (long long *)&numbers[1],
               (long long *)&numbers[2], &numbers[3]) == 5) {
        happening.kind = HAPPENED_EVENT;
        happening.type = numbers[1];
        happening.data = numbers[2];
        happening.count = numbers[3];
    } else if (sscanf(line, "reset %llu %15s %63s", &numbers[0], who, name) == 3 && value_by_name(name) >= 0) {
        happening.kind = HAPPENED_RESET;
        happening.value = (enum value_id)value_by_name(name);
    } else if (sscanf(line, "reload %llu %95s", &numbers[0], happening.text) >= 1) {
        copy_text(who, sizeof(who), "*");
    } else {
        return false;
    }
    happening.first = numbers[0];
    if (!parse_who(who, &happening.gpu, &happening.gi) || happening.count == 0) {
        return false;
    }
    happenings[happening_count++] = happening;
    return true;
}

static void parse_line(const char *line) {
    if (line[0] == '#' || line[strspn(line, " \n")] == '\0') {
        return;
    }
    if (strcmp(line, "log\n") == 0) {
        logs = true;
    } else if (sscanf(line, "at %lf", &frozen_at) == 1) {
        frozen = true;
    } else if (!parse_mig(line) && !parse_happening(line) && !parse_statement(line)) {
        fprintf(stderr, "nvml emulator: control file: no statement: %s", line);
    }
}

bool control_refresh(const char *path) {
    struct stat now = {0};
    if (path == NULL || stat(path, &now) != 0) {
        memset(&now, 0, sizeof(now));
    }
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec && strcmp(seen_path, path != NULL ? path : "") == 0) {
        return false;
    }
    seen = now;
    copy_text(seen_path, sizeof(seen_path), path != NULL ? path : "");
    statement_count = 0;
    happening_count = 0;
    frozen = false;
    logs = path == NULL || *path == '\0';
    memset(has_layout, 0, sizeof(has_layout));
    FILE *file = now.st_ino != 0 ? fopen(path, "r") : NULL;
    if (file == NULL) {
        return true;
    }
    char line[256];
    while (fgets(line, sizeof(line), file) != NULL) {
        parse_line(line);
    }
    fclose(file);
    return true;
}

/* "nvmlDeviceGetCount" names nvmlDeviceGetCount_v2 too; a name with its suffix names that one alone. */
static bool names_call(const char *pattern, const char *call) {
    size_t length = strlen(pattern);
    if (strcmp(pattern, "*") == 0 || strcmp(pattern, call) == 0) {
        return true;
    }
    if (strcmp(pattern, "nvmlInit") == 0 && strcmp(call, "nvmlInitWithFlags") == 0) {
        return true;
    }
    return strncmp(pattern, call, length) == 0 && call[length] == '_' && call[length + 1] == 'v';
}

/* What is set for a GPU holds for the instances on it, except values. */
static const struct statement *find(enum verb verb, int gpu, int gi, const char *call) {
    bool is_value = is_about_value(verb);
    for (size_t index = 0; index < statement_count; index++) {
        const struct statement *statement = &statements[index];
        if (statement->verb != verb || (call != NULL && !names_call(statement->call, call))) {
            continue;
        }
        bool is_gpu = statement->gpu == gpu || (statement->gpu == EVERY_GPU && gpu >= 0);
        if (is_gpu && (statement->gi == gi || (statement->gi == WHOLE && !is_value))) {
            return statement;
        }
    }
    return NULL;
}

nvmlReturn_t control_fault(int gpu, int gi, const char *call) {
    const struct statement *statement = find(FAIL, gpu, gi, call);
    return statement != NULL ? (nvmlReturn_t)statement->number : NVML_SUCCESS;
}

double control_hang(int gpu, int gi, const char *call) {
    const struct statement *statement = find(HANG, gpu, gi, call);
    return statement != NULL ? statement->number : 0;
}

double control_latency(int gpu, int gi, const char *call, bool *burns) {
    const struct statement *statement = find(LATENCY, gpu, gi, call);
    *burns = statement != NULL && statement->burns;
    return statement != NULL ? statement->number : 0;
}

bool control_override(int gpu, int gi, enum value_id id, double *value) {
    const struct statement *statement = find(OVERRIDE, gpu, gi, value_names[id]);
    if (statement != NULL) {
        *value = statement->number;
    }
    return statement != NULL;
}

double control_shift(int gpu, int gi, enum value_id id) {
    const struct statement *statement = find(SHIFT, gpu, gi, value_names[id]);
    return statement != NULL ? statement->number : 0;
}

int control_wrap_bits(int gpu, int gi, enum value_id id) {
    const struct statement *statement = find(WRAP, gpu, gi, value_names[id]);
    return statement != NULL ? (int)statement->number : 0;
}

bool control_frozen_at(double *elapsed) {
    if (frozen) {
        *elapsed = frozen_at;
    }
    return frozen;
}

bool control_logs(void) {
    return logs;
}

bool control_vanished(int gpu) {
    return find(GONE, gpu, WHOLE, NULL) != NULL;
}

const struct layout *control_layout(int gpu) {
    return has_layout[gpu] ? &layouts[gpu] : NULL;
}

size_t control_happenings(const struct happening **list) {
    *list = happenings;
    return happening_count;
}
