"""What to simulate: a kind of workload on a node for a time, and the random draws that fill in the rest."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np

from agent.errors import UsageError


@dataclass(frozen=True, slots=True, kw_only=True)
class Scenario:
    """One simulated node and what runs on it.

    `parameters` fixes draws of the kind by name (for instance `step_s`, `sm`); everything else comes from the seed.
    """

    kind: str
    board: str = "H100"
    gpu_count: int = 8
    duration_s: float = 900.0
    interval_s: float = 1.0
    #: Seconds the workload had been running before the trace starts; 0 shows its start.
    begin_s: float = 0.0
    #: Standard deviation of the sampling times.
    jitter_s: float = 0.0
    #: Seconds between two readings of the slow values (energy, temperature, PCIe, processes).
    slow_interval_s: float = 5.0
    #: Whether the node has an InfiniBand port.
    infiniband: bool = False
    #: Whether a network file system is mounted whose bytes can be seen.
    filesystem: bool = True
    #: Whether the recorder sees the processes: from within a container NVML lists none of the host's.
    processes_listed: bool = True
    #: Who records: a name of `styles.STYLES`. `agent` is the live agent as an ordinary user.
    recorder: str = "agent"
    #: Share of the ticks that never came.
    missed_share: float = 0.0
    #: Share of the values of GPU samples that could not be read; single ones.
    unread_share: float = 0.0
    #: How often the counters of all GPUs begin anew, as when the driver is loaded again.
    counter_resets: int = 0
    parameters: Mapping[str, float | str] = field(default_factory=dict)

    def __post_init__(self) -> None:
        if self.gpu_count < 1:
            raise UsageError(f"a simulated node needs at least 1 GPU, not {self.gpu_count}")
        if not (0.1 <= self.interval_s <= self.duration_s):
            raise UsageError(
                f"the interval ({self.interval_s} s) must be 0.1 s to the duration of the simulation"
                f" ({self.duration_s} s)"
            )
        for name, share in (("missed_share", self.missed_share), ("unread_share", self.unread_share)):
            if not 0.0 <= share < 1.0:
                raise UsageError(f"{name} of a simulation is {share}; it must be 0 or more and less than 1")


class Draws:
    """Named random draws of one job; a name in `fixed` takes that value and costs the same randomness."""

    def __init__(self, rng: np.random.Generator, fixed: Mapping[str, float | str]) -> None:
        self.rng = rng
        self._fixed = fixed
        self._asked: set[str] = set()

    def uniform(self, name: str, low: float, high: float) -> float:
        """Return a value between `low` and `high`."""
        return self._take(name, float(self.rng.uniform(low, high)))

    def log_uniform(self, name: str, low: float, high: float) -> float:
        """Return a value between `low` and `high`, even in its logarithm."""
        return self._take(name, math.exp(float(self.rng.uniform(math.log(low), math.log(high)))))

    def chance(self, name: str, probability: float) -> bool:
        """Return True with `probability`; fix it with 0 or 1."""
        return bool(self._take(name, float(self.rng.random() < probability)))

    def choice(self, name: str, options: Sequence[str], weights: Sequence[float] | None = None) -> str:
        """Return one of `options`."""
        total = sum(weights) if weights else 0.0
        drawn = str(self.rng.choice(list(options), p=[w / total for w in weights] if weights else None))
        self._asked.add(name)
        chosen = str(self._fixed.get(name, drawn))
        if chosen not in options:
            raise UsageError(f"simulation parameter {name} is {chosen!r}; choose one of {', '.join(options)}")
        return chosen

    def _take(self, name: str, drawn: float) -> float:
        self._asked.add(name)
        fixed = self._fixed.get(name)
        return drawn if fixed is None else float(fixed)

    def check_all_asked(self, kind: str) -> None:
        """Raise UsageError where a fixed parameter was never asked for: it is misspelt or of another kind."""
        unknown = self._fixed.keys() - self._asked
        if unknown:
            raise UsageError(f"simulation kind {kind} has no parameter {min(unknown)!r}")
