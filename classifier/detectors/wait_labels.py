"""What labels and declarations say of GPUs that wait: a part of `stalled_collective`."""

from __future__ import annotations

from classifier.results import Decision


def says_training(decision: Decision | None, least: float) -> bool:
    """Return whether the work is declared as training, or labelled so with at least this probability."""
    if decision is None or decision.workload == "inference":
        return False
    if decision.declared_class is not None:
        return decision.declared_class == "training"
    probabilities = decision.probabilities
    if decision.workload != "training" or probabilities is None:
        return False
    return probabilities["training"] >= least


def says_inference(decision: Decision | None, least: float) -> bool:
    """Return whether the work is labelled inference with at least this probability."""
    if decision is None or decision.workload != "inference" or decision.probabilities is None:
        return False
    return decision.probabilities["inference"] >= least
