/* What a value is at a moment: gauges hold from point to point, counters count on a straight
 * line and go on at the end, steps hold but never start again. */
#include <math.h>

#include "emulator.h"

/* Last point at or before `time`, or the first one. */
static size_t point_before(const struct series *series, double time) {
    size_t low = 0;
    size_t high = series->size;
    while (high - low > 1) {
        size_t middle = low + (high - low) / 2;
        if (series->times[middle] <= time) {
            low = middle;
        } else {
            high = middle;
        }
    }
    return low;
}

static double counter_at(const struct series *series, double time) {
    if (series->size == 1 || time <= series->times[0]) {
        return series->values[0];
    }
    size_t point = point_before(series, time);
    if (point == series->size - 1) {
        point--; /* past the end: the slope of the last stretch */
    }
    double span = series->times[point + 1] - series->times[point];
    double slope = span > 0 ? (series->values[point + 1] - series->values[point]) / span : 0;
    if (slope < 0) {
        return time < series->times[point + 1] ? series->values[point] : series->values[point + 1]; /* a reset */
    }
    return series->values[point] + slope * (time - series->times[point]);
}

/* Time within the script; `rounds` is how often it has been played before. */
static double script_time(const struct script *script, double elapsed, double *rounds) {
    *rounds = 0;
    if (!script->loops || script->length_s <= 0) {
        return elapsed;
    }
    *rounds = floor(elapsed / script->length_s);
    return elapsed - *rounds * script->length_s;
}

static double counted_at(const struct series *series, enum value_kind kind, double time) {
    return kind == COUNTER ? counter_at(series, time) : series->values[point_before(series, time)];
}

bool timeline_value(const struct script *script, const struct unit *unit, enum value_id id, double elapsed,
                    double *value) {
    const struct series *series = &unit->series[id];
    enum value_kind kind = value_kinds[id];
    if (series->size == 0) {
        return false;
    }
    double rounds;
    double time = script_time(script, elapsed, &rounds);
    if (kind == GAUGE) {
        *value = series->values[point_before(series, time)];
        return true;
    }
    double round_gain = counted_at(series, kind, script->length_s) - series->values[0];
    *value = floor(counted_at(series, kind, time) + rounds * round_gain);
    return true;
}

const char *timeline_processes(const struct script *script, const struct unit *unit, double elapsed) {
    double rounds;
    double time = script_time(script, elapsed, &rounds);
    const char *text = NULL;
    for (size_t point = 0; point < unit->process_points; point++) {
        if (text == NULL || unit->processes[point].time <= time) {
            text = unit->processes[point].text;
        }
    }
    return text;
}
