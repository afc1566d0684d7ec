/* The field ids. 580.82 gave the ids 251 to 273 other meanings: what was 251 to 253 before (since 570) is 269 to 271 from
 * it on, 254 and 255 became 272 and 273, and 256 to 273 (power smoothing) became 251 to 268. */
#include "fields.h"

#define INT NVML_VALUE_TYPE_UNSIGNED_INT
#define LONG NVML_VALUE_TYPE_UNSIGNED_LONG_LONG

struct row {
    unsigned int id;
    enum value_id value;
    unsigned int type;
    enum scope scope;
    double factor;
};

static const struct row rows[] = {
    {3, VALUE_ECC_CORRECTED_VOLATILE, LONG, NO_SCOPE, 1},
    {4, VALUE_ECC_UNCORRECTED_VOLATILE, LONG, NO_SCOPE, 1},
    {5, VALUE_ECC_CORRECTED_AGGREGATE, LONG, NO_SCOPE, 1},
    {6, VALUE_ECC_UNCORRECTED_AGGREGATE, LONG, NO_SCOPE, 1},
    {11, VALUE_ECC_CORRECTED_VOLATILE, LONG, NO_SCOPE, 1},
    {12, VALUE_ECC_UNCORRECTED_VOLATILE, LONG, NO_SCOPE, 1},
    {22, VALUE_ECC_CORRECTED_AGGREGATE, LONG, NO_SCOPE, 1},
    {23, VALUE_ECC_UNCORRECTED_AGGREGATE, LONG, NO_SCOPE, 1},
    {74, VALUE_POWER_CAP_TIME, LONG, NO_SCOPE, 1},
    {75, VALUE_THERMAL_TIME, LONG, NO_SCOPE, 1},
    {82, VALUE_MEMORY_TEMPERATURE, INT, NO_SCOPE, 1},
    {83, VALUE_ENERGY, LONG, NO_SCOPE, 1},
    {94, VALUE_PCIE_REPLAYS, INT, NO_SCOPE, 1},
    {138, VALUE_NVLINK_TX, LONG, LINKS_OR_SUM, 1},
    {139, VALUE_NVLINK_RX, LONG, LINKS_OR_SUM, 1},
    {142, VALUE_REMAPPED_CORRECTABLE, INT, NO_SCOPE, 1},
    {143, VALUE_REMAPPED_UNCORRECTABLE, INT, NO_SCOPE, 1},
    {144, VALUE_REMAP_PENDING, INT, NO_SCOPE, 1},
    {145, VALUE_REMAP_FAILURE, INT, NO_SCOPE, 1},
    {185, VALUE_POWER, INT, NO_SCOPE, 1},
    {186, VALUE_POWER_INSTANT, INT, NO_SCOPE, 1},
    {190, VALUE_POWER_LIMIT, INT, NO_SCOPE, 1},
    {191, VALUE_ENERGY, LONG, NO_SCOPE, 1},
    {197, VALUE_PCIE_TX, LONG, NO_SCOPE, 1},
    {198, VALUE_PCIE_RX, LONG, NO_SCOPE, 1},
    {230, VALUE_RECOVERY_ACTION, INT, NO_SCOPE, 1},
};

/* Up to version 4 of NVLink. */
static const struct row old_link_rows[] = {
    {38, VALUE_NVLINK_CRC, LONG, NO_SCOPE, 1},       {45, VALUE_NVLINK_CRC, LONG, NO_SCOPE, 0},
    {52, VALUE_NVLINK_REPLAYS, LONG, NO_SCOPE, 1},   {59, VALUE_NVLINK_RECOVERIES, LONG, NO_SCOPE, 1},
    {161, VALUE_NVLINK_REPLAYS, LONG, LINK_ONLY, 1}, {162, VALUE_NVLINK_RECOVERIES, LONG, LINK_ONLY, 1},
    {163, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 1},
};

/* From version 5 on; CRC errors are counted as errors received, recoveries as events. */
static const struct row new_link_rows[] = {
    {202, VALUE_NVLINK_TX, LONG, LINK_ONLY, 1024},     {204, VALUE_NVLINK_RX, LONG, LINK_ONLY, 1024},
    {206, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 0},       {207, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 0},
    {208, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 1},       {209, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 0},
    {210, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 0},       {211, VALUE_NVLINK_INTEGRITY, LONG, LINK_ONLY, 1},
    {212, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 0},       {213, VALUE_NVLINK_RECOVERIES, LONG, LINK_ONLY, 1},
    {214, VALUE_NVLINK_FAILED_RECOVERIES, LONG, LINK_ONLY, 1}, {215, VALUE_NVLINK_RECOVERIES, LONG, LINK_ONLY, 1},
    {219, VALUE_NVLINK_EFFECTIVE, LONG, LINK_ONLY, 1},  {221, VALUE_NVLINK_CRC, LONG, LINK_ONLY, 0},
};

static const struct row event_rows[] = {
    {0, VALUE_SW_THERMAL_TIME, LONG, NO_SCOPE, 1},
    {1, VALUE_HW_THERMAL_TIME, LONG, NO_SCOPE, 1},
    {2, VALUE_HW_POWER_BRAKE_TIME, LONG, NO_SCOPE, 1},
};

static bool find_row(const struct row *table, size_t size, unsigned int id, struct field *field) {
    for (size_t index = 0; index < size; index++) {
        if (table[index].id == id) {
            *field = (struct field){.value = table[index].value,
                                    .factor = table[index].factor,
                                    .type = table[index].type,
                                    .scope = table[index].scope};
            return true;
        }
    }
    return false;
}

#define FIND(table, id, field) find_row(table, sizeof(table) / sizeof((table)[0]), id, field)

/* Links 0 to 5 and 6 to 11 have an id each for flits' CRC, data's CRC, replays and recoveries. */
static bool find_one_link(unsigned int id, struct field *field) {
    static const struct {
        unsigned int first;
        unsigned int later;
        enum value_id value;
        double factor;
    } ranges[] = {{32, 96, VALUE_NVLINK_CRC, 1},
                  {39, 102, VALUE_NVLINK_CRC, 0},
                  {46, 108, VALUE_NVLINK_REPLAYS, 1},
                  {53, 114, VALUE_NVLINK_RECOVERIES, 1}};
    for (size_t index = 0; index < sizeof(ranges) / sizeof(ranges[0]); index++) {
        bool is_first = id >= ranges[index].first && id < ranges[index].first + 6;
        bool is_later = id >= ranges[index].later && id < ranges[index].later + 6;
        if (is_first || is_later) {
            *field = (struct field){.value = ranges[index].value,
                                    .factor = ranges[index].factor,
                                    .type = LONG,
                                    .scope = ONE_LINK,
                                    .link = is_first ? id - ranges[index].first : id - ranges[index].later + 6};
            return true;
        }
    }
    return false;
}

/* Power smoothing and balancing: Blackwell answers a small constant, so that a wrong id is read without an error. */
static bool find_renumbered(const struct gpu *gpu, unsigned int id, struct field *field) {
    bool is_new = driver_is_at_least(580, 82);
    unsigned int first_event = is_new ? 269 : 251;
    if (id < 251 || id > 273 || !driver_is_at_least(570, 0)) {
        return false;
    }
    if (id >= first_event && id < first_event + 3) {
        return FIND(event_rows, id - first_event, field);
    }
    *field = (struct field){.value = VALUE_COUNT, .type = INT, .is_constant = true, .constant = 1};
    return architecture_of(gpu) >= BLACKWELL;
}

bool find_field(const struct gpu *gpu, unsigned int id, struct field *field) {
    bool is_new = gpu->nvlink_version >= 5;
    if (FIND(rows, id, field) || find_renumbered(gpu, id, field)) {
        return true;
    }
    if (gpu->nvlink_links == 0) {
        return false;
    }
    return is_new ? FIND(new_link_rows, id, field) : FIND(old_link_rows, id, field) || find_one_link(id, field);
}
