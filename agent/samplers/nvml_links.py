"""NVLink of one GPU: bytes and errors, summed over its links by whatever way the board offers.

Asked for first is the driver's own sum (the default scope is link 0 alone). Where a driver refuses that scope the links
are read one by one; boards with NVLink 5 have other fields for it. A sum misses no link that it held before: it would
look like a counter that falls.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Final

from agent.samplers import nvml_binding as nvml
from agent.samplers import nvml_fields as ids
from agent.samplers.nvml_calls import Calls, value_of

_KIBIBYTE: Final = 1024
_MOST_LINKS: Final = 64
#: Links that are tried on a board that does not tell their number; those that are not there say so once.
_ASSUMED_LINKS: Final = 18
#: Kinds by counter of nvmlDeviceGetNvLinkErrorCounter.
_COUNTERS: Final = {"replay": (0,), "recovery": (1,), "crc": (2, 3)}
_TOTALS: Final = {
    "crc": (ids.NVLINK_CRC_FLIT_ERRORS, ids.NVLINK_CRC_DATA_ERRORS),
    "replay": (ids.NVLINK_REPLAY_ERRORS,),
    "recovery": (ids.NVLINK_RECOVERY_ERRORS,),
}
#: NVLink 5 counts no replays: it corrects errors forward, and what it sends again is no error of its own.
_NVLINK5_ERRORS: Final = {"crc": ids.NVLINK5_RECEIVE_ERRORS, "recovery": ids.NVLINK5_RECOVERIES}
#: What NVLink 5 counts beside these.
_NVLINK5_MORE: Final = {
    "integrity": ids.NVLINK5_INTEGRITY_ERRORS,
    "failed recovery": ids.NVLINK5_FAILED_RECOVERIES,
    "effective": ids.NVLINK5_EFFECTIVE_ERRORS,
}


class Links:
    """The links of one GPU. Used by one thread at a time."""

    def __init__(self, calls: Calls) -> None:
        self._calls = calls
        self._links: int | None = None  # asked for only where links are read one by one
        self.counts_bytes = True  # False once every way to read them was tried in vain

    def transmitted_and_received(self) -> tuple[int | None, int | None]:
        """Return the bytes since the driver was loaded."""
        if not self.counts_bytes:
            return None, None
        found = self._calls.fields("NVLink fields", (ids.NVLINK_TRANSMIT, ids.NVLINK_RECEIVE))
        sums = []
        for field, newer in ((ids.NVLINK_TRANSMIT, ids.NVLINK5_TRANSMIT), (ids.NVLINK_RECEIVE, ids.NVLINK5_RECEIVE)):
            if field in found or self._calls.offers_field(field):
                sums.append(self._kibibytes(value_of(found.get(field)), found.get(field)))
                continue
            kibibytes = self._sum(self._each(field[0]))
            sums.append(self._calls.count(kibibytes, _KIBIBYTE) if kibibytes is not None else self._count_of(newer))
        if sums == [None, None]:
            fields = (ids.NVLINK_TRANSMIT[0], ids.NVLINK_RECEIVE[0], ids.NVLINK5_TRANSMIT, ids.NVLINK5_RECEIVE)
            ways = [ids.NVLINK_TRANSMIT, ids.NVLINK_RECEIVE, *(way for field in fields for way in self._each(field))]
            self.counts_bytes = any(self._calls.offers_field(way) for way in ways)
        return sums[0], sums[1]

    def errors(self) -> dict[str, int | None]:
        """Return the errors since the driver was loaded, by kind."""
        fields = [field for kind in _TOTALS.values() for field in kind]
        found = self._calls.fields("NVLink error fields", fields)
        errors = {kind: self._errors_of(kind, totals, found) for kind, totals in _TOTALS.items()}
        # Where the links have totals they are older than version 5.
        is_older = any(field in found for field in fields)
        return errors | {kind: None if is_older else self._count_of(field) for kind, field in _NVLINK5_MORE.items()}

    def _errors_of(
        self, kind: str, totals: Sequence[nvml.FieldId], found: dict[nvml.FieldId, nvml.FieldReading]
    ) -> int | None:
        offered = [field for field in totals if self._calls.offers_field(field)]
        if offered:
            values = [self._calls.count(value_of(found.get(field))) for field in offered]
            return None if None in values else sum(value for value in values if value is not None)
        newer = self._sum(self._each(_NVLINK5_ERRORS[kind])) if kind in _NVLINK5_ERRORS else None
        return self._calls.count(newer) if newer is not None else self._errors_by_link(kind)

    def _errors_by_link(self, kind: str) -> int | None:
        total: int | None = None
        for link in range(self._link_count()):
            for counter in _COUNTERS[kind]:
                name = f"NVLink {kind} {link} {counter}"
                if not self._calls.offers(name):
                    continue
                value = self._calls.read(name, partial(nvml.nvlink_errors, link=link, counter=counter))
                if value is not None:
                    total = (total or 0) + value
                elif self._calls.offers(name):
                    return None
        return total

    def _count_of(self, field: int) -> int | None:
        return self._calls.count(self._sum(self._each(field)))

    def _kibibytes(self, value: float | None, reading: nvml.FieldReading | None) -> int | None:
        if reading is None or reading.bits < 64:
            return None
        return self._calls.count(value, _KIBIBYTE)

    def _each(self, field: int) -> list[nvml.FieldId]:
        return [(field, link) for link in range(self._link_count())]

    def _link_count(self) -> int:
        if self._links is None:
            count = value_of(self._calls.fields("NVLink count", (ids.NVLINK_COUNT,)).get(ids.NVLINK_COUNT))
            self._links = int(count) if count is not None and 0 <= count <= _MOST_LINKS else _ASSUMED_LINKS
        return self._links

    def _sum(self, entries: Sequence[nvml.FieldId]) -> float | None:
        """Return the sum of one field over the links that have it, None where one of them could not be read."""
        asked = [entry for entry in entries if self._calls.offers_field(entry)]
        if not asked:
            return None
        found = self._calls.fields("NVLink fields by link", asked)
        offered = [entry for entry in asked if self._calls.offers_field(entry)]
        if not offered or any(entry not in found for entry in offered):
            return None
        return sum(value_of(found[entry]) or 0 for entry in offered)
