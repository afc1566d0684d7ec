"""Which GPU a row of a foreign log is about: by UUID, PCI address, index, or by its place among rows of one moment."""

from __future__ import annotations

import statistics
from collections import Counter
from collections.abc import Callable, Iterable, Sequence
from itertools import pairwise
from typing import Final

from agent.errors import UsageError
from agent.importers.reading import Reading
from agent.records import GpuKey

#: Rows without identity belong to one moment where they are closer than this part of the usual long gap.
_NEAR: Final = 0.25
_NEAR_MAX_S: Final = 0.5


class GpuNames:
    """Gives every GPU of a log one key that stays, also where some rows lack a column.

    A UUID decides over a PCI address, and that over an index; the number of a GPU is its index when it was first
    seen, or the next free one. Without any of them, rows of one moment are numbered in their order, provided that
    every moment has the same number of rows.
    """

    def __init__(self, ahead: Sequence[Reading], where: str, warn: Callable[[str], None]) -> None:
        """Look at the first readings; raises UsageError where several GPUs cannot be told apart."""
        self._where = where
        self._warn = warn
        self._by_uuid: dict[str, GpuKey] = {}
        self._by_bus: dict[str, GpuKey] = {}
        self._by_index: dict[int, GpuKey] = {}
        self._taken: set[int] = set()
        #: Rows of one moment where rows say nothing about their GPU; 0 where they do.
        self.per_tick = 0
        if not any(reading.says_which for reading in ahead):
            self.per_tick = _rows_per_moment(ahead, where, warn)

    def key(self, reading: Reading, place: int) -> GpuKey | None:
        """Return the key; None for the first row of the next moment, where only the place in it tells GPUs apart.

        `place` is the number of GPUs that the present moment already has.
        """
        if self.per_tick:
            return GpuKey(place) if place < self.per_tick else None
        if not reading.says_which:
            self._warn(f"{self._where}: some rows do not say which GPU they are about; taken as the first GPU")
            return next(iter(self._by_index.values()), GpuKey(0))
        found = self._known(reading)
        if found is None:
            found = GpuKey(self._number(reading.gpu_index), reading.uuid)
            self._taken.add(found.gpu)
        if reading.uuid is not None:
            self._by_uuid.setdefault(reading.uuid, found)
        if reading.bus is not None:
            self._by_bus.setdefault(reading.bus, found)
        if reading.gpu_index is not None:
            self._by_index.setdefault(reading.gpu_index, found)
        return found

    def _known(self, reading: Reading) -> GpuKey | None:
        uuid, bus, index = reading.uuid, reading.bus, reading.gpu_index
        if uuid is not None and uuid in self._by_uuid:
            return self._by_uuid[uuid]
        found = None
        if bus is not None:
            found = self._by_bus.get(bus)
        if found is None and index is not None:
            found = self._by_index.get(index)
        if uuid is None or found is None:
            return found
        # A GPU first seen by rows that could not say its UUID keeps the key it got then; another UUID is another GPU.
        return found if found.uuid is None and found not in self._by_uuid.values() else None

    def _number(self, index: int | None) -> int:
        if index is not None and index not in self._taken:
            return index
        return next(number for number in range(len(self._taken) + 1) if number not in self._taken)


def distances(ahead: Iterable[Reading], per_tick: int) -> list[float]:
    """Return the seconds between readings of the same GPU that follow each other; steps back are left out."""
    last: dict[object, float] = {}
    gaps: list[float] = []
    for row, reading in enumerate(ahead):
        if reading.time_s is None:
            continue
        which = row % per_tick if per_tick else (reading.gpu_index, reading.uuid, reading.bus)
        if which in last and reading.time_s >= last[which]:
            gaps.append(reading.time_s - last[which])
        last[which] = reading.time_s
    return gaps


def _rows_per_moment(ahead: Sequence[Reading], where: str, warn: Callable[[str], None]) -> int:
    """Return how many GPUs rows without identity are about."""
    times = [reading.time_s for reading in ahead if reading.time_s is not None]
    gaps = [after - before for before, after in pairwise(times)]
    if len(times) < len(ahead) or not gaps:
        return _one_gpu(ahead, where, warn)
    long_s = statistics.quantiles([max(0.0, gap) for gap in gaps], n=50)[-1] if len(gaps) > 1 else gaps[0]
    near_s = min(_NEAR * long_s, _NEAR_MAX_S)
    moments = [1]
    for gap in gaps:
        if 0 <= gap <= near_s:
            moments[-1] += 1
        else:
            moments.append(1)
    size, often = Counter(moments[:-1] or moments).most_common(1)[0]
    if size == 1:
        return _one_gpu(ahead, where, warn)
    if often < 0.8 * len(moments[:-1] or moments):
        raise UsageError(f"{where}: the GPUs of its rows cannot be told apart; log the index or the uuid too")
    warn(f"{where} does not say which GPU a row is about; taken as {size} GPUs in the order of their rows")
    return size


def _one_gpu(ahead: Iterable[Reading], where: str, warn: Callable[[str], None]) -> int:
    names = {reading.info.get("model_name") for reading in ahead}
    if len(names - {None}) > 1:
        raise UsageError(f"{where}: the GPUs of its rows cannot be told apart; log the index or the uuid too")
    warn(f"{where} does not say which GPU a row is about; taken as one GPU")
    return 1
