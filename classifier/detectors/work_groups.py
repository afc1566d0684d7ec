"""Which GPUs of the host work together, as ranks of one job.

Ranks of one job have the same job where jobs are known, and one rhythm: the same step where steps are seen, else power
or utilisation that moves in step (measured: 0.56 to 0.99 between ranks, 0.08 to 0.31 between independent processes).
GPUs that show neither belong together only where they are known to be one job and exchange data, or where the same
process holds them.
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
#: Correlation above this is one rhythm.
_IN_STEP: Final = 0.5
_EXCHANGE_BYTES_PER_SECOND: Final = 1e6


def job_keys(gpu: GpuHistory) -> frozenset[str]:
    """Return the keys of the jobs that hold the GPU; empty where that is not known."""
    return frozenset(holder.job_key for holder in gpu.owners.holders) if gpu.owners else frozenset()


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
    steps = paces.step_seconds(one.key, now_s), paces.step_seconds(other.key, now_s)
    if steps[0] is not None and steps[1] is not None:
        return abs(steps[0] / steps[1] - 1.0) <= _SAME_STEP_RATIO
    moved = _in_step(one, other, now_s, seconds)
    if moved is not None:
        return moved
    pids = process_ids(one), process_ids(other)
    if pids[0] and pids[1] and not pids[0].isdisjoint(pids[1]):
        return True
    return bool(mine) and mine == theirs and _exchanges(one, now_s) and _exchanges(other, now_s)


def _in_step(one: GpuHistory, other: GpuHistory, now_s: float, seconds: float) -> bool | None:
    """Return whether two GPUs move in step; None where one of them hardly moves or too little was measured."""
    for channel in MOVING_CHANNELS:
        together = correlation(one, other, channel, now_s, seconds, least_spread=0.02)
        if together is not None and np.isfinite(together):
            return together >= _IN_STEP
    return None


def _exchanges(gpu: GpuHistory, now_s: float) -> bool:
    rate = gpu.series("nvlink_transmit_bytes_per_second", now_s, 60.0)
    return rate.size > 0 and float(rate.values.mean()) > _EXCHANGE_BYTES_PER_SECOND
