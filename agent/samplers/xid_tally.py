"""What was counted of one GPU or NVSwitch, and how the events of two sources become one count."""

from __future__ import annotations

from collections.abc import Iterable


class Tally:
    """Events by code since the start, and when each came last; at most `most_codes` codes."""

    def __init__(self, most_codes: int, codes: Iterable[int] = ()) -> None:
        self._most_codes = most_codes
        self.totals: dict[int, int] = dict.fromkeys(codes, 0)
        self.last_wall_s: dict[int, float] = {}

    def add(self, code: int, count: int, wall_s: float) -> bool:
        """Count events of this moment; return False where there are too many codes already."""
        if not self.remember(code, wall_s):
            return False
        self.totals[code] += count
        return True

    def remember(self, code: int, wall_s: float) -> bool:
        """Note that an event came, without counting it; return False where there are too many codes already."""
        if code not in self.totals:
            if len(self.totals) >= self._most_codes:
                return False
            self.totals[code] = 0
        self.last_wall_s[code] = max(wall_s, self.last_wall_s.get(code, wall_s))
        return True

    def join(self, other: Tally) -> None:
        """Take over the events of another one."""
        for code, wall_s in other.last_wall_s.items():
            self.add(code, other.totals[code], wall_s)


class Unmatched:
    """Events that one source told and the other has not told yet, by code; few entries however many events."""

    #: Moments kept per code; events of later ones are added to the newest, and wait as long as it.
    _MOST_MOMENTS = 8

    def __init__(self) -> None:
        self._moments: dict[int, list[tuple[float, int]]] = {}

    def add(self, code: int, count: int, now_s: float) -> None:
        """Note events that came now."""
        if count <= 0:
            return
        moments = self._moments.setdefault(code, [])
        if moments and (moments[-1][0] == now_s or len(moments) >= self._MOST_MOMENTS):
            count += moments.pop()[1]
        moments.append((now_s, count))

    def take(self, code: int, most: int) -> int:
        """Match up to `most` events of a code, oldest first, and return how many there were."""
        taken = 0
        moments = self._moments.get(code, [])
        while moments and taken < most:
            moment_s, count = moments.pop(0)
            used = min(count, most - taken)
            taken += used
            if count > used:
                moments.insert(0, (moment_s, count - used))
        if not moments:
            self._moments.pop(code, None)
        return taken

    def take_any(self, most: int) -> int:
        """Match up to `most` events of any code."""
        taken = 0
        for code in list(self._moments):
            taken += self.take(code, most - taken)
        return taken

    def expire(self, before_s: float) -> None:
        """Forget events from before a moment: the other source would have told them by now."""
        for code, moments in list(self._moments.items()):
            kept = [moment for moment in moments if moment[0] >= before_s]
            if kept:
                self._moments[code] = kept
            else:
                del self._moments[code]

    def __len__(self) -> int:
        return sum(len(moments) for moments in self._moments.values())
