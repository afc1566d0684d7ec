"""Faults from all sources at once against what must hold; `make chaos MINUTES=5` goes on for longer with other seeds.

A seed that failed once becomes a number in SEEDS.
"""

from __future__ import annotations

import pytest

from tests.chaos.node import chaos_node

pytestmark = pytest.mark.end_to_end

SEEDS = (2068,)
EPISODES = 2


@pytest.mark.parametrize("seed", SEEDS)
def test_chaos(nvml_emulator_library, tmp_path, seed):
    with chaos_node(tmp_path, seed) as node:
        for _ in range(EPISODES):
            node.episode()
        node.findings_are_right()
