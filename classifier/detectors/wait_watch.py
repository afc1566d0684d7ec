"""The state of one GPU between calls: was it working, since when does it wait, how long did earlier waits last."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from dataclasses import asdict, dataclass, field
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import Array, GpuHistory
from classifier.config_checks import require
from classifier.detectors import monotonic_s_of, wall_s_of
from classifier.detectors.channels import interval_seconds, is_fresh, is_same_work, process_ids
from classifier.detectors.restored import flag, number, numbers, optional, process_starts, processes_state, table
from classifier.detectors.wait_signature import QUIET, UNCLEAR, WAIT, WORK, Bounds, SignatureConfig, classify

_WORK_BIN_S = 10.0
#: Samples of the work before a wait that are looked at, and fewer than this many tell nothing.
_STEADY_SAMPLES: Final = 300
_LEAST_STEADY_SAMPLES: Final = 20
_MEAN_SAMPLES: Final = 10
#: What is between two pieces of work this far apart belongs to neither.
_BETWEEN_WORK_S: Final = 30.0
#: What of a watch lasts over a restart of the agent: times, and whether something is so.
_TIMES: Final = (
    "seen_s",
    "first_work_s",
    "last_work_s",
    "armed_until_s",
    "early_until_s",
    "wait_since_s",
    "io_first_s",
    "quiet_since_s",
)
_FLAGS: Final = ("wait_armed", "wait_early", "reported")


@dataclass(frozen=True, slots=True, kw_only=True)
class ArmConfig:
    """When a GPU has worked enough for its waiting to mean something."""

    #: Time with work, in bins of 10 s ...
    arm_seconds: float = 120.0
    #: (this much, and less than `arm_seconds`, makes a long wait information, never more)
    early_arm_seconds: float = 30.0
    #: ... within this long before the wait.
    arm_window_seconds: float = 900.0
    #: A wait must follow work, or another wait, within this time.
    keep_armed_seconds: float = 120.0
    #: Samples that match nothing end a wait after this long; a sample of work ends it at once.
    clear_seconds: float = 3.0
    #: Without a sample for this long, a wait that was not reported yet starts anew.
    gap_seconds: float = 15.0
    #: Waits shorter than this are not remembered.
    remember_seconds: float = 5.0
    #: Work is steady where utilisation of half its samples is within this share of the median, ...
    steady_share_ratio: float = 0.1
    #: ... or, for long steps, where means over ten samples are within this share of theirs; else it comes in bursts.
    steady_mean_share_ratio: float = 0.02

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.arm_seconds > 0, "arm_seconds", self.arm_seconds, "above 0")
        is_within = self.arm_window_seconds >= self.arm_seconds
        at_least = f"at least arm_seconds ({self.arm_seconds})"
        require(is_within, "arm_window_seconds", self.arm_window_seconds, at_least)


@dataclass(slots=True)
class PastWaits:
    """Waits of this work that ended by themselves."""

    count: int = 0
    longest_s: float = 0.0
    #: Those without any host I/O seen, and the longest of them.
    unexplained: int = 0
    longest_unexplained_s: float = 0.0
    #: Longest time from the start of a wait to the first host I/O.
    io_lag_s: float = 0.0


@dataclass(slots=True)
class GpuWatch:
    """What one GPU did so far; `advance` takes the new samples."""

    signature: SignatureConfig
    arm: ArmConfig
    interval_s: float = 1.0
    fresh: bool = False
    judgeable: bool = False
    seen_s: float | None = None  # time of the newest sample taken
    code: int = 0
    work_bins: deque[float] = field(default_factory=lambda: deque(maxlen=512))
    first_work_s: float | None = None
    last_work_s: float | None = None
    left_s: float | None = None  # last work of processes that ended, while there are none
    armed_until_s: float | None = None
    early_until_s: float | None = None  # the same after `early_arm_seconds` of work
    process_ids: frozenset[int] | None = None
    starts: Mapping[int, float] = field(default_factory=dict)  # of those that can be looked at, monotonic seconds
    unseen_until_s: float | None = None  # a wait was not seen up to here, since the agent was not there
    wait_since_s: float | None = None
    wait_armed: bool = False
    wait_early: bool = False  # not armed, but after some work: information at most
    reported: bool = False  # a finding of this wait is out: a gap does not restart it
    io_first_s: float | None = None  # first host I/O during this wait
    quiet_since_s: float | None = None
    busy_watts: float | None = None  # as learned; the caller holds both still while the GPU waits
    bounds_watts: Bounds | None = None  # the highest power of a waiting sample
    past: PastWaits = field(default_factory=PastWaits)
    #: Whether the work before the wait was steady, as steps are, or came in bursts, as requests do; None: not known.
    steady: bool | None = None
    _busy: deque[float] = field(default_factory=lambda: deque(maxlen=_STEADY_SAMPLES))  # utilisation at work
    _last_match_s: float = 0.0
    _misses: int = 0
    _quiet_samples: int = 0
    _quiet_sum: float = 0.0
    _ended: tuple[float, float, float | None] | None = None  # start, end, first host I/O of the wait that just ended

    def advance(self, gpu: GpuHistory, now_s: float) -> None:
        """Take the samples since the last call; set `bounds_watts` before."""
        self.interval_s = interval_seconds(gpu, now_s)
        self.fresh = is_fresh(gpu, now_s, self.interval_s) and gpu.state in ("ok", "reset_required")
        present = process_ids(gpu)
        has_ended = bool(self.process_ids) and present == frozenset()
        if has_ended:
            self.left_s = self.last_work_s or self.left_s
        elif present:
            self.left_s = None
        if has_ended or not is_same_work(self.process_ids, present):
            self._forget()
        self.process_ids = present or self.process_ids
        self.starts = process_starts(gpu) or (self.starts if present else {})
        lookback_s = 60.0 if self.seen_s is None else now_s - self.seen_s
        times, codes, utilization = classify(self.signature, gpu, now_s, lookback_s, self.bounds_watts)
        for time_s, code, ratio in zip(times.tolist(), codes.tolist(), utilization.tolist(), strict=True):
            self._step(time_s, code)
            is_near = self.last_work_s is not None and time_s - self.last_work_s <= _BETWEEN_WORK_S
            if code != WAIT and self.wait_since_s is None and is_near:
                self._busy.append(ratio)
            if code in (QUIET, UNCLEAR):
                self._quiet_samples += 1
                self._quiet_sum += ratio
            else:
                self._quiet_samples, self._quiet_sum = 0, 0.0
        age_s = float("inf") if self.seen_s is None else now_s - self.seen_s
        self.judgeable = self.fresh and age_s <= max(15.0, 3 * self.interval_s)

    def learned(self, now: Instant) -> Mapping[str, object] | None:
        """Return what the next run of the agent has to know; None where the GPU's processes cannot be told apart."""
        if self.seen_s is None or not self.starts:
            return None
        times = {name: getattr(self, name) for name in (*_TIMES, "_last_match_s")}
        ended = self._ended
        return {
            "processes": processes_state(self.starts, now),
            "work_wall_s": [wall_s_of(start_s, now) for start_s in self.work_bins],
            **{_wall(name): None if time_s is None else wall_s_of(time_s, now) for name, time_s in times.items()},
            **{name: getattr(self, name) for name in _FLAGS},
            "misses": self._misses,
            "steady": self.steady if self._is_steady() is None else self._is_steady(),
            "busy_watts": self.busy_watts,
            "bounds_watts": None if self.bounds_watts is None else list(self.bounds_watts),
            "past": asdict(self.past),
            "ended_wall_s": None if ended is None else [wall_s_of(one, now) for one in ended if one is not None],
        }

    def restore(self, state: Mapping[str, object], now: Instant) -> None:
        """Take back what `learned` returned into a new watch; ValueError for what does not fit."""

        def monotonic(wall_s: float | None) -> float | None:
            if wall_s is not None and wall_s > now.wall_s + self.arm.arm_window_seconds:
                raise ValueError("a time lies far in the future")
            return None if wall_s is None else monotonic_s_of(wall_s, now)

        for name in _TIMES:
            setattr(self, name, monotonic(optional(state, _wall(name))))
        for name in _FLAGS:
            setattr(self, name, flag(state, name))
        self._last_match_s = monotonic_s_of(number(state, _wall("_last_match_s")), now)
        self._misses = int(number(state, "misses"))
        self.work_bins.extend(monotonic_s_of(wall_s, now) for wall_s in numbers(state, "work_wall_s"))
        self.busy_watts = optional(state, "busy_watts")
        if state.get("bounds_watts") is not None:
            self.bounds_watts = Bounds(*_of_length(numbers(state, "bounds_watts"), 2))
        self.steady = None if state.get("steady") is None else flag(state, "steady")
        past = table(state, "past")
        self.past = PastWaits(
            count=int(number(past, "count")),
            longest_s=number(past, "longest_s"),
            unexplained=int(number(past, "unexplained")),
            longest_unexplained_s=number(past, "longest_unexplained_s"),
            io_lag_s=number(past, "io_lag_s"),
        )
        if state.get("ended_wall_s") is not None:
            start_s, end_s, *io_s = _of_length(
                [monotonic_s_of(wall_s, now) for wall_s in numbers(state, "ended_wall_s")], 2, 3
            )
            self._ended = (start_s, end_s, io_s[0] if io_s else None)
        if self.seen_s is None:
            raise ValueError("seen_wall_s is missing")

    @property
    def quiet_use_ratio(self) -> float:
        """Mean utilisation of the present run of samples that are neither work nor waiting; 0 where there is none."""
        return self._quiet_sum / self._quiet_samples if self._quiet_samples else 0.0

    def armed_at(self, time_s: float) -> bool:
        """Return whether there was enough work, or an armed wait, shortly before `time_s`."""
        return self.armed_until_s is not None and time_s <= self.armed_until_s

    def _forget(self) -> None:
        """Start anew: other processes are other work."""
        self.work_bins.clear()
        self.first_work_s = self.last_work_s = self.armed_until_s = self.early_until_s = None
        self.wait_since_s = self.quiet_since_s = self._ended = None
        self.wait_armed = self.wait_early = self.reported = False
        self.past = PastWaits()
        self.steady = None
        self._busy.clear()

    def _is_steady(self) -> bool | None:
        """Return whether the work so far was steady; None where too little of it was seen."""
        if len(self._busy) < _LEAST_STEADY_SAMPLES:
            return None
        values = np.array(self._busy)
        if _spread_share(values) <= self.arm.steady_share_ratio:
            return True
        # The newest samples: they end with the work.
        whole = values[values.size % _MEAN_SAMPLES :].reshape(-1, _MEAN_SAMPLES)
        return len(whole) >= 6 and _spread_share(whole.mean(axis=1)) <= self.arm.steady_mean_share_ratio

    def _step(self, time_s: float, code: int) -> None:
        gap_s = 0.0 if self.seen_s is None else time_s - self.seen_s
        if gap_s > max(self.arm.gap_seconds, 4 * self.interval_s):
            self._bridge(gap_s)
        self.seen_s = time_s
        self.code = code
        if code != QUIET:
            self.quiet_since_s = None
        elif self.quiet_since_s is None:
            self.quiet_since_s = time_s
        if code == WORK:
            self._work(time_s)
        elif code == WAIT:
            self._wait(time_s)
        elif self.wait_since_s is not None:
            self._misses += 1
            if self._misses >= 2 and time_s - self._last_match_s >= self.arm.clear_seconds:
                self._end_wait(self._last_match_s)

    def _bridge(self, gap_s: float) -> None:
        """Cross a gap: what was not reported starts anew; what is known to be the same work stays armed."""
        self.quiet_since_s = None
        if self.wait_since_s is not None and not self.reported:
            self.wait_since_s = None
        if self.armed_until_s is not None and self.process_ids and gap_s <= self.arm.arm_window_seconds:
            self.armed_until_s += gap_s

    def _work(self, time_s: float) -> None:
        if self.wait_since_s is not None:
            self._end_wait(time_s)
        if self._ended is not None:
            self._remember(time_s)
        start_s = time_s - time_s % _WORK_BIN_S
        if not self.work_bins or start_s > self.work_bins[-1]:
            self.work_bins.append(start_s)
            while self.work_bins[0] < time_s - self.arm.arm_window_seconds:
                self.work_bins.popleft()
        self.first_work_s = time_s if self.first_work_s is None else self.first_work_s
        self.last_work_s = time_s
        # Slow logs bring fewer samples than bins; each stands for its own interval.
        worked_s = len(self.work_bins) * max(_WORK_BIN_S, self.interval_s)
        until_s = time_s + max(self.arm.keep_armed_seconds, 3 * self.interval_s)
        if worked_s >= self.arm.arm_seconds:
            self.armed_until_s = until_s
        if worked_s >= self.arm.early_arm_seconds:
            self.early_until_s = until_s

    def _wait(self, time_s: float) -> None:
        if self.wait_since_s is None:
            self.wait_since_s, self.wait_armed = time_s, self.armed_at(time_s)
            is_early = self.early_until_s is not None and time_s <= self.early_until_s
            self.wait_early = is_early and not self.wait_armed
            self.reported, self.io_first_s = False, None
            steady = self._is_steady()
            self.steady = self.steady if steady is None else steady
        self._last_match_s, self._misses = time_s, 0
        if self.wait_armed:
            self.armed_until_s = time_s + max(self.arm.keep_armed_seconds, 3 * self.interval_s)

    def _end_wait(self, end_s: float) -> None:
        if self.wait_since_s is not None and self.wait_armed:
            self._ended = (self.wait_since_s, end_s, self.io_first_s)
        self.wait_since_s, self._misses = None, 0
        self.wait_armed = self.wait_early = self.reported = False

    def _remember(self, time_s: float) -> None:
        """Note a wait that was followed by work: it ended by itself."""
        if self._ended is None:
            return
        start_s, end_s, io_s = self._ended
        self._ended = None
        length_s = end_s - start_s
        if length_s < self.arm.remember_seconds or time_s - end_s > self.arm.keep_armed_seconds:
            return
        self.past.count += 1
        self.past.longest_s = max(self.past.longest_s, length_s)
        if io_s is None:
            self.past.unexplained += 1
            self.past.longest_unexplained_s = max(self.past.longest_unexplained_s, length_s)
        else:
            self.past.io_lag_s = max(self.past.io_lag_s, io_s - start_s)


def _spread_share(values: Array) -> float:
    """Return the median distance from the median, as a share of it."""
    middle = float(np.median(values))
    return float(np.median(np.abs(values - middle))) / middle if middle > 0 else float("inf")


def _wall(name: str) -> str:
    """Return the key in the state file of a time of the watch: there it is of the wall clock."""
    return name.strip("_").removesuffix("_s") + "_wall_s"


def _of_length(values: list[float], *lengths: int) -> list[float]:
    if len(values) not in lengths:
        raise ValueError("a list has the wrong length")
    return values
