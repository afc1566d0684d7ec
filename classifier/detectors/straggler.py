"""straggler: one GPU of a job holds the others up.

Looks at GPUs that work together (`work_groups`) every half minute, and at the minute before. A straggler has, for two
minutes, a clock below 0.93 of the median of its peers while all of them work, or SM activity above theirs by 15 points
or by a quarter while they wait in collectives: it computes when they spin. More activity that is more work (tensor or
DRAM activity higher as well, as in the stages of a pipeline) is none. Software power capping is normal: healthy boards
at their power limit differ by 8 to 16 % in clock. So a low clock counts where the driver gives another reason, or where
it fell: against the peers', which it had about reached in the half hour before, and against its own of then, while the
board draws less than its limit, and while the peers wait, as far as SM activity is measured. Peers whose clock is lower
let a GPU look slow or fast without any change of its own, and without waiting peers nobody is held up: replicas of a
server, or ranks with unequal load. Where power is not measured, as in a guest with a virtual GPU, only a clock lower
than power limits explain counts. One that was low since it was first seen may be locked by the site.

Where it shows, the cause is named: throttling by heat or power brake, a lower power limit, a PCIe link that is narrower
or slower than those of the peers, memory that waits for a row remap or has errors, NVLink errors, or the clock alone.
Cannot see: GPUs on other nodes, and GPUs whose clock and SM activity are not measured.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import median
from typing import Final

import numpy as np

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuHealth, GpuKey
from classifier.config_checks import require
from classifier.detectors.card_watch import Answers
from classifier.detectors.channels import aligned, is_fresh
from classifier.detectors.step_pace import StepPaces
from classifier.detectors.work_groups import work_groups
from classifier.results import Assessment, Decision

#: Counters of GpuHealth that say which part is at fault, by cause.
_ERRORS: Final = {
    "hbm": ("ecc_uncorrected_volatile_total", "ecc_corrected_volatile_total"),
    "link_errors": (
        "nvlink_crc_errors_total",
        "nvlink_replay_errors_total",
        "nvlink_recovery_errors_total",
        "pcie_replays_total",
    ),
}
#: Looks at a clock that are remembered, half an hour, and the fewest that say what it was: programs load first.
_LOOKS: Final = 60
_LEAST_LOOKS: Final = 8
#: So many of the looks before may have been lower: a low one now and then is noise.
_LOW_QUANTILE: Final = 0.1


@dataclass(frozen=True, slots=True, kw_only=True)
class StragglerConfig:
    """When one GPU counts as holding up the others."""

    enabled: bool = True
    #: Time between two looks.
    judge_seconds: float = 30.0
    #: Length of the time that is looked at.
    window_seconds: float = 60.0
    #: How long it has to be so.
    confirm_seconds: float = 120.0
    #: A clock below this share of the median of the peers' clocks is low.
    clock_ratio: float = 0.93
    #: A GPU that ran at this share of its peers' clock, median of half an hour, was not locked; its clock has fallen.
    same_clock_ratio: float = 0.96
    #: A fall to this share of the peers' clock is more than power limits explain, where power is not measured.
    blind_clock_ratio: float = 0.84
    #: Power above this share of the limit, in a twentieth of the samples, explains the clock: boards differ there.
    at_limit_ratio: float = 0.95
    #: SM activity above that of the peers by this much says that they wait for a GPU with a low clock.
    waiting_margin_ratio: float = 0.03
    #: SM activity above the median of the peers by more than this is high ...
    busy_margin_ratio: float = 0.15
    #: (or by this factor, and at least half of the margin) ...
    busy_factor: float = 1.25
    #: ... unless tensor or DRAM activity is higher by this factor as well: then it has more work.
    same_work_factor: float = 1.10
    #: Samples below this utilisation say nothing about clocks.
    work_utilization_ratio: float = 0.5
    #: Share of samples above it that all GPUs of the group need.
    work_share_ratio: float = 0.5
    #: Throttled for this share of the time is the cause.
    throttled_share_ratio: float = 0.05
    #: A power limit below this share of the peers' is the cause.
    power_limit_ratio: float = 0.97

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(0 < self.clock_ratio < 1, "clock_ratio", self.clock_ratio, "between 0 and 1")
        require(self.busy_margin_ratio > 0, "busy_margin_ratio", self.busy_margin_ratio, "above 0")
        require(self.busy_factor > 1, "busy_factor", self.busy_factor, "above 1")
        require(self.judge_seconds > 0, "judge_seconds", self.judge_seconds, "above 0")
        is_long = self.window_seconds >= 30
        require(is_long, "window_seconds", self.window_seconds, "at least 30")


@dataclass(frozen=True, slots=True)
class _View:
    """What one GPU did in the window, means over its working samples; None where it is not measured."""

    gpu: GpuHistory
    clock_hertz: float | None
    sm_ratio: float | None
    tensor_ratio: float | None
    dram_ratio: float | None
    throttled_ratio: float | None
    watts: float | None
    high_watts: float | None  # a twentieth of the samples are above


@dataclass(frozen=True, slots=True)
class _Sign:
    """How a GPU stands out."""

    reason: str  # clock or busy
    value: float
    peers: float


@dataclass(slots=True)
class _Watch:
    since_s: float | None = None  # since when it stands out
    compared_s: float = float("-inf")  # when it last had peers
    severity: int = 0
    #: Its clock against that of its peers, look by look; a low one is noted once it is over.
    ratios: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))
    clocks: deque[float] = field(default_factory=lambda: deque(maxlen=_LOOKS))  # its own, in Hz, likewise
    health: GpuHealth | None = None  # when it began, or of half an hour ago
    health_s: float = field(default=float("-inf"))


class StragglerDetector:
    """Says for every GPU that works with others whether it holds them up."""

    anomalies: tuple[str, ...] = ("straggler",)

    def __init__(self, config: StragglerConfig, paces: StepPaces) -> None:
        self._config = config
        self._paces = paces
        self._watches: dict[GpuKey, _Watch] = {}
        self._answers = Answers(config.judge_seconds)

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment for each GPU that works with others and has a clock or SM activity."""
        return self._answers.of(now, history, lambda: self._look(now, history))

    def _look(self, now: Instant, history: History) -> tuple[Assessment, ...]:
        self._paces.update(now, history)
        for gone in self._watches.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._watches[gone]
        views = {key: view for key, gpu in history.gpus.items() if (view := self._view(gpu, now.monotonic_s))}
        found: list[Assessment] = []
        for group in work_groups([view.gpu for view in views.values()], self._paces, now.monotonic_s, 300.0):
            members = [views[gpu.key] for gpu in group]
            found += self._judge_group(now, members, history)
        # A GPU that stood out and cannot be compared any more keeps what was said, unless it stopped working.
        said = {assessment.key for assessment in found}
        for key, watch in self._watches.items():
            if key not in said and key not in views:
                if watch.severity:
                    found.append(Assessment(anomaly="straggler", scope="gpu", severity=0, key=key))
                watch.since_s, watch.severity = None, 0
        return tuple(found)

    def _view(self, gpu: GpuHistory, now_s: float) -> _View | None:
        """Return what one GPU did of late; None where it did not work."""
        config = self._config
        use = gpu.series("utilization_ratio", now_s, config.window_seconds)
        if use.size < 4 or not is_fresh(gpu, now_s, 5.0) or gpu.state != "ok":
            return None
        works = use.values >= config.work_utilization_ratio
        if float(works.mean()) < config.work_share_ratio:
            return None

        def mean(channel: str, *, of_work: bool = True) -> float | None:
            if not gpu.has(channel):
                return None
            values = aligned(gpu, channel, use.times, now_s, config.window_seconds)
            values = values[works & np.isfinite(values)] if of_work else values[np.isfinite(values)]
            return float(values.mean()) if values.size else None

        return _View(
            gpu=gpu,
            clock_hertz=mean("sm_clock_hertz"),
            sm_ratio=mean("sm_active_ratio", of_work=False),
            tensor_ratio=mean("tensor_active_ratio", of_work=False),
            dram_ratio=mean("dram_active_ratio", of_work=False),
            throttled_ratio=mean("throttled"),
            watts=mean("power_watts", of_work=False),
            high_watts=_high(gpu, now_s, config.window_seconds),
        )

    def _judge_group(self, now: Instant, members: Sequence[_View], history: History) -> list[Assessment]:
        found = []
        signs = [self._sign(view, [other for other in members if other is not view], history) for view in members]
        # Half of a group that stands out is a group that differs, and nobody's peer.
        are_odd = sum(sign is not None for sign in signs) * 2 < max(len(members), 3)
        for view, sign in zip(members, signs, strict=True):
            if view.clock_hertz is None and view.sm_ratio is None:
                continue
            key = view.gpu.key
            watch = self._watches[key]
            self._note_health(watch, history.card(key), now.monotonic_s)
            if not watch.severity and now.monotonic_s - watch.compared_s > 2 * self._config.judge_seconds:
                watch.since_s = None  # what was not compared did not last
            watch.compared_s = now.monotonic_s
            if sign is None or not are_odd:
                self._note_clock(watch, view, [other for other in members if other is not view], now.monotonic_s)
                watch.since_s, watch.severity = None, 0
                found.append(Assessment(anomaly="straggler", scope="gpu", severity=0, key=key))
                continue
            if watch.since_s is None:
                # What is seen now was so for most of the window.
                watch.since_s = now.monotonic_s - self._config.window_seconds
            lasted_s = now.monotonic_s - watch.since_s
            watch.severity = 2 if lasted_s >= self._config.confirm_seconds else 0
            peers = [other for other in members if other is not view]
            found.append(self._describe(now, view, peers, sign, self._cause(view, peers, watch, history)))
        return found

    def _sign(self, view: _View, peers: Sequence[_View], history: History) -> _Sign | None:
        """Return how this GPU stands out from its peers; None where it does not."""
        config = self._config
        clock = _median([peer.clock_hertz for peer in peers])
        busy = _median([peer.sm_ratio for peer in peers])
        watch = self._watches.setdefault(view.gpu.key, _Watch())
        if view.clock_hertz is not None and clock is not None and view.clock_hertz < config.clock_ratio * clock:
            do_wait = view.sm_ratio is None or busy is None
            if view.sm_ratio is not None and busy is not None:
                # Peers that compute at full clock are done earlier by as much as the clock is lower.
                early = (1 - view.clock_hertz / clock) * view.sm_ratio
                do_wait = view.sm_ratio > busy + min(config.waiting_margin_ratio, early / 2)
            has_fallen = self._has_fallen(watch, view, clock) and not self._is_at_limit(view, history)
            if (has_fallen and do_wait) or self._clock_reason(view, peers, history) is not None:
                return _Sign("clock", view.clock_hertz, clock)
        if view.sm_ratio is None or busy is None:
            return None
        margin = min(config.busy_margin_ratio, max(config.busy_margin_ratio / 2, (config.busy_factor - 1) * busy))
        if view.sm_ratio <= busy + margin:
            return None
        works = (
            (view.tensor_ratio, [peer.tensor_ratio for peer in peers]),
            (view.dram_ratio, [peer.dram_ratio for peer in peers]),
        )
        measured = [(mine, theirs) for mine, others in works if mine is not None and (theirs := _median(others))]
        has_more_work = any(mine > config.same_work_factor * theirs for mine, theirs in measured)
        return _Sign("busy", view.sm_ratio, busy) if measured and not has_more_work else None

    def _has_fallen(self, watch: _Watch, view: _View, peers_hertz: float) -> bool:
        """Return whether the clock was that of the peers, and is low against that past and against its own."""
        if len(watch.ratios) < _LEAST_LOOKS or view.clock_hertz is None:
            return False
        config, usual, ratio = self._config, median(watch.ratios), view.clock_hertz / peers_hertz
        least = config.blind_clock_ratio if view.high_watts is None else config.clock_ratio
        # Clocks that waver have been low before.
        lowest = min(1.0, usual, float(np.quantile(watch.ratios, _LOW_QUANTILE)) / config.same_clock_ratio)
        is_below_own = view.clock_hertz < config.same_clock_ratio * median(watch.clocks)
        return usual >= config.same_clock_ratio and is_below_own and ratio < least * lowest

    def _is_at_limit(self, view: _View, history: History) -> bool:
        limit = _power_limit(history, view)
        if limit is None or view.high_watts is None:
            return False
        return view.high_watts >= self._config.at_limit_ratio * limit

    def _note_clock(self, watch: _Watch, view: _View, peers: Sequence[_View], now_s: float) -> None:
        clock = _median([peer.clock_hertz for peer in peers])
        if watch.since_s is not None:
            looks = int((now_s - watch.since_s) / max(self._config.judge_seconds, 1.0))
            watch.ratios.extend([self._config.clock_ratio] * min(looks, _LOOKS))
        if clock and view.clock_hertz is not None:
            watch.ratios.append(view.clock_hertz / clock)
            watch.clocks.append(view.clock_hertz)

    def _note_health(self, watch: _Watch, card: GpuHistory | None, now_s: float) -> None:
        """Keep the counters of when all was well, to tell which of them grew."""
        if card is None or card.health is None or watch.since_s is not None:
            return
        if now_s - watch.health_s >= 600.0:
            watch.health, watch.health_s = card.health, now_s

    def _describe(
        self, now: Instant, view: _View, peers: Sequence[_View], sign: _Sign, why: tuple[str, str]
    ) -> Assessment:
        key = view.gpu.key
        watch = self._watches[key]
        since_s = watch.since_s or now.monotonic_s
        lasted_s = now.monotonic_s - since_s
        cause, detail = why
        if sign.reason == "clock":
            what = f"runs at {sign.value / 1e6:.0f} MHz, its peers at {sign.peers / 1e6:.0f} MHz"
        else:
            shares = f"{100 * sign.value:.0f} % of the time, its peers {100 * sign.peers:.0f} %"
            what = f"computes {shares} with the same work"
        return Assessment(
            anomaly="straggler",
            scope="gpu",
            severity=watch.severity,
            key=key,
            since_monotonic_s=since_s,
            since_wall_s=now.wall_s - lasted_s,
            evidence={
                "cause": cause,
                "group_gpus": float(len(peers) + 1),
                "clock_hertz": view.clock_hertz,
                "peers_clock_hertz": _median([peer.clock_hertz for peer in peers]),
                "sm_active_ratio": view.sm_ratio,
                "peers_sm_active_ratio": _median([peer.sm_ratio for peer in peers]),
                "power_watts": view.watts,
                "peers_power_watts": _median([peer.watts for peer in peers]),
                "temperature_celsius": view.gpu.latest("temperature_celsius", now.monotonic_s, 60.0),
                "throttled_ratio": view.throttled_ratio,
            },
            action="look",
            summary=f"GPU {key.gpu} {what}, for {lasted_s:.0f} s; {detail}.",
            suspect=True,
        )

    def _clock_reason(self, view: _View, peers: Sequence[_View], history: History) -> tuple[str, str] | None:
        """Return what holds the clock down, as a word and as part of a sentence."""
        throttled = view.throttled_ratio or 0.0
        if throttled > self._config.throttled_share_ratio:
            return "thermal", f"it is throttled {100 * throttled:.0f} % of the time"
        limit = _power_limit(history, view)
        limits = _median([_power_limit(history, peer) for peer in peers])
        if limit is not None and limits is not None and limit < self._config.power_limit_ratio * limits:
            return "power_limit", f"its power limit is {limit:.0f} W, that of the others {limits:.0f} W"
        return None

    def _cause(self, view: _View, peers: Sequence[_View], watch: _Watch, history: History) -> tuple[str, str]:
        """Return the likeliest cause, likewise."""
        reason = self._clock_reason(view, peers, history)
        if reason is not None:
            return reason
        card = history.card(view.gpu.key)
        link = None if card is None else _slower_link(card, [history.card(peer.gpu.key) for peer in peers])
        if link is not None:
            return link
        health = card.health if card is not None else None
        grown = _grown(health, watch.health)
        if health is not None and (health.is_row_remap_pending or health.is_row_remap_failed):
            grown = "hbm"
        if grown is not None:
            return grown, f"{'its memory' if grown == 'hbm' else 'a link of it'} has errors that came since"
        clock = _median([peer.clock_hertz for peer in peers])
        if view.clock_hertz is not None and clock is not None and view.clock_hertz < self._config.clock_ratio * clock:
            return "clock", "the driver gives no reason for the clock"
        return "unknown", "nothing else stands out"


def _high(gpu: GpuHistory, now_s: float, seconds: float) -> float | None:
    values = gpu.series("power_watts", now_s, seconds).values
    return float(np.quantile(values, 0.95)) if values.size else None


def _power_limit(history: History, view: _View) -> float | None:
    card = history.card(view.gpu.key)
    return card.power_limit_watts if card is not None else None


def _slower_link(card: GpuHistory, others: Sequence[GpuHistory | None]) -> tuple[str, str] | None:
    """Return how the PCIe link of a card falls behind those of others."""
    for name, word in (("pcie_width", "{} lanes"), ("pcie_generation", "generation {}")):
        mine = getattr(card.limits, name, None)
        theirs = _median([getattr(other.limits, name, None) for other in others if other is not None])
        if mine is not None and theirs is not None and mine < theirs:
            return name, f"its PCIe link has {word.format(mine)}, those of the others {theirs:.0f}"
    return None


def _grown(health: GpuHealth | None, before: GpuHealth | None) -> str | None:
    """Return the cause whose counters grew."""
    if health is None or before is None:
        return None
    for cause, names in _ERRORS.items():
        for name in names:
            new, old = getattr(health, name), getattr(before, name)
            if new is not None and old is not None and new > old:
                return cause
    return None


def _median(values: Sequence[float | int | None]) -> float | None:
    known = [float(value) for value in values if value is not None]
    return median(known) if known else None
