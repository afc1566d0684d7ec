"""The bundle that a training writes: report, arrays, metadata and model card."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from hashlib import sha256
from io import BytesIO
from pathlib import Path
from typing import Any, Final

import numpy as np
from numpy.typing import NDArray

from agent.errors import FaultError
from agent.vocabulary import CLASSES
from classifier.features import CORE_FEATURES, FEATURE_NAMES
from classifier.hierarchy import ACTIVITY_CLASSES, answered
from classifier.model import ARRAYS_NAME, CARD_NAME, ESTIMATOR, JSON_NAME, SCHEMA, Domain, feature_schema
from classifier.own_traces import OwnTraces
from classifier.profiles import PROFILE_NAMES
from classifier.scores import Scores, show
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset


@dataclass(frozen=True, slots=True, kw_only=True)
class TrainingReport:
    """What a training gave: where the bundle is, and how it does on windows it has not seen."""

    directory: Path
    windows: int
    scenarios: int  # and recordings
    recorded: int  # windows that come from recordings
    temperatures: tuple[float, float]
    thresholds: Mapping[str, float]  # by profile
    test: Mapping[str, Scores]  # by profile: scenarios held out, of families that were trained on
    held_out: Mapping[
        str, Scores
    ]  # by profile: whole families held out; they have a share in temperatures and thresholds

    def format(self) -> str:
        """Return the report as text."""
        return (
            f"bundle written to {self.directory}\n"
            f"{self.windows} windows ({self.recorded} recorded) of {self.scenarios} scenarios and recordings, "
            f"temperatures {self.temperatures[0]:.3g} and {self.temperatures[1]:.3g}, thresholds "
            f"{', '.join(f'{name} {value:.3g}' for name, value in self.thresholds.items())}\n"
            f"held-out {self._what()} of trained families:\n{format_profiles(self.test)}\n"
            + (f"whole families held out:\n{format_profiles(self.held_out)}\n" if self.held_out else "")
        )

    def _what(self) -> str:
        return "scenarios and recordings" if self.recorded else "simulated scenarios"


def format_profiles(scores: Mapping[str, Scores]) -> str:
    """Return one line per profile in Markdown."""
    lines = [
        "| profile | windows | balanced accuracy | macro-F1 | calibration error | coverage | balanced where decided |",
        "|---|---|---|---|---|---|---|",
    ]
    for name, one in scores.items():
        figures = (one.balanced_accuracy_forced, one.macro_f1_forced, one.calibration_error, one.coverage)
        windows = sum(part.windows for part in one.classes.values())
        lines.append(f"| {name} | {windows} | " + " | ".join(map(show, (*figures, one.balanced_accuracy))) + " |")
    return "\n".join(lines)


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
    *,
    classes: Sequence[str],
    domain: Domain,
    deciding: Sequence[str],
    own: OwnTraces | None = None,
) -> dict[str, Any]:
    """Return what model.json says; `write_bundle` adds the digest of the arrays."""
    import sklearn

    trained_on = "simulated data only"
    if own is not None:
        trained_on = f"simulated data and {own.describe()}" if config.data.scenarios > 0 else own.describe()
    return {
        "schema": SCHEMA,
        "version": config.version,
        "estimator": ESTIMATOR,
        "classes": list(CLASSES),
        "features": feature_schema(),
        "levels": {
            "activity": {"classes": list(ACTIVITY_CLASSES), "temperature": report.temperatures[0]},
            "workload": {"classes": list(classes), "temperature": report.temperatures[1]},
        },
        "thresholds": dict(report.thresholds),
        "domain_thresholds": dict(zip(PROFILE_NAMES, domain.thresholds.tolist(), strict=True)),
        "deciding_features": list(deciding),
        "trained_on": trained_on,
        "training": {
            "seed": config.seed,
            "windows": report.windows,
            "recorded_windows": report.recorded,
            "scenarios": report.scenarios,
            "kinds": {str(kind): int((data.kinds == kind).sum()) for kind in np.unique(data.kinds)},
            "data_sha256": data.digest(),
            **{name: getattr(config, name) for name in _TOLD},
            **({} if own is None else {"own_traces": own.as_dict()}),
        },
        "held_out_simulated": {
            "scenarios": {name: one.as_dict() for name, one in report.test.items()},
            "families": {name: one.as_dict() for name, one in report.held_out.items()},
        },
        "libraries": {"scikit-learn": sklearn.__version__, "numpy": np.__version__},
    }


_TOLD: Final = (
    "exclude_kinds", "copies", "members", "max_iter", "activity_iter", "max_bins", "max_depth", "max_leaf_nodes",
    "min_samples_leaf", "learning_rate", "l2_regularization", "max_features", "family_balance", "recorded_share",
    "strange_share", "strange_weight", "family_folds", "unseen_share", "target_precision", "domain_quantile",
)  # fmt: skip


def domain_arrays(domain: Domain) -> dict[str, NDArray[Any]]:
    """Return the arrays to store of the out-of-domain statistics."""
    return {"domain_mean": domain.means, "domain_deviation": domain.deviations}


def card_of(metadata: dict[str, Any], report: TrainingReport) -> str:
    """Return the model card in Markdown."""
    training, core = metadata["training"], len(CORE_FEATURES)
    answers = answered(tuple(metadata["levels"]["workload"]["classes"]))
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
    excluded = f"\nNever trained on: {', '.join(training['exclude_kinds'])}.\n" if training["exclude_kinds"] else ""
    families = (
        f"""
## Families held out

Whole kinds of workload held out in turn, pooled: the trees that scored them have not seen the kinds. They have a share
of {training["unseen_share"]:g} in what temperatures and thresholds are set on.

{format_profiles(report.held_out)}
"""
        if report.held_out
        else ""
    )
    return f"""# Model card: warpwatch workload model {metadata["version"]}

{origin}

## What it is

Two levels: idle or busy, then {", ".join(answers)}. Each is the mean of
{training["members"]} fits of scikit-learn's {ESTIMATOR} ({metadata["libraries"]["scikit-learn"]};
{training["activity_iter"]} and {training["max_iter"]} rounds, depth at most {training["max_depth"]},
{training["max_leaf_nodes"]} leaves), exported as arrays.
{len(FEATURE_NAMES)} features over 15 to 900 s; temperatures {report.temperatures[0]:.3g} and
{report.temperatures[1]:.3g}; abstention below {levels(report.thresholds)} by channel profile; a diagonal Mahalanobis
distance over {core} core features to the nearest trained family refuses what is out of its domain. Made-up work, parts
of different windows put together ({training["strange_share"]:g} for each busy window), is a class that is never
answered: its probability is shared by the answers.

Profiles: U utilisation and memory, P with power and clocks, G with profiling, NVLink and PCIe, N with the node around.

## Data

{report.windows} windows of {report.scenarios} scenarios of classifier.simulator, seed {training["seed"]}, SHA-256
{training["data_sha256"]}:

{kinds}
{excluded}
Channels are left out by profile and by group at random, independently of the class ({training["copies"]} draws for each
scenario), and sampling intervals vary. Whole scenarios are held out, never single windows.

## Held-out scenarios of trained families

{format_profiles(report.test)}

Profile N by class:

{report.test["N"].format()}
{families}
## Limits

- With nvidia-smi columns alone (U, P), training and inference do not separate on machines never seen; the labeller
  therefore asks for a high probability there and says `unknown` otherwise.
- Levels are per board family through limits and sizes; boards whose limit is not known give no power features.
"""


def levels(values: Mapping[str, float]) -> str:
    """Return thresholds by profile as text."""
    return ", ".join(f"{name} {value:.3g}" for name, value in values.items())
