"""Profiles: each holds the one before, all channels belong to one, and rows are told by what is measured."""

from __future__ import annotations

from itertools import pairwise

import numpy as np

from agent.history import GPU_CHANNELS, HOST_CHANNELS
from classifier.features import FEATURE_NAMES
from classifier.profiles import POWER_LIMIT, PROFILE_NAMES, PROFILES, columns_of, mask, profile_of


def row(*names):
    result = np.full(len(FEATURE_NAMES), np.nan)
    for name in names:
        result[FEATURE_NAMES.index(name)] = 0.0
    return result


def test_each_profile_holds_the_one_before_and_the_last_holds_all():
    sets = list(PROFILES.values())
    for poor, rich in pairwise(sets):
        assert poor < rich
    assert PROFILES["N"] == {*GPU_CHANNELS, *HOST_CHANNELS, POWER_LIMIT}
    assert columns_of("N").all()


def test_what_each_profile_gives():
    named = {name: {f for f, kept in zip(FEATURE_NAMES, columns_of(name), strict=True) if kept} for name in PROFILES}
    assert "util__p50__60" in named["U"]
    assert "memory__p50__60" in named["U"]
    assert "power__p50__60" in named["P"] - named["U"]
    assert {"sm__p50__60", "nvlink_tx__p50__60", "pcie_rx__p50__60"} <= named["G"] - named["P"]
    assert {"network_rx__p50__60", "processes__p50__60"} <= named["N"] - named["G"]


def test_mask_leaves_what_the_profile_gives_and_nothing_else():
    rows = np.arange(2.0 * len(FEATURE_NAMES)).reshape(2, -1)
    for name in PROFILE_NAMES:
        masked = mask(rows, name)
        kept = columns_of(name)
        assert np.array_equal(masked[:, kept], rows[:, kept])
        assert np.isnan(masked[:, ~kept]).all()


def test_a_row_is_told_by_what_it_holds():
    rows = np.stack(
        [
            row(),
            row("util__p50__60"),
            row("power__p50__60"),
            row("util__p50__60", "pcie_rx__p50__60"),
            row("sm__p50__60", "network_rx__p50__60"),
            row("power__p50__60", "network_rx__p50__60"),  # a node whose GPU shows power only
            row("util__p50__60", "processes__p50__60"),
        ]
    )
    assert [PROFILE_NAMES[position] for position in profile_of(rows)] == ["U", "U", "P", "G", "N", "P", "U"]
