/* What a field id of nvmlDeviceGetFieldValues stands for. */
#ifndef WARPWATCH_NVML_FIELDS_H
#define WARPWATCH_NVML_FIELDS_H

#include "emulator.h"

/* What the scope of a field means: nothing; a link or UINT_MAX for the sum; a link; the link is in the id. */
enum scope { NO_SCOPE, LINKS_OR_SUM, LINK_ONLY, ONE_LINK };

struct field {
    enum value_id value;
    double factor; /* from the script's unit to the field's */
    unsigned int type;
    enum scope scope;
    unsigned link;
    bool is_constant;
    double constant;
};

/* False where a GPU under this driver has no such field. */
bool find_field(const struct gpu *gpu, unsigned int id, struct field *field);

#endif
