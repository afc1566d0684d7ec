"""Models that the shipped one is measured against: a linear one and a forest, on the same windows.

They answer like a model bundle but are never exported. scikit-learn is imported inside the functions only.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from agent.history import Array
from agent.vocabulary import CLASSES
from classifier.model import Prediction
from classifier.training_config import TrainingConfig
from classifier.training_data import Dataset
from classifier.training_windows import augmented


@dataclass(frozen=True, slots=True, kw_only=True)
class Rival:
    """A fitted scikit-learn classifier of all four classes."""

    name: str
    estimator: Any
    threshold: float = 0.84

    def thresholds_of(self, rows: Array) -> Array:
        """Return the least probability of an answer: the same for every row."""
        return np.full(len(rows), self.threshold)

    def predict(self, rows: Array) -> Prediction:
        """Return its probabilities; a rival has no notion of a domain, every row is in it."""
        probabilities = np.zeros((len(rows), len(CLASSES)))
        probabilities[:, self.estimator.classes_] = self.estimator.predict_proba(rows)
        return Prediction(probabilities=probabilities, out_of_domain_ratio=np.zeros(len(rows)))


def fit_rivals(data: Dataset, *, seed: int, rows: int = 12_000, trees: int = 150) -> tuple[Rival, ...]:
    """Return a logistic regression and a random forest fitted on at most `rows` windows of `data`.

    They see the windows as the model does, with channels left out at random. Missing features are the median and a flag
    for the linear model; the forest takes NaN as it is.
    """
    from sklearn.ensemble import RandomForestClassifier
    from sklearn.impute import SimpleImputer
    from sklearn.linear_model import LogisticRegression
    from sklearn.pipeline import make_pipeline
    from sklearn.preprocessing import StandardScaler

    data = augmented(TrainingConfig(copies=1), data, seed)
    rng = np.random.default_rng([seed, 31])
    chosen = np.sort(rng.permutation(data.labels.size)[:rows])
    x, y = data.rows[chosen], data.labels[chosen]
    linear = make_pipeline(
        SimpleImputer(strategy="median", add_indicator=True, keep_empty_features=True),
        StandardScaler(),
        LogisticRegression(C=0.1, class_weight="balanced", max_iter=300, tol=1e-3),
    )
    forest = RandomForestClassifier(
        n_estimators=trees, min_samples_leaf=3, class_weight="balanced", n_jobs=-1, random_state=seed
    )
    return (
        Rival(name="linear model", estimator=linear.fit(x, y)),
        Rival(name="random forest", estimator=forest.fit(x, y)),
    )
