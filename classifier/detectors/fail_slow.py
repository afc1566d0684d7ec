"""fail_slow: the steps of a training job take longer than they did, and go on like that.

Sees the time of a step (`step_pace`) against the median of the last half hour before it rose. A cumulative sum calls it
after two minutes at 10 % more, sooner the more it is, and never before one minute. Longer steps mean something only
where a step is still the same work: NVLink bytes, DRAM or memory activity and tensor cycles of one step (rate times
period), as far as they are measured, have to stay what they were, and change by less than the time of a step does:
where they grow with it, as much is done in a second as ever, and the steps are larger ones. So an evaluation, a
checkpoint, longer sequences and a period that is a multiple of the step are none; where nothing of a step's work is
measured, the GPU is left out. Only a rhythm that holds is one of steps: the usual one was seen for most of its time,
with few other periods, and the longer ones are alike; those of requests change, and are alike for minutes only now and
then. Half of a step's work in about half of its time is the same step, seen as two. Other processes are another job and
begin anew. A pace that stays for half an hour is the new normal, and ends the finding.

Cannot see: steps that `step_pace` does not see (below 4 s where power is read once a second), and a job that was slow
from its start.
"""

from __future__ import annotations

import itertools
import math
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.channels import is_same_work, process_ids
from classifier.detectors.step_pace import Pace, StepPaces
from classifier.results import Assessment, Decision

#: A pace stands for no more time than this.
_LONGEST_LOOK_S: Final = 60.0
#: Share of the time of the usual steps in which they were seen, and of the last paces that are usual or slower ones.
_LEAST_SEEN: Final = 0.6
_LEAST_FITTING: Final = 0.75
_FITTING_LOOKS: Final = 30
#: Slower paces in a row that have to be alike: those of a minute.
_STEADY_LOOKS: Final = 4
#: Channels whose mean times the period is the work of a step, and what they are multiplied with, which may change.
_WORK: Final = (
    ("nvlink_transmit_bytes_per_second", None),
    ("dram_active_ratio", "memory_clock_hertz"),
    ("memory_utilization_ratio", "memory_clock_hertz"),
    ("tensor_active_ratio", "sm_clock_hertz"),
)
#: Means below this say nothing: a whole per cent of memory utilisation is a large share of them.
_LEAST_WORK: Final = {
    "nvlink_transmit_bytes_per_second": 1e6,
    "dram_active_ratio": 0.01,
    "memory_utilization_ratio": 0.1,
    "tensor_active_ratio": 0.01,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class FailSlowConfig:
    """When longer steps are worth a word."""

    enabled: bool = True
    #: Steps that take this many times what they took are slow.
    slow_factor: float = 1.10
    #: Steps up to this many times are as usual, and are learned.
    usual_factor: float = 1.05
    #: Time until steps at `slow_factor` are called slow; worse ones are sooner, but never before ...
    confirm_seconds: float = 120.0
    #: ... this long.
    least_seconds: float = 60.0
    #: Length of the time whose median is the usual step.
    usual_seconds: float = 1800.0
    #: A usual step is known once it was seen for this long.
    learn_seconds: float = 300.0
    #: A slow pace that stays this long is the usual one.
    relearn_seconds: float = 1800.0
    #: The work of a step may differ by this factor from what it was.
    same_work_factor: float = 1.15
    #: A label `inference` with at least this probability is left out: load, not fault, sets its pace.
    inference_probability: float = 0.8

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.usual_factor > 1, "usual_factor", self.usual_factor, "above 1")
        is_ordered = self.slow_factor > self.usual_factor
        require(is_ordered, "slow_factor", self.slow_factor, f"above usual_factor ({self.usual_factor})")
        require(self.same_work_factor > 1, "same_work_factor", self.same_work_factor, "above 1")
        require(self.learn_seconds > 0, "learn_seconds", self.learn_seconds, "above 0")


@dataclass(slots=True)
class _Steps:
    """What is known of the steps of one GPU."""

    process_ids: frozenset[int] | None = None
    usual: deque[tuple[float, float]] = field(default_factory=deque)  # time, period
    #: Whether each pace was a usual one or a slower one, not of another kind.
    fits: deque[bool] = field(default_factory=lambda: deque(maxlen=_FITTING_LOOKS))
    slower: deque[tuple[float, float]] = field(default_factory=deque)  # since the sum began to rise
    work: dict[str, float] = field(default_factory=dict)  # of a usual step, by channel
    work_s: float = -math.inf
    since_s: float = 0.0  # when they began to
    channel: str = ""
    found_s: float = -math.inf
    excess: float = 0.0  # cumulative sum, in logarithm times seconds
    is_slow: bool = False
    severity: int = 0
    ratio: float = 1.0
    work_ratio: float | None = None
    usual_again: int = 0  # paces in a row that are as usual, during a rise
    others_s: float | None = None  # since when the steps are of another kind
    ended: bool = False  # a finding is to be ended though nothing is known any more

    def forget(self) -> None:
        """Begin anew: another job, or another pace that is the usual one now."""
        self.usual.clear()
        self.fits.clear()
        self.work.clear()
        self.work_s = -math.inf
        self.ended = self.severity > 0
        self.settle()

    def is_rhythm(self) -> bool:
        """Return whether these are steps: seen for most of the time, and without many other periods."""
        times = [time_s for time_s, _ in self.usual]
        seen_s = sum(min(later - earlier, _LONGEST_LOOK_S) for earlier, later in itertools.pairwise(times))
        return seen_s >= _LEAST_SEEN * (times[-1] - times[0]) and sum(self.fits) >= _LEAST_FITTING * len(self.fits)

    def settle(self) -> None:
        """End a rise."""
        self.slower.clear()
        self.others_s = None
        self.excess, self.severity, self.ratio, self.usual_again = 0.0, 0, 1.0, 0


class FailSlowDetector:
    """Says for every GPU with visible steps whether they have become longer."""

    anomalies: tuple[str, ...] = ("fail_slow",)

    def __init__(self, config: FailSlowConfig, paces: StepPaces) -> None:
        self._config = config
        self._paces = paces
        self._steps: dict[GpuKey, _Steps] = {}

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each GPU whose usual step is known and whose steps are seen now."""
        self._paces.update(now, history)
        for gone in self._steps.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._steps[gone]
        assessments = []
        for key, gpu in history.gpus.items():
            steps = self._steps.setdefault(key, _Steps())
            present = process_ids(gpu)
            if not is_same_work(steps.process_ids, present) or (steps.process_ids and present == frozenset()):
                steps.forget()
            steps.process_ids = present or steps.process_ids
            pace = self._paces.pace(key, now.monotonic_s)
            if pace is not None and pace.found_s > steps.found_s and not self._is_serving(decisions.get(key)):
                self._take(steps, pace, gpu)
            usual = self._usual_s(steps)
            if steps.ended or (usual is not None and pace is not None and steps.work):
                steps.ended = False
                assessments.append(self._describe(now, gpu, steps, usual, pace))
        return tuple(assessments)

    def _is_serving(self, decision: Decision | None) -> bool:
        if decision is None or decision.workload != "inference" or decision.probabilities is None:
            return False
        return decision.probabilities["inference"] >= self._config.inference_probability

    def _usual_s(self, steps: _Steps) -> float | None:
        """Return the time of a usual step; None where it was not seen for long enough."""
        if not steps.usual or steps.usual[-1][0] - steps.usual[0][0] < self._config.learn_seconds:
            return None
        periods = sorted(period for _, period in steps.usual)
        return periods[len(periods) // 2]

    def _take(self, steps: _Steps, pace: Pace, gpu: GpuHistory) -> None:
        """Take a pace that was found anew."""
        config, now_s = self._config, pace.found_s
        if steps.channel and pace.channel != steps.channel:
            steps.forget()  # another channel may show a multiple
        since_s = now_s - steps.found_s if steps.usual else 0.0
        steps.channel, steps.found_s = pace.channel, now_s
        usual = self._usual_s(steps)
        if usual is None:
            self._learn(steps, pace, gpu)
            return
        ratio = pace.period_s / usual
        if ratio < 1 / config.slow_factor:
            # Half of a step as its work says too: a step of two equal parts, which shows as one or as two.
            twice = replace(pace, period_s=2 * pace.period_s)
            share = self._work_ratio(steps, twice, gpu)
            if share is not None and 1 / config.usual_factor <= share <= config.usual_factor:
                pace, ratio = twice, 2 * ratio
        if ratio <= config.usual_factor and ratio >= 1 / config.slow_factor:
            steps.others_s = None
            steps.fits.append(True)
            self._usual_again(steps, pace, gpu)
            return
        work_ratio = self._work_ratio(steps, pace, gpu) if ratio > 1 else None
        most = min(config.same_work_factor, math.sqrt(ratio))
        if work_ratio is None or not 1 / config.same_work_factor <= work_ratio <= most:
            # Steps of another kind: an evaluation, longer sequences, a multiple of the step. Where they stay, they are
            # the job's new ones.
            steps.fits.append(False)
            steps.others_s = now_s if steps.others_s is None else steps.others_s
            if now_s - steps.others_s > 2 * config.learn_seconds:
                steps.forget()
            return
        steps.others_s = None
        steps.fits.append(True)
        steps.work_ratio = work_ratio
        steps.usual_again = 0
        if not steps.slower:
            # A new pace shows once about half of the window holds it.
            steps.since_s = now_s - pace.window_s / 2
        steps.slower.append((now_s, pace.period_s))
        # A pause in what is seen is no time with slow steps.
        steps.excess += (math.log(ratio) - math.log(config.usual_factor)) * min(since_s, _LONGEST_LOOK_S)
        self._judge(steps, usual)

    def _usual_again(self, steps: _Steps, pace: Pace, gpu: GpuHistory) -> None:
        """Take steps that last as long as usual; two of them in a row end a rise."""
        if not steps.slower:
            self._learn(steps, pace, gpu)
            return
        steps.usual_again += 1
        if steps.usual_again >= 2:
            steps.settle()

    def _judge(self, steps: _Steps, usual: float) -> None:
        config = self._config
        recent = sorted(period for _, period in list(steps.slower)[-3:])
        steps.ratio = recent[len(recent) // 2] / usual
        lasted_s = steps.slower[-1][0] - steps.slower[0][0]
        threshold = math.log(config.slow_factor / config.usual_factor) * config.confirm_seconds
        # At `slow_factor` exactly, rounding must not decide.
        is_over = steps.excess >= 0.999 * threshold and steps.ratio >= 0.999 * config.slow_factor
        looks = [period for _, period in list(steps.slower)[-_STEADY_LOOKS:]]
        is_steady = len(looks) == _STEADY_LOOKS and max(looks) <= config.slow_factor * min(looks) and steps.is_rhythm()
        if is_over and lasted_s >= config.least_seconds and (steps.severity or is_steady):
            steps.severity = 2
        if lasted_s >= config.relearn_seconds:
            steps.forget()

    def _learn(self, steps: _Steps, pace: Pace, gpu: GpuHistory) -> None:
        steps.usual.append((pace.found_s, pace.period_s))
        while steps.usual[0][0] < pace.found_s - self._config.usual_seconds:
            steps.usual.popleft()
        if pace.found_s - steps.work_s < 60.0 and steps.work:
            return
        steps.work_s = pace.found_s
        for channel, amount in _work_of(gpu, pace).items():
            before = steps.work.get(channel)
            steps.work[channel] = amount if before is None else before + 0.2 * (amount - before)

    def _work_ratio(self, steps: _Steps, pace: Pace, gpu: GpuHistory) -> float | None:
        """Return the work of a step against that of a usual one; None where it is not measured."""
        ratios = [
            amount / steps.work[channel] for channel, amount in _work_of(gpu, pace).items() if channel in steps.work
        ]
        return max(ratios, key=lambda ratio: abs(math.log(ratio)), default=None)

    def _describe(
        self, now: Instant, gpu: GpuHistory, steps: _Steps, usual: float | None, pace: Pace | None
    ) -> Assessment:
        key = gpu.key
        if not steps.severity or usual is None or pace is None or not steps.slower:
            return Assessment(anomaly="fail_slow", scope="gpu", severity=0, key=key)
        lasted_s = now.monotonic_s - steps.since_s
        step_s = steps.ratio * usual
        return Assessment(
            anomaly="fail_slow",
            scope="gpu",
            severity=steps.severity,
            key=key,
            since_monotonic_s=steps.since_s,
            since_wall_s=now.wall_s - lasted_s,
            evidence={
                "step_seconds": step_s,
                "usual_step_seconds": usual,
                "slowdown_ratio": steps.ratio,
                "slow_seconds": lasted_s,
                "work_of_step_ratio": steps.work_ratio,
                "confidence_ratio": pace.confidence_ratio,
                "channel": pace.channel,
            },
            action="look",
            summary=f"The steps of GPU {key.gpu} take {step_s:.2f} s, {steps.ratio:.2f} times the {usual:.2f} s of "
            f"before, for {lasted_s:.0f} s and with the same work in each.",
        )


def _work_of(gpu: GpuHistory, pace: Pace) -> dict[str, float]:
    """Return the work of a step by channel, of the window in which its pace was found."""
    found: dict[str, float] = {}
    for channel, clock in _WORK:
        if channel == "memory_utilization_ratio" and "dram_active_ratio" in found:
            continue
        series = gpu.series(channel, pace.found_s, pace.window_s)
        if series.size < 10:
            continue
        mean = float(series.values.mean())
        if mean < _LEAST_WORK[channel]:
            continue
        hertz = None if clock is None else gpu.series(clock, pace.found_s, pace.window_s)
        found[channel] = (
            mean * pace.period_s * (float(hertz.values.mean()) if hertz is not None and hertz.size else 1.0)
        )
    return found
