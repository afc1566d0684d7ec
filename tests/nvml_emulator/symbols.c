/* The exported functions: each answers through API(name), with the call log around it. */
#include "emulator.h"

#define EXPORTED __attribute__((visibility("default")))

#define DEFINE(name, parameters, arguments)                                                                            \
    EXPORTED nvmlReturn_t name parameters;                                                                             \
    nvmlReturn_t name parameters {                                                                                     \
        call_begin(#name);                                                                                             \
        return call_end(answer_##name arguments);                                                                      \
    }
SYMBOLS(DEFINE)

EXPORTED const char *nvmlErrorString(nvmlReturn_t code);
const char *nvmlErrorString(nvmlReturn_t code) {
    static const char *const texts[] = {
        "Success",         "Uninitialized",         "Invalid Argument",
        "Not Supported",   "Insufficient Permissions", "Already Initialized",
        "Not Found",       "Insufficient Size",     "Insufficient External Power",
        "Driver Not Loaded", "Timeout",             "Interrupt Request Issue",
        "NVML Shared Library Not Found", "Function Not Found", "Corrupted infoROM",
        "GPU is lost",     "GPU requires reset",    "The operating system has blocked the request",
        "RM has detected an NVML/RM version mismatch",
    };
    bool is_listed = code >= 0 && (size_t)code < sizeof(texts) / sizeof(texts[0]);
    return is_listed ? texts[code] : code == NVML_ERROR_UNKNOWN ? "Unknown Error" : "Emulated Error";
}
