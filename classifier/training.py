"""Training: fit on simulated windows, calibrate and test on groups of their own, write the bundle.

scikit-learn is imported here only, inside the functions that need it (`warpwatch[train]`). The same configuration gives
the same bundle, byte for byte, with the same versions of NumPy and scikit-learn.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import FaultError, UsageError
from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES
from classifier.model import (
    ARRAYS_NAME,
    CARD_NAME,
    ESTIMATOR,
    JSON_NAME,
    SCHEMA,
    Domain,
    feature_schema,
    load,
)
from classifier.scores import Scores, score
from classifier.training_data import Dataset, DatasetConfig, simulate_dataset
from classifier.trees import MAX_DEPTH, Trees, softmax

Progress = Callable[[str], None]

#: Parts of the scenarios (not of the windows) for calibration and for the test; the rest is fitted.
_CALIBRATION_SHARE: Final = 0.2
_TEST_SHARE: Final = 0.2
#: Least deviation of a core feature: a constant one must not refuse everything else.
_LEAST_DEVIATION: Final = 0.05


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingConfig:
    """Tunables of `train`."""

    version: str = "1"
    estimator: str = ESTIMATOR
    seed: int = 1
    max_iter: int = 100
    max_depth: int = 5
    max_leaf_nodes: int = 16
    min_samples_leaf: int = 20
    learning_rate: float = 0.08
    l2_regularization: float = 1.0
    #: Share of right labels among the decided calibration windows that sets the abstention threshold.
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


def train(config: TrainingConfig, out_dir: Path, progress: Progress = lambda _: None) -> TrainingReport:
    """Simulate, fit, calibrate, test and write a bundle to `out_dir`.

    Raises UsageError where another estimator is asked for or scikit-learn is missing, FaultError where `out_dir` cannot
    be written.
    """
    _require_estimator(config.estimator)
    _import_sklearn()
    progress(f"simulating {config.data.scenarios} scenarios")
    data = simulate_dataset(config.data, config.seed, progress)
    return train_on(config, data, out_dir, progress)


def train_on(
    config: TrainingConfig, data: Dataset, out_dir: Path, progress: Progress = lambda _: None
) -> TrainingReport:
    """Fit, calibrate, test and write a bundle from `data`; see `train`."""
    _require_estimator(config.estimator)
    fitted, calibration, test = split(data, config.seed)
    progress(f"fitting on {fitted.size} windows, calibrating on {calibration.size}, testing on {test.size}")
    classifier = fit(config, data.rows[fitted], data.labels[fitted])
    trees = trees_from(classifier)
    raw = trees.raw(data.rows[calibration])
    temperature = fit_temperature(raw, data.labels[calibration])
    probabilities = softmax(raw / temperature)
    threshold = abstention_threshold(probabilities, data.labels[calibration], config.target_precision)
    domain = fit_domain(data.rows[fitted], data.labels[fitted], data.rows[calibration], config.domain_quantile)
    tested = softmax(trees.raw(data.rows[test]) / temperature)
    basic = data.basic[test]
    report = TrainingReport(
        directory=out_dir,
        windows=len(data.labels),
        scenarios=len(np.unique(data.groups)),
        temperature=temperature,
        threshold=threshold,
        test=score(tested, data.labels[test], threshold),
        basic_test=score(tested[basic], data.labels[test][basic], threshold),
    )
    metadata = _metadata(config, data, report, domain, _strongest(classifier, 8))
    write_bundle(out_dir, metadata, {**trees.arrays(), **_domain_arrays(domain)}, _card(metadata, report))
    load(out_dir)  # what was written must be what the agent accepts
    return report


def split(data: Dataset, seed: int) -> tuple[NDArray[np.intp], NDArray[np.intp], NDArray[np.intp]]:
    """Return the indices to fit, calibrate and test on, whole scenarios each, with every kind in every part."""
    rng = np.random.default_rng([seed, 2])
    part = np.zeros(len(data.labels), dtype=np.int64)
    for kind in np.unique(data.kinds):
        groups = rng.permutation(np.unique(data.groups[data.kinds == kind]))
        first = round(groups.size * _CALIBRATION_SHARE)
        second = first + round(groups.size * _TEST_SHARE)
        part[np.isin(data.groups, groups[:first])] = 1
        part[np.isin(data.groups, groups[first:second])] = 2
    return np.flatnonzero(part == 0), np.flatnonzero(part == 1), np.flatnonzero(part == 2)


def fit(config: TrainingConfig, rows: Array, labels: NDArray[np.int64]) -> Any:  # noqa: ANN401 - an untyped estimator
    """Return a fitted HistGradientBoostingClassifier; labels are positions in vocabulary.CLASSES, all four present."""
    ensemble = _import_sklearn()
    if not 1 <= config.max_depth <= MAX_DEPTH:
        raise UsageError(f"max_depth is {config.max_depth}; trees may have a depth of 1 to {MAX_DEPTH}")
    missing = [name for position, name in enumerate(CLASSES) if not (labels == position).any()]
    if missing:
        raise UsageError(f"the training data holds no window of {', '.join(missing)}; add scenarios of that class")
    counts = np.bincount(labels, minlength=len(CLASSES))
    classifier = ensemble.HistGradientBoostingClassifier(
        max_iter=config.max_iter,
        max_depth=config.max_depth,
        max_leaf_nodes=config.max_leaf_nodes,
        min_samples_leaf=config.min_samples_leaf,
        learning_rate=config.learning_rate,
        l2_regularization=config.l2_regularization,
        max_features=0.5,
        early_stopping=False,
        random_state=config.seed,
    )
    return classifier.fit(rows, labels, sample_weight=(labels.size / len(CLASSES) / counts)[labels])


def trees_from(classifier: Any) -> Trees:  # noqa: ANN401 - an untyped estimator
    """Return the trees of a fitted HistGradientBoostingClassifier over all classes; raises UsageError for others."""
    _require_estimator(type(classifier).__name__)
    columns: dict[str, list[NDArray[Any]]] = {name: [] for name in _NODE_COLUMNS}
    roots: list[int] = []
    size = 0
    for iteration in classifier._predictors:
        for tree in iteration:
            nodes = tree.nodes
            if nodes["is_categorical"].any():
                raise UsageError("the model splits on categories; only numerical features can be exported")
            own = np.arange(nodes.size)
            leaf = nodes["is_leaf"].astype(bool)
            roots.append(size)
            columns["feature"].append(np.where(leaf, 0, nodes["feature_idx"]))
            columns["threshold"].append(np.where(leaf, np.inf, nodes["num_threshold"]))
            columns["missing_left"].append(leaf | nodes["missing_go_to_left"].astype(bool))
            columns["left"].append(size + np.where(leaf, own, nodes["left"]))
            columns["right"].append(size + np.where(leaf, own, nodes["right"]))
            columns["value"].append(np.where(leaf, nodes["value"], 0.0))
            size += nodes.size
    arrays: dict[str, NDArray[Any]] = {name: np.concatenate(parts) for name, parts in columns.items()}
    arrays["root"] = np.array(roots, dtype=np.int64)
    arrays["baseline"] = np.asarray(classifier._baseline_prediction, dtype=np.float64).reshape(-1)
    return Trees.from_arrays(arrays, features=classifier.n_features_in_, classes=arrays["baseline"].size)


_NODE_COLUMNS: Final = ("feature", "threshold", "missing_left", "left", "right", "value")


def fit_temperature(raw: Array, labels: NDArray[np.int64]) -> float:
    """Return the divisor of raw scores that minimises the log loss, by golden-section search over its logarithm."""
    rows = np.arange(labels.size)

    def loss(exponent: float) -> float:
        return -float(np.log(np.maximum(softmax(raw / np.exp(exponent))[rows, labels], 1e-300)).mean())

    low, high = -3.0, 3.0
    ratio = (5**0.5 - 1) / 2
    left, right = high - ratio * (high - low), low + ratio * (high - low)
    while high - low > 1e-4:
        if loss(left) < loss(right):
            high, right = right, left
            left = high - ratio * (high - low)
        else:
            low, left = left, right
            right = low + ratio * (high - low)
    return float(np.exp((low + high) / 2))


def abstention_threshold(probabilities: Array, labels: NDArray[np.int64], precision: float) -> float:
    """Return the least probability from which on decided windows are right with `precision`, within 0.6 to 0.95."""
    top = probabilities.max(axis=1)
    right = probabilities.argmax(axis=1) == labels
    order = np.argsort(-top, kind="stable")
    share = np.cumsum(right[order]) / np.arange(1, right.size + 1)
    good = np.flatnonzero(share >= precision)
    found = float(top[order[good[-1]]]) if good.size else 1.0
    return min(0.95, max(0.6, found))


def fit_domain(rows: Array, labels: NDArray[np.int64], calibration: Array, quantile: float) -> Domain:
    """Return the out-of-domain statistics of the core features, the threshold set on the calibration rows."""
    columns = np.array([FEATURE_NAMES.index(name) for name in CORE_FEATURES], dtype=np.int64)
    means = np.zeros((len(CLASSES), columns.size))
    deviations = np.ones_like(means)
    for position in range(len(CLASSES)):
        core = rows[labels == position][:, columns]
        for column in range(columns.size):
            known = core[np.isfinite(core[:, column]), column]
            if known.size:
                means[position, column] = known.mean()
                deviations[position, column] = max(_LEAST_DEVIATION, float(known.std()))
    plain = Domain(columns=columns, means=means, deviations=deviations, threshold=1.0)
    distances = plain.ratio(calibration)
    threshold = float(np.quantile(distances[np.isfinite(distances)], quantile))
    return Domain(columns=columns, means=means, deviations=deviations, threshold=threshold)


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


def _metadata(
    config: TrainingConfig, data: Dataset, report: TrainingReport, domain: Domain, deciding: Sequence[str]
) -> dict[str, Any]:
    import sklearn

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
        "trained_on": "simulated data only",
        "training": {
            "seed": config.seed,
            "windows": report.windows,
            "scenarios": report.scenarios,
            "kinds": {str(kind): int((data.kinds == kind).sum()) for kind in np.unique(data.kinds)},
            "data_sha256": data.digest(),
            "max_iter": config.max_iter,
            "max_depth": config.max_depth,
            "max_leaf_nodes": config.max_leaf_nodes,
            "learning_rate": config.learning_rate,
        },
        "held_out_simulated": {"all": report.test.as_dict(), "nvidia_smi_columns": report.basic_test.as_dict()},
        "libraries": {"scikit-learn": sklearn.__version__, "numpy": np.__version__},
    }


def _domain_arrays(domain: Domain) -> dict[str, NDArray[Any]]:
    return {"domain_mean": domain.means, "domain_deviation": domain.deviations}


def _strongest(classifier: Any, count: int) -> list[str]:  # noqa: ANN401 - an untyped estimator
    """Return the features with the highest summed gain."""
    gains = np.zeros(classifier.n_features_in_)
    for iteration in classifier._predictors:
        for tree in iteration:
            inner = tree.nodes[tree.nodes["is_leaf"] == 0]
            np.add.at(gains, inner["feature_idx"], inner["gain"])
    return [FEATURE_NAMES[position] for position in np.argsort(-gains, kind="stable")[:count]]


def _require_estimator(name: str) -> None:
    if name != ESTIMATOR:
        raise UsageError(f"train cannot export a {name}; the agent evaluates {ESTIMATOR} only")


def _import_sklearn() -> Any:  # noqa: ANN401 - scikit-learn has no types
    try:
        from sklearn import ensemble
    except ImportError as error:
        raise UsageError("training needs scikit-learn; install warpwatch[train]") from error
    return ensemble


def _card(metadata: dict[str, Any], report: TrainingReport) -> str:
    training = metadata["training"]
    kinds = "\n".join(f"- {kind}: {count} windows" for kind, count in training["kinds"].items())
    return f"""# Model card: warpwatch workload model {metadata["version"]}

**Trained on simulated data only.** No recording of a real machine went into it. docs/accuracy.md says how it does on
public recordings; figures below are from simulated scenarios and say nothing about real ones.

## What it is

A {ESTIMATOR} of scikit-learn {metadata["libraries"]["scikit-learn"]} ({training["max_iter"]} rounds, depth at most
{training["max_depth"]}, {training["max_leaf_nodes"]} leaves), exported as arrays; {len(FEATURE_NAMES)} features over
15, 60 and 300 s; temperature {report.temperature:.3g}; abstention below {report.threshold:.3g}; a diagonal Mahalanobis
distance over {len(CORE_FEATURES)} core features refuses what is out of its domain.

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
