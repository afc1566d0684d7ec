/* The call log: a line for each call into the library, where WARPWATCH_NVML_CALLS names a file and the control
 * file, if there is one, says "log". Words parted by spaces:
 *
 *     BEGAN GPU SYMBOL DURATION RETURN DETAIL
 *
 * BEGAN is CLOCK_MONOTONIC and DURATION its difference, in seconds; GPU is the script's number ("3", "3:1" for a GPU
 * instance) or "-"; DETAIL is the fields or metrics asked for, or "-". A call is written when it returns, in one write. */
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <time.h>
#include <unistd.h>

#include "emulator.h"

_Thread_local struct call current_call;

static pthread_mutex_t log_lock = PTHREAD_MUTEX_INITIALIZER;
static char log_path[4096];
static int log_file = -1;

static double monotonic_s(void) {
    struct timespec now;
    clock_gettime(CLOCK_MONOTONIC, &now);
    return (double)now.tv_sec + (double)now.tv_nsec / 1e9;
}

void call_begin(const char *symbol) {
    current_call.symbol = symbol;
    current_call.gpu = SYSTEM;
    current_call.gi = WHOLE;
    current_call.detail[0] = '\0';
    current_call.began_s = getenv("WARPWATCH_NVML_CALLS") != NULL ? monotonic_s() : 0;
}

void call_detail(const char *format, ...) {
    size_t used = strlen(current_call.detail);
    va_list arguments;
    va_start(arguments, format);
    vsnprintf(current_call.detail + used, sizeof(current_call.detail) - used, format, arguments);
    va_end(arguments);
}

static void open_log(const char *path) {
    if (strcmp(path, log_path) == 0) {
        return;
    }
    if (log_file >= 0) {
        close(log_file);
    }
    copy_text(log_path, sizeof(log_path), path);
    log_file = open(path, O_WRONLY | O_CREAT | O_APPEND | O_CLOEXEC, 0644);
}

nvmlReturn_t call_end(nvmlReturn_t code) {
    const char *path = getenv("WARPWATCH_NVML_CALLS");
    if (path == NULL || *path == '\0' || current_call.began_s == 0 || !control_logs()) {
        return code;
    }
    char line[512];
    char gpu[24] = "-";
    if (current_call.gpu >= 0 && current_call.gi >= 0) {
        snprintf(gpu, sizeof(gpu), "%d:%d", current_call.gpu, current_call.gi);
    } else if (current_call.gpu >= 0) {
        snprintf(gpu, sizeof(gpu), "%d", current_call.gpu);
    }
    int length = snprintf(line, sizeof(line), "%.6f %s %s %.6f %d %s\n", current_call.began_s, gpu, current_call.symbol,
                          monotonic_s() - current_call.began_s, code,
                          current_call.detail[0] != '\0' ? current_call.detail : "-");
    pthread_mutex_lock(&log_lock);
    open_log(path);
    if (log_file >= 0 && write(log_file, line, (size_t)length) < 0) {
        close(log_file);
        log_file = -1;
    }
    pthread_mutex_unlock(&log_lock);
    return code;
}
