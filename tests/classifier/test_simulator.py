"""Tests of the simulator: against measured figures, and against its own promises."""

from __future__ import annotations

import pytest

from classifier.simulator import Scenario, available_kinds, simulate_arrays


@pytest.mark.parametrize("kind", available_kinds())
def test_every_kind_runs_and_names_its_truth(kind):
    run = simulate_arrays(Scenario(kind=kind, duration_s=120), seed=1)
    assert len(run.gpus) == 8
    assert run.phases
