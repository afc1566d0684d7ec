"""Tunables of the NVML sampler."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from agent.records import (
    GpuFastPower,
    GpuHealth,
    GpuInfo,
    GpuLimits,
    GpuMigInfo,
    GpuSample,
    GpuSlowSample,
    GpuState,
    Record,
)

#: Least and most that makes sense of each key: shorter would disturb the driver, longer would be blind.
_RANGES: Final = (
    ("period_s", 0.1, 60.0),
    ("slow_period_s", 0.1, 600.0),
    ("limits_period_s", 1.0, 3600.0),
    ("fast_hertz", 0.0, 100.0),
    ("fast_period_s", 0.1, 60.0),
    ("fast_most_s", 0.0, 1.0),
    ("mig_period_s", 0.1, 3600.0),
    ("tick_wait_s", 0.01, 10.0),
    ("deadline_s", 0.01, 60.0),
    ("start_deadline_s", 0.01, 600.0),
    ("stop_deadline_s", 0.0, 10.0),
    ("release_deadline_s", 0.0, 60.0),
    ("count_period_s", 0.1, 3600.0),
    ("restart_first_s", 0.1, 3600.0),
    ("restart_most_s", 0.1, 86_400.0),
    ("start_tries", 1, 1000),
)


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlConfig:
    """Periods, deadlines and pauses of the NVML sampler."""

    period_s: float = 1.0
    """Distance of core ticks."""
    slow_period_s: float = 5.0
    """Distance of readings that are slow to change or dear: energy, temperatures, PCIe bytes, processes, errors."""
    limits_period_s: float = 60.0
    """Distance of identity and limits."""
    fast_hertz: float = 10.0
    """Readings of instant power in a second; 0 switches the fast channel off."""
    fast_period_s: float = 2.0
    """Distance of records with these readings."""
    fast_most_s: float = 0.001
    """A GPU whose driver takes longer for such a reading is left out of the fast channel."""
    mig_period_s: float = 10.0
    """Distance of looks at the MIG instances."""
    tick_wait_s: float = 0.5
    """Time that a tick waits for GPUs that do not answer at once; what they bring then comes with a later tick."""
    deadline_s: float = 3.0
    """Time for all calls of one tick on one GPU; a GPU that takes longer is hung."""
    start_deadline_s: float = 15.0
    """Time for nvmlInit, which initialises GPUs without persistence mode."""
    stop_deadline_s: float = 0.5
    """Time for nvmlShutdown when the agent ends."""
    release_deadline_s: float = 1.5
    """Time for the other threads that use the library to let go of it."""
    count_period_s: float = 10.0
    """Distance of looks at the number of GPUs."""
    restart_first_s: float = 10.0
    """First pause before the library is started anew for a lost GPU; doubles while that does not help."""
    restart_most_s: float = 300.0
    """Longest such pause."""
    start_tries: int = 5
    """Failed starts in a row, by a cause that only a new process ends, until the sampler asks for one."""

    def record_periods_s(self) -> Mapping[type[Record], float]:
        """Return how often each record of this sampler comes, for whoever judges its age."""
        core: tuple[type[Record], ...] = (GpuState, GpuSample)
        slow: tuple[type[Record], ...] = (GpuSlowSample, GpuHealth)
        limits: tuple[type[Record], ...] = (GpuInfo, GpuLimits, GpuMigInfo)
        return {
            **dict.fromkeys(core, self.period_s),
            **dict.fromkeys(slow, max(self.slow_period_s, self.period_s)),
            **dict.fromkeys(limits, max(self.limits_period_s, self.period_s)),
            GpuFastPower: max(self.fast_period_s, self.period_s),
        }

    def __post_init__(self) -> None:
        """Raise ValueError where a period, a deadline or a rate cannot be meant."""
        for key, least, most in _RANGES:
            value = getattr(self, key)
            if not least <= value <= most:
                raise ValueError(f"{key} is {value}; it must be from {least:g} to {most:g}")
        if self.tick_wait_s > self.period_s:
            raise ValueError(f"tick_wait_s is {self.tick_wait_s}; it must be at most period_s, {self.period_s}")
