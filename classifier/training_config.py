"""What a training can be told, and nothing else."""

from __future__ import annotations

from dataclasses import dataclass, field

from classifier.model import ESTIMATOR
from classifier.training_data import DatasetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Tunables of `train`."""

    version: str = "2"
    estimator: str = ESTIMATOR
    seed: int = 1
    #: Kinds that are never trained on; `other` may then be unknown to the model.
    exclude_kinds: tuple[str, ...] = ()
    #: Times each member sees each window with other channels left out, beside once as it is.
    copies: int = 1
    #: Models fitted with other random channels and features each, whose scores are averaged: one alone is too sure of
    #: what it saw.
    members: int = 2
    max_iter: int = 50
    #: Rounds of the first level, idle or busy, which is soon learnt.
    activity_iter: int = 20
    max_depth: int = 5
    max_leaf_nodes: int = 16
    min_samples_leaf: int = 40
    learning_rate: float = 0.18
    l2_regularization: float = 1.0
    #: Values that each feature may be split at; few cost little and blur what only the simulator tells apart.
    max_bins: int = 64
    #: Share of the features that each split may choose from.
    max_features: float = 0.5
    #: How far families of one class weigh the same: 0 by their windows, 1 all the same.
    family_balance: float = 0.5
    #: Share of the weight of a class that recorded windows have together, where there are any.
    recorded_share: float = 0.5
    #: Windows of made-up work (`classifier.hierarchy.STRANGE`) for each busy window, and what one weighs against it; 0
    #: for none. More makes the model refuse more of what it has not seen, families of known classes included.
    strange_share: float = 0.6
    strange_weight: float = 0.5
    #: Parts of the families, each held out once to set temperatures and thresholds; 0: scenarios held out only.
    family_folds: int = 4
    #: Share of that calibration that families never seen have; the rest are scenarios never seen of trained families.
    #: All of it would leave nothing to be said of what is known, none of it would be sure of what is not.
    unseen_share: float = 0.5
    #: Share of right labels among the decided calibration windows that are not idle, families never seen included;
    #: sets the abstention thresholds.
    target_precision: float = 0.95
    #: Quantile of the calibration distances at which refusal as out of domain starts.
    domain_quantile: float = 0.995
    data: DatasetConfig = field(default_factory=DatasetConfig)
