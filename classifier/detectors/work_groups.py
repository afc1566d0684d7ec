"""Which GPUs of the host work together, as ranks of one job.

Ranks of one job have the same job where jobs are known, and one rhythm: the same step where steps are seen, else power
or utilisation that moves in step (measured: 0.56 to 0.99 between ranks, 0.08 to 0.31 between independent processes).
GPUs that show neither belong together only where they are known to be one job and exchange data (or where nothing that
could show it is measured), or where the same process holds them.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Final

import numpy as np

from agent.history import GpuHistory
from classifier.detectors.channels import MOVING_CHANNELS, correlation, process_ids
from classifier.detectors.step_pace import StepPaces

#: Steps that differ by more than this share are of different jobs.
_SAME_STEP_RATIO: Final = 0.03
#: A period that was found may be that of so many steps.
_MOST_STEPS: Final = 3
#: Correlation above this is one rhythm.
_IN_STEP: Final = 0.5
_EXCHANGE_BYTES_PER_SECOND: Final = 1e6
#: Holders that are no jobs.
_NO_SCHEDULERS: Final = frozenset({"systemd", "process"})


def job_keys(gpu: GpuHistory) -> frozenset[str]:
    """Return the keys of the jobs that hold the GPU; empty where that is not known."""
    return frozenset(holder.job_key for holder in gpu.owners.holders) if gpu.owners else frozenset()


def are_of_one_job(one: GpuHistory, other: GpuHistory) -> bool:
    """Return whether a scheduler or a job file gives both GPUs to one job: a user or a unit may run several at once."""
    jobs = [
        {holder.job_key for holder in gpu.owners.holders if holder.scheduler not in _NO_SCHEDULERS}
        for gpu in (one, other)
        if gpu.owners
    ]
    return len(jobs) == 2 and not jobs[0].isdisjoint(jobs[1])


def work_groups(gpus: Sequence[GpuHistory], paces: StepPaces, now_s: float, seconds: float) -> list[list[GpuHistory]]:
    """Return the groups of two GPUs and more among `gpus`, by how they moved in the last `seconds`."""
    groups: list[list[GpuHistory]] = []
    for gpu in gpus:
        for group in groups:
            if _is_together(group[0], gpu, paces, now_s, seconds):
                group.append(gpu)
                break
        else:
            groups.append([gpu])
    return [group for group in groups if len(group) > 1]


def _is_together(one: GpuHistory, other: GpuHistory, paces: StepPaces, now_s: float, seconds: float) -> bool:
    mine, theirs = job_keys(one), job_keys(other)
    if mine and theirs and mine.isdisjoint(theirs):
        return False
    step, their_step = paces.step_seconds(one.key, now_s), paces.step_seconds(other.key, now_s)
    if step is not None and their_step is not None:
        ratio = max(step, their_step) / min(step, their_step)
        if ratio <= 1.0 + _SAME_STEP_RATIO:
            return True
        # A period may be found at two or three steps: one job that is known as such has one rhythm all the same.
        is_multiple = round(ratio) <= _MOST_STEPS and abs(ratio / round(ratio) - 1.0) <= _SAME_STEP_RATIO
        return is_multiple and bool(mine) and mine == theirs
    moved = _in_step(one, other, now_s, seconds)
    if moved is not None:
        return moved
    pids = process_ids(one), process_ids(other)
    if pids[0] and pids[1] and not pids[0].isdisjoint(pids[1]):
        return True
    return bool(mine) and mine == theirs and _may_exchange(one, now_s) and _may_exchange(other, now_s)


def _in_step(one: GpuHistory, other: GpuHistory, now_s: float, seconds: float) -> bool | None:
    """Return whether two GPUs move in step; None where one of them hardly moves or too little was measured."""
    for channel in MOVING_CHANNELS:
        together = correlation(one, other, channel, now_s, seconds, least_spread=0.02)
        if together is not None and np.isfinite(together):
            return together >= _IN_STEP
    return None


def _may_exchange(gpu: GpuHistory, now_s: float) -> bool:
    """Return whether data moves over NVLink, or neither that nor power is measured, as in a vGPU's guest."""
    rate = gpu.series("nvlink_transmit_bytes_per_second", now_s, 60.0)
    if rate.size:
        return float(rate.values.mean()) > _EXCHANGE_BYTES_PER_SECOND
    return not gpu.has("power_watts")
