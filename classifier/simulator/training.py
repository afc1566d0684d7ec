"""Training jobs: steps with all-reduce, loading, warm-up, evaluation, checkpoints, and what goes wrong with them.

A job is a sequence of stages that its GPUs share. Parameters of a style are in `training_styles`, the shape of a step
in `cycles`, checkpoints in `checkpoints`; the ranges reach into those of inference on purpose.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import partial

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.checkpoints import READ, Saves
from classifier.simulator.cycles import CONTINUOUS
from classifier.simulator.overlays import Extra, Overlaid
from classifier.simulator.priors import GB, take
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Array, Constant, Cyclic, HostLoad, Job, Signal, Stage, cycle_starts
from classifier.simulator.steps import FLAVOURS, Step, draw_step, step_signals


@dataclass(frozen=True, slots=True)
class Span:
    """The stretch of time to fill, of trace time, and since when the job has been running (at most `start_s`)."""

    start_s: float
    end_s: float
    begin_s: float


def training_job(
    draws: Draws,
    board: Board,
    gpus: tuple[int, ...],
    span: Span,
    *,
    fault: str | None = None,
    flavours: Mapping[str, float] = FLAVOURS,
) -> Job:
    """Return a training job that fills `span`; `fault` is None, "stall" or "rank0_saves"."""
    step = draw_step(draws, board, len(gpus), flavours, collective=fault is not None)
    saves = Saves(draws, board, step, fault)
    load_s = draws.log_uniform("load_s", 8, 90)
    warm_s = draws.log_uniform("warm_up_s", 6, 120)
    stall = _Stall(draws, span, load_s + warm_s) if fault == "stall" else None
    run = _Run(draws, step, saves, span.start_s)
    stages: list[Stage] = []
    now = span.begin_s
    while now < span.end_s:
        if stages:  # a restart: the processes are gone for a while
            down_s = float(draws.rng.uniform(6, 30))
            stages.append(_absent(now, now + down_s, len(gpus)))
            now += down_s
        until = min(span.end_s, stall.at_s) if stall and now < stall.at_s else span.end_s
        opening = _open(draws, step, board, run.host, start_s=now, load_s=load_s, warm_s=warm_s)
        stages += opening
        now = opening[-1].end_s
        for stage in run.stages(now, until):
            stages.append(stage)
            now = stage.end_s
        if stall and until == stall.at_s:
            stages.append(stall.stage(now, step))
            now = stages[-1].end_s
        elif now >= until:
            break
    # Above context idle, on an H100: 1 to 65 W while a collective waits; 155-165 W in all beside a rank that saves.
    watts = draws.uniform("waiting_watts", 26, 38) if fault == "rank0_saves" else None
    waiting_watts = draws.log_uniform("waiting_watts", 2, 65) if watts is None else watts
    return Job(
        gpus=gpus,
        stages=tuple(stages),
        host=tuple(run.host),
        power_gain=draws.uniform("power_gain", 0.88, 1.12),
        spin_watts=waiting_watts / step.waiting,
        drift=draws.log_uniform("drift", 0.004, 0.04),
        singles=step.singles,
    )


def _absent(start_s: float, end_s: float, ranks: int) -> Stage:
    return Stage(
        start_s=start_s,
        end_s=end_s,
        signals=(Constant(),) * ranks,
        memory_ratio=(0.0, 0.0),
        present=False,
        workload="idle",
        note="no process",
    )


def _open(
    draws: Draws, step: Step, board: Board, host: list[HostLoad], *, start_s: float, load_s: float, warm_s: float
) -> list[Stage]:
    """Return loading (memory grows, data comes in) and warm-up (ranks wait for each other, kernels compile)."""
    rng = draws.rng
    ranks = step.ranks
    size = step.memory * board.memory_bytes * ranks * float(rng.uniform(0.1, 0.5))
    rate = min(6e9, size / load_s)
    source = draws.choice("load_from", READ, (0.5, 0.2, 0.3))
    host.append(HostLoad(start_s=start_s, end_s=start_s + load_s, channel=source, bytes_per_second=rate))
    copy = {
        "pcie_receive": min(board.pcie_bytes_per_second, size / ranks / load_s),
        "busy": float(rng.uniform(0, 0.3)),
        "cpu_cores": float(rng.uniform(0.5, 4)),
        "process_read": rate / ranks,
    }
    middle, end = start_s + load_s, start_s + load_s + warm_s
    late = rng.integers(ranks)
    # Compilers run beside: ptxas and triton children on many cores, kernels tried out now and then.
    compiling = {"busy": 0.15, "sm": 0.05, "dram": 0.03, "pcie_receive": 2e6, "cpu_cores": float(rng.uniform(1, 12))}
    waiting = {"busy": 1.0, "spin": step.waiting, "dram": 0.001, "pcie_receive": 6e5, "cpu_cores": 1.0}
    waits = tuple(Constant(compiling if rank == late or not step.together else waiting) for rank in range(ranks))
    grown = step.first_memory * float(rng.uniform(0.3, 0.8))
    return [
        Stage(
            start_s=start_s,
            end_s=middle,
            signals=(Constant(copy),) * ranks,
            memory_ratio=(0.006, grown),
            workload="training",
            note="loading",
        ),
        Stage(
            start_s=middle,
            end_s=end,
            signals=waits,
            memory_ratio=(grown, step.first_memory),
            workload="training",
            note="warm-up",
        ),
    ]


class _Traffic:
    """What the host does while a job trains: data in, logs and metrics out, and the reduction between nodes."""

    def __init__(self, draws: Draws, step: Step) -> None:
        self._source = draws.choice("dataset_from", ("cache", *READ), (0.35, 0.3, 0.1, 0.25))
        self._rate = take(draws, step.priors, "dataset_bytes_per_second")
        # A data set in the page cache reads nothing; one that comes by sockets is no file.
        read = 0.0 if self._source in {"cache", "network_receive"} else self._rate / step.ranks
        self.levels = {"process_read": read}
        self._logs = draws.log_uniform("log_bytes_per_second", 1e3, 3e5)
        self._metrics = draws.log_uniform("metrics_bytes_per_second", 1e2, 1e5) * draws.chance("sends_metrics", 0.7)
        multi_node = draws.chance("multi_node", 0.35) and step.together
        fabric = take(draws, step.priors, "fabric_gb_s") * GB
        self._fabric = draws.uniform("fabric_bytes_per_second", fabric, fabric) * multi_node
        self._link = draws.choice("fabric", ("infiniband", "network"), (0.75, 0.25))
        if self._link == "network":
            self._fabric = min(self._fabric, 1e10)  # one port of 100 Gbit/s
        self._evenness = draws.uniform("fabric_roughness", 0.03, 0.3)
        self._asymmetry = draws.uniform("fabric_asymmetry", 0.97, 1.03)
        breaks, levels = step.traffic
        self._breaks, self._levels = breaks, {"host": levels}

    def loads(self, start_s: float, end_s: float, starts: Array) -> list[HostLoad]:
        """Return the loads of a stretch of training whose steps begin at `starts`."""
        traffic = partial(HostLoad, start_s=start_s, end_s=end_s)
        found = [traffic(channel="disk_written", bytes_per_second=self._logs, roughness=1.2)]
        if self._source != "cache":
            found.append(traffic(channel=self._source, bytes_per_second=self._rate, roughness=0.8))
        for way, share in (("receive", 0.2), ("transmit", 1.0)):
            channel = f"network_{way}"
            found.append(traffic(channel=channel, bytes_per_second=share * self._metrics, roughness=1.0))
        if self._fabric > 0:
            # Between nodes a reduction takes place when it does within the node.
            steps = Cyclic(self._breaks, self._levels, starts)
            found += [
                traffic(
                    channel=f"{self._link}_{way}",
                    bytes_per_second=self._fabric * share,
                    roughness=self._evenness,
                    shape=steps,
                )
                for way, share in (("receive", 1.0), ("transmit", self._asymmetry))
            ]
        return found


class _Evaluations:
    """Forward passes over other data from time to time: no all-reduce, every rank at its own pace.

    Reinforcement learning generates what it learns from in the same way, more often and for longer.
    """

    def __init__(self, draws: Draws, step: Step) -> None:
        self.takes_place = draws.chance("evaluates", 0.35)
        steps = take(draws, step.priors, "eval_steps")
        every_s = float(np.clip(steps * step.step_s, 60, 7200))
        self.every_s = draws.uniform("eval_every_s", every_s, 1.1 * every_s)
        self.length_s = min(take(draws, step.priors, "eval_s"), 0.5 * self.every_s)
        batch_s = draws.log_uniform("eval_batch_s", 0.04, 2)
        generates = draws.chance("eval_generates", 0.15)  # text to be judged: decoding
        self._note = "evaluation"
        if "rollout_s" in step.priors:
            generates, self.takes_place, self._note = True, True, "rollout"
            self.every_s = take(draws, step.priors, "learning_s")
            self.length_s = take(draws, step.priors, "rollout_s")
        self._step = step
        self._batch_s = batch_s
        self._busy = draws.uniform("eval_busy", 0.6, 1.0)
        # Shares of the levels of training; a forward pass is as dense but writes no gradients.
        self._shares = {"sm": 0.8, "tensor": 0.85, "dram": 0.8}
        if generates:
            self._shares = {"sm": 0.35, "tensor": 0.12, "dram": 1.3}
        # Weights in shards or tensor parallel layers talk in the forward pass, too.
        self._link = 0.4 * CONTINUOUS.get(step.flavour, 0.0)

    def stage(self, rng: np.random.Generator, start_s: float, end_s: float, memory: float) -> Stage:
        """Return one evaluation."""
        step = self._step
        breaks = np.array([0.0, 1 - self._busy, 1.0]) if self._busy < 1 else np.array([0.0, 1.0])
        on = np.array([0.0, 1.0]) if self._busy < 1 else np.array([1.0])
        signals: list[Signal] = []
        for rank in range(step.ranks):
            levels = {
                name: on * min(0.95, share * step.mean(rank, name) / self._busy) for name, share in self._shares.items()
            }
            levels |= {"busy": on, "cpu_cores": 1.0 + 0 * on}
            for name in ("nvlink_receive", "nvlink_transmit"):
                levels[name] = on * self._link * step.mean(rank, name)
            levels["pcie_receive"] = 0.5 * step.mean(rank, "pcie_receive") + 0 * on
            starts = cycle_starts(rng, start_s, end_s, period_s=self._batch_s, spread=0.1)
            signals.append(Cyclic(breaks, levels, starts))
        return Stage(
            start_s=start_s,
            end_s=end_s,
            signals=tuple(signals),
            memory_ratio=(memory, memory),
            workload="training",
            note=self._note,
        )


class _Run:
    """Training, evaluation and saving in turn, and what the host does for it."""

    def __init__(self, draws: Draws, step: Step, saves: Saves, seen_from_s: float) -> None:
        self.host: list[HostLoad] = []
        self._draws = draws
        self._step = step
        self._saves = saves
        self._traffic = _Traffic(draws, step)
        self._evaluations = _Evaluations(draws, step)
        self._seen_from_s = seen_from_s
        self._used = step.first_memory

    def stages(self, start_s: float, until_s: float) -> Iterator[Stage]:
        """Yield the stages from `start_s` to `until_s`; parts before the trace cost nothing."""
        rng, saves, evaluations = self._draws.rng, self._saves, self._evaluations
        save_s = start_s + saves.next_s(rng, first=True)
        evaluate_s = start_s + evaluations.every_s * float(rng.uniform(0.3, 1)) if evaluations.takes_place else np.inf
        behind: tuple[Extra, ...] = ()
        now = start_s
        while now < until_s:
            end = min(until_s, max(min(save_s, evaluate_s), now + 2 * self._step.step_s))
            yield self._training(now, end, behind)
            now = end
            if now >= until_s:
                return
            if evaluate_s <= save_s:
                length_s = evaluations.length_s * float(np.clip(rng.normal(1, 0.1), 0.6, 1.5))
                yield evaluations.stage(rng, now, min(until_s, now + length_s), self._used)
                now += length_s
                evaluate_s = now + evaluations.every_s
                continue
            pause_s = saves.length_s * float(np.clip(rng.normal(1, 0.08), 0.6, 2))
            self.host += saves.host(rng, now, pause_s)
            yield Stage(
                start_s=now,
                end_s=min(until_s, now + saves.blocking_s(pause_s)),
                signals=saves.signals(rng, pause_s),
                memory_ratio=(self._used, self._used),
                workload="training",
                note="checkpoint",
            )
            now += saves.blocking_s(pause_s)
            behind = saves.behind(now, pause_s)
            save_s = now + saves.next_s(rng, first=False)

    def _training(self, start_s: float, end_s: float, behind: tuple[Extra, ...]) -> Stage:
        step = self._step
        seen_from = max(start_s, min(self._seen_from_s, end_s) - 30)
        extras = (Extra(start_s, end_s, self._traffic.levels), *behind)
        signals = step_signals(self._draws, step, seen_from, end_s)
        self.host += self._traffic.loads(start_s, end_s, signals[0].starts)
        used = self._used
        self._used += (step.memory - used) * float(self._draws.rng.uniform(0, 0.5))
        return Stage(
            start_s=start_s,
            end_s=end_s,
            signals=tuple(Overlaid(signal, extras) for signal in signals),
            memory_ratio=(used, self._used),
            workload="training",
        )


class _Stall:
    """A collective that hangs: every rank waits in it, or one rank never came."""

    def __init__(self, draws: Draws, span: Span, opening_s: float) -> None:
        earliest = max(span.begin_s + opening_s, span.start_s) + 60
        latest = max(earliest + 1, span.start_s + 0.6 * (span.end_s - span.start_s))
        self.at_s = draws.uniform("stall_at_s", earliest, latest)
        self.length_s = draws.log_uniform("stall_s", 180, 3600)
        self._variant = draws.choice("stall_variant", ("all_wait", "missing_rank"), (0.7, 0.3))
        self._missing = int(draws.rng.integers(64))
        self._sleeps = draws.chance("stall_sleeps", 0.2)

    def stage(self, start_s: float, step: Step) -> Stage:
        """Return the hang: the utilisation stays at 100 % while nothing moves."""
        ranks = step.ranks
        spin = 0.004 if self._sleeps else step.waiting
        waiting = Constant({"busy": 1.0, "spin": spin, "dram": 0.0004, "pcie_receive": 6e5, "pcie_transmit": 2e5})
        signals: list[Signal] = [waiting] * ranks
        missing = self._missing % ranks if self._variant == "missing_rank" and ranks > 1 else None
        if missing is not None:
            signals[missing] = Constant()
        return Stage(
            start_s=start_s,
            end_s=start_s + self.length_s,
            signals=tuple(signals),
            memory_ratio=(step.memory, step.memory),
            workload="training",
            anomaly="stalled_collective",
            note="waiting",
            missing=missing,
        )
