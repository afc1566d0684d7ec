/* Faults, switched while the emulator runs through a small file. One statement a line:
 *
 *     fail WHO CALL CODE              the call returns the code; CALL is a symbol with or without its _vN, "field:ID", or *
 *     hang WHO CALL SECONDS           the call blocks so long, or until the line is gone
 *     value WHO NAME NUMBER           in place of the script's value
 *     gone WHO                        the GPU is no longer enumerated after the next nvmlInit
 *     at SECONDS                      the script stands still at this moment
 *
 * WHO is the number of a GPU in the script, * for every GPU, or "system" for calls that name none (nvmlInit with any suffix
 * is "nvmlInit"). The file is replaced by a rename, so a change shows in its inode, size or time. */
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>

#include "emulator.h"

#define MAX_STATEMENTS 128
#define EVERY_GPU (-1)
#define SYSTEM (-2)

enum verb { FAIL, HANG, OVERRIDE, GONE };

struct statement {
    enum verb verb;
    int who;
    char call[64];
    double number;
};

static struct statement statements[MAX_STATEMENTS];
static size_t statement_count;
static bool frozen;
static double frozen_at;
static struct stat seen;

static int parse_who(const char *word) {
    if (strcmp(word, "*") == 0) {
        return EVERY_GPU;
    }
    return strcmp(word, "system") == 0 ? SYSTEM : atoi(word);
}

static void parse_line(const char *line) {
    char verb[16] = "";
    char who[16] = "";
    struct statement statement = {.verb = GONE};
    int words = sscanf(line, "%15s %15s %63s %lf", verb, who, statement.call, &statement.number);
    if (words >= 2 && strcmp(verb, "at") == 0) {
        frozen = true;
        frozen_at = strtod(who, NULL);
        return;
    }
    if (words == 4 && strcmp(verb, "fail") == 0) {
        statement.verb = FAIL;
    } else if (words == 4 && strcmp(verb, "hang") == 0) {
        statement.verb = HANG;
    } else if (words == 4 && strcmp(verb, "value") == 0 && value_by_name(statement.call) >= 0) {
        statement.verb = OVERRIDE;
    } else if (words != 2 || strcmp(verb, "gone") != 0) {
        if (words > 0) {
            fprintf(stderr, "nvml emulator: control file: no statement: %s", line);
        }
        return;
    }
    statement.who = parse_who(who);
    if (statement_count < MAX_STATEMENTS) {
        statements[statement_count++] = statement;
    }
}

void control_refresh(const char *path) {
    struct stat now = {0};
    if (path == NULL || stat(path, &now) != 0) {
        memset(&now, 0, sizeof(now));
    }
    if (now.st_ino == seen.st_ino && now.st_size == seen.st_size && now.st_mtim.tv_sec == seen.st_mtim.tv_sec &&
        now.st_mtim.tv_nsec == seen.st_mtim.tv_nsec) {
        return;
    }
    seen = now;
    statement_count = 0;
    frozen = false;
    FILE *file = now.st_ino != 0 ? fopen(path, "r") : NULL;
    if (file == NULL) {
        return;
    }
    char line[256];
    while (fgets(line, sizeof(line), file) != NULL) {
        parse_line(line);
    }
    fclose(file);
}

/* "nvmlDeviceGetCount" names nvmlDeviceGetCount_v2 too; a name with its suffix names that one alone. */
static bool names_call(const char *pattern, const char *call) {
    size_t length = strlen(pattern);
    if (strcmp(pattern, "*") == 0 || strcmp(pattern, call) == 0) {
        return true;
    }
    return strncmp(pattern, call, length) == 0 && call[length] == '_' && call[length + 1] == 'v';
}

static const struct statement *find(enum verb verb, int gpu, const char *call) {
    for (size_t index = 0; index < statement_count; index++) {
        const struct statement *statement = &statements[index];
        bool is_theirs = statement->who == gpu || (statement->who == EVERY_GPU && gpu >= 0);
        if (statement->verb == verb && is_theirs && (call == NULL || names_call(statement->call, call))) {
            return statement;
        }
    }
    return NULL;
}

nvmlReturn_t control_fault(int gpu, const char *call) {
    const struct statement *statement = find(FAIL, gpu < 0 ? SYSTEM : gpu, call);
    return statement != NULL ? (nvmlReturn_t)statement->number : NVML_SUCCESS;
}

double control_hang(int gpu, const char *call) {
    const struct statement *statement = find(HANG, gpu < 0 ? SYSTEM : gpu, call);
    return statement != NULL ? statement->number : 0;
}

bool control_override(int gpu, enum value_id id, double *value) {
    const struct statement *statement = find(OVERRIDE, gpu, value_names[id]);
    if (statement != NULL) {
        *value = statement->number;
    }
    return statement != NULL;
}

bool control_frozen_at(double *elapsed) {
    if (frozen) {
        *elapsed = frozen_at;
    }
    return frozen;
}

bool control_vanished(int gpu) {
    return find(GONE, gpu, NULL) != NULL;
}
