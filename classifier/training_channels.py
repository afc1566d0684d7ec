"""Channel groups: what a machine offers or not as a whole, and rows of features with some of them left out.

Leaving a channel out turns exactly the features that read it into NaN, so that a window is simulated once and seen as
many machines would show it. What is left out is drawn without looking at the class.
"""

from __future__ import annotations

from collections.abc import Mapping
from functools import cache
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from classifier.features import FEATURES
from classifier.profiles import POWER_LIMIT, PROFILE_NAMES, columns_of
from classifier.signals import SIGNALS

#: Channels by the group that is there or not as a whole, and the probability that it is missing.
CHANNEL_GROUPS: Final[Mapping[str, tuple[float, tuple[str, ...]]]] = {
    "gpm": (0.3, ("sm_active_ratio", "sm_occupancy_ratio", "tensor_active_ratio", "dram_active_ratio")),
    "gpm_pipes": (
        0.4,
        (
            "fp64_active_ratio", "fp32_active_ratio", "fp16_active_ratio", "tensor_hmma_active_ratio",
            "tensor_imma_active_ratio", "tensor_dfma_active_ratio",
        ),
    ),
    "nvlink": (0.3, ("nvlink_receive_bytes_per_second", "nvlink_transmit_bytes_per_second")),
    "pcie": (0.3, ("pcie_receive_bytes_per_second", "pcie_transmit_bytes_per_second")),
    "memory_utilization": (0.15, ("memory_utilization_ratio",)),
    "processes": (0.3, ("process_count",)),
    "process_work": (
        0.4, ("process_cpu_ratio", "process_read_bytes_per_second", "process_written_bytes_per_second")
    ),
    "network": (0.4, ("network_receive_bytes_per_second", "network_transmit_bytes_per_second")),
    "infiniband": (0.4, ("infiniband_receive_bytes_per_second", "infiniband_transmit_bytes_per_second")),
    "disk": (0.4, ("disk_read_bytes_per_second", "disk_written_bytes_per_second")),
    "filesystem": (0.4, ("filesystem_read_bytes_per_second", "filesystem_written_bytes_per_second")),
    "pressure": (
        0.4,
        (
            "cpu_pressure_ratio", "io_pressure_ratio", "memory_pressure_ratio", "dirty_bytes", "writeback_bytes",
            "blocked_tasks",
        ),
    ),
    "power": (0.08, ("power_watts",)),
    "power_fast": (0.4, ("power_fast_watts", "energy_power_watts")),
    "power_limit": (0.12, (POWER_LIMIT,)),
    "clocks": (0.3, ("sm_clock_hertz", "memory_clock_hertz")),
    "memory": (0.1, ("memory_used_bytes",)),
    "memory_total": (0.1, ("memory_total_bytes",)),
}  # fmt: skip
#: How often a machine shows each profile whole, before single groups go missing.
PROFILE_SHARES: Final[Mapping[str, float]] = {"U": 0.15, "P": 0.25, "G": 0.25, "N": 0.35}
#: Share of the machines that lack no group of their profile.
_WHOLE_SHARE: Final = 0.35
#: What a signal is divided by, beside its channel.
_SCALES: Final = {"_power_limit": POWER_LIMIT, "_memory_total": "memory_total_bytes"}


@cache
def columns_without(group: str) -> NDArray[np.bool_]:
    """Return which features are left when the channels of `group` are not measured, shape (features,)."""
    gone = set(CHANNEL_GROUPS[group][1])
    return np.array([not gone & channels_of(names) for names in (feature.channels for feature in FEATURES)])


def channels_of(signals: tuple[str, ...]) -> set[str]:
    """Return all channels and facts that these signals are made from."""
    found: set[str] = set()
    for name in signals:
        signal = SIGNALS[name]
        found.add(signal.channel)
        if signal.scale is not None:
            found.add(_SCALES[signal.scale.__name__])
    return found


def draw_kept(rng: np.random.Generator) -> NDArray[np.bool_]:
    """Return which features one machine can show, shape (features,): a profile, then single groups missing."""
    profile = PROFILE_NAMES[int(rng.choice(len(PROFILE_NAMES), p=[PROFILE_SHARES[name] for name in PROFILE_NAMES]))]
    kept = columns_of(profile).copy()
    if rng.random() < _WHOLE_SHARE:
        return kept
    for group, (probability, _) in CHANNEL_GROUPS.items():
        if rng.random() < probability:
            kept &= columns_without(group)
    return kept


def drop_channels(rows: Array, groups: NDArray[np.int64], rng: np.random.Generator) -> Array:
    """Return `rows` as other machines would show them: one draw for each group (scenario or recording)."""
    result = rows.copy()
    names, position = np.unique(groups, return_inverse=True)
    if names.size:
        dropped: NDArray[np.bool_] = np.array([~draw_kept(rng) for _ in names])
        result[dropped[position]] = np.nan
    return result
