"""The windows of a fit: split by scenario and by family, seen with channels left out, weighed, and made up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Final

import numpy as np
from numpy.typing import NDArray

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.features import FEATURES
from classifier.profiles import PROFILE_NAMES, mask
from classifier.signals import SIGNALS
from classifier.training_channels import drop_channels
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset

Indices = NDArray[np.intp]

#: Parts of the scenarios (not of the windows) for calibration and for the test; the rest is fitted.
_CALIBRATION_SHARE: Final = 0.2
_TEST_SHARE: Final = 0.2
#: Parts of what is measured, by the beginning of a channel's name, that made-up work takes from several windows; what
#: begins otherwise (network, disks, file systems, InfiniBand) is one part more. A feature goes with its first channel.
PARTS: Final = (
    ("sm_", "tensor_", "dram_", "fp64_", "fp32_", "fp16_"),
    ("nvlink_", "infiniband_"),
    ("pcie_",),
    ("power_", "energy_"),
    ("utilization_", "memory_utilization_"),
    ("process_", "memory_used_"),
)


def _part_of(channel: str) -> int:
    return next((number for number, part in enumerate(PARTS) if channel.startswith(part)), len(PARTS))


_PART_OF_COLUMN: Final = np.array([_part_of(SIGNALS[feature.channels[0]].channel) for feature in FEATURES])


def split(data: Dataset, seed: int) -> tuple[Indices, Indices, Indices]:
    """Return the indices to fit, calibrate and test on, whole scenarios or recordings each.

    Every simulated kind is in every part, and of recordings every class; where there are enough of them.
    """
    rng = np.random.default_rng([seed, 2])
    part = np.zeros(len(data.labels), dtype=np.int64)
    strata = _strata(data)
    for stratum in np.unique(strata):
        groups = rng.permutation(np.unique(data.groups[strata == stratum]))
        first = round(groups.size * _CALIBRATION_SHARE)
        second = first + round(groups.size * _TEST_SHARE)
        part[np.isin(data.groups, groups[:first])] = 1
        part[np.isin(data.groups, groups[first:second])] = 2
    return np.flatnonzero(part == 0), np.flatnonzero(part == 1), np.flatnonzero(part == 2)


def _strata(data: Dataset) -> NDArray[np.str_]:
    """Return the kind of every window; of a recorded one the class that its recording mostly holds."""
    strata = data.kinds.astype(object)
    for group in np.unique(data.groups[data.recorded]):
        mine = data.groups == group
        strata[mine] = f"recorded/{CLASSES[int(np.bincount(data.labels[mine]).argmax())]}"
    return strata.astype(np.str_)


def family_folds(data: Dataset, folds: int, seed: int) -> Iterator[tuple[Indices, Indices]]:
    """Yield the indices to fit on and those held out, whole kinds each.

    Every kind is held out once, except that of a class with one kind only: no fold takes all kinds of a class.
    """
    rng = np.random.default_rng([seed, 5])
    fold_of: dict[str, int] = {}
    kinds = [str(kind) for kind in np.unique(data.kinds)]
    main = {kind: int(np.bincount(data.labels[data.kinds == kind]).argmax()) for kind in kinds}
    for position in range(len(CLASSES)):
        mine = [kind for kind in kinds if main[kind] == position]
        if len(mine) > 1:
            for place, kind in enumerate(rng.permutation(mine)):
                fold_of[str(kind)] = place % min(folds, len(mine))
    number = np.array([fold_of.get(str(kind), -1) for kind in data.kinds])
    for fold in range(folds):
        if (number == fold).any():
            yield np.flatnonzero(number != fold), np.flatnonzero(number == fold)


def augmented(config: TrainingConfig, data: Dataset, seed: int) -> Dataset:
    """Return the windows as they are and `config.copies` copies, each scenario with other channels left out in each.

    Machines that show all there is are a third of the draws only, and what combines all of it is learnt from them.
    """
    rng = np.random.default_rng([seed, 6])
    count = config.copies + 1
    dropped = [drop_channels(data.rows, data.groups, rng) for _ in range(config.copies)]
    return Dataset(
        rows=np.concatenate((data.rows, *dropped)),
        labels=np.tile(data.labels, count),
        groups=np.tile(data.groups, count),
        kinds=np.tile(data.kinds, count),
        sources=np.tile(data.sources, count),
    )


def views(data: Dataset, seed: int) -> Dataset:
    """Return each window as every profile shows it, and once with channels left out at random."""
    dropped = drop_channels(data.rows, data.groups, np.random.default_rng([seed, 7]))
    count = len(PROFILE_NAMES) + 1
    return Dataset(
        rows=np.concatenate([*(mask(data.rows, name) for name in PROFILE_NAMES), dropped]),
        labels=np.tile(data.labels, count),
        groups=np.tile(data.groups, count),
        kinds=np.tile(data.kinds, count),
        sources=np.tile(data.sources, count),
    )


def weights_of(config: TrainingConfig, data: Dataset, labels: NDArray[np.int64]) -> Array:
    """Return a weight for each window, mean 1: classes weigh the same, rare families more than their windows.

    Recorded windows together weigh `config.recorded_share` of each class that they are in.
    """
    weights: Array = np.ones(labels.size)
    for kind, count in zip(*np.unique(data.kinds, return_counts=True), strict=True):
        weights[data.kinds == kind] = float(count) ** -config.family_balance
    recorded = data.recorded
    for label in np.unique(labels):
        mine = labels == label
        for part, share in ((mine & recorded, config.recorded_share), (mine & ~recorded, 1 - config.recorded_share)):
            if part.any():
                weights[part] *= share / weights[part].sum()
        weights[mine] /= weights[mine].sum()
    scaled: Array = weights * (labels.size / weights.sum())
    return scaled


def strange_rows(config: TrainingConfig, working: Dataset, seed: int) -> Array:
    """Return made-up work: windows of which each part (PARTS) is left or taken from another window, by a coin each.

    Single parts look like known work, together they do not. Channels are left out of every second of them.
    """
    rng = np.random.default_rng([seed, 8])
    count = round(config.strange_share * working.labels.size)
    rows: Array = working.rows[rng.integers(working.labels.size, size=count)] if count else working.rows[:0]
    others = rng.integers(max(1, working.labels.size), size=count)
    for part in np.unique(_PART_OF_COLUMN):
        taken = rng.random(count) < 0.5
        columns = np.flatnonzero(part == _PART_OF_COLUMN)
        rows[np.ix_(taken, columns)] = working.rows[np.ix_(others[taken], columns)]
    rows[::2] = drop_channels(rows[::2], np.arange(len(rows[::2])), rng)
    return rows
