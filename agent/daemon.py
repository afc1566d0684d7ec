"""The composition root of a live node: samplers, schedule, pipeline and web server, and the way they start and stop."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Final

from agent.alert_trial import TrialWatch
from agent.clock import Clock, Instant
from agent.composition import build_pipeline
from agent.config import Config
from agent.driver_state import DriverState, DriverStateFile
from agent.gpu_roster import GpuRoster
from agent.host import build_host
from agent.importers import Trace, open_trace
from agent.learned_state import SAVE_PERIOD_S, LearnedState
from agent.maintenance import READ_PERIOD_S, Maintenance, MaintenanceWatch
from agent.pipeline import JUDGEMENT_PERIOD_S, Pipeline
from agent.pod_resources.client import PodResources
from agent.records import GpuSlowSample, GpuXids, NvswitchSxids, Tick
from agent.reload import changes, in_force, new_detectors, new_judges
from agent.samplers import Sampler
from agent.samplers.demo import DemoSampler
from agent.samplers.nvml import NvmlSampler
from agent.samplers.nvml_events import NvmlEvents
from agent.samplers.pci import ExpectedGpus
from agent.samplers.xid import XidSampler
from agent.schedule import Schedule
from agent.serving import build_access, build_server, build_textfile, export_table
from agent.threads import share_memory
from exporters.prometheus import PrometheusPage
from exporters.snapshot import MaintenanceView, NodeSnapshot

log = logging.getLogger("warpwatch")

#: Seconds between two snapshots: what a scrape sees is at most this old.
SNAPSHOT_PERIOD_S: Final = 1.0
#: Seconds between two looks whether the web configuration, a certificate or a key is another one.
WEB_CONFIG_PERIOD_S: Final = 1.0
#: A snapshot older than this is not served as it is.
OLDEST_SNAPSHOT_S: Final = 5.0
_SNAPSHOT_WAIT_S: Final = 0.2
#: Snapshots and judgements that stood still for longer are a fault that only a new process mends.
STANDSTILL_S: Final = 30.0
#: Judgements come this long after the samplers of the same moment: with their readings, and not beside them.
_JUDGEMENT_AFTER_S: Final = 0.5
#: Stopping has to fit into two seconds, whatever a driver call is doing.
STOP_TIMEOUT_S: Final = 1.5


@dataclass(frozen=True, slots=True)
class Samplers:
    """The samplers of this node; at most one of `nvml` and `demo` is there."""

    all: tuple[Sampler, ...]
    expected: ExpectedGpus
    nvml: NvmlSampler | None = None
    demo: DemoSampler | None = None
    roster: GpuRoster | None = None  # where NVML is sampled
    pods: PodResources | None = None

    def start(self) -> None:
        """Start what runs beside the schedule."""
        if self.pods is not None:
            self.pods.start()

    def observed(self, deliver: Callable[[Tick], object]) -> Callable[[Tick], None]:
        """Return `deliver` for a schedule: the samplers of processes and owners hear what NVML's found before it."""

        def observe_and_deliver(tick: Tick) -> None:
            if self.roster is not None:
                self.roster.observe(tick)
            deliver(tick)

        return observe_and_deliver

    def gpu_counts(self, now: Instant) -> tuple[int | None, int | None]:
        """Return how many GPUs are expected and how many are visible; None where no sampler knows."""
        if self.nvml is not None:
            return self.expected.count(self.nvml.expected_gpus, now), self.nvml.visible_gpus
        if self.demo is not None:
            return self.demo.gpu_count, self.demo.gpu_count
        return None, None

    def close(self) -> None:
        """Release what the samplers hold; after the schedule's end."""
        if self.pods is not None:
            self.pods.close()


def build_samplers(config: Config, clock: Clock, demo: Trace | None = None) -> Samplers:
    """Return the samplers that the configuration asks for; `demo` is played in the place of NVML."""
    player = DemoSampler(demo, demo.header.interval_s) if demo else None
    nvml = roster = None
    chosen: list[Sampler] = [player] if player else []
    if config.samplers.nvml and player is None:
        # The thread that waits for events holds the library too, so the sampler tells it when to let go.
        events = NvmlEvents(clock)
        nvml = NvmlSampler(config.nvml, companions=(events,) if config.samplers.xid else ())
        roster = GpuRoster(config.nvml.record_periods_s()[GpuSlowSample])
        chosen.append(nvml)
        if config.samplers.xid:
            chosen.append(
                XidSampler(
                    nvml.addresses,
                    clock,
                    config.agent.kmsg,
                    config=config.xid,
                    events=events,
                    on_xid=nvml.refresh_limits,
                )
            )
    host = build_host(config, clock, roster)
    expected = ExpectedGpus(config.agent.sys_root, config.samplers.expected_gpus)
    return Samplers((*chosen, *host.samplers), expected, nvml, player, roster, host.pods)


class Daemon:
    """A running node. `start` returns once the port is open; samples arrive from then on."""

    def __init__(
        self,
        config: Config,
        clock: Clock,
        *,
        listen: str | None = None,
        demo: Path | None = None,
        on_fault: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Put the node together; `on_fault` is called with a reason when only a new process could go on sampling."""
        self._config = config
        self._clock = clock
        self._on_fault = on_fault
        self._lock = threading.Lock()
        self._samplers, self._pipeline, self.demo_notice = _build(config, clock, demo)
        self._snapshot: NodeSnapshot | None = None
        self._driver_state = DriverStateFile()
        self._release_requests = 0
        self._reload_failed = False
        #: When each of the two that make the agent one last came to its end.
        self._done_s = dict.fromkeys(("snapshot", "judgement"), clock.now().monotonic_s)
        self._schedule = Schedule(self._samplers.all, clock, self._samplers.observed(self._deliver))
        self._schedule.every(SNAPSHOT_PERIOD_S, "snapshot", self._take_snapshot)
        self._schedule.every(JUDGEMENT_PERIOD_S, "judgement", self._judge, after_s=_JUDGEMENT_AFTER_S)
        # What a demonstration shows is learned of no GPU of this host.
        learners = () if demo is not None else self._pipeline.learners
        self._learned = LearnedState(config.agent.state_directory, learners, clock, self._lock)
        self._schedule.every(SAVE_PERIOD_S, "learned state", self._learned.keep)
        self._maintenance = MaintenanceWatch(config.agent.state_directory, clock)
        self._schedule.every(READ_PERIOD_S, "maintenance", self._maintenance.read)
        self._trials = TrialWatch(config.agent.state_directory, clock)
        self._schedule.every(READ_PERIOD_S, "test alerts", self._trials.read)
        self._access = build_access(config)
        if self._access is not None:
            self._schedule.every(WEB_CONFIG_PERIOD_S, "web configuration", self._access.refresh)
        is_live = demo is None
        self._server = build_server(config, self.snapshot, is_live=is_live, listen=listen, access=self._access)
        self._textfile = build_textfile(config, self.snapshot, is_live=is_live)
        if self._textfile is not None:
            self._schedule.every(config.export.textfile_period_s, "textfile", self._textfile.write, after_s=2.0)

    @property
    def runtime_folder(self) -> Path:
        """Folder for the file with the process id."""
        return self._config.agent.runtime_folder

    @property
    def url(self) -> str:
        """Address of the landing page, once started."""
        return self._server.url

    def snapshot(self) -> NodeSnapshot | None:
        """Return the newest snapshot; None before the first.

        Where nobody took one of late, as after the end of the schedule, it is taken here, so that what went stale is
        absent; and where that is not possible either, nothing of a GPU is known and the node is not ready.
        """
        newest = self._snapshot
        now = self._clock.now()
        if newest is None or now.monotonic_s - newest.built.monotonic_s <= OLDEST_SNAPSHOT_S:
            return newest
        if self._lock.acquire(timeout=_SNAPSHOT_WAIT_S):
            try:
                return self._pipeline.snapshot(now, samplers=self._schedule.statuses())
            finally:
                self._lock.release()
        return NodeSnapshot(built=now, replay=newest.replay, version=newest.version, demo_notice=newest.demo_notice)

    def is_working(self) -> bool:
        """Return whether snapshots and judgements go on, as they do whatever the driver does."""
        return self._clock.now().monotonic_s - min(self._done_s.values()) <= STANDSTILL_S

    def release_driver(self) -> None:
        """Let go of the driver, so that an operator can reset a GPU or divide it; for a limited time."""
        if self._samplers.nvml is None:
            log.warning("there is no NVIDIA driver to release: this agent reads none")
            return
        limit_s = self._config.agent.driver_release_seconds
        self._samplers.nvml.release(limit_s)
        self._release_requests += 1
        log.warning("releasing the NVIDIA driver for %.0f s at most; warpwatch driver resume ends it", limit_s)

    def driver_state(self) -> DriverState:
        """Return whether the driver is held, by whom where it is to be released."""
        nvml, requests = self._samplers.nvml, self._release_requests
        if nvml is None:
            return DriverState(state="none")
        state = "held" if not nvml.is_held else "released" if nvml.is_released else "releasing"
        return DriverState(
            state=state,
            waits_for=nvml.waits_for,
            limit_s=self._config.agent.driver_release_seconds,
            requests=requests,
        )

    def reload(self, config: Config) -> tuple[str, ...]:
        """Take a configuration that was read again, and return the keys of it that wait for the next start.

        Raises UsageError where the bundle that it names does not fit; nothing has changed then.
        """
        before, after = self._config, in_force(self._config, config)
        changed = changes(before, config)
        model = self._pipeline.model
        judges = new_judges(before, after, None if model is None else model.sha256)
        with self._lock:
            detectors = new_detectors(before, after, self._pipeline, self._clock.now())
            self._pipeline.judge_by(detectors=detectors, labeller=judges.labeller, model=judges.model)
            self._learned.keep_for(self._pipeline.learners)
        self._config = after
        self._reload_failed = False
        log.info("the configuration was read again; changed: %s", ", ".join(changed.at_once) or "nothing")
        if judges.model is not None and judges.model != model:
            log.info("labels come from model %s now", judges.model.version)
        if changed.at_start:
            log.warning("these keys hold from the next start on: %s", ", ".join(changed.at_start))
        return changed.at_start

    def refuse_reload(self) -> None:
        """Show that a configuration could not be used; the one before goes on to hold."""
        self._reload_failed = True

    def resume_driver(self) -> None:
        """Take the driver up again."""
        if self._samplers.nvml is not None:
            self._samplers.nvml.resume()
            self._schedule.probe_now("nvml")
            self._schedule.probe_now("xid")
            log.info("taking the NVIDIA driver up again")

    def start(self) -> None:
        """Open the port, then start sampling; raises FaultError where the port cannot be had."""
        share_memory()
        self._server.start()
        self._learned.restore()
        self._samplers.start()
        self._schedule.start()

    def stop(self) -> None:
        """Stop sampling and serving and release the driver, within two seconds; what was learned is kept meanwhile."""
        with self._learned.kept_beside():
            self._schedule.stop(STOP_TIMEOUT_S)
        self._samplers.close()
        self._server.stop()
        if self._textfile is not None:
            self._textfile.remove()

    def _deliver(self, tick: Tick) -> None:
        with self._lock:
            self._pipeline.ingest(tick)
        # The first records are shown at once.
        if self._snapshot is None or not any(status.success for status in self._snapshot.samplers):
            self._take_snapshot()

    def _judge(self) -> None:
        with self._lock:
            judgement = self._pipeline.judge(self._clock.now())
        for event in judgement.events:
            log.warning("%s: %s (%s)", event.finding.anomaly, event.finding.summary, event.state)
        self._done_s["judgement"] = self._clock.now().monotonic_s

    def _tend_driver(self) -> None:
        """Pass on that only a new process helps; look each second whether a release of the driver is done or over."""
        nvml = self._samplers.nvml
        self._driver_state.say(self.driver_state())
        if nvml is None:
            return
        if nvml.wants_restart is not None:
            self._on_fault(nvml.wants_restart)
        if nvml.is_released or nvml.is_held:
            self._schedule.probe_now(nvml.name)

    def _take_snapshot(self) -> None:
        self._tend_driver()
        expected, visible = self._samplers.gpu_counts(self._clock.now())
        statuses = self._schedule.statuses()
        with self._lock:
            snapshot = self._pipeline.snapshot(
                self._clock.now(), samplers=statuses, gpus_expected=expected, gpus_visible=visible
            )
            is_refused = self._reload_failed or (self._access is not None and self._access.error is not None)
            snapshot = replace(snapshot, config_reload_successful=not is_refused)
            # It is no source of records, on which it would depend whether the node is ready.
            self._snapshot = replace(
                snapshot,
                samplers=(*snapshot.samplers, *self._learned.statuses()),
                test_alerts=self._trials.held(snapshot.built),
                maintenance=_maintenance_views(self._maintenance.held(snapshot.built), snapshot),
            )
        self._done_s["snapshot"] = snapshot.built.monotonic_s


def _maintenance_views(held: Sequence[Maintenance], snapshot: NodeSnapshot) -> tuple[MaintenanceView, ...]:
    """Return what is in maintenance, by the cards that are here."""
    cards = [view.key for view in snapshot.gpus if view.key.gpu_i_id is None]
    return tuple(
        MaintenanceView(
            keys=None if one.is_of_node else tuple(key for key in cards if one.names(key)),
            anomalies=one.anomalies,
            until_wall_s=one.expires_wall_s,
            reason=one.reason,
        )
        for one in held
    )


def run_once(config: Config, clock: Clock, demo: Path | None = None) -> bytes:
    """Sample every source once, without a schedule or a port, and return the page in Prometheus' text format."""
    samplers, pipeline, notice = _build(config, clock, demo)
    if notice:
        log.warning(notice)
    schedule = Schedule(samplers.all, clock, samplers.observed(pipeline.ingest))
    if samplers.pods is not None:
        samplers.pods.refresh()
    schedule.run_once()
    now = clock.now()
    pipeline.judge(now)
    expected, visible = samplers.gpu_counts(now)
    snapshot = pipeline.snapshot(now, samplers=schedule.statuses(), gpus_expected=expected, gpus_visible=visible)
    for sampler in samplers.all:
        sampler.close()
    table = export_table(config, is_live=demo is None)
    return PrometheusPage(lambda: snapshot, table=table).render() or b""


def _build(config: Config, clock: Clock, demo: Path | None) -> tuple[Samplers, Pipeline, str | None]:
    """Return samplers and pipeline, and what has to be said where `demo` is played; UsageError where it is no trace."""
    if demo is None:
        periods_s = {
            **config.nvml.record_periods_s(),
            GpuXids: config.xid.send_period_s,
            NvswitchSxids: config.xid.send_period_s,
        }
        pipeline = build_pipeline(config, sample_interval_s=config.nvml.period_s, periods_s=periods_s)
        return build_samplers(config, clock), pipeline, None
    trace = open_trace(demo, log.warning)
    notice = (
        f"DEMO: the GPUs shown are played from the {trace.header.provenance} trace {demo.name}; "
        "network and disks are this host's"
    )
    pipeline = build_pipeline(
        config, sample_interval_s=trace.header.interval_s, facts_hold=True, replay=True, demo_notice=notice
    )
    return build_samplers(config, clock, trace), pipeline, notice


def bundled_demo() -> Path:
    """Return the simulated trace that ships with the package."""
    return next(iter(sorted((Path(__file__).parent / "demo").glob("simulated_*.jsonl.gz"))))
