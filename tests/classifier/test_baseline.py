"""Learned power baselines on simulated histories, tick by tick."""

from __future__ import annotations

from dataclasses import replace

import pytest

from classifier.detectors.baseline import PowerBaselines
from tests.classifier.detector_histories import IDLES, WAITS, WORKS, Node, Script, Shown


def learned(script: Script, seconds: float) -> dict[str, float]:
    baselines = PowerBaselines()
    node = Node((), baselines, script, gpus=1)
    for _ in node.play(seconds):
        pass
    return dict(baselines.watts(node.key(0)))


def test_context_idle_and_busy_power_are_learned_from_a_held_gpu() -> None:
    script: Script = lambda _, t: IDLES if t <= 60 else WORKS  # noqa: E731
    assert learned(script, 50) == {"context_idle": 120}
    assert learned(script, 200) == {"context_idle": 120, "busy": 550}


@pytest.mark.parametrize("free", [{"pids": ()}, {"pids": None, "used_bytes": 3_000_000}])
def test_a_free_gpu_teaches_nothing(free: dict) -> None:
    assert learned(lambda _, __: replace(IDLES, watts=70, **free), 120) == {}


@pytest.mark.parametrize("missing", [{"watts": None}, {"utilization": None}])
def test_without_power_or_utilization_nothing_is_learned(missing: dict) -> None:
    assert learned(lambda _, t: replace(WORKS if t > 60 else IDLES, **missing), 120) == {}


@pytest.mark.parametrize("missing", [{}, {"memory": None}])
def test_waiting_is_no_busy_power(missing: dict) -> None:
    script: Script = lambda _, t: replace(WORKS if t <= 120 else WAITS, **missing)  # noqa: E731
    assert learned(script, 1500)["busy"] == 550


def test_other_processes_start_anew() -> None:
    def script(_: int, t: float) -> Shown:
        return WORKS if t <= 300 else replace(WORKS, watts=300, pids=(202,))

    # 60 observations are remembered: without the processes the median would still be 550 W after 150 s.
    assert learned(script, 450)["busy"] == 300
