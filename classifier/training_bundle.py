"""The bundle that a training writes: configuration, report, arrays, metadata and model card."""

from __future__ import annotations

import json
from collections.abc import Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from agent.errors import FaultError
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES
from classifier.model import ARRAYS_NAME, CARD_NAME, ESTIMATOR, JSON_NAME, SCHEMA, Domain, feature_schema
from classifier.own_traces import OwnTraces
from classifier.scores import Scores
from classifier.training_data import Dataset, DatasetConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Tunables of `train`."""

    version: str = "1"
    estimator: str = ESTIMATOR
    seed: int = 1
    #: Models fitted with other random features each, whose scores are averaged: one alone is too sure of what it saw.
    members: int = 2
    #: Share of the scenarios each member is fitted on.
    member_share: float = 1.0
    max_iter: int = 120
    max_depth: int = 5
    max_leaf_nodes: int = 16
    min_samples_leaf: int = 20
    learning_rate: float = 0.1
    l2_regularization: float = 1.0
    #: Share of right labels among the decided calibration windows that are not idle; sets the abstention threshold.
    target_precision: float = 0.97
    #: Quantile of the calibration distances at which refusal as out of domain starts.
    domain_quantile: float = 0.995
    data: DatasetConfig = field(default_factory=DatasetConfig)


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a training gave: where the bundle is, and how it does on simulated scenarios it has not seen."""

    directory: Path
    windows: int
    scenarios: int
    temperature: float
    threshold: float
    test: Scores
    basic_test: Scores  # test windows on which nothing but nvidia-smi's columns is measured

    def format(self) -> str:
        """Return the report as text."""
        return (
            f"bundle written to {self.directory}\n"
            f"{self.windows} windows of {self.scenarios} simulated scenarios, temperature {self.temperature:.3g}, "
            f"threshold {self.threshold:.3g}\n"
            f"held-out simulated scenarios:\n{self.test.format()}\n"
            f"the same with nvidia-smi columns only:\n{self.basic_test.format()}\n"
        )


def write_bundle(directory: Path, metadata: dict[str, Any], arrays: dict[str, NDArray[Any]], card: str) -> None:
    """Write a bundle; `metadata` gets the SHA-256 of the arrays. Raises FaultError where it cannot be written."""
    packed = BytesIO()
    np.savez_compressed(packed, allow_pickle=False, **arrays)
    metadata = {**metadata, "arrays_sha256": sha256(packed.getvalue()).hexdigest()}
    try:
        directory.mkdir(parents=True, exist_ok=True)
        (directory / ARRAYS_NAME).write_bytes(packed.getvalue())
        (directory / JSON_NAME).write_text(json.dumps(metadata, indent=1) + "\n", encoding="utf-8")
        (directory / CARD_NAME).write_text(card, encoding="utf-8")
    except OSError as error:
        raise FaultError(f"cannot write the model bundle to {directory}: {error.strerror}") from error


def metadata_of(
    config: TrainingConfig,
    data: Dataset,
    report: TrainingReport,
    domain: Domain,
    deciding: Sequence[str],
    *,
    own: OwnTraces | None = None,
) -> dict[str, Any]:
    """Return what model.json says; `write_bundle` adds the digest of the arrays."""
    import sklearn

    simulated = config.data.scenarios > 0
    trained_on = "simulated data only"
    if own is not None:
        trained_on = f"simulated data and {own.describe()}" if simulated else own.describe()

    return {
        "schema": SCHEMA,
        "version": config.version,
        "estimator": ESTIMATOR,
        "classes": list(CLASSES),
        "features": feature_schema(),
        "temperature": report.temperature,
        "threshold": report.threshold,
        "domain_threshold": domain.threshold,
        "deciding_features": list(deciding),
        "trained_on": trained_on,
        "training": {
            "seed": config.seed,
            "windows": report.windows,
            "scenarios": report.scenarios,
            "kinds": {str(kind): int((data.kinds == kind).sum()) for kind in np.unique(data.kinds)},
            "data_sha256": data.digest(),
            "members": config.members,
            "max_iter": config.max_iter,
            "max_depth": config.max_depth,
            "max_leaf_nodes": config.max_leaf_nodes,
            "learning_rate": config.learning_rate,
            **({} if own is None else {"own_traces": own.as_dict()}),
        },
        "held_out_simulated": {"all": report.test.as_dict(), "nvidia_smi_columns": report.basic_test.as_dict()},
        "libraries": {"scikit-learn": sklearn.__version__, "numpy": np.__version__},
    }


def domain_arrays(domain: Domain) -> dict[str, NDArray[Any]]:
    """Return the arrays to store of the out-of-domain statistics."""
    return {"domain_mean": domain.means, "domain_deviation": domain.deviations}


def card_of(metadata: dict[str, Any], report: TrainingReport) -> str:
    """Return the model card in Markdown."""
    training, core = metadata["training"], len(CORE_FEATURES)
    kinds = "\n".join(f"- {kind}: {count} windows" for kind, count in training["kinds"].items())
    origin = (
        "**Trained on simulated data only.** No recording of a real machine went into it. docs/accuracy.md says how it "
        "does on\npublic recordings; figures below are from simulated scenarios and say nothing about real ones."
    )
    if "own_traces" in training:
        origin = (
            f"**Trained on {metadata['trained_on']}.** Figures below are from simulated scenarios and own traces held "
            "out together,\nwhole ones each; they are no promise for other machines."
        )
    return f"""# Model card: warpwatch workload model {metadata["version"]}

{origin}

## What it is

The mean of {training["members"]} fits of scikit-learn's {ESTIMATOR} ({metadata["libraries"]["scikit-learn"]};
{training["max_iter"]} rounds, depth at most {training["max_depth"]}, {training["max_leaf_nodes"]} leaves), exported as
arrays. {len(FEATURE_NAMES)} features over 15 to 900 s; temperature {report.temperature:.3g}; abstention below
{report.threshold:.3g}; a diagonal Mahalanobis distance over {core} core features refuses what is out of its domain.

## Data

{report.windows} windows of {report.scenarios} scenarios of classifier.simulator, seed {training["seed"]}, SHA-256
{training["data_sha256"]}:

{kinds}

Channel groups (GPM, NVLink, PCIe, memory utilisation, processes, host I/O, power, power limit) are removed at random,
independently of the class, and sampling intervals vary. Whole scenarios are held out, never single windows.

## Held-out simulated scenarios

{report.test.format()}

With nvidia-smi columns only:

{report.basic_test.format()}

## Limits

- With nvidia-smi columns alone, training and inference do not separate on machines never seen; the labeller therefore
  asks for a high probability there and says `unknown` otherwise.
- `other` (HPC, mining) is known from few simulated families; graphics and video are not simulated.
- Levels are per board family through limits and sizes; boards whose limit is not known give no power features.
"""
