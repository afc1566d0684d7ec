"""Families of series as Prometheus' text format and OpenMetrics.

prometheus_client renders the same, in three to five times the time of this loop: it escapes names character by
character, and every name here is fixed. Its parsers are the judges in the tests.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Final

from exporters.metric_def import MIG_LABEL, MetricDef
from exporters.snapshot import NodeSnapshot

#: Whole numbers below this are written without a fraction; all of them are exact in a double.
_WHOLE_BELOW: Final = 1e15
#: Characters of a label value. A longer one ends in a digest of the whole, so that two that begin alike stay apart.
MAX_LABEL_LENGTH: Final = 256
_DIGEST_BYTES: Final = 8


@dataclass(frozen=True, slots=True, kw_only=True)
class Family:
    """One family with its series: values by label values, in the order of `labels`."""

    name: str  # of the samples: with _total for a counter
    kind: str  # gauge or counter
    unit: str
    help: str
    labels: tuple[str, ...]
    series: Mapping[tuple[str, ...], float]
    leaves_out_empty: bool = False  # labels without a value are not there; else the MIG label alone


def series_of(row: MetricDef, snapshot: NodeSnapshot) -> dict[tuple[str, ...], float]:
    """Return the series of a row by their label values: no None, no NaN, no label set twice (the first one stays)."""
    series: dict[tuple[str, ...], float] = {}
    for values, number in row.values(snapshot):
        if number is not None and math.isfinite(number):
            series.setdefault(tuple(map(label_value, values)), float(number))
    return series


def label_value(text: str) -> str:
    """Return `text` as a label can hold it: valid Unicode, at most MAX_LABEL_LENGTH characters.

    A name that was no UTF-8 in the kernel keeps its bytes as escapes.
    """
    if not text.isascii():
        text = text.encode("utf-8", "backslashreplace").decode("utf-8")
    if len(text) <= MAX_LABEL_LENGTH:
        return text
    digest = hashlib.blake2b(text.encode("utf-8"), digest_size=_DIGEST_BYTES).hexdigest()
    return f"{text[: MAX_LABEL_LENGTH - len(digest) - 1]}~{digest}"


def families_of(rows: Iterable[MetricDef], snapshot: NodeSnapshot) -> list[Family]:
    """Return the families that have a series, in the order of the table."""
    found = ((row, series_of(row, snapshot)) for row in rows)
    return [
        Family(
            name=row.full_name,
            kind=row.kind,
            unit=row.unit,
            help=row.help,
            labels=row.labels,
            series=series,
            leaves_out_empty=row.leaves_out_empty,
        )
        for row, series in found
        if series
    ]


def render(families: Iterable[Family], *, openmetrics: bool) -> bytes:
    """Return a page; both formats hold the same samples."""
    lines: list[str] = []
    for family in families:
        name, kind = family.name, family.kind
        if openmetrics and kind == "counter":
            # OpenMetrics has no counter without _total: one under another's name keeps the name.
            name, kind = (name.removesuffix("_total"), kind) if name.endswith("_total") else (name, "unknown")
        lines.append(f"# HELP {name} {_escape_help(family.help, openmetrics=openmetrics)}")
        lines.append(f"# TYPE {name} {kind}")
        if openmetrics and family.unit:
            lines.append(f"# UNIT {name} {family.unit}")
        lines += [
            f"{family.name}{_label_text(family, values)} {_number_text(number)}"
            for values, number in family.series.items()
        ]
    if openmetrics:
        lines.append("# EOF")
    return ("\n".join(lines) + "\n").encode("utf-8")


def _label_text(family: Family, values: tuple[str, ...]) -> str:
    """Return `{name="value",...}`; a whole card has no MIG label at all, any other label may be empty."""
    names = family.labels
    if not names:
        return ""
    if family.leaves_out_empty:
        return _sparse_label_text(names, values)
    if MIG_LABEL in names and not values[names.index(MIG_LABEL)]:
        position = names.index(MIG_LABEL)
        names, values = names[:position] + names[position + 1 :], values[:position] + values[position + 1 :]
    return _template(names) % tuple(map(_escape, values))


@lru_cache(maxsize=128)
def _sparse_label_text(names: tuple[str, ...], values: tuple[str, ...]) -> str:
    """Return the labels that have a value; families that leave out empty ones all have the same few sets of labels."""
    pairs = [(name, value) for name, value in zip(names, values, strict=True) if value]
    return _template(tuple(name for name, _ in pairs)) % tuple(_escape(value) for _, value in pairs) if pairs else ""


@lru_cache(maxsize=256)
def _template(names: tuple[str, ...]) -> str:
    return "{" + ",".join(f'{name}="%s"' for name in names) + "}"


@lru_cache(maxsize=4096)
def _escape(value: str) -> str:
    return value.replace("\\", r"\\").replace("\n", r"\n").replace('"', r"\"")


def _escape_help(text: str, *, openmetrics: bool) -> str:
    escaped = text.replace("\\", r"\\").replace("\n", r"\n")
    return escaped.replace('"', r"\"") if openmetrics else escaped


def _number_text(number: float) -> str:
    """Return the shortest text that reads back as the same double."""
    return str(int(number)) if abs(number) < _WHOLE_BELOW and number.is_integer() else repr(number)
