"""Whether a reading fits those before it: counters that fall or leap, and values that no longer move.

A counter starts anew when the driver is loaded again, and that never happens under a valid handle: these guards live as
long as the handle, so a fall after a reload is right and a fall without one is not. What is not believed is withheld,
never mended, but for one case: a counter of 32 bits that wraps goes on in 64.

A lower value that stays for `confirm_s` without falling further is believed after all, as the new start of a counter:
an operator can clear counters of errors while the driver runs.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

WITHHELD_FALL: Final = "counter_fell"
RESET: Final = "counter_reset"
LEAP: Final = "implausible"
FROZEN: Final = "frozen"
_WRAP: Final = 1 << 32


@dataclass(slots=True, kw_only=True)
class CounterGuard:
    """Lets the readings of one counter through, or withholds them.

    `most_per_s` is a rate far above what the hardware can do, in the counter's unit: a step beyond it is a glitch, and
    would make every true reading after it look like a fall. `bits` is the width of the driver's type.
    """

    most_per_s: float
    bits: int = 64
    confirm_s: float = 60.0
    _last: float | None = None
    _last_s: float = 0.0
    _wrapped: int = 0  # what wraps have taken away so far
    _doubt: float | None = None  # the newest reading that was withheld
    _doubt_s: float = 0.0  # since when readings are withheld and agree with each other

    def check(self, value: float, now_s: float) -> tuple[float | None, str | None]:
        """Return the value to hand on, None to withhold it; and a reason to count, once for each lapse."""
        value += self._wrapped
        if self._last is not None and self.bits == 32 and value < self._last and self._is_wrap(value):
            self._wrapped += _WRAP
            value += _WRAP
        if self._last is None or self._fits(value, now_s):
            self._last, self._last_s, self._doubt = value, now_s, None
            return value, None
        is_fall = value < self._last
        is_first = self._doubt is None
        if self._doubt is None or value < self._doubt or is_fall != (self._doubt < self._last):
            self._doubt_s = now_s  # the lapse begins, or what is withheld is no counter itself
        self._doubt = value
        if now_s - self._doubt_s >= self.confirm_s:
            self._last, self._last_s, self._doubt = value, now_s, None
            return value, RESET
        return None, (WITHHELD_FALL if is_fall else LEAP) if is_first else None

    def _fits(self, value: float, now_s: float) -> bool:
        if self._last is None:
            return True
        # A second of slack: the driver updates a counter when it likes.
        return 0 <= value - self._last <= self.most_per_s * (now_s - self._last_s + 1.0)

    def _is_wrap(self, value: float) -> bool:
        if self._last is None:
            return False
        last = self._last - self._wrapped
        return last >= _WRAP * 0.9 and value - self._wrapped < _WRAP * 0.1


@dataclass(slots=True, kw_only=True)
class PowerGuard:
    """Finds power or energy that no longer moves, each judged by the other.

    Energy that stands still while power is drawn is frozen; so is power that repeats to the milliwatt while energy says
    that on average it was another. Neither is judged alone: an idle board may well draw the same for hours.
    Nothing is judged over a gap between readings: a machine that sleeps draws nothing, while its clock goes on.
    """

    frozen_s: float = 60.0
    gap_s: float = 15.0  # three slow ticks
    least_watts: float = 20.0  # below it nothing is judged
    most_difference_ratio: float = 0.3
    _power: float | None = None
    _power_s: float = 0.0  # since when power reads the same
    _power_energy: float | None = None  # at the first energy reading from then on
    _power_energy_s: float = 0.0
    _energy: float | None = None
    _energy_s: float = 0.0  # since when energy reads the same
    _seen_s: float = 0.0  # the energy reading before
    is_power_frozen: bool = False
    is_energy_frozen: bool = False

    def check_power(self, watts: float | None, now_s: float) -> tuple[float | None, str | None]:
        """Return the power to hand on, None while it is frozen."""
        if watts is not None and watts != self._power:
            self._power, self._power_s, self._power_energy, self.is_power_frozen = watts, now_s, None, False
        return (None if self.is_power_frozen else watts), None

    def check_energy(self, joules: float | None, now_s: float) -> tuple[float | None, str | None]:
        """Return the energy to hand on, None while it is frozen; a lapse of either is reported here, once."""
        if joules is None:
            return None, None
        reason = None
        if now_s - self._seen_s > self.gap_s:
            self._energy_s, self._power_energy = now_s, None
        self._seen_s = now_s
        if self._energy is None or joules != self._energy:
            self._energy, self._energy_s, self.is_energy_frozen = joules, now_s, False
            reason = self._judge_power(joules, now_s)
        elif self._is_drawing(now_s) and not self.is_energy_frozen and now_s - self._energy_s >= self.frozen_s:
            self.is_energy_frozen = True
            reason = FROZEN
        return (None if self.is_energy_frozen else joules), reason

    def _is_drawing(self, now_s: float) -> bool:
        if self._power is not None and self._power >= self.least_watts:
            return True
        self._energy_s = now_s  # no power, no energy: the count of seconds starts anew
        return False

    def _judge_power(self, joules: float, now_s: float) -> str | None:
        if self._power is None or self.is_power_frozen:
            return None
        if self._power_energy is None:
            self._power_energy, self._power_energy_s = joules, now_s
            return None
        span_s = now_s - self._power_energy_s
        if span_s < self.frozen_s:
            return None
        watts = (joules - self._power_energy) / span_s
        if abs(watts - self._power) <= max(self.least_watts, self.most_difference_ratio * max(watts, self._power)):
            return None
        self.is_power_frozen = True
        return FROZEN


@dataclass(slots=True, kw_only=True)
class RepeatGuard:
    """Finds a set of measured ratios that repeats to the last bit while utilisation says that the load changed."""

    most_repeats: int = 10
    least_change_ratio: float = 0.2
    _values: tuple[float, ...] = ()
    _repeats: int = 0
    _low: float = 1.0
    _high: float = 0.0

    def is_frozen(self, values: tuple[float, ...], utilization_ratio: float | None) -> bool:
        """Return whether this set is a repetition; sets of nothing but 0 are none, for that is what idle looks like."""
        if values != self._values or not any(values):
            self._values, self._repeats, self._low, self._high = values, 0, 1.0, 0.0
        else:
            self._repeats += 1
        if utilization_ratio is not None:
            self._low = min(self._low, utilization_ratio)
            self._high = max(self._high, utilization_ratio)
        return self._repeats >= self.most_repeats and self._high - self._low >= self.least_change_ratio
