"""missed_checkpoint: a job that wrote a checkpoint every so often does not, or writes too little, or for too long.

Sees bursts of writing (`checkpoint_bursts`) in the host's disks, file systems and network, in what the job's processes
write and in what leaves its GPUs over PCIe; takes those with a sign of the job for its checkpoints
(`checkpoint_streams`); learns their period, or takes the one the job file declares (`checkpoint_cadence`). Then

- late (warning): a quarter of the period after it was due, later where intervals vary;
- missed (critical): a whole period after that; a warning only, while the period is not sure, or was learned and neither
  labels nor steps say that the job trains (`checkpoint_work`), or nothing but what leaves the GPUs shows its saves;
- truncated (warning): less than half of the usual bytes, where sizes are alike;
- long (warning): a burst goes on for three times the usual length.

The clock of all this stands still while the job does, so that a stall is the finding of stalled_collective alone. A gap
in telemetry, or a restart of the agent, loses the phase and not the period: nothing is due before a whole period after
it. Other processes are another job, and none is its end; one whose GPUs are lost is out of sight. Nothing is learned of
GPUs that are idle most of the time: a server's requests come in bursts. A job that is labelled inference or other is
left out unless it declares training, and so is one of which no cadence is known: it may save on another node, or never.

Cannot see: checkpoints of less than 200 MB, where the agent may not read what processes write; periods under a minute,
whose bursts are one; a job whose writes are drowned in the traffic of others; a first checkpoint that never comes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Final

from agent.clock import Instant
from agent.history import History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors import monotonic_s_of, wall_s_of
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.channels import is_same_work
from classifier.detectors.checkpoint_bursts import HOST_SOURCES, JOB_SOURCES, Burst, BurstConfig, BurstTracker
from classifier.detectors.checkpoint_cadence import CadenceConfig
from classifier.detectors.checkpoint_finding import finding_of
from classifier.detectors.checkpoint_jobs import JobActivity, JobGpus, jobs_of, process_ids_of
from classifier.detectors.checkpoint_state import SavedJob, saved_jobs
from classifier.detectors.checkpoint_streams import ALL, INSIDE, NONE, STRONG, Stream
from classifier.detectors.checkpoint_watch import DEVICE, HostBursts, WatchedJob, note_begun
from classifier.detectors.checkpoint_work import JobWork, is_not_training
from classifier.detectors.host_io import counts_all_writes
from classifier.detectors.restored import process_starts, processes_state
from classifier.detectors.step_pace import StepPaces
from classifier.results import Assessment, CheckpointStatus, Decision

#: A checkpoint that takes long has the bytes of the others, about.
_LONG_BYTES_SHARE: Final = 1.25
#: How often sources are compared, beside each burst that ends.
_CHOOSE_S: Final = 60.0
#: How long a job without GPUs is remembered.
_FORGET_S: Final = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class MissedCheckpointConfig:
    """When checkpoints are late, missed, truncated or long."""

    enabled: bool = True
    #: A burst that goes on for this many times the usual length is long ...
    long_factor: float = 3.0
    #: ... where that is at least this much more.
    long_seconds: float = 60.0
    #: The least confidence in the period, 0..1, for a missed one to be critical.
    critical_confidence: float = 0.4
    #: A label inference or other with at least this probability leaves the job out.
    label_probability: float = 0.8
    #: Jobs that are watched at a time, and have series.
    most_jobs: int = 16
    bursts: BurstConfig = field(default_factory=BurstConfig)
    cadence: CadenceConfig = field(default_factory=CadenceConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.long_factor > 1, "long_factor", self.long_factor, "above 1")
        require(1 <= self.most_jobs <= 64, "most_jobs", self.most_jobs, "between 1 and 64: each has series of its own")
        is_share = 0 <= self.critical_confidence <= 1
        require(is_share, "critical_confidence", self.critical_confidence, "a share between 0 and 1")


class MissedCheckpointDetector:
    """Finds jobs whose checkpoints are late, missing, too small or too long."""

    anomalies: tuple[str, ...] = ("missed_checkpoint",)
    learner = "checkpoint_cadence"

    def __init__(
        self, config: MissedCheckpointConfig, baselines: PowerBaselines, paces: StepPaces | None = None
    ) -> None:
        self._config = config
        self._paces = paces
        self._baselines = baselines
        self._host = HostBursts({source: BurstTracker(config.bursts, source) for source in HOST_SOURCES})
        self._jobs: dict[str, WatchedJob] = {}
        self._saved: dict[str, SavedJob] = {}
        self._now: Instant | None = None

    @property
    def checkpoints(self) -> tuple[CheckpointStatus, ...]:
        """What is known of the checkpoints of each job with a cadence, as of the last call of `assess`."""
        return tuple(job.status(self._now) for job in self._jobs.values() if job.chosen is not None)

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return one assessment for each job whose cadence is known, and whose source is read."""
        self._now = now
        if self._paces is not None:
            self._paces.update(now, history)
        present = jobs_of(history, self._config.most_jobs)
        present = {key: gpus for key, gpus in present.items() if not self._has_ended(key, gpus)}
        for key, gpus in present.items():
            self._meet(key, gpus, now)
        closed = self._read(present, history, decisions, now.monotonic_s)
        self._attribute(closed, now, counts_all_writes(history.host, now.monotonic_s, self._config.bursts.gap_seconds))
        assessments = [assessment for key in self._jobs.keys() - present.keys() if (assessment := self._leave(key))]
        for key, gpus in present.items():
            job = self._jobs[key]
            if closed or now.monotonic_s - job.chosen_s >= _CHOOSE_S:
                job.chosen_s = now.monotonic_s
                job.choose(now)
            if is_not_training(gpus, decisions, self._config.label_probability):
                job.severity = 0
                continue
            found = self._judge(job, gpus, now)
            if found is not None:
                job.severity = found.severity
                assessments.append(found)
        return tuple(assessments)

    def learned(self, now: Instant) -> Mapping[str, object]:
        """Return the cadence of each job, with the processes it holds for."""
        jobs: dict[str, object] = {key: saved.state for key, saved in self._saved.items()}
        for job in self._jobs.values():
            if job.chosen is None:
                continue
            stream = job.streams[job.chosen]
            jobs[job.job_key] = {
                "seen": now.wall_s,
                "processes": processes_state(job.starts, now),
                "source": job.chosen,
                "intervals": list(stream.cadence.intervals),
                "sizes": list(stream.sizes),
                "lengths": list(stream.lengths),
                "total": job.total,
                "last": job.last_wall_s,
                "last_bytes": job.last_bytes,
            }
        return {"jobs": jobs}

    def restore(self, state: Mapping[str, object], now: Instant) -> None:
        """Take back what `learned` returned; each cadence waits for its job's processes to show."""
        self._saved = saved_jobs(state, now, self._config.most_jobs)

    def _meet(self, key: str, gpus: JobGpus, now: Instant) -> None:
        """Begin to watch a job, or begin anew where its processes are others."""
        job = self._jobs.get(key)
        present = process_ids_of(gpus.gpus)
        by_gpu = {
            gpu.key: frozenset(process.pid for process in gpu.processes)
            for gpu in gpus.gpus
            if gpu.processes
        }  # fmt: skip
        if job is not None and self._is_other_work(job, present, by_gpu, is_named=gpus.is_named):
            before, job = job, None
            self._jobs[key] = job = self._new(key, now)
            # A counter does not fall: the job_key is the same.
            job.total, job.severity = before.total, before.severity
        elif job is None:
            job = self._jobs[key] = self._new(key, now)
        job.seen_s, job.is_named = now.monotonic_s, gpus.is_named
        if present:
            job.process_ids = present
            job.processes_by_gpu = by_gpu
        if not job.starts.keys() >= (present or frozenset()):
            job.starts = {pid: start_s for gpu in gpus.gpus for pid, start_s in process_starts(gpu).items()}
        for stream in job.streams.values():
            stream.cadence.declared_s = gpus.declared_interval_s
        if self._saved:
            self._take_saved(job, now)

    def _has_ended(self, key: str, gpus: JobGpus) -> bool:
        """Return whether a job had processes and has none: nobody may say that its GPUs are free."""
        job = self._jobs.get(key)
        return job is not None and bool(job.process_ids) and all(gpu.processes == () for gpu in gpus.gpus)

    @staticmethod
    def _is_other_work(
        job: WatchedJob, present: frozenset[int] | None, by_gpu: Mapping[GpuKey, frozenset[int]], *, is_named: bool
    ) -> bool:
        if not is_same_work(job.process_ids, present or None):
            return True
        if is_named:
            return False
        # Of a user, or nobody: one of several runs may have ended and another begun.
        return any(ids.isdisjoint(job.processes_by_gpu.get(gpu, ids)) for gpu, ids in by_gpu.items())

    def _new(self, key: str, now: Instant) -> WatchedJob:
        return WatchedJob(
            job_key=key,
            activity=JobActivity(),
            work=JobWork(),
            trackers={source: BurstTracker(self._config.bursts, source) for source in JOB_SOURCES},
            streams={
                **{source: Stream.of(source, self._config.cadence) for source in (*JOB_SOURCES, *HOST_SOURCES)},
                **{source + ALL: Stream.of(source, self._config.cadence, takes_all=True) for source in HOST_SOURCES},
            },
            source_gaps={source: self._host.trackers[source].gaps for source in HOST_SOURCES},
            seen_s=now.monotonic_s,
        )

    def _take_saved(self, job: WatchedJob, now: Instant) -> None:
        saved = self._saved.get(job.job_key)
        if now.monotonic_s > next(iter(self._saved.values())).until_s:
            self._saved.clear()
        elif saved is not None and job.process_ids:
            starts = {pid: wall_s_of(start_s, now) for pid, start_s in job.starts.items()}
            if saved.is_of(starts, is_named=job.is_named):
                del self._saved[job.job_key]
                saved.give(job.streams[saved.source], job.activity.clock_s)
                job.total, job.last_wall_s, job.last_bytes = saved.total, saved.last_wall_s, saved.last_bytes
                job.last_s = None if saved.last_wall_s is None else monotonic_s_of(saved.last_wall_s, now)
            elif starts:
                del self._saved[job.job_key]

    def _leave(self, key: str) -> Assessment | None:
        """Forget a job that has no GPUs any more; what was wrong with it is over."""
        job = self._jobs[key]
        if self._now is not None and self._now.monotonic_s - job.seen_s <= _FORGET_S:
            return None
        del self._jobs[key]
        return Assessment(anomaly="missed_checkpoint", scope="job", severity=0, job_key=key) if job.severity else None

    def _read(
        self,
        present: Mapping[str, JobGpus],
        history: History,
        decisions: Mapping[GpuKey, Decision],
        now_s: float,
    ) -> list[tuple[Burst, WatchedJob | None]]:
        """Advance clocks and trackers; return the bursts that are over, with the job whose own source it was."""
        closed: list[tuple[Burst, WatchedJob | None]] = []
        for source, tracker in self._host.trackers.items():
            burst = tracker.read((history.host,), HOST_SOURCES[source], now_s)
            if burst is not None:
                closed.append((burst, None))
        for key, gpus in present.items():
            job = self._jobs[key]
            for source, tracker in job.trackers.items():
                burst = tracker.read(gpus.gpus, JOB_SOURCES[source], now_s)
                if burst is not None:
                    closed.append((burst, job))
            trackers = (*self._host.trackers.values(), *job.trackers.values())
            is_writing = any(tracker.is_rising for tracker in trackers)
            job.activity.advance(gpus.gpus, self._baselines, now_s, is_writing=is_writing)
            is_still = job.activity.is_still
            job.work.look(gpus, decisions, self._paces, now_s, is_still=is_still, is_writing=is_writing)
            over = {burst.source for burst, owner in closed if owner is None or owner is job}
            for tracker in trackers:
                self._note_open(job, tracker, is_over=tracker.source in over)
        return closed

    @staticmethod
    def _note_open(job: WatchedJob, tracker: BurstTracker, *, is_over: bool) -> None:
        """Note the clock when a burst begins, and whatever makes a burst go unseen."""
        if tracker.is_rising:
            job.open_clocks.setdefault(tracker.source, job.activity.before_s)
        elif not is_over:
            job.open_clocks.pop(tracker.source, None)
        gaps = tracker.gaps + job.activity.gaps
        if job.source_gaps.get(tracker.source, 0) != gaps:
            job.source_gaps[tracker.source] = gaps
            for stream in job.streams.values():
                if stream.source == tracker.source:
                    stream.lose_phase(job.activity.clock_s)

    def _attribute(self, closed: Sequence[tuple[Burst, WatchedJob | None]], now: Instant, sees_all: bool) -> None:
        """Offer each burst to the jobs whose it may be; with `sees_all` all writing shows in the host's sources."""
        for burst, owner in closed:
            note_begun((self._host if owner is None else owner).begun, burst)
        # A job's own first: they are the signs of the others.
        for burst, owner in sorted(closed, key=lambda pair: pair[1] is None):
            jobs = list(self._jobs.values()) if owner is None else [owner]
            signs = {job.job_key: job.sign(burst, self._host, is_own=owner is job, sees_all=sees_all) for job in jobs}
            is_claimed = STRONG in signs.values()
            for job in jobs:
                clock_s = job.open_clocks.pop(burst.source, None)
                sign = signs[job.job_key]
                # What another job's processes or GPUs moved is not this one's, whether or not it paused.
                if clock_s is None or burst.is_cut or (is_claimed and sign != STRONG):
                    continue
                if sign == NONE:
                    pause_s = job.activity.first_dip(burst.start_s, burst.end_s)
                    if pause_s is not None:
                        sign, clock_s = INSIDE, clock_s + pause_s - burst.start_s
                names = (burst.source,) if owner is not None or len(jobs) > 1 else (burst.source, burst.source + ALL)
                for name in names:
                    if job.work.is_in_bursts and job.streams[name].cadence.period_s is None:
                        continue
                    if job.streams[name].offer(burst, clock_s, sign) and job.chosen == name:
                        job.count(job.streams[name], now)

    def _judge(self, job: WatchedJob, gpus: JobGpus, now: Instant) -> Assessment | None:
        if job.chosen is None:
            return None
        stream = job.streams[job.chosen]
        tracker = self._tracker(job, stream.source)
        cadence, clock_s = stream.cadence, job.activity.clock_s
        deadline_s, period_s = cadence.deadline_s, cadence.period_s
        if deadline_s is None or period_s is None or tracker.seen_s is None:
            return None
        if now.monotonic_s - tracker.seen_s > self._config.bursts.gap_seconds:
            return None
        if job.activity.is_out_of_sight(gpus.gpus, now.monotonic_s):
            return None
        variant, severity = "none", 0
        if stream.is_smallness_due(clock_s):
            stream.call_truncated()
            deadline_s = cadence.deadline_s or deadline_s
        if self._is_long(job, stream, tracker):
            variant, severity = "long", 2
        elif clock_s > deadline_s and not job.is_written(stream, now):
            is_missed = clock_s > deadline_s + period_s
            is_sure = cadence.confidence >= self._config.critical_confidence and job.work.is_training(gpus)
            is_sure = is_sure and stream.source != DEVICE  # nobody saw it written before, either
            variant, severity = ("missed", 3 if is_sure else 2) if is_missed else ("late", 2)
        if not severity and stream.truncated is not None:
            variant, severity = "truncated", 2
        if severity and variant in {"late", "missed"} and job.is_in_progress(stream, tracker):
            # What is being written now may be it: nothing new is said until that is over.
            severity = min(severity, job.severity)
        if not severity:
            return Assessment(anomaly="missed_checkpoint", scope="job", severity=0, job_key=job.job_key)
        return finding_of(
            now,
            stream,
            variant,
            severity=severity,
            job_key=job.job_key,
            clock_s=clock_s,
            open_since_s=tracker.open_since_s,
            total=job.total,
            last_s=job.last_s,
        )

    def _tracker(self, job: WatchedJob, source: str) -> BurstTracker:
        return job.trackers[source] if source in job.trackers else self._host.trackers[source]

    def _is_long(self, job: WatchedJob, stream: Stream, tracker: BurstTracker) -> bool:
        usual_s, since_s = stream.usual_seconds, tracker.open_since_s
        if usual_s is None or since_s is None or not job.is_in_progress(stream, tracker):
            return False
        usual_bytes, clock_s = stream.usual_bytes or 0.0, job.open_clocks[stream.source]
        if tracker.open_bytes > _LONG_BYTES_SHARE * usual_bytes or not stream.cadence.is_due(clock_s):
            return False  # somebody else writes as well
        # The last reading that belongs to it counts, not the time in which it may have ended.
        length_s = tracker.open_end_s - since_s
        return length_s > self._config.long_factor * usual_s and length_s > usual_s + self._config.long_seconds
