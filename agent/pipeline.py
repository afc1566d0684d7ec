"""The one path from records to a snapshot, live and in replay: history, labels, detectors, accounts.

Not thread-safe: the caller holds a lock where several threads deliver.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final, TypeVar

from agent import __version__
from agent.accounts import Account
from agent.clock import Instant
from agent.devices import DeviceLimit
from agent.history import History
from agent.mig_layout import card_of
from agent.records import (
    PERIODS_S,
    DiskSample,
    FilesystemSample,
    GpuDirectStorageSample,
    GpuHealth,
    GpuInfo,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuOwners,
    GpuSample,
    GpuSlowSample,
    GpuState,
    GpuXids,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    NvswitchSxids,
    PressureSample,
    ProcessSample,
    Record,
    Tick,
)
from agent.samplers import SamplerStatus
from agent.xids import XIDS, XidCatalogue
from classifier.detectors import Detector, Learner
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.step_pace import StepPaces
from classifier.findings import FindingEvent, FindingTracker
from classifier.labeller import Labeller
from classifier.results import Assessment, Decision, KnowsCheckpoints
from exporters.snapshot import GpuView, ModelInfo, NodeSnapshot

#: What tells records of one type apart; the first that a type has.
_IDENTITIES: Final = (("key",), ("device", "port"), ("mountpoint",), ("pid",))

R = TypeVar("R", bound=Record)

#: Seconds between two judgements, live and in replay (DESIGN.md, Commands).
JUDGEMENT_PERIOD_S: Final = 5.0
#: A value older than this many of its periods is stale.
STALE_PERIODS: Final = 3.0
#: Seconds for which a source may bring nothing before the agent counts as not ready: one late run is no fault.
READY_AGE_S: Final = 15.0
#: XID codes of one GPU that are kept: those of its first record, the critical ones among them, then the first to come.
MAX_XIDS: Final = 64


@dataclass(frozen=True, slots=True)
class Judgement:
    """What one call of `Pipeline.judge` decided."""

    decisions: tuple[Decision, ...]
    events: tuple[FindingEvent, ...]


class Pipeline:
    """Takes ticks in the order of time, judges when told to, and hands out snapshots."""

    def __init__(
        self,
        *,
        labeller: Labeller,
        detectors: Sequence[Detector],
        baselines: PowerBaselines,
        paces: StepPaces | None = None,
        sample_interval_s: float = 1.0,
        facts_hold: bool = False,
        replay: bool = False,
        demo_notice: str | None = None,
        model: ModelInfo | None = None,
        xids: XidCatalogue = XIDS,
        periods_s: Mapping[type[Record], float] | None = None,
    ) -> None:
        """Build the path.

        `sample_interval_s` is the usual distance of two core samples of a GPU, above 1 s in slow foreign logs;
        `facts_hold` says that identity and limits are not repeated, as in such logs, and so never go stale;
        `periods_s` says which records come less often than by default.
        """
        self.history = History(sample_interval_s=sample_interval_s)
        self.findings = FindingTracker()
        self._labeller = labeller
        self._detectors = tuple(detectors)
        self._baselines = baselines
        self._paces = paces or StepPaces()
        slower = periods_s or {}
        self._periods_s = {kind: max(seconds, slower.get(kind, 0.0)) for kind, seconds in PERIODS_S.items()}
        self._sample_interval_s = max(sample_interval_s, self._periods_s[GpuSample])
        self._max_gap_s = STALE_PERIODS * self._sample_interval_s
        self._facts_hold = facts_hold
        self._replay = replay
        self._demo_notice = demo_notice
        self._model = model
        #: The newest record by type and subject.
        self._latest: dict[type[Record], dict[object, Record]] = {kind: {} for kind in PERIODS_S}
        self._accounts: dict[GpuKey, Account] = {}
        self._length_s = 0.0  # of a replay that has ended
        self._decisions: dict[GpuKey, Decision] = {}
        self._assessments: tuple[Assessment, ...] = ()
        self._devices = DeviceLimit()
        self._xid_actions = {row.code: row.action for row in xids.rows()}
        self._critical_xids = frozenset(xids.critical())

    @property
    def detectors(self) -> tuple[Detector, ...]:
        """Those that judge now."""
        return self._detectors

    @property
    def model(self) -> ModelInfo | None:
        """The model that labels now."""
        return self._model

    @property
    def shared(self) -> tuple[PowerBaselines, StepPaces]:
        """What the detectors share: baselines, and paces of steps."""
        return self._baselines, self._paces

    def judge_by(
        self, *, detectors: Sequence[Detector], labeller: Labeller | None = None, model: ModelInfo | None = None
    ) -> None:
        """Judge by these from now on; the history, the accounts and the findings that last stay.

        A new labeller begins its evidence where the history does.
        """
        self._detectors = tuple(detectors)
        if labeller is not None:
            self._labeller, self._model = labeller, model

    @property
    def learners(self) -> tuple[Learner, ...]:
        """Those whose knowledge outlives the agent."""
        return tuple(one for one in (self._baselines, *self._detectors) if isinstance(one, Learner))

    def ingest(self, tick: Tick) -> None:
        """Take the records of one tick."""
        self.history.ingest(tick)
        for record in tick.records:
            if isinstance(record, ProcessSample):
                continue  # no page shows them, and a host may start thousands
            latest, subject = self._latest[type(record)], _subject(record)
            latest[subject] = _merged_xids(latest.get(subject), record)

    def judge(self, now: Instant) -> Judgement:
        """Label every GPU, ask every detector, and book the time since the last call to the labels held then.

        A card that is divided has neither label nor assessment: its instances have them.
        """
        decisions = self._labeller.decide(now, self.history)
        self._decisions = {decision.key: decision for decision in decisions}
        self._baselines.update(now, self.history, self._decisions)
        self._paces.update(now, self.history)
        self._assessments = tuple(
            assessment
            for detector in self._detectors
            for assessment in detector.assess(now, self.history, self._decisions)
        )
        for key in (self._accounts.keys() | self.history.all_gpus.keys()) - self.history.gpus.keys():
            self._accounts.setdefault(key, Account(self._max_gap_s)).pause()
        for decision in decisions:
            self._book(now, decision.key)
            self._accounts[decision.key].workload = decision.workload
        return Judgement(decisions, self.findings.update(now, self._assessments))

    def settle(self, start_s: float, now: Instant) -> None:
        """Book the time since the last judgement, at the end of a replay that began at `start_s`."""
        for key in self._accounts.keys() & self.history.gpus.keys():
            self._book(now, key, is_final=True)
        self._length_s = now.monotonic_s - start_s

    def _book(self, now: Instant, key: GpuKey, *, is_final: bool = False) -> None:
        account = self._accounts.setdefault(key, Account(self._max_gap_s))
        account.book(now.monotonic_s, self.history.gpus[key], is_final=is_final)

    def workload_seconds(self, key: GpuKey) -> Mapping[str, float]:
        """Return the seconds by workload, all five words, since the first judgement of this GPU.

        At the end of a replay they sum to its length: what is left of a GPU that came late or went early is unknown.
        """
        return self._accounts[key].filled(self._length_s)

    def snapshot(
        self,
        now: Instant,
        *,
        samplers: Sequence[SamplerStatus] = (),
        gpus_expected: int | None = None,
        gpus_visible: int | None = None,
    ) -> NodeSnapshot:
        """Return the node as it is now; values older than three of their periods are left out."""
        return NodeSnapshot(
            built=now,
            replay=self._replay,
            gpus=tuple(self._view(now, key) for key in sorted(self.history.all_gpus, key=lambda key: key.order)),
            networks=self._devices.choose(NetworkSample, self._fresh(now, NetworkSample)),
            infiniband=self._devices.choose(InfinibandSample, self._fresh(now, InfinibandSample)),
            disks=self._devices.choose(DiskSample, self._fresh(now, DiskSample)),
            filesystems=self._devices.choose(FilesystemSample, self._fresh(now, FilesystemSample)),
            network_links=self._devices.more_of_chosen(NetworkLink, self._fresh(now, NetworkLink)),
            infiniband_ports=self._devices.more_of_chosen(InfinibandPort, self._fresh(now, InfinibandPort)),
            gpu_direct_storage=next(iter(self._fresh(now, GpuDirectStorageSample)), None),
            pressure=next(iter(self._fresh(now, PressureSample)), None),
            sxids=self._fresh(now, NvswitchSxids),
            assessments=self._assessments,
            checkpoints=tuple(
                status
                for detector in self._detectors
                if isinstance(detector, KnowsCheckpoints)
                for status in detector.checkpoints
            ),
            finding_totals=self.findings.totals,
            xid_actions=self._xid_actions,
            samplers=tuple(self._with_devices(status) for status in samplers),
            gpus_expected=gpus_expected,
            gpus_visible=gpus_visible,
            model=self._model,
            version=__version__,
            ready=self._is_ready(now, samplers),
            demo_notice=self._demo_notice,
        )

    def _view(self, now: Instant, key: GpuKey) -> GpuView:
        sample = self._get(now, GpuSample, key)
        newest = self._latest[GpuSample].get((key,))
        account = self._accounts.get(key)
        is_work = key in self.history.gpus
        state = self._state(now, key)
        # What a GPU said before it was lost or hung is not what it would say now, however young it is.
        answers = state not in ("lost", "hung")
        return GpuView(
            key=key,
            state=state,
            info=self._get(now, GpuInfo, key),
            sample=sample if answers else None,
            slow=self._get(now, GpuSlowSample, key) if answers else None,
            limits=self._get(now, GpuLimits, key) if answers else None,
            health=self._get(now, GpuHealth, key) if answers else None,
            xids=self._get(now, GpuXids, key),
            critical_xids=self._critical_xids,
            mig=self._get(now, GpuMigInfo, key),
            owners=self._get(now, GpuOwners, key),
            decision=self._decisions.get(key) if is_work else None,
            sample_wall_s=newest.wall_s if newest else None,
            workload_seconds=dict(account.seconds) if account and is_work else {},
            workload_energy_joules=(
                dict(account.energy_joules) if account and account.has_energy and is_work else None
            ),
            power_baseline_watts=self._baselines.watts(key) if is_work else {},
            training_step_seconds=self._step_seconds(now, key) if is_work and answers else None,
        )

    def _step_seconds(self, now: Instant, key: GpuKey) -> float | None:
        """Return the time of a training step: inference has a pace as well, and is no training."""
        decision = self._decisions.get(key)
        is_training = decision is not None and decision.workload == "training"
        return self._paces.step_seconds(key, now.monotonic_s) if is_training else None

    def _state(self, now: Instant, key: GpuKey) -> str | None:
        """Return the state of a card, for an instance too: only cards are asked for theirs."""
        card = card_of(key)
        state = self._get(now, GpuState, card)
        if state is not None:
            return state.state
        # Foreign logs hold no state: a GPU that brings samples is ok.
        has_samples = (self._get(now, GpuSample, key) or self._get(now, GpuSample, card)) is not None
        return "ok" if has_samples and (card,) not in self._latest[GpuState] else None

    def _is_ready(self, now: Instant, samplers: Sequence[SamplerStatus]) -> bool:
        """Return whether a source is read, and none that ever was has stopped; GPUs count as one of them."""
        if not samplers:
            return any(self._latest.values())
        age_s = max(READY_AGE_S, STALE_PERIODS * self._sample_interval_s)
        sampled_s = [record.monotonic_s for record in self._latest[GpuSample].values()]
        if sampled_s and now.monotonic_s - max(sampled_s) > age_s:
            return False
        # A source that never worked is not on this machine. The wall clock may have been stepped either way.
        return any(status.success for status in samplers) and all(
            status.success or abs(now.wall_s - status.last_success_wall_s) <= age_s
            for status in samplers
            if status.last_success_wall_s is not None
        )

    def _with_devices(self, status: SamplerStatus) -> SamplerStatus:
        more = self._devices.errors(status.name)
        return dataclasses.replace(status, errors={**status.errors, **more}) if more else status

    def _get(self, now: Instant, kind: type[R], key: GpuKey) -> R | None:
        record = self._latest[kind].get((key,))
        return record if isinstance(record, kind) and self._is_fresh(now, record) else None

    def _fresh(self, now: Instant, kind: type[R]) -> tuple[R, ...]:
        """Return the newest records of a kind that are not stale; what is stale is forgotten."""
        latest = self._latest[kind]
        for subject in [subject for subject, record in latest.items() if not self._is_fresh(now, record)]:
            del latest[subject]
        return tuple(record for record in latest.values() if isinstance(record, kind))

    def _is_fresh(self, now: Instant, record: Record) -> bool:
        if self._facts_hold and isinstance(record, GpuInfo | GpuLimits | GpuMigInfo):
            return True
        period = max(self._periods_s[type(record)], self._sample_interval_s)
        return now.monotonic_s - record.monotonic_s <= STALE_PERIODS * period


def _subject(record: Record) -> object:
    """Identity of what a record describes, within its type."""
    for names in _IDENTITIES:
        if names[0] in record.__dataclass_fields__:
            return tuple(getattr(record, name, None) for name in names)
    return ()  # there is one on the host


def _merged_xids(before: Record | None, record: Record) -> Record:
    """Return the counts of `record`, none of them below an earlier one: the agent counts, and counts do not fall."""
    if not isinstance(before, GpuXids) or not isinstance(record, GpuXids):
        return record
    totals = dict(before.totals)
    last_wall_s = dict(before.last_wall_s)
    for code, count in record.totals.items():
        if code in totals or len(totals) < MAX_XIDS:
            totals[code] = max(count, totals.get(code, 0))
    for code, wall_s in record.last_wall_s.items():
        if code in totals:
            last_wall_s[code] = max(wall_s, last_wall_s.get(code, wall_s))
    return dataclasses.replace(record, totals=totals, last_wall_s=last_wall_s)
