"""How long a training step takes on each GPU: the period of its power, its NVLink traffic or its activity.

The step is looked for where it shows best. Power of the moment, read ten times a second, shows steps of 0.3 to 20 s,
and of up to 40 s where they took more than 10 s before, since twice as much of it is looked at then; where it is
measured nothing else is asked, since a step of 0.4 s may show in a reading a second as a period that is not there. Else
NVLink traffic, SM activity and power, once a second, show steps of 3 to 60 s. A period counts where it is at least 3
sample periods long, where the signal moves, and where it comes back after two periods as well: an alias of a faster
step that varies by 1 to 3 % does not. What is slower or faster is not seen, and so are logs that are slower than 5 s.

Steps with accumulation have a period within the period: a period that was found is kept while it is still one, so that
the pace does not jump between the two. `StepPaces.update` may be called as often as one likes: it looks every twenty
seconds, and only at GPUs that are in use (1.2 ms for 8 GPUs with power read ten times a second).
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import Array, GpuHistory, History
from agent.records import GpuKey
from classifier.cadence import CADENCE_SAMPLES, autocorrelation
from classifier.config_checks import require
from classifier.detectors.channels import is_same_work, process_ids

#: Channel of each source: power of the moment first, and then what is read every second.
FAST: Final = "power_fast_watts"
SLOW: Final = ("nvlink_transmit_bytes_per_second", "sm_active_ratio", "power_watts")
#: They have to move by this share of their mean (standard deviation). The mean over a second leaves a fifth of what a
#: step of 0.8 to 1.3 s moves, and readings a second apart show that as a period of many seconds.
_SLOW_DEPTHS: Final = dict(zip(SLOW, (0.2, 0.1, 0.05), strict=True))
#: Least lag in samples; below 2.5 of them a period may be an alias.
_LEAST_LAG: Final = 3
#: Peaks this close to the highest one are equal to it: multiples of a period are as high as the period.
_EQUAL_SHARE: Final = 0.9
#: A pause in a channel that is this many samples long begins the signal anew.
_GAP_SAMPLES: Final = 6.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StepPaceConfig:
    """When a period counts as the time of a step."""

    #: Time between two looks.
    judge_seconds: float = 20.0
    #: Length of signal that is looked at, of power read ten times a second ...
    fast_window_seconds: float = 60.0
    #: ... and of channels that are read every second.
    slow_window_seconds: float = 180.0
    #: Lowest height of the autocorrelation at the period: measured steps reach 0.61 to 0.94 (8 H100, 10 Hz).
    least_height: float = 0.4
    #: At two periods it may be lower than at one by this factor.
    second_share_ratio: float = 0.7
    #: Power of the moment has to move by this share of its mean (standard deviation).
    least_depth_ratio: float = 0.01
    #: A period is kept while its height is at least this share of the highest.
    keep_share_ratio: float = 0.8
    #: Samples further apart than this show no steps.
    slowest_sampling_seconds: float = 5.0
    #: A pace that was not found again for this long is not known any more.
    hold_seconds: float = 70.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.judge_seconds > 0, "judge_seconds", self.judge_seconds, "above 0")
        for name in ("fast_window_seconds", "slow_window_seconds"):
            require(getattr(self, name) >= 30, name, getattr(self, name), "at least 30")
        is_height = 0 < self.least_height < 1
        require(is_height, "least_height", self.least_height, "between 0 and 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class Pace:
    """The time of a step of one GPU, as last found."""

    found_s: float  # monotonic
    period_s: float
    confidence_ratio: float  # height of the autocorrelation, 0..1
    channel: str
    window_s: float  # length of signal it was found in


@dataclass(frozen=True, slots=True)
class _Signal:
    """A channel on a grid."""

    key: GpuKey
    channel: str
    step_s: float
    values: Array  # without mean and trend
    moves: bool


class StepPaces:
    """Finds the time of a step on every GPU; call `update` before asking."""

    def __init__(self, config: StepPaceConfig | None = None) -> None:
        self._config = config or StepPaceConfig()
        self._paces: dict[GpuKey, Pace] = {}
        self._process_ids: dict[GpuKey, frozenset[int] | None] = {}
        self._judged_s: float | None = None

    @property
    def judged_s(self) -> float | None:
        """When was last looked, in monotonic seconds."""
        return self._judged_s

    def update(self, now: Instant, history: History) -> None:
        """Look for the pace of every GPU, where the last look is long enough ago."""
        now_s = now.monotonic_s
        if self._judged_s is not None and now_s - self._judged_s < self._config.judge_seconds - 0.5:
            return
        self._judged_s = now_s
        for gone in self._paces.keys() - history.gpus.keys():
            del self._paces[gone]
        by_shape: dict[tuple[int, float], list[_Signal]] = {}
        for key, gpu in history.gpus.items():
            present = process_ids(gpu)
            if not is_same_work(self._process_ids.get(key), present):
                self._paces.pop(key, None)
            self._process_ids[key] = present or self._process_ids.get(key)
            for signal in self._signals(gpu, now_s):
                by_shape.setdefault((signal.values.size, signal.step_s), []).append(signal)
        found: dict[GpuKey, Pace] = {}
        for signals in by_shape.values():
            for pace, signal in zip(self._find(signals, now_s), signals, strict=True):
                best = found.get(signal.key)
                if pace is not None and (best is None or pace.confidence_ratio > best.confidence_ratio):
                    found[signal.key] = pace
        self._paces.update(found)

    def pace(self, key: GpuKey, now_s: float) -> Pace | None:
        """Return the pace of this GPU; None where it was not found of late."""
        pace = self._paces.get(key)
        return pace if pace is not None and now_s - pace.found_s <= self._config.hold_seconds else None

    def step_seconds(self, key: GpuKey, now_s: float) -> float | None:
        """Return the time of a step on this GPU; None where it was not found of late."""
        pace = self.pace(key, now_s)
        return pace.period_s if pace else None

    def _signals(self, gpu: GpuHistory, now_s: float) -> Iterator[_Signal]:
        """Yield the channels of one GPU that may show its steps: the fast one, or else those of a second."""
        config = self._config
        use = gpu.series("utilization_ratio", now_s, 10.0)
        if use.size and not use.values.any():
            return
        last = self._paces.get(gpu.key)
        is_long = last is not None and last.channel == FAST and last.period_s > config.fast_window_seconds / 6
        # A third of the window is the longest step that shows: long steps that become longer must not vanish.
        fast = self._signal(gpu, FAST, now_s, config.fast_window_seconds * (1 + is_long), 0.1)
        if fast is not None:
            yield fast
            return
        pace = self.pace(gpu.key, now_s)
        seconds = config.slow_window_seconds
        if gpu.series("samples", now_s, 10.0).size > 20:
            seconds = config.fast_window_seconds  # a log that reads everything several times a second
        for channel in SLOW if pace is None or pace.channel == FAST else (pace.channel,):
            signal = self._signal(gpu, channel, now_s, seconds, 1.0)
            if signal is not None:
                yield signal

    def _signal(
        self, gpu: GpuHistory, channel: str, now_s: float, seconds: float, usual_step_s: float
    ) -> _Signal | None:
        if not gpu.has(channel):
            return None
        times, values = gpu.series(channel, now_s, seconds)
        if times.size < CADENCE_SAMPLES or now_s - times[-1] > seconds / 4:
            return None
        gaps = np.diff(times)
        spacing_s = float(times[-1] - times[0]) / gaps.size
        is_usual = 0.7 * usual_step_s <= spacing_s < 1.3 * usual_step_s
        step_s = usual_step_s if is_usual else max(0.1, round(spacing_s, 1))
        if step_s > self._config.slowest_sampling_seconds:
            return None
        breaks = np.flatnonzero(gaps > _GAP_SAMPLES * step_s)
        if breaks.size:
            times, values = times[breaks[-1] + 1 :], values[breaks[-1] + 1 :]
        columns = int((times[-1] - times[0]) / step_s) + 1
        # One shape for all GPUs of a recorder, so that they are transformed together.
        columns = min(columns - columns % 10, round(seconds / step_s) - 10)
        if columns < CADENCE_SAMPLES or times.size < 0.75 * columns:
            return None
        grid = times[-1] + step_s * np.arange(1 - columns, 1)
        even = np.interp(grid, times, values)
        mean = float(even.mean())
        even -= mean
        ramp = np.arange(columns) - (columns - 1) / 2.0
        even -= ramp * (float(ramp @ even) / float(ramp @ ramp))
        depth_ratio = _SLOW_DEPTHS.get(channel, self._config.least_depth_ratio)
        moves = float(even @ even) / columns > (depth_ratio * mean) ** 2
        return _Signal(gpu.key, channel, step_s, even, moves)

    def _find(self, signals: Sequence[_Signal], now_s: float) -> Iterator[Pace | None]:
        """Yield the pace in each of several signals of one shape."""
        values = np.stack([signal.values for signal in signals])
        columns = values.shape[-1]
        curves, flat = autocorrelation(values, np.full(len(signals), float(columns)), columns // 2)
        inner = curves[:, _LEAST_LAG:-1]
        peaks = (inner > curves[:, _LEAST_LAG - 1 : -2]) & (inner >= curves[:, _LEAST_LAG + 1 :])
        peaks[:, columns // 3 - _LEAST_LAG :] = False
        # A sharp peak between two columns is higher than both: by half the difference of its neighbours.
        heights = inner + 0.5 * np.abs(curves[:, _LEAST_LAG + 1 :] - curves[:, _LEAST_LAG - 1 : -2])
        heights = np.where(peaks & ~flat[:, np.newaxis], np.minimum(heights, 1.0), -1.0)
        highest = heights.max(axis=-1)
        first = (heights >= _EQUAL_SHARE * highest[:, np.newaxis]).argmax(axis=-1) + _LEAST_LAG
        for row, signal in enumerate(signals):
            yield self._choose(signal, curves[row], float(highest[row]), int(first[row]), now_s)

    def _choose(self, signal: _Signal, curve: Array, highest: float, first: int, now_s: float) -> Pace | None:
        config = self._config
        if not signal.moves or highest < config.least_height:
            return None
        lag = float(first)
        known = self._paces.get(signal.key)
        if known is not None and known.channel == signal.channel:
            kept = _peak_near(curve, known.period_s / signal.step_s, 0.06)
            # A multiple of the first peak is none that a step needs: two paces share one while they change.
            is_same = kept is not None and kept < 1.5 * first
            if kept is not None and is_same and _height(curve, kept) >= config.keep_share_ratio * highest:
                lag = kept
        # Between columns the first peak is at its parabola.
        lag = _peak_near(curve, lag, 0.0) or lag
        height = _height(curve, lag)
        if signal.channel != FAST:
            # A multiple of a step between two samples falls off at once beside its peak; 4 samples and more do not.
            beside = curve[round(lag) - 1] + curve[round(lag) + 1]
            if beside < 0:
                return None
        twice = _peak_near(curve, 2 * lag, 0.1)
        if twice is None or _height(curve, twice) < config.second_share_ratio * height:
            return None
        # Peaks at multiples of the period place it more finely than the first one does.
        period, count = lag, 1
        while (count + 1) * period < curve.size - 2:
            count = min(3 * count, int((curve.size - 2) / period))
            peak = _peak_near(curve, count * period, 0.3 / count)
            if peak is None or _height(curve, peak) < 0.5 * height:
                break
            period = peak / count
        return Pace(
            found_s=now_s,
            period_s=period * signal.step_s,
            confidence_ratio=min(1.0, height),
            channel=signal.channel,
            window_s=curve.size * 2 * signal.step_s,
        )


def _height(curve: Array, peak: float) -> float:
    """Return the height of a peak between columns."""
    before, height, after = curve[round(peak) - 1 : round(peak) + 2].tolist()
    return min(1.0, float(height + 0.5 * abs(after - before)))


def _peak_near(curve: Array, lag: float, share: float) -> float | None:
    """Return the place of the highest point within `share` of `lag`, between columns; None where it is no peak."""
    reach = max(1.0, share * lag)
    low, high = max(1, int(np.ceil(lag - reach))), min(curve.size - 2, int(lag + reach))
    if low > high:
        return None
    best = low + int(curve[low : high + 1].argmax())
    before, height, after = curve[best - 1 : best + 2].tolist()
    if before > height or after > height:
        return None
    bend = before - 2 * height + after
    return best + (0.5 * (before - after) / bend if bend < 0 else 0.0)
