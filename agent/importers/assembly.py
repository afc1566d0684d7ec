"""From the readings of a foreign log to ticks: which GPU, which moment, which rows belong together.

Every format yields `Reading`s in the order of the log; `ImportedTrace` does what is the same for all of them.
"""

from __future__ import annotations

import statistics
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any, Final

from agent.errors import UsageError
from agent.importers.identity import GpuNames, distances
from agent.importers.logtext import LogText
from agent.importers.reading import Reading
from agent.records import GpuInfo, GpuKey, GpuLimits, GpuSample, GpuSlowSample, GpuState, Record, Tick
from agent.trace import MAX_PAUSE_S, TraceHeader

#: Readings that are looked at before the first tick: for the interval, the number of GPUs and the model.
LOOK_AHEAD: Final = 1024
#: Seconds between two samples of a log that holds no times: what nvidia-smi does unless told otherwise.
DEFAULT_INTERVAL_S: Final = 1.0
#: Facts that do not change are sent as often as live, so that what consumes them never finds them stale.
_REPEAT_S: Final = 60.0
#: Numbers from here on are seconds since 1970 (1973 and later), smaller ones count from some start.
_EPOCH_S: Final = 1e8


@dataclass(slots=True)
class _Facts:
    """What was last sent about one GPU."""

    info: dict[str, Any]
    limits: dict[str, Any]
    info_sent_s: float | None = None
    limits_sent_s: float | None = None


class ImportedTrace:
    """A foreign log as a trace: `header`, then ticks by iteration, once.

    Readings of different GPUs that are less than half an interval apart become one tick, at the time of the first.
    Times count from the first tick and always go on: where the log repeats a time or goes back, one interval passes,
    and after a step back the log's clock is taken as moved by that much. A step forward cannot be told from a pause
    and is kept as one, unless it is longer than 30 days: then a clock was set, and one interval passes. `wall_s` is
    what the log says, and `monotonic_s` where it holds no date.
    """

    def __init__(self, text: LogText, source: str, readings: Iterator[Reading]) -> None:
        """Read as far as the header needs; raises UsageError where there is no reading or no telling of GPUs."""
        self._text = text
        self._where = str(text.path)
        ahead = list(islice(readings, LOOK_AHEAD))
        if not ahead:
            raise UsageError(f"{self._where} holds no sample: no row could be read as {source}")
        self._readings = chain(ahead, readings)
        self._warned: set[str] = set()
        self._names = GpuNames(ahead, self._where, self._warn_once)
        interval_s = _interval(ahead, self._names.per_tick)
        if interval_s is None and all(reading.time_s is None for reading in ahead):
            self._warn_once(f"{self._where} holds no times; taken as one sample every {DEFAULT_INTERVAL_S:g} s")
        self._interval_s = interval_s or DEFAULT_INTERVAL_S
        self._facts: dict[GpuKey, _Facts] = {}
        self._clock = _LogClock(self._interval_s, self._where, self._warn_once)
        self.header = TraceHeader(
            provenance="imported", interval_s=self._interval_s, source=source, machine=_machine(ahead)
        )

    def __iter__(self) -> Iterator[Tick]:
        try:
            for group in self._groups():
                yield self._tick(group)
        finally:
            self.close()

    def fraction_read(self) -> float:
        """Return how much of the file was read so far, from 0 to 1, by its bytes on disk."""
        return self._text.fraction_read()

    def close(self) -> None:
        """Close the file; idempotent, and done by reading to the end."""
        self._text.close()

    def _groups(self) -> Iterator[dict[GpuKey, Reading]]:
        group: dict[GpuKey, Reading] = {}
        start_s: float | None = None
        for reading in self._readings:
            key = self._names.key(reading, len(group))
            if key is None or key in group or self._apart(start_s, reading.time_s):
                if group:
                    yield group
                self._refuse_one_after_the_other(start_s, reading, key)
                group, start_s = {}, None
                if self._names.per_tick:
                    key = self._names.key(reading, 0)
            if key is None:
                continue
            group[key] = reading
            start_s = reading.time_s if start_s is None else start_s
        if group:
            yield group

    def _apart(self, start_s: float | None, time_s: float | None) -> bool:
        if start_s is None or time_s is None:
            return False
        return abs(time_s - start_s) > self._interval_s / 2

    def _refuse_one_after_the_other(self, start_s: float | None, reading: Reading, key: GpuKey | None) -> None:
        """Raise where a GPU never seen before starts at an earlier time: GPUs stand one below the other."""
        back = start_s is not None and reading.time_s is not None and reading.time_s < start_s - self._interval_s
        if back and key is not None and key not in self._facts:
            raise UsageError(f"{self._where} holds one GPU after the other; sort its rows by time")

    def _tick(self, group: Mapping[GpuKey, Reading]) -> Tick:
        times = (reading.time_s for reading in group.values() if reading.time_s is not None)
        monotonic_s, wall_s = self._clock.next(next(times, None))
        records: list[Record] = []
        for key, reading in group.items():
            records.extend(self._records(key, reading, monotonic_s, wall_s))
        return Tick(monotonic_s=monotonic_s, wall_s=wall_s, records=tuple(records))

    def _records(self, key: GpuKey, reading: Reading, monotonic_s: float, wall_s: float) -> Iterator[Record]:
        facts = self._facts.get(key)
        if facts is None:
            facts = self._facts[key] = _Facts({}, {})
        if _due(facts.info, reading.info, facts.info_sent_s, monotonic_s):
            facts.info_sent_s = monotonic_s
            yield GpuInfo(key=key, **facts.info, monotonic_s=monotonic_s, wall_s=wall_s)
        if reading.state is not None:
            yield GpuState(key=key, state=reading.state, monotonic_s=monotonic_s, wall_s=wall_s)
            if reading.state != "ok":
                return
        if _due(facts.limits, reading.limits, facts.limits_sent_s, monotonic_s):
            facts.limits_sent_s = monotonic_s
            yield GpuLimits(key=key, **facts.limits, monotonic_s=monotonic_s, wall_s=wall_s)
        yield GpuSample(key=key, **reading.sample, monotonic_s=monotonic_s, wall_s=wall_s)
        if reading.slow:
            yield GpuSlowSample(key=key, **reading.slow, monotonic_s=monotonic_s, wall_s=wall_s)

    def _warn_once(self, message: str) -> None:
        if message not in self._warned:
            self._warned.add(message)
            self._text.warn(message)


def _due(known: dict[str, Any], new: Mapping[str, Any], sent_s: float | None, now_s: float) -> bool:
    """Take the new facts into the known ones and return whether they are to be sent: on change, and every minute."""
    if not new and not known:
        return False
    changed = any(known.get(name) != value for name, value in new.items())
    known.update(new)
    return changed or sent_s is None or now_s - sent_s >= _REPEAT_S


class _LogClock:
    """Turns the times of a log into monotonic and wall time by the rule of `ImportedTrace`."""

    def __init__(self, interval_s: float, where: str, warn: Callable[[str], None]) -> None:
        self._interval_s = interval_s
        self._where = where
        self._warn = warn
        self._first_s: float | None = None
        self._shift_s = 0.0  # what steps back of the log's clock amount to
        self._log_s: float | None = None
        self._now_s: float | None = None

    def next(self, log_s: float | None) -> tuple[float, float]:
        """Return (monotonic, wall) of a tick at the log's time `log_s`."""
        before_s, log_before_s = self._now_s, self._log_s
        if log_s is not None:
            self._log_s = log_s
            if self._first_s is None:
                # Readings without a time may have come first; the log's clock then starts one interval after them.
                self._first_s = log_s - (0.0 if before_s is None else before_s + self._interval_s)
        now_s = self._advance(before_s, log_s, log_before_s)
        self._now_s = now_s
        if log_s is not None and log_s >= _EPOCH_S:
            return now_s, log_s
        if log_s is None and log_before_s is not None and log_before_s >= _EPOCH_S:
            return now_s, log_before_s + now_s - (before_s or 0.0)
        return now_s, now_s

    def _advance(self, before_s: float | None, log_s: float | None, log_before_s: float | None) -> float:
        if log_s is None or self._first_s is None:
            return 0.0 if before_s is None else round(before_s + self._interval_s, 6)
        now_s = round(log_s - self._first_s + self._shift_s, 6)
        if before_s is None or before_s < now_s <= before_s + MAX_PAUSE_S:
            return now_s
        if now_s > before_s or (log_before_s is not None and log_s < log_before_s):
            way = "forward by months" if now_s > before_s else "back"
            self._warn(f"{self._where}: time goes {way} in the middle; taken as one interval each time it does")
            now_s = round(before_s + self._interval_s, 6)
            self._shift_s = now_s - (log_s - self._first_s)
            return now_s
        if log_s == log_before_s:
            self._warn(f"{self._where}: a time is there twice; taken as one interval each time it is")
            return round(before_s + self._interval_s, 6)
        # The log's clock has yet to catch up with the intervals that repeated times were given.
        return round(before_s + self._interval_s / 10, 6)


def _interval(ahead: list[Reading], per_tick: int) -> float | None:
    """Return the usual seconds between two readings of a GPU: the median; the mean where times are too coarse."""
    gaps = distances(ahead, per_tick)
    positive = [gap for gap in gaps if gap > 0]
    if not positive:
        return None
    usual_s = statistics.median_low(positive)
    if len(positive) < 0.75 * len(gaps):
        near = [gap for gap in gaps if gap <= 3 * usual_s]
        usual_s = sum(near) / len(near)
    return round(usual_s, 6) or None


def _machine(ahead: list[Reading]) -> dict[str, str | int | float]:
    machine: dict[str, str | int | float] = {}
    for reading in ahead:
        for field, name in (("model_name", "gpu_model"), ("driver_version", "driver_version")):
            if field in reading.info:
                machine.setdefault(name, reading.info[field])
    return machine
