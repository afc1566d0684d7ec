"""The Prometheus page: the metric table rendered from a snapshot, at most once per snapshot and format.

A scrape touches no hardware: it takes the newest snapshot by reference and, mostly, bytes that are there already.
"""

from __future__ import annotations

import gzip
import math
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Final

from prometheus_client import CollectorRegistry, ProcessCollector
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.registry import Collector

from exporters.metric_def import MIG_LABEL, MetricDef
from exporters.metrics import METRICS
from exporters.snapshot import NodeSnapshot

TEXT: Final = "text/plain; version=0.0.4; charset=utf-8"
OPENMETRICS: Final = "application/openmetrics-text; version=1.0.0; charset=utf-8"

#: A full page of 100 kB: level 1 gives 8.9 kB in 0.26 ms, level 3 8.7 kB in 0.31 ms, level 6 7.9 kB in 0.77 ms.
_GZIP_LEVEL: Final = 3


class SnapshotCollector(Collector):
    """A prometheus_client collector over one snapshot."""

    def __init__(self, snapshot: NodeSnapshot, rows: Iterable[MetricDef] = METRICS) -> None:
        self._snapshot = snapshot
        self._rows = tuple(rows)

    def collect(self) -> Iterator[Metric]:
        """Yield every family that has a series, in the order of the table."""
        for row in self._rows:
            family = Metric(row.full_name.removesuffix("_total"), row.help, row.kind, row.unit)
            for labels, number in series_of(row, self._snapshot).items():
                family.add_sample(row.full_name, dict(labels), number)
            if family.samples:
                yield family


def series_of(row: MetricDef, snapshot: NodeSnapshot) -> Mapping[tuple[tuple[str, str], ...], float]:
    """Return the series of one family by their labels: no None, no NaN, no label set twice (the first one stays)."""
    series: dict[tuple[tuple[str, str], ...], float] = {}
    for values, number in row.values(snapshot):
        if number is None or not math.isfinite(number):
            continue
        pairs = zip(row.labels, values, strict=True)
        labels = tuple((name, _printable(value)) for name, value in pairs if value or name != MIG_LABEL)
        series.setdefault(labels, float(number))
    return series


def _printable(value: str) -> str:
    """Return a label value that UTF-8 can hold: a name that was no UTF-8 in the kernel keeps its bytes as escapes."""
    return value if value.isascii() else value.encode("utf-8", "backslashreplace").decode("utf-8")


def negotiate(accept: str | None) -> str:
    """Return the content type to answer an Accept header with: OpenMetrics where it is preferred, else text."""
    openmetrics = text = anything = 0.0
    for part in (accept or "").split(","):
        media, _, parameters = part.partition(";")
        quality = _quality(parameters)
        name = media.strip().lower()
        if name == "application/openmetrics-text" and _parameter(parameters, "version") in {None, "1.0.0"}:
            openmetrics = max(openmetrics, quality)
        elif name in {"text/plain", "text/*"}:
            text = max(text, quality)
        elif name == "*/*":
            anything = max(anything, quality)
    return OPENMETRICS if openmetrics > 0 and openmetrics >= max(text, anything) else TEXT


def accepts_gzip(accept_encoding: str | None) -> bool:
    """Return whether an Accept-Encoding header admits gzip; `gzip;q=0` refuses it."""
    qualities: dict[str, float] = {}
    for part in (accept_encoding or "").split(","):
        coding, _, parameters = part.partition(";")
        qualities[coding.strip().lower()] = _quality(parameters)
    return qualities.get("gzip", qualities.get("*", 0.0)) > 0


def _parameter(parameters: str, name: str) -> str | None:
    for parameter in parameters.split(";"):
        key, _, value = parameter.partition("=")
        if key.strip().lower() == name:
            return value.strip().strip('"')
    return None


def _quality(parameters: str) -> float:
    """Return the q parameter, 1 where there is none or it is unreadable."""
    try:
        quality = float(_parameter(parameters, "q") or 1)
    except ValueError:
        return 1.0
    return quality if 0 <= quality <= 1 else 1.0


@dataclass(slots=True)
class _Built:
    """What was rendered of one snapshot so far, by content type and coding."""

    snapshot: NodeSnapshot
    pages: dict[tuple[str, bool], bytes] = field(default_factory=dict)


class PrometheusPage:
    """The bytes of /metrics."""

    def __init__(self, get_snapshot: Callable[[], NodeSnapshot | None], *, own_process: bool = True) -> None:
        """Serve the snapshot that `get_snapshot` returns; `own_process` adds process_* (not for equal bytes)."""
        self._get_snapshot = get_snapshot
        self._own_process = own_process
        self._lock = threading.Lock()
        self._built: _Built | None = None

    def render(self, content_type: str = TEXT, *, gzipped: bool = False) -> bytes | None:
        """Return the page of the newest snapshot; None before the first one."""
        snapshot = self._get_snapshot()
        if snapshot is None:
            return None
        built = self._built
        page = built.pages.get((content_type, gzipped)) if built is not None and built.snapshot is snapshot else None
        # The lock is for building alone: two scrapers that come together build once.
        return page if page is not None else self._build(snapshot, content_type, gzipped=gzipped)

    def text(self) -> bytes:
        """Return the page in text format, empty before the first snapshot."""
        return self.render(TEXT) or b""

    def _build(self, snapshot: NodeSnapshot, content_type: str, *, gzipped: bool) -> bytes:
        with self._lock:
            if self._built is None or self._built.snapshot is not snapshot:
                self._built = _Built(snapshot)
            pages = self._built.pages
            if (content_type, False) not in pages:
                pages[content_type, False] = self._encode(snapshot, content_type)
            if gzipped and (content_type, True) not in pages:
                pages[content_type, True] = gzip.compress(pages[content_type, False], _GZIP_LEVEL, mtime=0)
            return pages[content_type, gzipped]

    def _encode(self, snapshot: NodeSnapshot, content_type: str) -> bytes:
        registry = CollectorRegistry(auto_describe=False)
        registry.register(SnapshotCollector(snapshot))
        if self._own_process:
            ProcessCollector(registry=registry)
        if content_type == OPENMETRICS:
            page: bytes = generate_openmetrics(registry)  # type: ignore[no-untyped-call]  # untyped in the library
            return page
        return generate_text(registry)
