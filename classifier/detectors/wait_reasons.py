"""What the processes of waiting GPUs do meanwhile: stopped, compiling, or nothing beyond spinning.

A rank that waits in a collective burns a core, and the network's proxy thread another; both say nothing. Compilers are
descendants (ptxas, the C compiler, workers of torch.compile), or many threads of the process itself.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.history import GpuHistory
from classifier.config_checks import require

_TOTAL: Final = "process_cpu_ratio"
_DESCENDANTS: Final = "descendants_cpu_ratio"
#: States of stat: stopped by a signal (SIGSTOP, a suspended job), or by a debugger.
_STOPPED: Final = frozenset({"T", "t"})
_STALE_S: Final = 30.0


@dataclass(frozen=True, slots=True, kw_only=True)
class WaitCpuConfig:
    """What counts as CPU work of a group that waits, in cores for each GPU."""

    #: Descendants that use this much more than before the wait compile, ...
    descendants_cores: float = 0.5
    #: ... and so does a process that uses this much more, with its descendants.
    total_cores: float = 2.0
    #: Up to this much is spinning, without the proxy thread of the network.
    spinning_cores: float = 1.3
    #: Readings this soon after the start of a wait still hold work.
    settle_seconds: float = 6.0
    #: Length of the time before the wait to compare with.
    before_seconds: float = 300.0
    #: Length of the time that is looked at.
    recent_seconds: float = 20.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.descendants_cores > 0, "descendants_cores", self.descendants_cores, "above 0")
        require(self.total_cores > 0, "total_cores", self.total_cores, "above 0")
        require(self.recent_seconds >= 10, "recent_seconds", self.recent_seconds, "at least 10")


def are_stopped(gpus: Sequence[GpuHistory], now_s: float) -> bool:
    """Return whether a process of these GPUs is stopped, by a signal or by a debugger."""
    samples = (sample for gpu in gpus for sample in gpu.process_samples)
    return any(sample.state in _STOPPED and now_s - sample.monotonic_s <= _STALE_S for sample in samples)


def cpu_works(config: WaitCpuConfig, gpus: Sequence[GpuHistory], since_s: float, now_s: float) -> bool:
    """Return whether processes of these GPUs use more CPU than before the wait by so much that they compile."""
    recent_s = min(config.recent_seconds, now_s - since_s - config.settle_seconds)
    if recent_s <= 0:
        return False
    for gpu in gpus:
        for channel, more in ((_DESCENDANTS, config.descendants_cores), (_TOTAL, config.total_cores)):
            during = gpu.series(channel, now_s, recent_s).values
            before = gpu.series(channel, since_s, config.before_seconds).values
            usual = float(np.median(before)) if before.size else 0.0
            if during.size and float(during.mean()) > usual + more:
                return True
    return False


def only_spins(config: WaitCpuConfig, gpus: Sequence[GpuHistory], idle: Sequence[GpuHistory], now_s: float) -> bool:
    """Return whether processes of `gpus` at most spin and those of `idle` do nothing; False where that is not seen."""
    for gpu in (*gpus, *idle):
        values = gpu.series(_TOTAL, now_s, config.recent_seconds).values
        highest = config.spinning_cores - 1.0 if gpu in idle else config.spinning_cores
        if not values.size or float(values.max()) > highest:
            return False
    return True


def works_on_cpu(config: WaitCpuConfig, gpus: Sequence[GpuHistory], now_s: float) -> bool:
    """Return whether a process of these GPUs is seen to use more CPU than spinning takes, all the time."""
    recent = (gpu.series(_TOTAL, now_s, config.recent_seconds).values for gpu in gpus)
    return any(values.size > 1 and float(values.min()) > config.spinning_cores for values in recent)
