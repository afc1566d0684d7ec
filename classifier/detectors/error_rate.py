"""Whether errors come faster than they used to: an exact test of two Poisson rates, and the counters it is made for.

The test is that of Przyborowski and Wilenski (1940): of n0 errors in a baseline of T0 seconds and n1 in a window of T1,
n1 is binomial with n0 + n1 trials and probability T1 / (T0 + T1) where both have one rate. It needs no variance and
knows how little a short baseline says. Errors of real links come in clumps, though, for which Poisson is too sure:
so the window has to stand out from the worst of the past, too.
"""

from __future__ import annotations

import math
from collections import deque
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final, NamedTuple

from agent.clock import Instant
from classifier.config_checks import require

#: The errors of a window come in at least this many of its parts: one burst is no rate, whatever its size.
_LEAST_PARTS: Final = 3
#: Most cards or ports whose baselines are taken from a file.
_MOST_SUBJECTS: Final = 256


def probability_of_more(n1: int, t1_s: float, n0: float, t0_s: float) -> float:
    """Return how likely at least `n1` errors in `t1_s` are where the rate is that of `n0` errors in `t0_s`.

    1 where there is no baseline or `n1` is not above what is expected.
    """
    trials = n1 + math.ceil(n0)
    if n1 <= 0 or t0_s <= 0 or t1_s <= 0:
        return 1.0
    share = t1_s / (t0_s + t1_s)
    if n1 <= trials * share:
        return 1.0
    log_term = (
        math.lgamma(trials + 1)
        - math.lgamma(n1 + 1)
        - math.lgamma(trials - n1 + 1)
        + n1 * math.log(share)
        + (trials - n1) * math.log1p(-share)
    )
    # Above the mean each further term is smaller than the one before.
    total, term = 0.0, 1.0
    odds = share / (1.0 - share)
    for k in range(math.ceil(n1), math.floor(trials) + 1):  # a trace may hold counters with a fraction
        total += term
        term *= (trials - k) / (k + 1) * odds
        if term < 1e-9 * total:
            break
    return min(1.0, math.exp(log_term) * total)


@dataclass(frozen=True, slots=True, kw_only=True)
class ErrorRateConfig:
    """When a rate of errors is worth a word."""

    #: How often counters are looked at; the window has parts of this length.
    part_seconds: float = 30.0
    #: Length of the window that is compared with the baseline.
    window_seconds: float = 300.0
    #: Probability below which the window does not fit the baseline.
    probability: float = 1e-4
    #: Errors in a window that are worth a word at all.
    least_errors: int = 10
    #: PCIe replays in a window that are worth a word at all: links send again now and then. 8 in a minute are where
    #: NVIDIA's DCGM warns.
    least_replays: int = 40
    #: The rate has to be this many times that of the baseline: of many errors a small change would be sure, too.
    least_factor: float = 3.0
    #: And the errors have to be this many times those of the worst window of the baseline: errors come in clumps.
    least_peak_factor: float = 2.0
    #: Least baseline; before that only what needs none is judged.
    baseline_seconds: float = 600.0
    #: How fast the baseline forgets.
    memory_seconds: float = 86400.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.part_seconds >= 1, "part_seconds", self.part_seconds, "at least 1")
        least_s = _LEAST_PARTS * self.part_seconds
        require(self.window_seconds >= least_s, "window_seconds", self.window_seconds, f"at least {least_s:g}")
        require(0 < self.probability < 0.1, "probability", self.probability, "between 0 and 0.1")
        require(self.least_errors >= 1, "least_errors", self.least_errors, "at least 1")
        require(self.least_replays >= 1, "least_replays", self.least_replays, "at least 1")
        require(self.least_factor >= 1, "least_factor", self.least_factor, "at least 1")
        require(self.least_peak_factor >= 0, "least_peak_factor", self.least_peak_factor, "at least 0")
        require(self.memory_seconds > 0, "memory_seconds", self.memory_seconds, "above 0")


class Baseline(NamedTuple):
    """What is usual of one counter."""

    events: float
    seconds: float
    peak: float  # errors of its worst window


class ErrorRate:
    """One counter of errors: its window, its baseline, and whether the one fits the other.

    A reading below the one before is a reset, and what came between them is not known. While errors come too fast the
    baseline holds still, so that a fault does not become the new normal.
    """

    __slots__ = (
        "_base_events",
        "_base_s",
        "_block_events",
        "_block_s",
        "_config",
        "_last",
        "_least",
        "_parts",
        "_peak",
        "is_high",
        "probability",
    )

    def __init__(self, config: ErrorRateConfig, least_errors: int) -> None:
        self._config = config
        self._least = least_errors
        self._last: tuple[float, int] | None = None
        self._parts: deque[tuple[int, float]] = deque()
        self._base_events = 0.0
        self._base_s = 0.0
        self._peak = 0.0  # errors of the worst window that has become past, forgotten slowly
        self._block_events, self._block_s = 0, 0.0  # of the newest part of the past, not a whole window yet
        self.is_high = False
        self.probability = 1.0

    @property
    def errors(self) -> int:
        """Errors in the window."""
        return sum(events for events, _ in self._parts)

    @property
    def baseline_per_hour(self) -> float | None:
        """Usual errors an hour; None before there is a baseline."""
        return 3600 * self._base_events / self._base_s if self._base_s >= self._config.baseline_seconds else None

    @property
    def learned(self) -> Baseline:
        """What is usual."""
        return Baseline(self._base_events, self._base_s, self._peak)

    def restore(self, baseline: Baseline) -> None:
        """Take back what is usual."""
        self._base_events, self._base_s, self._peak = baseline

    def take(self, time_s: float, total: int) -> None:
        """Take a reading of the counter, a part of the window after the last one, and judge."""
        last, self._last = self._last, (time_s, total)
        if last is None or time_s <= last[0]:
            return
        if total < last[1]:
            self._parts.clear()
            self.is_high = False
            return
        self._parts.append((total - last[1], time_s - last[0]))
        window_s = sum(seconds for _, seconds in self._parts)
        while self._parts and window_s - self._parts[0][1] >= self._config.window_seconds - 1e-6:
            window_s -= self._parts[0][1]
            self._learn(*self._parts.popleft())
        if window_s > 2 * self._config.window_seconds:
            # After a gap: when in it the errors came is not known.
            while self._parts:
                self._learn(*self._parts.popleft())
            self.is_high = False
            return
        self._judge(window_s)

    def _judge(self, window_s: float) -> None:
        errors, config = self.errors, self._config
        if not errors or self._base_s < config.baseline_seconds:
            self.is_high, self.probability = False, 1.0
            return
        self.probability = probability_of_more(errors, window_s, self._base_events, self._base_s)
        factor = errors / window_s / (self._base_events / self._base_s) if self._base_events else math.inf
        if self.is_high:
            self.is_high = 2 * errors >= self._least and factor >= 0.5 * config.least_factor
            return
        parts = sum(events > 0 for events, _ in self._parts)
        self.is_high = (
            errors >= self._least
            and parts >= _LEAST_PARTS
            and factor >= config.least_factor
            and errors >= config.least_peak_factor * self._peak
            and self.probability < config.probability
        )

    def _learn(self, events: int, seconds: float) -> None:
        if self.is_high:
            return
        kept = math.exp(-seconds / self._config.memory_seconds)
        self._base_events = self._base_events * kept + events
        self._base_s = self._base_s * kept + seconds
        self._peak *= kept
        self._block_events += events
        self._block_s += seconds
        if self._block_s >= self._config.window_seconds - 1e-6:
            # A longer one, after a gap, counts by its mean.
            share = min(1.0, self._config.window_seconds / self._block_s)
            self._peak = max(self._peak, self._block_events * share)
            self._block_events, self._block_s = 0, 0.0


class ErrorRates:
    """The counters of one card or port, by name: which of them rise too fast, and since when."""

    __slots__ = ("_config", "_labels", "_least", "_rates", "_restored", "_taken_s", "high_since")

    def __init__(
        self,
        config: ErrorRateConfig,
        labels: Mapping[str, str],
        restored: Mapping[str, Baseline],
        least_errors: Mapping[str, int] | None = None,
    ) -> None:
        """Follow the counters that have a label, what a person calls them; `restored` holds their baselines."""
        self._config = config
        self._labels = labels
        self._least = least_errors or {}
        self._restored = restored
        self._rates: dict[str, ErrorRate] = {}
        self._taken_s: float | None = None
        self.high_since: dict[str, Instant] = {}

    def __bool__(self) -> bool:
        """Return whether any of the counters was ever read."""
        return bool(self._rates)

    def is_due(self, time_s: float) -> bool:
        """Return whether a part of the window has passed since the last reading that was taken."""
        return self._taken_s is None or time_s - self._taken_s >= self._config.part_seconds - 1e-6

    def take(self, time_s: float, totals: Mapping[str, int | None], now: Instant) -> None:
        """Take a reading of the counters; None is one that is not there."""
        self._taken_s = time_s
        for name in self._labels:
            total = totals.get(name)
            if total is None:
                continue
            rate = self._rates.get(name)
            if rate is None:
                rate = self._rates[name] = ErrorRate(self._config, self._least.get(name, self._config.least_errors))
                if name in self._restored:
                    rate.restore(self._restored[name])
            rate.take(time_s, total)
            if not rate.is_high:
                self.high_since.pop(name, None)
            elif name not in self.high_since:
                self.high_since[name] = now.later(-self._config.window_seconds)

    def texts(self) -> list[tuple[str, Instant]]:
        """Return a phrase for each counter that rises too fast, and since when it does."""
        return [(self._text(name), since) for name, since in self.high_since.items()]

    def _text(self, name: str) -> str:
        rate, minutes = self._rates[name], self._config.window_seconds / 60
        usual = rate.baseline_per_hour or 0.0
        return f"{rate.errors} {self._labels[name]} in {minutes:.0f} min, usually {usual:.1f} an hour"

    def evidence(self, prefix: str = "") -> dict[str, float | str | None]:
        """Return the numbers of the counters that rise too fast."""
        found: dict[str, float | str | None] = {}
        for name in self.high_since:
            rate, short = self._rates[name], prefix + name.removesuffix("_total")
            found[f"{short}_recent"] = float(rate.errors)
            found[f"{short}_usual_per_hour"] = rate.baseline_per_hour
            found[f"{short}_probability"] = rate.probability
        return found

    def learned(self) -> dict[str, list[float]]:
        """Return the numbers of each baseline."""
        return {name: list(rate.learned) for name, rate in self._rates.items() if rate.learned.seconds}


def baselines(state: object, what: str) -> dict[str, dict[str, Baseline]]:
    """Return baselines by subject and counter, of what `ErrorRates.learned` gave; ValueError for others."""
    table = _table(state, what)
    if len(table) > _MOST_SUBJECTS:
        raise ValueError(f"{what} are more than {_MOST_SUBJECTS}")
    return {
        subject: {name: _baseline(pair, f"{name} of {subject}") for name, pair in _table(rates, subject).items()}
        for subject, rates in table.items()
    }


def _table(value: object, what: str) -> Mapping[str, object]:
    if isinstance(value, Mapping) and all(isinstance(name, str) for name in value):
        return value
    raise ValueError(f"{what} is no table")


def _baseline(value: object, what: str) -> Baseline:
    if isinstance(value, list) and len(value) == 3:
        events, seconds, peak = value
        if all(isinstance(one, int | float) and not isinstance(one, bool) and 0 <= one < 1e15 for one in value):
            return Baseline(float(events), float(seconds), float(peak))
    raise ValueError(f"{what} is no list of errors, seconds and the worst window")
