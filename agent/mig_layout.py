"""Which MIG instances exist now: the one place that says whether work runs on a card or on its instances.

No record says that a card is whole again, so an instance ends in one of three ways: the card's instances are listed
anew without it, another one took its id (its MIG UUID differs), or it brings nothing more while its card goes on. Time
is that of the card's own records: a card that hangs keeps its instances, whose values are stale then.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final

from agent.records import PERIODS_S, GpuKey, GpuMigInfo, GpuSample, GpuSlowSample, Tick

#: Seconds without a sample after which an instance is gone, while its card goes on: a reading that fails for a few
#: seconds must not turn a divided card into a whole one.
_SAMPLE_HOLD_S: Final = 15.0
#: Likewise where an instance never brought a sample and is known by its identity alone.
_INFO_HOLD_S: Final = 3 * PERIODS_S[GpuMigInfo]


@dataclass(slots=True)
class _Instance:
    """When one instance was last heard of (monotonic seconds), and which one it is."""

    sample_s: float | None = None
    info_s: float | None = None
    mig_uuid: str | None = None

    def is_gone(self, card_s: float, hold_s: float) -> bool:
        """Return whether nothing more came although the card's records reached `card_s`."""
        if self.sample_s is not None:
            return card_s - self.sample_s > hold_s
        return self.info_s is not None and card_s - self.info_s > _INFO_HOLD_S


def card_of(key: GpuKey) -> GpuKey:
    """Return the key of the whole card."""
    return key._replace(gpu_i_id=None)


class MigLayout:
    """Follows the records and keeps the instances that exist, by card."""

    def __init__(self, sample_interval_s: float) -> None:
        self._hold_s = max(_SAMPLE_HOLD_S, 3 * sample_interval_s)
        self._cards: dict[GpuKey, dict[GpuKey, _Instance]] = {}

    def is_divided(self, card: GpuKey) -> bool:
        """Return whether work on this card runs on instances."""
        return bool(self._cards.get(card))

    def instances(self, card: GpuKey) -> tuple[GpuKey, ...]:
        """Return the instances of a card."""
        return tuple(self._cards.get(card, ()))

    def observe(self, tick: Tick) -> frozenset[GpuKey]:
        """Take a tick and return the instances that ended with it; one whose id was taken over is among them."""
        gone: set[GpuKey] = set()
        heard: set[GpuKey] = set()
        listed: set[GpuKey] = set()
        card_s: dict[GpuKey, float] = {}
        for record in tick.records:
            if not isinstance(record, GpuSample | GpuSlowSample | GpuMigInfo):
                continue
            card = card_of(record.key)
            card_s[card] = max(card_s.get(card, record.monotonic_s), record.monotonic_s)
            if record.key.gpu_i_id is None:
                if isinstance(record, GpuSample) and _has_work_values(record):
                    listed.add(card)  # with the instances of this tick, that is without any: it is whole again
                continue
            heard.add(record.key)
            instance = self._cards.setdefault(card, {}).setdefault(record.key, _Instance())
            if not isinstance(record, GpuMigInfo):
                instance.sample_s = record.monotonic_s
                continue
            listed.add(card)
            if instance.mig_uuid is not None and instance.mig_uuid != record.mig_uuid:
                gone.add(record.key)
            instance.info_s, instance.mig_uuid = record.monotonic_s, record.mig_uuid
        for card, now_s in card_s.items():
            for key, instance in tuple(self._cards.get(card, {}).items()):
                if key not in heard and (card in listed or instance.is_gone(now_s, self._hold_s)):
                    del self._cards[card][key]
                    gone.add(key)
        return frozenset(gone)


def _has_work_values(sample: GpuSample) -> bool:
    """Return whether a card tells what only a whole card can: of a divided one the driver tells neither."""
    return sample.utilization_ratio is not None or sample.memory_used_bytes is not None
