"""One job's checkpoints in one source: which bursts are its own, how large and long they are, how regular.

A burst of a host's source is a job's only with a sign of that job: its processes wrote then, data left its GPUs over
PCIe, or it paused. A dataset cache, a log, a backup or another tenant's job has none; where pauses are so frequent that
chance explains the signs, the source is not used for that job.
"""

from __future__ import annotations

import math
from collections import deque
from dataclasses import dataclass, field
from typing import Final

from classifier.detectors.checkpoint_bursts import JOB_SOURCES, Burst
from classifier.detectors.checkpoint_cadence import Cadence, CadenceConfig, median

#: Sizes, lengths and signs that are remembered.
REMEMBERED: Final = 12
#: Lengths that have to be alike before one of them can be odd, and sizes.
_LEAST_ALIKE: Final = 4
_NEW_SIZE: Final = 3
#: Shares of the median size: below is no checkpoint of this row (SIGNALS 4.2), below is truncated (4.6) ...
_LEAST_SHARE: Final = 0.3
_TRUNCATED_SHARE: Final = 0.5
#: ... where the others are within these shares of it.
_ALIKE: Final = (0.7, 1.4)
#: How long after one that is too small one in full is waited for.
_FOLLOW_S: Final = 120.0
#: Where all others had a sign, one without has to be as large as they are.
_EQUAL: Final = (0.9, 1.1)
#: Share of the median size up to which a burst without a sign may be the one that is due.
_MOST_SHARE: Final = 2.0
#: Preference between sources of equal confidence: what is nearest to the job goes first, and what only leaves the GPUs
#: last, since that says nothing of how much is written and for how long.
_PREFERENCE: Final = {
    "process": 0.2,
    "filesystem": 0.15,
    "gpu_direct_storage": 0.15,
    "disk": 0.1,
    "network": 0.05,
    "device_to_host": -0.3,
}

#: A row is trusted where chance alone would give as many signs less often than this: two standard deviations, and three
#: where every burst of the host counts.
_MOST_BY_CHANCE: Final = 0.0228
_MOST_BY_CHANCE_OF_ALL: Final = 0.00135

#: Ends the name of a row of a host's source in which bursts without a sign count.
ALL: Final = "/all"
#: How a burst may bear the sign of a job: chance explains a pause, and hardly what its processes or GPUs move.
STRONG: Final = "strong"
WEAK: Final = "weak"
#: It began without one, and the job paused later in it: others wrote as well.
INSIDE: Final = "inside"
NONE: Final = "none"


@dataclass(slots=True)
class Stream:
    """The checkpoints of one job in one source."""

    source: str
    cadence: Cadence
    #: Whether bursts without a sign count too: an asynchronous checkpoint may pause the job for less than can be seen.
    takes_all: bool = False
    sizes: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    lengths: deque[float] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    signs: deque[str] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    count: int = 0
    last: Burst | None = None
    last_clock_s: float | None = None
    small: Burst | None = None  # with a sign, when a checkpoint was due
    small_clock_s: float = 0.0
    truncated: Burst | None = None  # was called so, and none in full has come since
    _small_sizes: list[float] = field(default_factory=list)
    #: Bursts that may be checkpoints, to learn from: how often the phase was lost before, clock, burst.
    _candidates: deque[tuple[int, float, Burst]] = field(default_factory=lambda: deque(maxlen=REMEMBERED))
    _losses: int = 0
    _is_sized: bool = False  # whether sizes were alike when the period was learned

    @classmethod
    def of(cls, source: str, config: CadenceConfig, *, takes_all: bool = False) -> Stream:
        """Return the empty row of one source."""
        return cls(source, Cadence(config), takes_all)

    @property
    def is_own(self) -> bool:
        """Whether all in this source is of this job."""
        return self.source in JOB_SOURCES

    def offer(self, burst: Burst, clock_s: float, sign: str) -> bool:
        """Take a burst that began when the job's clock showed `clock_s`; return whether it is a checkpoint."""
        is_due = self.cadence.is_due(clock_s)
        share = burst.written_bytes / median(self.sizes) if self.sizes else 1.0
        is_unsigned = sign in {NONE, INSIDE}
        is_alike = _TRUNCATED_SHARE <= share <= _MOST_SHARE
        if is_alike and not (is_unsigned and self._are_all_signed):
            self.signs.append(NONE if is_unsigned else sign)
        if is_unsigned and not self._counts_unsigned(clock_s, share, sign, is_due=is_due):
            # Where every one had a sign, one that others hide would have it as well.
            if share >= _TRUNCATED_SHARE and not (sign == NONE and self._are_all_signed):
                self.cadence.obscure(clock_s, clock_s + burst.seconds)
            return False
        if self.cadence.declared_s is None:
            self._candidates.append((self._losses, clock_s, burst))
            if self.cadence.period_s is None:
                return self._learn()
        if share < _LEAST_SHARE or (share < _TRUNCATED_SHARE and self._is_alike(self.sizes)):
            self._take_small(burst, clock_s, is_due=is_due)
            return False
        if self._is_sized and share > _MOST_SHARE and not is_due:
            return False  # of the same time as a pause, by chance
        self.cadence.add(clock_s)
        self._take(burst, clock_s)
        if self.cadence.period_s is None:
            self._learn()
        return True

    def lose_phase(self, clock_s: float) -> None:
        """Forget where in the period the job is: a burst may have gone unseen until now."""
        self._losses += 1
        self.cadence.lose_phase(clock_s)

    def _take(self, burst: Burst, clock_s: float) -> None:
        self.sizes.append(burst.written_bytes)
        self.lengths.append(burst.seconds)
        self.count += 1
        self.last, self.last_clock_s = burst, clock_s
        self.small = self.truncated = None
        self._small_sizes.clear()

    def _learn(self) -> bool:
        """Look for a period: in those bursts that are of one size, as checkpoints mostly are, else in all."""
        sizes = [burst.written_bytes for _, _, burst in self._candidates]
        like = [[_ALIKE[0] <= other / one <= _ALIKE[1] for other in sizes] for one in sizes]
        best = max(like, key=sum)
        for kept in (best, [True] * len(sizes)):
            cadence, losses = Cadence(self.cadence.config), self._losses
            chosen = [one for one, is_kept in zip(self._candidates, kept, strict=True) if is_kept]
            for loss, clock_s, _ in chosen:
                if loss != losses:
                    cadence.lose_phase(clock_s)
                    losses = loss
                cadence.add(clock_s)
            if cadence.period_s is None or losses != self._losses:
                continue
            self.cadence, self._is_sized = cadence, kept is best
            self.sizes.clear()
            self.lengths.clear()
            before = self.count
            for _, clock_s, burst in chosen:
                self._take(burst, clock_s)
            self.count = max(before, len(chosen))
            return chosen[-1] is self._candidates[-1]
        return False

    @property
    def _are_all_signed(self) -> bool:
        return len(self.signs) >= _LEAST_ALIKE and NONE not in self.signs

    def _counts_unsigned(self, clock_s: float, share: float, sign: str, *, is_due: bool) -> bool:
        """Return whether a burst without a sign is a checkpoint: one of the usual size when one is due.

        Later, or out of turn, only where others had no sign either.
        """
        deadline_s = self.cadence.deadline_s
        if is_due and deadline_s is not None and clock_s <= deadline_s:
            if self._are_all_signed and sign == NONE:
                return _EQUAL[0] <= share <= _EQUAL[1]
            return share >= _TRUNCATED_SHARE and (share <= _MOST_SHARE or sign == INSIDE)
        return sign == NONE and self.takes_all and not self._are_all_signed

    def is_trusted(self, chance: float) -> bool:
        """Return whether the bursts that count are this job's, where any burst looks so with probability `chance`."""
        if self.is_own:
            return True
        strong = sum(sign == STRONG for sign in self.signs)
        signed = strong + sum(sign == WEAK for sign in self.signs)
        if self.cadence.declared_s is not None:
            return signed >= 1
        by_chance = _at_least(signed, len(self.signs), chance)
        return strong >= 3 or (
            signed >= 3 and by_chance < (_MOST_BY_CHANCE_OF_ALL if self.takes_all else _MOST_BY_CHANCE)
        )

    @property
    def score(self) -> float:
        """How much this row is worth beside the others."""
        return self.cadence.confidence + _PREFERENCE[self.source] - (0.1 if self.takes_all else 0.0)

    @property
    def usual_bytes(self) -> float | None:
        """Median size."""
        return median(self.sizes) if self.sizes else None

    @property
    def usual_seconds(self) -> float | None:
        """Median length, where lengths are alike enough for one to be odd."""
        if len(self.lengths) < _LEAST_ALIKE or max(self.lengths) > 2.0 * median(self.lengths):
            return None
        return median(self.lengths)

    def is_smallness_due(self, clock_s: float) -> bool:
        """Return whether what was written in place of the checkpoint that is due is a truncated one.

        One in full may follow: that is waited for.
        """
        expected_s = self.cadence.expected_s
        if self.small is None or expected_s is None or self.small_clock_s < expected_s - self.cadence.tolerance_s:
            return False
        return clock_s - self.small_clock_s > self.small.seconds + _FOLLOW_S

    def call_truncated(self) -> None:
        """Take the small burst for a checkpoint that was cut short, and count from it."""
        if self.small is None:
            return
        self.cadence.forgive(self.small_clock_s)
        self.truncated, self.small = self.small, None
        self._small_sizes.append(self.truncated.written_bytes)
        if len(self._small_sizes) >= _NEW_SIZE and self._is_alike(self._small_sizes):
            # So many in a row that are alike: that is how large they are now.
            self.sizes.clear()
            self.sizes.extend(self._small_sizes)
            self._small_sizes.clear()
            self.truncated = None

    def _take_small(self, burst: Burst, clock_s: float, *, is_due: bool) -> None:
        if is_due and self._is_alike(self.sizes):
            self.small, self.small_clock_s = burst, clock_s

    @staticmethod
    def _is_alike(values: deque[float] | list[float]) -> bool:
        if len(values) < _NEW_SIZE:
            return False
        middle = median(values)
        return middle * _ALIKE[0] <= min(values) and max(values) <= middle * _ALIKE[1]


def _at_least(count: int, trials: int, chance: float) -> float:
    """Return the probability of at least so many of `trials`, each with `chance` (binomial)."""
    return sum(math.comb(trials, k) * chance**k * (1.0 - chance) ** (trials - k) for k in range(count, trials + 1))
