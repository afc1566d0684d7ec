"""The classifier behind `classifier.realism`, apart because it needs scikit-learn."""

from __future__ import annotations

import numpy as np
from numpy.typing import NDArray

from agent.errors import UsageError
from agent.history import Array


def simulated_looks(rows: Array, answers: NDArray[np.int64], weights: Array, tested: Array, seed: int) -> Array:
    """Fit on `rows` (`answers` 1 for simulated) and return how simulated each row of `tested` looks, 0..1.

    Raises UsageError where scikit-learn is missing.
    """
    try:
        from sklearn import ensemble
        from threadpoolctl import threadpool_limits  # type: ignore[import-not-found, import-untyped, unused-ignore] # no types
    except ImportError as error:
        raise UsageError("telling simulated from recorded needs scikit-learn; install warpwatch[train]") from error
    model = ensemble.HistGradientBoostingClassifier(
        max_iter=80, learning_rate=0.1, max_leaf_nodes=12, min_samples_leaf=20, random_state=seed, early_stopping=False
    )
    with threadpool_limits(1):  # as good as any number for tables this small, and kinder to a shared machine
        model.fit(rows, answers, sample_weight=weights / weights.mean())
    looks: Array = model.predict_proba(tested)[:, 1]
    return looks
