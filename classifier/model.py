"""The model: load a bundle of plain arrays and JSON, and evaluate it with NumPy alone.

A bundle is a folder with `model.json` (what it is and expects), `arrays.npz` (the trees of two histogram gradient
boostings and the out-of-domain statistics) and `card.md` (for people). Nothing in it is executed. The scores equal
scikit-learn's to 1e-9; `classifier.training` writes bundles, `classifier.hierarchy` and `classifier.trees` hold the
arithmetic.

What a caller needs: `Model.predict(rows)` gives probabilities over vocabulary.CLASSES and an out-of-domain ratio (above
1: do not believe them); `Model.thresholds_of(rows)` gives the least probability at which each row's answer is worth
saying, which depends on the profile the row holds (`classifier.profiles`); `Model.threshold` is the one for rows with
profiling or link counters, where a single figure is wanted.
"""

from __future__ import annotations

import hashlib
import io
import json
import zipfile
import zlib
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import UsageError
from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES, FEATURES
from classifier.hierarchy import LEVELS, Hierarchy, Level
from classifier.profiles import PROFILE_NAMES, profile_of

#: 1 was one level with one temperature and one threshold.
SCHEMA: Final = 2
JSON_NAME: Final = "model.json"
ARRAYS_NAME: Final = "arrays.npz"
CARD_NAME: Final = "card.md"
ESTIMATOR: Final = "HistGradientBoostingClassifier"
#: The bundle that ships with the package.
BUNDLED: Final = Path(__file__).parent / "bundle"
#: Larger files are no bundle of ours (the shipped one is a few hundred kB).
_SIZE_LIMIT_BYTES: Final = 16_000_000
_ARRAY_LIMIT_BYTES: Final = 64_000_000
#: What values of other kinds than they should be can raise.
_UNFIT: Final = (KeyError, ValueError, TypeError, AttributeError, IndexError, OverflowError)
#: What bytes that are no array file can raise in zipfile and NumPy; RuntimeError where they call themselves encrypted.
_NO_ARRAYS: Final = (OSError, ValueError, EOFError, KeyError, MemoryError, RuntimeError, zipfile.BadZipFile, zlib.error)
#: Least number of core features a row needs for its distance to mean something.
_MINIMUM_CORE: Final = 3


class BundleError(UsageError):
    """A model bundle that does not fit this version, or is damaged; the message says why and what to do."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Prediction:
    """Result for a batch of feature rows, one row each."""

    probabilities: Array  # (rows, 4) in the order of vocabulary.CLASSES, calibrated, each row sums to 1
    out_of_domain_ratio: Array  # (rows,) distance over the refusal threshold; NaN where too little is measured


@dataclass(frozen=True, slots=True, kw_only=True)
class Domain:
    """Out-of-domain statistics: mean and deviation of the core features per prototype, and where refusal starts.

    A prototype is one trained family in one class (the steady work of a trainer, say); there are a few dozen.
    """

    columns: NDArray[np.int64]  # (core,) columns of the core features
    means: Array  # (prototypes, core)
    deviations: Array  # (prototypes, core), positive
    thresholds: Array  # (profiles,) in the order of PROFILE_NAMES: few features scatter more than many

    def distance(self, rows: Array) -> Array:
        """Return the diagonal Mahalanobis distance to the nearest prototype, shape (rows,).

        The distance is the root of the mean squared deviation over the features that are not NaN; NaN where fewer than
        three are left.
        """
        core = rows[:, self.columns]
        known = np.isfinite(core)
        filled = np.where(known, core, 0.0)[:, np.newaxis, :]
        squared = ((filled - self.means) / self.deviations) ** 2 * known[:, np.newaxis, :]
        count = known.sum(axis=1)
        distance = np.sqrt(squared.sum(axis=2).min(axis=1) / np.maximum(count, 1))
        result: Array = np.where(count >= _MINIMUM_CORE, distance, np.nan)
        return result

    def ratio(self, rows: Array) -> Array:
        """Return the distance over the refusal threshold of each row's profile, shape (rows,); NaN as `distance`."""
        result: Array = self.distance(rows) / self.thresholds[profile_of(rows)]
        return result

    def farthest(self, row: Array, count: int) -> list[int]:
        """Return the columns of one row farthest from its nearest prototype, farthest first, at most `count`."""
        core = row[self.columns]
        deviation = np.abs((core - self.means) / self.deviations)
        known = np.isfinite(core)
        squared = np.where(known, deviation, 0.0) ** 2
        nearest = np.where(known, deviation[int(squared.sum(axis=1).argmin())], -1.0)
        order = np.argsort(-nearest, kind="stable")[: min(count, int(known.sum()))]
        return [int(column) for column in self.columns[order]]


@dataclass(frozen=True, slots=True, kw_only=True)
class Model:
    """A loaded bundle."""

    version: str
    sha256: str  # of arrays.npz and model.json together: changes with any byte of either
    hierarchy: Hierarchy
    domain: Domain
    thresholds: Mapping[str, float]  # by profile: least probability of a label; below it the model abstains
    deciding_features: tuple[str, ...]  # the ones with the highest gain, best first
    metadata: Mapping[str, Any]  # all of model.json

    @property
    def threshold(self) -> float:
        """Least probability of a label on rows that hold more than nvidia-smi's columns."""
        return max(self.thresholds["G"], self.thresholds["N"])

    def thresholds_of(self, rows: Array) -> Array:
        """Return the least probability of a label for each row, by the profile that it holds, shape (rows,)."""
        result: Array = np.array([self.thresholds[name] for name in PROFILE_NAMES])[profile_of(rows)]
        return result

    def predict(self, rows: Array) -> Prediction:
        """Return calibrated probabilities and out-of-domain ratios of feature rows, shape (rows, features)."""
        rows = np.asarray(rows, dtype=np.float64)
        return Prediction(
            probabilities=self.hierarchy.probabilities(rows),
            out_of_domain_ratio=self.domain.ratio(rows),
        )

    def contributions(self, row: Array) -> Array:
        """Return what each feature of one row adds to the score of every class, shape (features, classes)."""
        return self.hierarchy.contributions(np.asarray(row, dtype=np.float64), len(FEATURES))


def load(directory: Path = BUNDLED) -> Model:
    """Load the bundle in `directory`; raises BundleError with the reason where it does not fit."""
    text = _read(directory / JSON_NAME)
    packed = _read(directory / ARRAYS_NAME)
    try:
        metadata = json.loads(text)
    except (ValueError, RecursionError) as error:
        raise BundleError(f"{directory / JSON_NAME} is no JSON: {error}; install the bundle again") from error
    if not isinstance(metadata, dict):
        raise _unfit(directory, "model.json is no object")
    _check_metadata(directory, metadata)
    digest = hashlib.sha256(packed).hexdigest()
    if digest != metadata.get("arrays_sha256"):
        raise _unfit(directory, f"{ARRAYS_NAME} has SHA-256 {digest[:12]}…, not the one in {JSON_NAME}")
    arrays = _unpack(directory, packed)
    try:
        model = Model(
            version=str(metadata["version"]),
            sha256=hashlib.sha256(packed + text).hexdigest(),
            hierarchy=Hierarchy(
                **{name: Level.load(name, metadata["levels"][name], arrays, features=len(FEATURES)) for name in LEVELS}
            ),
            domain=_domain(arrays, [float(metadata["domain_thresholds"][name]) for name in PROFILE_NAMES]),
            thresholds={name: float(metadata["thresholds"][name]) for name in PROFILE_NAMES},
            deciding_features=tuple(str(name) for name in metadata["deciding_features"]),
            metadata=metadata,
        )
    except _UNFIT as error:
        raise _unfit(directory, f"{type(error).__name__}: {error}") from error
    if not all(0.0 < threshold <= 1.0 for threshold in model.thresholds.values()):
        raise _unfit(directory, "a threshold is out of range")
    return model


def feature_schema() -> list[dict[str, Any]]:
    """Return what a bundle must say about its input: name, window and unit of every feature in order."""
    return [{"name": f.name, "window_s": f.window_s, "unit": f.unit} for f in FEATURES]


def _check_metadata(directory: Path, metadata: Mapping[str, Any]) -> None:
    if metadata.get("schema") != SCHEMA:
        raise _unfit(directory, f"bundle schema {metadata.get('schema')!r}, this version reads {SCHEMA}")
    if metadata.get("estimator") != ESTIMATOR:
        raise _unfit(directory, f"estimator {metadata.get('estimator')!r}, this version evaluates {ESTIMATOR}")
    if metadata.get("classes") != list(CLASSES):
        raise _unfit(directory, f"classes {metadata.get('classes')!r} are not {list(CLASSES)}")
    theirs, ours = metadata.get("features"), feature_schema()
    if theirs == ours:
        return
    names = [f.get("name") for f in theirs if isinstance(f, dict)] if isinstance(theirs, list) else []
    for position, feature in enumerate(ours):
        name = names[position] if position < len(names) else None
        if name != feature["name"]:
            raise _unfit(directory, f"feature {position} is {name!r}, this version computes {feature['name']!r}")
    raise _unfit(directory, f"it wants {len(names)} features or other windows or units, this version has {len(ours)}")


def _unpack(directory: Path, packed: bytes) -> dict[str, NDArray[Any]]:
    try:
        with zipfile.ZipFile(io.BytesIO(packed)) as archive:
            if sum(entry.file_size for entry in archive.infolist()) > _ARRAY_LIMIT_BYTES:
                raise _unfit(directory, f"{ARRAYS_NAME} unpacks to more than {_ARRAY_LIMIT_BYTES} bytes")
        with np.load(io.BytesIO(packed), allow_pickle=False) as stored:
            return {name: stored[name] for name in stored.files}
    except _NO_ARRAYS as error:
        raise _unfit(directory, f"{ARRAYS_NAME} is no array file: {error}") from error


def _domain(arrays: Mapping[str, NDArray[Any]], thresholds: list[float]) -> Domain:
    means = np.asarray(arrays["domain_mean"], dtype=np.float64)
    deviations = np.asarray(arrays["domain_deviation"], dtype=np.float64)
    if means.ndim != 2 or means.shape[1] != len(CORE_FEATURES) or not means.size or deviations.shape != means.shape:
        raise ValueError(f"out-of-domain statistics are not of {len(CORE_FEATURES)} features")
    if not (np.isfinite(means).all() and np.isfinite(deviations).all() and (deviations > 0).all()):
        raise ValueError("out-of-domain statistics are not finite and positive")
    if not all(0.0 < threshold < float("inf") for threshold in thresholds):
        raise ValueError("an out-of-domain threshold is out of range")
    return Domain(columns=core_columns(), means=means, deviations=deviations, thresholds=np.array(thresholds))


def core_columns() -> NDArray[np.int64]:
    """Return the columns of the core features."""
    return np.array([FEATURE_NAMES.index(name) for name in CORE_FEATURES], dtype=np.int64)


def _read(path: Path) -> bytes:
    try:
        if path.stat().st_size > _SIZE_LIMIT_BYTES:
            raise BundleError(f"model bundle file {path} is larger than {_SIZE_LIMIT_BYTES} bytes; install it again")
        return path.read_bytes()
    except OSError as error:
        raise BundleError(
            f"cannot read model bundle file {path}: {error.strerror}; train or install a bundle"
        ) from error


def _unfit(directory: Path, reason: str) -> BundleError:
    reason = " ".join(reason.split())[:400]
    return BundleError(f"model bundle {directory} does not fit: {reason}; train or install one for this version")
