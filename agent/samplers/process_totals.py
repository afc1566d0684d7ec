"""Sums of counters over a family of processes that never fall."""

from __future__ import annotations


class SteadyTotal:
    """A counter made of the counters of processes that come and go.

    The sum over a process, its living descendants and those it waited for is steady by itself: what a child used moves
    to its parent when that waits for it. It falls in two ways:

    1. For one reading, where a child ends while the family is read: its parent was read before that, and the child is
       gone. The last value is kept.
    2. For good, where a child is not waited for (its parent ignores SIGCHLD), or its parent ended before it, so that it
       has another parent now. The second low reading in a row is taken for this, and the counter goes on from where it
       was.
    """

    __slots__ = ("_base", "_is_low", "_value")

    def __init__(self) -> None:
        self._base = 0
        self._value: int | None = None
        self._is_low = False

    def update(self, total: int) -> int:
        """Take the present sum and return the counter."""
        value = self._base + total
        if self._value is None or value >= self._value:
            self._value, self._is_low = value, False
        elif self._is_low:
            self._base += self._value - value
            self._is_low = False
        else:
            self._is_low = True
        return self._value
