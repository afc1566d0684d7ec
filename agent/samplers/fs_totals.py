"""Totals of file systems that only grow, whatever comes and goes behind a name.

Behind one name stand several counters, one after another or side by side: mounts of one Lustre file system, clients of
a Ceph cluster, the volume of the next pod at the same mountpoint. Each starts from its own zero, long ago. So a name's
total takes from each counter only what it grew by between two looks. A counter that is there at the very first look
counts whole: the total is then the kernel's own, and goes on from where it was when the agent starts again. One that
comes later adds nothing with its first reading, since nothing tells what it counted before; what it moved between its
mount and that look is lost, at most one period. A counter that falls (its statistics were cleared, its number was given
to another mount) likewise.

An agent that starts again knows nothing of counters that are gone. The totals of names that had such start lower, which
is a reset as Prometheus knows it; `rate()` then takes the new value for growth.
"""

from __future__ import annotations

from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Final

#: Names without a file system whose totals are kept. Beyond, the one that is gone longest begins at 0 if it returns.
MAX_GONE_NAMES: Final = 256

#: Counters of one instance, in an order of the caller's; None where it does not offer one.
Values = tuple[int | None, ...]
#: By instance; None for one that is there and cannot be read now. One that is not named is gone.
Readings = Mapping[Hashable, Values | None]


@dataclass(slots=True)
class _Total:
    """What one name has counted, and the last readings of the instances behind it now."""

    sums: list[int] = field(default_factory=list)
    last: dict[Hashable, Values] = field(default_factory=dict)

    def add(self, instance: Hashable, values: Values, *, is_whole: bool) -> None:
        """Take a reading; `is_whole` counts what came before the first one as well."""
        self.sums += [0] * (len(values) - len(self.sums))
        before = self.last.get(instance, ())
        for index, value in enumerate(values):
            last = before[index] if index < len(before) else 0 if is_whole else None
            if value is not None and last is not None:
                self.sums[index] += max(0, value - last)
        # A counter that is missing for once goes on from where it was.
        self.last[instance] = tuple(
            value if value is not None or index >= len(before) else before[index] for index, value in enumerate(values)
        )


class GrowingTotals:
    """The totals of all names."""

    def __init__(self) -> None:
        self._totals: dict[Hashable, _Total] = {}  # those seen last come last
        self._is_first = True

    def update(self, readings: Mapping[Hashable, Readings | None]) -> dict[Hashable, Values]:
        """Take one look at all names, and return the totals of those whose instances could all be read.

        None stands for a name of whose instances nothing is known now. A name that is not given has no instance.
        """
        shown: dict[Hashable, Values] = {}
        for name, found in readings.items():
            total = self._totals.pop(name, None) or _Total()
            self._totals[name] = total
            if found is None:
                continue
            total.last = {instance: values for instance, values in total.last.items() if instance in found}
            known = [values for values in found.values() if values is not None]
            for instance, values in found.items():
                if values is not None:
                    total.add(instance, values, is_whole=self._is_first)
            if known and len(known) == len(found):
                shown[name] = tuple(
                    sum_ if any(values[index] is not None for values in known) else None
                    for index, sum_ in enumerate(total.sums)
                )
        self._is_first = False
        self._forget(readings)
        return shown

    def _forget(self, readings: Mapping[Hashable, Readings | None]) -> None:
        gone = [name for name in self._totals if name not in readings]
        for name in gone[: max(0, len(gone) - MAX_GONE_NAMES)]:
            del self._totals[name]
        for name in gone[max(0, len(gone) - MAX_GONE_NAMES) :]:
            self._totals[name].last.clear()
