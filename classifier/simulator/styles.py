"""Recorder styles: which columns a log has, how often it looks, and which of two readings it takes.

The same second looks different in a log of nvidia-smi, of DCGM and of the agent. What a style holds never depends on
the work that is recorded. Columns are those of the tools' own defaults and of public recordings; DCGM profiles boards
since Volta by other counters than GPM, which NVML offers on Hopper and later only.
"""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass
from typing import Final, Literal

import numpy as np

from agent.errors import UsageError
from classifier.simulator.boards import Board
from classifier.simulator.scenario import Scenario

_BASIC: Final = frozenset(
    {
        "utilization_ratio",
        "memory_utilization_ratio",
        "memory_used_bytes",
        "memory_total_bytes",
        "power_watts",
        "sm_clock_hertz",
        "memory_clock_hertz",
        "temperature_celsius",
        "memory_temperature_celsius",
    }
)


@dataclass(frozen=True, slots=True, kw_only=True)
class RecorderStyle:
    """What a recorder reads of a node."""

    #: Usual seconds between two readings.
    intervals_s: tuple[float, ...]
    #: Fields of GpuSample and GpuSlowSample that are kept, None for all.
    fields: frozenset[str] | None = None
    #: Whether power is what the driver reports (averaged on most boards) or the sensor's last look.
    power: Literal["reported", "instant"] = "reported"
    watt_step: float = 0.001
    #: Boards with profiling ratios: none, those with GPM, or all.
    profiling: Literal["none", "gpm", "all"] = "none"
    #: Bytes over PCIe: as a mean between readings by profiling, as a counter on boards with GPM, as one slice of 20 ms.
    pcie: Literal["none", "profiling", "counter", "slice"] = "none"
    nvlink: bool = False
    energy: bool = False
    #: Clock event reasons: power cap, heat, brakes.
    reasons: bool = False
    #: Ten readings of instant power a second.
    fast_power: bool = False
    #: What is known of processes: nothing, how many, their CPU time, their I/O, too.
    processes: Literal["none", "listed", "cpu", "io"] = "none"
    host: bool = False

    def profiles(self, board: Board) -> bool:
        """Return whether a log of this style has profiling ratios of `board`."""
        return self.profiling == "all" or (self.profiling == "gpm" and board.profiling)

    def keeps(self, field: str) -> bool:
        """Return whether a field of the GPU's records is in the log."""
        return self.fields is None or field in self.fields


_AGENT: Final = RecorderStyle(
    intervals_s=(1.0, 1.0, 1.0, 2.0, 5.0),
    profiling="gpm",
    pcie="profiling",
    nvlink=True,
    energy=True,
    reasons=True,
    fast_power=True,
    processes="cpu",
    host=True,
)
#: Styles by name. `agent` is the live agent at its plain level: it may not read the I/O of other users' processes.
STYLES: Final[dict[str, RecorderStyle]] = {
    "agent": _AGENT,
    "agent_capable": dataclasses.replace(_AGENT, processes="io"),
    # In an instance, under a hypervisor, or where another tool holds the profiling counters: no GPM.
    "agent_without_profiling": dataclasses.replace(_AGENT, profiling="none", pcie="counter", fast_power=False),
    "nvidia_smi": RecorderStyle(intervals_s=(0.1, 0.5, 1.0, 1.0, 2.0, 5.0, 15.0, 60.0), fields=_BASIC, watt_step=0.01),
    "nvidia_smi_instant": RecorderStyle(
        intervals_s=(0.1, 0.2, 0.5, 1.0, 1.0), fields=_BASIC, power="instant", watt_step=0.01
    ),
    "dmon": RecorderStyle(
        intervals_s=(1.0, 1.0, 2.0, 5.0, 10.0),
        fields=(_BASIC - {"memory_total_bytes"}) | {f"pcie_{way}_bytes_per_second" for way in ("receive", "transmit")},
        watt_step=1.0,
        pcie="slice",
    ),
    "dcgm": RecorderStyle(
        intervals_s=(0.1, 1.0, 1.0, 5.0, 15.0, 60.0), profiling="all", pcie="profiling", nvlink=True, energy=True
    ),
    "dcgm_without_profiling": RecorderStyle(intervals_s=(1.0, 5.0, 15.0, 60.0), energy=True),
}
_WEIGHTS: Final = (0.5, 0.08, 0.06, 0.14, 0.04, 0.06, 0.09, 0.03)


def style_named(name: str) -> RecorderStyle:
    """Return the style of a name; raises UsageError where there is none."""
    try:
        return STYLES[name]
    except KeyError:
        raise UsageError(f"unknown recorder style {name!r}; choose one of {', '.join(STYLES)}") from None


def with_random_recorder(rng: np.random.Generator, scenario: Scenario) -> Scenario:
    """Return `scenario` as a recorder of a random style would see it, with what goes wrong now and then.

    The draw is independent of the kind. The interval comes from the style, and stays below a fifth of the duration.
    """
    name = str(rng.choice(list(STYLES), p=_WEIGHTS))
    interval_s = float(rng.choice(STYLES[name].intervals_s))
    interval_s = max(0.1, min(interval_s, scenario.duration_s / 5))
    return dataclasses.replace(
        scenario,
        recorder=name,
        interval_s=interval_s,
        slow_interval_s=max(5.0, interval_s) if name.startswith("agent") else interval_s,
        jitter_s=interval_s * float(np.exp(rng.uniform(np.log(0.001), np.log(0.05)))),
        missed_share=float(rng.choice([0.0, 0.0, 0.002, 0.02])),
        unread_share=float(rng.choice([0.0, 0.0, 0.0, 0.005])),
        counter_resets=int(rng.random() < 0.02),
    )
