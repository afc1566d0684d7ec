"""Series for promtool from traces: a trace is played by the code of a live node and scraped each 15 s.

What comes of it is the `input_series` of as many instances as a case has, each with GPUs of its own. The clock of a
case begins at 0, as promtool's does.
"""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path

from agent.clock import Instant
from agent.config import Config
from agent.importers import open_trace
from agent.pipeline import Pipeline
from agent.records import GpuKey, GpuOwners, GpuSample, Holder, Tick
from agent.replay import replay
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import build_detectors
from classifier.labeller import Labeller
from exporters.prometheus import PrometheusPage

ROOT = Path(__file__).resolve().parents[2]
TRACES = ROOT / "fixtures/traces/simulated"
RULES = sorted((ROOT / "exporters/rules").glob("*.rules.yml"))
SCRAPE_S = 15
OWNERS_S = 5.0
#: The value of a series at one scrape by the series as written; None where the agent did not answer.
Pages = list[Mapping[str, str] | None]


@dataclasses.dataclass(frozen=True, kw_only=True)
class Play:
    """A trace and how it is played; equal plays are made once."""

    trace: str
    #: Seconds of the trace, from and to, in their order: a part may come again, and counters then begin anew.
    parts: tuple[tuple[float, float], ...]
    job_key: str = ""
    checkpoint_interval_s: float | None = None
    #: When the agent starts again, with nothing learned; it does not answer for two scrapes.
    restart_s: float | None = None
    #: When a GPU is no longer seen, and which.
    gone_s: float = float("inf")
    gone_gpu: int | None = None


@functools.cache
def read_by_rules() -> frozenset[str]:
    """Return the names of the exported series that the shipped rules read."""
    text = "".join(path.read_text(encoding="utf-8") for path in RULES)
    return frozenset(re.findall(r"(?<![\w:/.-])warpwatch_[a-z_]+", text))


@functools.cache
def pages(play: Play) -> Pages:
    """Return what each scrape finds, from the first second on."""
    found: Pages = []
    ticks = list(_ticks(play))
    end_s = ticks[-1].monotonic_s
    restart_s = end_s + 1 if play.restart_s is None else play.restart_s
    for lives in (
        [tick for tick in ticks if tick.monotonic_s < restart_s],
        [tick for tick in ticks if tick.monotonic_s >= restart_s + 2 * SCRAPE_S],
    ):
        if lives:
            found += [None] * (int(lives[0].monotonic_s / SCRAPE_S) - len(found))
            found += _life(lives)
    return found


def _life(ticks: Sequence[Tick]) -> Iterator[Mapping[str, str]]:
    """Yield the page of each scrape of an agent that sees these ticks from its start to its end."""
    config = Config()
    baselines = PowerBaselines(config.detectors.baseline)
    pipeline = Pipeline(
        labeller=Labeller(None, config.labels),
        detectors=build_detectors(config.detectors, baselines),
        baselines=baselines,
    )
    page = PrometheusPage(lambda: pipeline.snapshot(now), own_process=False)
    due_s = SCRAPE_S * int(ticks[0].monotonic_s / SCRAPE_S)
    now = Instant(0.0, 0.0)
    for step in replay(iter(ticks), pipeline, 1.0):
        now = step.now
        while due_s <= now.monotonic_s:
            yield _parsed(page.render().decode())
            due_s += SCRAPE_S


def _parsed(text: str) -> Mapping[str, str]:
    lines = (line.rpartition(" ") for line in text.splitlines() if not line.startswith("#"))
    return {series: value for series, _, value in lines if series.partition("{")[0] in read_by_rules()}


def _ticks(play: Play) -> Iterator[Tick]:
    """Yield the ticks of the parts one after the other from 0 on, with the owner of every GPU beside."""
    trace = list(open_trace(TRACES / f"{play.trace}.jsonl.gz", lambda _: None))
    offset_s, owned_s = 0.0, float("-inf")
    for start_s, end_s in play.parts:
        offset_s -= start_s
        for tick in trace:
            if not start_s <= tick.monotonic_s < end_s:
                continue
            at_s = tick.monotonic_s + offset_s
            records = [
                dataclasses.replace(record, monotonic_s=at_s, wall_s=at_s)
                for record in tick.records
                if at_s < play.gone_s or not hasattr(record, "key") or record.key.gpu != play.gone_gpu
            ]
            if play.job_key and at_s - owned_s >= OWNERS_S:
                owned_s = at_s
                records += [_owners(play, record.key, at_s) for record in records if isinstance(record, GpuSample)]
            yield dataclasses.replace(tick, monotonic_s=at_s, wall_s=at_s, records=tuple(records))
        offset_s += end_s


def _owners(play: Play, key: GpuKey, at_s: float) -> GpuOwners:
    holder = Holder(
        play.job_key,
        scheduler="slurm",
        processes=1,
        declared_class="training",
        checkpoint_interval_seconds=play.checkpoint_interval_s,
    )
    return GpuOwners(monotonic_s=at_s, wall_s=at_s, key=key, holders=(holder,), holder_count=1)


def input_series(instances: Mapping[str, Play], dies: Mapping[str, float] | None = None) -> list[dict[str, str]]:
    """Return the series of all instances, by name, as promtool takes them.

    An instance that `dies` answers no scrape from then on; where a play ends before others, its last page stays.
    """
    length = max(len(pages(play)) for play in instances.values())
    made = []
    for name, play in instances.items():
        scrapes = [*pages(play), *[pages(play)[-1]] * (length - len(pages(play)))]
        first_lost = int((dies or {}).get(name, float("inf")) // SCRAPE_S) if name in (dies or {}) else length
        scrapes = [page if number < first_lost else None for number, page in enumerate(scrapes)]
        ups = [str(int(page is not None)) for page in scrapes]
        made.append({"series": f'up{{job="warpwatch",instance="{name}"}}', "values": " ".join(ups)})
        for series in dict.fromkeys(series for page in scrapes if page for series in page):
            values = [None if page is None else page.get(series) for page in scrapes]
            made.append({"series": _labelled(series, name), "values": " ".join(_notation(values))})
    return made


def _labelled(series: str, instance: str) -> str:
    """Return a series as Prometheus has it: with its target's labels, and GPUs that no other instance has."""
    name, _, labels = series.partition("{")
    labels = re.sub(r'(gpu="(\d+)"),uuid="[^"]*"', rf'\1,uuid="GPU-{instance}-\2"', labels.rstrip("}"))
    target = f'job="warpwatch",instance="{instance}"'
    return f"{name}{{{target},{labels}}}" if labels else f"{name}{{{target}}}"


def _notation(values: Sequence[str | None]) -> Iterator[str]:
    """Yield values in promtool's notation: a series that was there and is not is stale, not the last value for long."""
    before: str | None = None
    for value in values:
        yield value if value is not None else "_" if before is None else "stale"
        before = value
