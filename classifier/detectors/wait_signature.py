"""What each sample of a GPU shows: work, waiting in a collective, quiet, or nothing clear.

A NCCL kernel that waits for the others keeps utilisation at 100 %, moves nothing and draws little more than an idle
context. Each channel that exists has to agree; utilisation and at least one of power (against the GPU's own baseline),
tensor, DRAM or SM activity have to exist, otherwise nothing is said. The software power cap says nothing and is not
looked at. A single profiling sample of zeros says nothing either: it can only break or join a run together with power
and utilisation of the same moment.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, NamedTuple

import numpy as np
from numpy.typing import NDArray

from agent.history import Array, GpuHistory
from classifier.config_checks import require
from classifier.detectors.channels import aligned

UNCLEAR: Final = 0
WORK: Final = 1
WAIT: Final = 2
QUIET: Final = 3


@dataclass(frozen=True, slots=True, kw_only=True)
class SignatureConfig:
    """Bounds of the waiting signature."""

    #: Lowest utilisation of a waiting sample.
    utilization_ratio: float = 0.95
    #: Highest utilisation of a quiet sample.
    quiet_utilization_ratio: float = 0.08
    #: Lowest utilisation of a working sample.
    work_utilization_ratio: float = 0.5
    #: Highest memory utilisation of a waiting sample.
    memory_utilization_ratio: float = 0.03
    #: Tensor activity of a waiting sample stays below this.
    tensor_active_ratio: float = 0.01
    #: DRAM activity of a waiting sample stays below this.
    dram_active_ratio: float = 0.02
    #: SM activity of a waiting sample stays below this: the channels of a NCCL kernel hold up to 0.2 of the SMs.
    sm_active_ratio: float = 0.30
    #: NVLink traffic, both ways, of a waiting sample stays below this.
    nvlink_bytes_per_second: float = 2e6
    #: Waiting power ends at context-idle power plus this share of the way up to busy power ...
    power_share_ratio: float = 0.25
    #: ... or, where context-idle power was never seen, at this share of busy power.
    power_of_busy_ratio: float = 0.5
    #: Where work shows at least this memory utilisation, its absence tells a wait by itself ...
    contrast_memory_ratio: float = 0.1
    #: ... and waiting power may reach this share of busy power: a waiting L4 or T4 draws 0.6 of what it draws at work.
    power_of_contrast_ratio: float = 0.75
    #: With tensor and DRAM activity both still, waiting power may reach this share of busy power: light work draws
    #: little more than waiting does.
    power_profiled_ratio: float = 0.85

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        quiet, work, wait = self.quiet_utilization_ratio, self.work_utilization_ratio, self.utilization_ratio
        require(work > quiet, "work_utilization_ratio", work, f"above quiet_utilization_ratio ({quiet})")
        require(wait >= work, "utilization_ratio", wait, f"at least work_utilization_ratio ({work})")


class Bounds(NamedTuple):
    """The highest power of a waiting sample in watts: by power alone, and where profiling shows stillness as well."""

    plain: float
    profiled: float


def power_bounds(
    config: SignatureConfig, idle_watts: float | None, busy_watts: float | None, busy_memory_ratio: float | None
) -> Bounds | None:
    """Return the bounds of one GPU from its baselines; None where busy power is not known."""
    if busy_watts is None:
        return None
    bound = config.power_of_busy_ratio * busy_watts
    if idle_watts is not None and idle_watts < config.power_of_contrast_ratio * busy_watts:
        bound = idle_watts + config.power_share_ratio * (busy_watts - idle_watts)
    if busy_memory_ratio is not None and busy_memory_ratio >= config.contrast_memory_ratio:
        bound = max(bound, config.power_of_contrast_ratio * busy_watts)
    return Bounds(bound, max(bound, config.power_profiled_ratio * busy_watts))


def classify(
    config: SignatureConfig, gpu: GpuHistory, now_s: float, seconds: float, bounds_watts: Bounds | None
) -> tuple[Array, NDArray[np.int8], Array]:
    """Return times, codes (UNCLEAR, WORK, WAIT, QUIET) and utilisation of the samples of the last `seconds`."""
    times = gpu.series("samples", now_s, seconds).times

    def values(channel: str) -> Array:
        return aligned(gpu, channel, times, now_s, seconds)

    utilization = values("utilization_ratio")
    known = np.isfinite(utilization)
    power, memory = values("power_watts"), values("memory_utilization_ratio")
    tensor, dram, sm = values("tensor_active_ratio"), values("dram_active_ratio"), values("sm_active_ratio")
    nvlink = values("nvlink_receive_bytes_per_second") + values("nvlink_transmit_bytes_per_second")
    profiled = np.isfinite(tensor) | np.isfinite(dram) | np.isfinite(sm)
    still = (tensor < config.tensor_active_ratio) & (dram < config.dram_active_ratio)
    bounds = np.where(still, *(bounds_watts or (np.nan, np.nan))[::-1])
    low_power = np.where(np.isfinite(power) & np.isfinite(bounds), power <= bounds, np.nan)
    # Comparisons with NaN are false: a channel that does not exist never objects.
    moves = (memory > config.memory_utilization_ratio) | (tensor >= config.tensor_active_ratio)
    moves |= (dram >= config.dram_active_ratio) | (nvlink > config.nvlink_bytes_per_second)
    waits = (utilization >= config.utilization_ratio) & ~moves & ~(sm >= config.sm_active_ratio) & ~(low_power == 0)
    waits &= np.isfinite(low_power) | profiled
    evident = np.isfinite(memory) | profiled
    works = (utilization >= config.work_utilization_ratio) & ~waits
    works &= (low_power == 0) | moves | (np.isnan(low_power) & ~evident)
    codes = np.zeros(times.size, dtype=np.int8)
    codes[utilization <= config.quiet_utilization_ratio] = QUIET
    codes[waits] = WAIT
    codes[works] = WORK
    return times[known], codes[known], utilization[known]
