"""What a decision costs on the machine that made the report."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import Final

import numpy as np

from agent.clock import process_cpu_seconds, stopwatch
from agent.history import History
from classifier.features import compute_all
from classifier.model import load
from classifier.report.playback import through
from classifier.report.simulated import simulated_run
from classifier.signals import Signals
from classifier.simulator.recorder import ticks

_GPUS: Final = 16
_REPEATS: Final = 15


@dataclass(frozen=True, slots=True, kw_only=True)
class Speed:
    """Medians over several runs."""

    decision_s: float  # CPU time of features and prediction for 16 GPUs with all channels and 300 s of history
    bundle_bytes: int
    load_s: float


def measure_speed(bundle: Path) -> Speed:
    """Measure the model in `bundle`; other work on the machine shows in the load time only, not in CPU time."""
    simulated = simulated_run(np.random.default_rng(5), "data_parallel_training", (330.0, 330.0), gpus=8)
    history = History(sample_interval_s=1.0)
    for tick in through("N", ticks(simulated)):
        history.ingest(tick)
    gpus = list(history.gpus.values())
    asked = [gpus[position % len(gpus)] for position in range(_GPUS)]
    now_s = float(simulated.core_s[-1])
    model = load(bundle)
    decisions, loads = [], []
    for _ in range(_REPEATS):
        before = process_cpu_seconds()
        signals = [Signals(gpu, history.host, now_s, gpu_count=_GPUS, peers=asked) for gpu in asked]
        model.predict(np.asarray(compute_all(signals)))
        decisions.append(process_cpu_seconds() - before)
        before = stopwatch()
        load(bundle)
        loads.append(stopwatch() - before)
    size = sum(path.stat().st_size for path in bundle.iterdir() if path.is_file())
    return Speed(decision_s=float(np.median(decisions)), bundle_bytes=size, load_s=float(np.median(loads)))
