"""Recorded training through the detectors of pace and progress: healthy work has none of their findings."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.importers import open_trace
from tests.classifier.test_stalled_collective import RECORDINGS, replayed

ANOMALIES = {"fail_slow", "straggler", "input_starved", "no_progress"}


@pytest.mark.skipif(not RECORDINGS.is_dir(), reason=f"no recordings in {RECORDINGS}")
@pytest.mark.parametrize(
    "name", ["atharvanihalani__t13_tp_pp_node0", "atharvanihalani__t2_ddp_136m", "gwtrain__h100_8gpu_ckpt1"]
)
def test_recorded_training_is_neither_slow_nor_starved_nor_stuck(name: str) -> None:
    trace = open_trace(Path(RECORDINGS) / f"training/{name}.csv.gz", lambda _: None)
    events = replayed(tick for tick in trace if tick.monotonic_s < 600)
    assert [event.finding.summary for event in events if event.finding.anomaly in ANOMALIES] == []
    assert not any(event.finding.severity == 3 for event in events)
