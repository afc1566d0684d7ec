"""Channel profiles: four sets of channels, each holding the one before, under which models are judged and calibrated.

U is what the plainest nvidia-smi log holds, P adds power and clocks, G what only profiling and link counters show, and
N the node around the GPU and its fast power. A profile says what is measured, never what it is worth: a channel inside
a profile may still be missing on one machine.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from itertools import pairwise
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import GPU_CHANNELS, HOST_CHANNELS, Array
from classifier.features import FEATURES
from classifier.signals import SIGNALS

#: Stands for the power limit, which is a fact about a GPU and no channel of the history.
POWER_LIMIT: Final = "power_limit"
_ALWAYS: Final = frozenset({"samples"})
_UTILIZATION: Final = _ALWAYS | {
    "utilization_ratio",
    "memory_utilization_ratio",
    "memory_used_bytes",
    "memory_total_bytes",
}
_POWER: Final = _UTILIZATION | {
    "power_watts",
    POWER_LIMIT,
    "sm_clock_hertz",
    "memory_clock_hertz",
    "temperature_celsius",
    "memory_temperature_celsius",
    "throttled",
}
_NODE: Final = frozenset({*GPU_CHANNELS, *HOST_CHANNELS, POWER_LIMIT})
#: Of the GPU's channels, the ones a node's agent sees and a GPU's counters do not: its processes, and power read
#: faster than the driver averages it.
_BESIDE: Final = frozenset(
    {
        "energy_power_watts",
        "power_fast_watts",
        "process_count",
        "process_cpu_ratio",
        "process_read_bytes_per_second",
        "process_written_bytes_per_second",
    }
)
_GPU: Final = frozenset({*GPU_CHANNELS, POWER_LIMIT}) - _BESIDE

#: Names of the channels of each profile (`agent.history`, and POWER_LIMIT), poorest first.
PROFILES: Final[Mapping[str, frozenset[str]]] = {"U": _UTILIZATION, "P": _POWER, "G": _GPU, "N": _NODE}
PROFILE_NAMES: Final[tuple[str, ...]] = tuple(PROFILES)


@cache
def columns_of(profile: str) -> NDArray[np.bool_]:
    """Return which features of the table can be computed from the channels of `profile`, shape (features,)."""
    channels = PROFILES[profile]
    columns = np.array([all(SIGNALS[name].channel in channels for name in f.channels) for f in FEATURES])
    columns.flags.writeable = False  # it is kept, and shared by all who ask
    return columns


def mask(rows: Array, profile: str) -> Array:
    """Return `rows` with NaN in every feature that `profile` does not give, shape (rows, features)."""
    result: Array = np.where(columns_of(profile), rows, np.nan)
    return result


def profile_of(rows: Array) -> NDArray[np.int64]:
    """Return the position in PROFILE_NAMES of the profile that each row holds, shape (rows,).

    G needs a feature of profiling or a link, and N one of the node beside it: host traffic without anything that only
    G shows does not tell what the GPU does, and counts as the P or U that is there. A row of nothing is U.
    """
    known = np.isfinite(rows)
    steps = [columns_of(name) for name in PROFILE_NAMES]
    has_power, has_gpu, has_node = (known[:, mine & ~below].any(axis=1) for below, mine in pairwise(steps))
    result: NDArray[np.int64] = np.where(has_gpu, np.where(has_node, 3, 2), np.where(has_power, 1, 0))
    return result
