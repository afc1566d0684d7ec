"""stalled_collective and collective_wait: GPUs that worked together wait in a collective operation, and nothing moves.

What arms is the GPU's own past: at least two minutes of work in the last fifteen, with the same processes. Then the
signature of `wait_signature` starts a wait. Waits that began together are one group; a GPU that worked until then and
reads about 0 % since, or whose process ended then, is the odd one out, the suspect. Whether a wait is a stall or a
pause is decided by

- host I/O, where all of it is seen (`host_io`: at least disk writes and network transmit are measured, and no file
  system is mounted whose bytes show nowhere): quiet makes it critical after `confirm_seconds`, longer where earlier
  waits of this work ended by themselves without I/O, or where the odd one out still does something and its process is
  not seen to take no CPU, or computes; active I/O makes it a wait (a checkpoint), and after it the wait has to be
  longer than any that ended;
- the past alone, where it is not: critical only past ten minutes and twice the longest wait that ended. So it is on a
  host with InfiniBand where Lustre is mounted, its bytes cannot be read and another job works.

While processes of the group compile (`wait_reasons`), or other GPUs of the same job work, the past alone decides as
well. Work that came in bursts before the wait (`wait_watch`: its utilisation is not that of steps) may be a server
between requests, and those spin for hours: where neither a label nor a declaration says training, it is a warning after
a minute and twice the longest earlier wait, and never critical. A label `inference` keeps it at info: idle tensor-
parallel servers spin in the same kernel for hours; so do stopped processes (SIGSTOP, a debugger). A GPU that waits
after 30 s to two minutes of work is a collective_wait of severity info after a minute, since the start of a job is full
of waits that end (compilation, a first evaluation). It is critical after three minutes only where two GPUs and more
wait, all host I/O is seen and quiet, and the CPU time of their processes is no more than spinning. One that waits with
less work before it (after a restart of the agent) is left out, and so is one without a usable channel. Cannot see: a
stall in which all GPUs read 0 % (no_progress), checkpoints whose bytes leave the host by a path that is not measured
and of which nothing is known: a file system of a mount namespace that the agent does not see, or over a fabric of which
it sees no ports; that a group without a label is a server where it was loaded so evenly before the wait that it looks
like steps.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Final

from agent.clock import Instant
from agent.history import GpuHistory, History
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.channels import is_in_step
from classifier.detectors.host_io import HostIo, HostIoConfig, observe_host_io
from classifier.detectors.restored import Pending, gpu_states, gpu_text, number
from classifier.detectors.wait_cases import Case, Group, Verdict, described, merged
from classifier.detectors.wait_labels import says_inference, says_training
from classifier.detectors.wait_reasons import WaitCpuConfig, are_stopped, cpu_works, only_spins, works_on_cpu
from classifier.detectors.wait_signature import WORK, SignatureConfig, power_bounds
from classifier.detectors.wait_watch import ArmConfig, GpuWatch, PastWaits
from classifier.detectors.work_groups import are_of_one_job
from classifier.results import Assessment, Decision

#: Work this young may still be what moves bytes over the fabric.
_RECENT_WORK_S: Final = 30.0
#: A wait may last this much longer than the longest of its kind that ended.
_LEARNED_MARGIN_S: Final = 10.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StalledCollectiveConfig:
    """When a wait is worth a word, a warning, a page."""

    enabled: bool = True
    #: A wait is reported as info from here on.
    suspect_seconds: float = 15.0
    #: A wait after too little work to be armed is reported as info from here on ...
    early_wait_seconds: float = 60.0
    #: ... and, where everything else that could explain it is seen not to be there, as critical from here on.
    early_critical_seconds: float = 180.0
    #: Host I/O seen and quiet: critical after this long.
    confirm_seconds: float = 35.0
    #: The most that earlier waits or a busy odd one out can extend `confirm_seconds` to.
    confirm_max_seconds: float = 120.0
    #: From this many earlier waits without host I/O on, waiting is a habit of this work: twice the longest one ...
    habit_waits: int = 2
    #: ... and from this many on, host I/O says nothing about it: `blind_critical_seconds` hold.
    constant_habit_waits: int = 5
    #: Host I/O was active during the wait: critical once it has been quiet for this long.
    quiet_after_io_seconds: float = 45.0
    #: Host I/O that ends this soon after the start was what came before: quiet for `confirm_seconds` is enough.
    tail_seconds: float = 10.0
    #: Host I/O not seen: collective_wait becomes a warning after this long.
    blind_warning_seconds: float = 60.0
    #: Host I/O not seen, or active all the time: critical past this ...
    blind_critical_seconds: float = 600.0
    #: ... and past this many times the longest wait of this work that ended by itself.
    blind_critical_factor: float = 2.0
    #: Host I/O active and no earlier wait known: collective_wait becomes a warning after this long.
    io_warning_seconds: float = 300.0
    #: Waits of a group begin within this time of each other.
    start_spread_seconds: float = 10.0
    #: Length of the time before a wait in which GPUs of one group move in step.
    step_seconds: float = 300.0
    #: A label `inference` with at least this probability keeps the finding at info.
    inference_probability: float = 0.8
    #: Work that came in bursts counts as training where it is declared, or labelled with at least this probability.
    training_probability: float = 0.8
    signature: SignatureConfig = field(default_factory=SignatureConfig)
    arm: ArmConfig = field(default_factory=ArmConfig)
    host_io: HostIoConfig = field(default_factory=HostIoConfig)
    cpu: WaitCpuConfig = field(default_factory=WaitCpuConfig)

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        for high, low in (
            ("confirm_seconds", "suspect_seconds"),
            ("confirm_max_seconds", "confirm_seconds"),
            ("blind_critical_seconds", "blind_warning_seconds"),
            ("constant_habit_waits", "habit_waits"),
            ("early_critical_seconds", "early_wait_seconds"),
        ):
            upper, lower = getattr(self, high), getattr(self, low)
            require(upper >= lower, high, upper, f"at least {low} ({lower})")
        require(self.habit_waits >= 1, "habit_waits", self.habit_waits, "at least 1")
        factor = self.blind_critical_factor
        require(
            factor >= 1, "blind_critical_factor", factor, "at least 1: a wait as long as an earlier one is no stall"
        )
        require(self.step_seconds > 0, "step_seconds", self.step_seconds, "above 0")


class StalledCollectiveDetector:
    """Finds groups of GPUs that wait in a collective, and says whether the wait is a stall."""

    anomalies: tuple[str, ...] = ("stalled_collective", "collective_wait")
    learner: str = "stalled_collective"

    def __init__(self, config: StalledCollectiveConfig, baselines: PowerBaselines) -> None:
        self._config = config
        self._baselines = baselines
        self._watches: dict[GpuKey, GpuWatch] = {}
        self._pending: Pending[GpuWatch] | None = None

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:
        """Return two assessments, one for each anomaly, for every GPU that can be judged."""
        self._advance(now, history)
        cases: dict[GpuKey, Case] = {}
        # Armed groups last: a GPU that would be the odd one out of both belongs to the one that matters.
        for group in (*self._groups(now.monotonic_s, is_armed=False), *self._groups(now.monotonic_s, is_armed=True)):
            keys = (*group.members, *group.odd)
            others_work = self._others_work(keys, group.since_s, now.monotonic_s)
            io = observe_host_io(
                self._config.host_io, history, keys, group.since_s, now.monotonic_s, others_work=others_work
            )
            io = self._with_unseen(io, group)
            case = Case(group=group, io=io, verdict=self._judge(now.monotonic_s, group, io, decisions, history))
            if not group.is_armed and not (case.verdict.wait or case.verdict.stalled):
                continue  # not to be judged yet
            for key in keys:
                cases[key] = case
                watch = self._watches[key]
                watch.reported = watch.reported or case.verdict.stalled > 0
                if watch.io_first_s is None:
                    watch.io_first_s = io.first_active_s
        assessments: list[Assessment] = []
        for key, watch in self._watches.items():
            found = cases.get(key)
            if not watch.judgeable:
                continue
            if found is not None:
                idle_watts = self._baselines.context_idle_watts(key)
                stalled, wait = described(now, key, found, watch, history.gpus[key], context_idle_watts=idle_watts)
                assessments += (stalled, wait) if found.group.is_armed or found.verdict.stalled else (wait,)
            elif watch.wait_since_s is None or watch.wait_armed:
                assessments.extend(Assessment(anomaly=a, scope="gpu", severity=0, key=key) for a in self.anomalies)
        return tuple(assessments)

    def learned(self, now: Instant) -> Mapping[str, object]:
        """Return what arms each GPU, its wait if it waits, and how long earlier waits lasted."""
        gpus: dict[str, object] = {}
        for key, watch in self._watches.items():
            name, section = gpu_text(key), watch.learned(now)
            if name is not None and section is not None:
                gpus[name] = section
        return {"gpus": {**gpus, **(self._pending.states(now) if self._pending is not None else {})}}

    def restore(self, state: Mapping[str, object], now: Instant) -> None:
        """Take the watches back, each once its GPU shows the same processes, and the gap as one in telemetry."""
        pending: Pending[GpuWatch] = Pending(now)
        for name, section in gpu_states(state):
            watch = GpuWatch(self._config.signature, self._config.arm)
            watch.restore(section, now)
            pending.put(name, section, watch, number(section, "seen_wall_s"))
        self._pending = pending

    def _with_unseen(self, io: HostIo, group: Group) -> HostIo:
        """Return `io` with the time that the agent was not there as active: a checkpoint may have been written then."""
        unseen_s = max((self._watches[key].unseen_until_s or 0.0 for key in group.members), default=0.0)
        if unseen_s <= group.since_s:
            return io
        return replace(io, last_active_s=max(io.last_active_s or 0.0, unseen_s))

    def _advance(self, now: Instant, history: History) -> None:
        for gone in self._watches.keys() - history.gpus.keys():  # a MIG layout that changed
            del self._watches[gone]
        for key, gpu in history.gpus.items():
            watch = self._watches.get(key)
            if watch is None:
                watch = self._watches[key] = GpuWatch(self._config.signature, self._config.arm)
            restored = self._pending.take(gpu, now) if self._pending is not None else None
            if restored is not None:
                # It takes the samples since the start once more, after those it knows of.
                watch = self._watches[key] = restored
                watch.unseen_until_s = gpu.first_s
            if watch.wait_since_s is None:
                # Learned values hold still during a wait, so that a long one does not become the new normal.
                watch.busy_watts = self._baselines.busy_watts(key)
                watch.bounds_watts = power_bounds(
                    self._config.signature,
                    self._baselines.context_idle_watts(key),
                    watch.busy_watts,
                    self._baselines.busy_memory_utilization_ratio(key),
                )
            watch.advance(gpu, now.monotonic_s)

    def _groups(self, now_s: float, *, is_armed: bool) -> list[Group]:
        """Return the groups of GPUs that wait, armed or early, with the ones beside them."""
        spread_s = self._config.start_spread_seconds
        waiting = sorted(
            (watch.wait_since_s, key)
            for key, watch in self._watches.items()
            if watch.judgeable and watch.wait_since_s is not None
            if (watch.wait_armed if is_armed else watch.wait_early)
        )
        groups: list[Group] = []
        for since_s, key in waiting:
            slack_s = spread_s + 2 * self._watches[key].interval_s
            if groups and since_s - groups[-1].since_s <= slack_s:
                groups[-1].members.append(key)
                groups[-1].since_s = since_s
            else:
                groups.append(Group([key], since_s, is_armed=is_armed))
        for group in groups:
            for key, watch in self._watches.items():
                if key in group.members or not watch.judgeable:
                    continue
                if self._is_odd(watch, group):
                    group.odd.append(key)
                elif watch.code == WORK and watch.armed_at(now_s):
                    group.working.append(key)
            if len(group.odd) > len(group.members):
                group.odd.clear()  # most GPUs being quiet is another story than one of them missing
        return groups

    def _is_odd(self, watch: GpuWatch, group: Group) -> bool:
        """Return whether this GPU went quiet when the others began to wait, after working as they did.

        So does one whose process ended then, where several wait: ranks that die are what the others wait for.
        """
        last_s = watch.last_work_s
        if last_s is None and len(group.members) > 1:
            last_s = watch.left_s
        if watch.code == WORK or last_s is None or watch.wait_armed:
            return False
        slack_s = 3 * self._config.start_spread_seconds + 2 * watch.interval_s
        return abs(last_s - group.since_s) <= slack_s

    def _judge(
        self, now_s: float, group: Group, io: HostIo, decisions: Mapping[GpuKey, Decision], history: History
    ) -> Verdict:
        config = self._config
        waited_s = now_s - group.since_s
        if not group.is_armed:
            return self._judge_early(now_s, group, io, decisions, history)
        benign = self._benign_reason(now_s, group, io, decisions, history)
        if waited_s < config.suspect_seconds or benign is not None:
            is_seen = waited_s >= config.suspect_seconds
            return Verdict(stalled=0, wait=int(is_seen), reason=benign or "short", threshold_s=config.suspect_seconds)
        past = merged([self._watches[key].past for key in group.members])
        compiles = cpu_works(config.cpu, self._gpus_of(group, history), group.since_s, now_s)
        works_with = compiles or self._works_with(group, history)
        is_warning, is_stalled = False, False
        if self._may_serve(group, decisions):
            # However long: a server waits until somebody asks.
            threshold_s = max(config.blind_warning_seconds, config.blind_critical_factor * past.longest_s)
            reason, is_warning = "bursts", waited_s >= threshold_s
        elif io.seen and io.last_active_s is None and not works_with:
            threshold_s = self._confirm_seconds(now_s, group, past, history)
            reason, is_stalled, is_warning = "quiet", waited_s >= threshold_s, False
        elif io.seen and not works_with and waited_s >= (threshold_s := self._stalled_after_io_s(group, io, past)):
            reason, is_stalled, is_warning = "quiet_after_io", True, False
        else:
            threshold_s = max(config.blind_critical_seconds, config.blind_critical_factor * past.longest_s)
            # A wait as long as one that ended is no news; and activity explains one for twice as long.
            learned_s = past.longest_s + _LEARNED_MARGIN_S if past.count else 0.0
            # What is seen is activity, whatever else may not be.
            is_active = io.last_active_s is not None and now_s - io.last_active_s < self._quiet_seconds(group, io)
            if io.seen or is_active:
                learned_s = config.blind_critical_factor * past.longest_s if past.count else config.io_warning_seconds
            warning_s = max(config.blind_warning_seconds, learned_s)
            reason = "host_io_active" if io.seen or is_active else "host_io_not_seen"
            if works_with:
                reason = "host_cpu_active" if compiles else "others_work"
            is_stalled, is_warning = waited_s > threshold_s, waited_s >= warning_s
        # Once called, a stall lasts until the wait ends: what the host writes meanwhile is not its own doing.
        is_stalled = is_stalled or any(self._watches[key].reported for key in group.members)
        wait = 0 if is_stalled else 2 if is_warning else 1
        return Verdict(stalled=3 if is_stalled else 0, wait=wait, reason=reason, threshold_s=threshold_s)

    def _gpus_of(self, group: Group, history: History) -> list[GpuHistory]:
        return [history.gpus[key] for key in (*group.members, *group.odd)]

    def _judge_early(
        self, now_s: float, group: Group, io: HostIo, decisions: Mapping[GpuKey, Decision], history: History
    ) -> Verdict:
        """Judge a wait after too little work to be armed."""
        config = self._config
        waited_s = now_s - group.since_s
        if any(self._watches[key].reported for key in group.members) or (
            waited_s >= config.early_critical_seconds and self._is_unexplained(now_s, group, io, decisions, history)
        ):
            return Verdict(stalled=3, wait=0, reason="quiet", threshold_s=config.early_critical_seconds)
        least_s = config.early_wait_seconds
        return Verdict(stalled=0, wait=int(waited_s >= least_s), reason="little_work", threshold_s=least_s)

    def _is_unexplained(
        self, now_s: float, group: Group, io: HostIo, decisions: Mapping[GpuKey, Decision], history: History
    ) -> bool:
        """Return whether all that could explain a wait is seen, and is not there."""
        if group.working or len(group.members) + len(group.odd) < 2 or not io.seen:
            return False
        if self._may_serve(group, decisions):
            return False
        if io.last_active_s is not None and now_s - io.last_active_s < self._config.early_critical_seconds:
            return False
        if self._benign_reason(now_s, group, io, decisions, history) is not None:
            return False
        waiting, odd = ([history.gpus[key] for key in keys] for keys in (group.members, group.odd))
        odd = [gpu for gpu in odd if gpu.processes != ()]  # those that ended do nothing
        return only_spins(self._config.cpu, waiting, odd, now_s)

    def _benign_reason(
        self, now_s: float, group: Group, io: HostIo, decisions: Mapping[GpuKey, Decision], history: History
    ) -> str | None:
        """Return why this wait stays information however long it lasts; None where it may be a stall."""
        least = self._config.inference_probability
        if all(says_inference(decisions.get(key), least) for key in group.members):
            return "inference"
        # A debugger that looks at a stall stops processes as well.
        is_called = any(self._watches[key].reported for key in group.members)
        if not is_called and are_stopped(self._gpus_of(group, history), now_s):
            return "stopped"
        is_alone = len(group.members) + len(group.odd) == 1 and len(self._watches) > 1
        if is_alone and not io.fabric_fell_silent:
            return "alone"
        return None

    def _quiet_seconds(self, group: Group, io: HostIo) -> float:
        """Return how long the host has to be quiet after activity; activity at the start is a tail."""
        is_early = io.last_active_s is not None and io.last_active_s - group.since_s <= self._config.tail_seconds
        return self._config.confirm_seconds if is_early else self._config.quiet_after_io_seconds

    def _stalled_after_io_s(self, group: Group, io: HostIo, past: PastWaits) -> float:
        """Return how long a wait has to last to be a stall although the host wrote or sent during it.

        It is longer than those that ended: an upload may be too slow to be seen all the time.
        """
        quiet_s = (io.last_active_s or group.since_s) - group.since_s + self._quiet_seconds(group, io)
        return max(quiet_s, past.longest_s + _LEARNED_MARGIN_S) if past.count else quiet_s

    def _confirm_seconds(self, now_s: float, group: Group, past: PastWaits, history: History) -> float:
        """Return how long quiet host I/O has to last; earlier waits that looked the same and ended extend it.

        Work that waits again and again without host I/O is either no training (a server between requests), or its
        checkpoints go where the agent cannot see them: then the past alone decides, as without host I/O.
        """
        config = self._config
        if past.unexplained >= config.constant_habit_waits:
            return max(config.blind_critical_seconds, config.blind_critical_factor * past.longest_s)
        if past.unexplained >= config.habit_waits:
            return max(config.confirm_max_seconds, config.blind_critical_factor * past.longest_unexplained_s)
        learned_s = max(past.longest_unexplained_s, past.io_lag_s) + _LEARNED_MARGIN_S if past.count else 0.0
        confirm_s = max(config.confirm_seconds, learned_s, *(6 * self._watches[k].interval_s for k in group.members))
        busy_odd = [history.gpus[key] for key in group.odd if self._watches[key].quiet_use_ratio > 0.005]
        # A rank that serialises a checkpoint takes a core for it, and one that computes on the CPU alone takes several.
        odd = [history.gpus[key] for key in group.odd]
        if works_on_cpu(config.cpu, odd, now_s) or (busy_odd and not only_spins(config.cpu, (), busy_odd, now_s)):
            confirm_s = config.confirm_max_seconds
        return min(confirm_s, max(config.confirm_max_seconds, config.confirm_seconds))

    def _works_with(self, group: Group, history: History) -> bool:
        """Return whether GPUs that still work belong to the group, as a rank that evaluates alone does.

        They do where they are of the same job (some of its GPUs may learn while others generate), or a minority that
        moved in step with a waiting one before; two jobs side by side do not.
        """
        member = history.gpus[group.members[0]]
        if any(are_of_one_job(member, history.gpus[key]) for key in group.working):
            return True
        if len(group.working) * 2 > len(group.members):
            return False
        return any(
            is_in_step(member, history.gpus[key], group.since_s, self._config.step_seconds) for key in group.working
        )

    def _others_work(self, keys: Sequence[GpuKey], since_s: float, now_s: float) -> bool:
        """Return whether GPUs beside `keys` worked of late, and well after the wait began."""
        after_s = max(since_s + self._config.start_spread_seconds, now_s - _RECENT_WORK_S)
        return any(
            watch.last_work_s is not None and watch.last_work_s > after_s
            for key, watch in self._watches.items()
            if key not in keys
        )

    def _may_serve(self, group: Group, decisions: Mapping[GpuKey, Decision]) -> bool:
        """Return whether the group may be a server between requests: it worked in bursts, and nothing says training."""
        steady = [self._watches[key].steady for key in group.members]
        if 2 * steady.count(True) >= len(steady) - steady.count(None):
            return False
        least = self._config.training_probability
        return not any(says_training(decisions.get(key), least) for key in group.members)
