"""The bars that the model is held to, what was measured against each, and what would settle the ones missed."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from classifier.profiles import PROFILE_NAMES
from classifier.report.experiment import Results
from classifier.report.figures import (
    RealFigures,
    SimulatedFigures,
    declared_of_profile,
    never_training,
    real_methods,
    simulated_figures,
    unknown_figures,
    worst_families,
)
from classifier.report.metrics import Estimate
from classifier.report.recorded import idle_against_busy
from classifier.report.steady import Steady


@dataclass(frozen=True, slots=True, kw_only=True)
class Bar:
    """One bar; `gap` is how much is missing, 0 or less where it is met, None where it could not be measured."""

    name: str
    bar: str
    measured: str
    gap: float | None
    why: str = ""  # it was missed, and what data would settle it

    @property
    def verdict(self) -> str:
        """Return `met`, `missed by ...` or `not measured`."""
        if self.gap is None:
            return "not measured"
        return "met" if self.gap <= 1e-9 else f"missed by {self.gap:.3g}"


_SIMULATED_WHY = (
    "Families that were never seen resemble ones of another class. More families of their class in training, or "
    "recordings of them, settle it."
)
_COLUMNS_WHY = (
    "nvidia-smi's columns do not tell training from inference on machines never seen; utilisation and power stop near "
    "0.7 for anyone, and with so few sources the interval is wide. Recordings of tens of further sources settle the "
    "figure; profiling, link and process channels, or a declaration, settle the class."
)
_STEADY_WHY = (
    "There is one source with profiling columns, and its logs hold no channels of the host. Recordings of more Hopper "
    "machines with the agent's own channels settle it."
)


def all_bars(results: Results) -> list[Bar]:
    """Return every bar in the order of the report."""
    return [
        *_simulated(results),
        *_real(results),
        _steady(results),
        *_declared(results),
        *_never(results),
        *_unknown(results),
        *_speed(results),
    ]


def at_least(name: str, bar: float, estimate: Estimate | None, why: str) -> Bar:
    """Return the bar of a figure that must be `bar` or more."""
    if estimate is None or estimate.value is None:
        return Bar(name=name, bar=f"at least {bar:g}", measured="-", gap=None, why=why)
    return Bar(name=name, bar=f"at least {bar:g}", measured=estimate.format(), gap=bar - estimate.value, why=why)


def at_most(name: str, bar: float, estimate: Estimate | None, why: str) -> Bar:
    """Return the bar of a figure that must be `bar` or less."""
    if estimate is None or estimate.value is None:
        return Bar(name=name, bar=f"at most {bar:g}", measured="-", gap=None, why=why)
    return Bar(name=name, bar=f"at most {bar:g}", measured=estimate.format(), gap=estimate.value - bar, why=why)


def _simulated(results: Results) -> list[Bar]:
    found: list[Bar] = []
    figures = {name: simulated_figures(results, name, 60.0) for name in PROFILE_NAMES}
    wide = "families held out, 60 s"
    reasons = {name: f"{_SIMULATED_WHY} Under {name}: {worst_families(results, name)}." for name in ("N", "G")}
    found.append(_balanced("N", wide, 0.98, figures["N"], reasons["N"]))
    found.append(at_least(f"N, simulated {wide}: macro-F1", 0.95, figures["N"].macro_f1, reasons["N"]))
    found.append(_balanced("G", wide, 0.95, figures["G"], reasons["G"]))
    why = "Families never seen are answered too surely. Calibration on families of their own, and more of them, help."
    found += [
        at_most(f"{name}, simulated {wide}: calibration error", 0.05, figures[name].calibration, why)
        for name in PROFILE_NAMES
    ]
    return found


def _balanced(profile: str, wide: str, bar: float, figures: SimulatedFigures, why: str) -> Bar:
    """Return the bar of a balanced accuracy: without `other`, which macro-F1 is asked for with; both are shown."""
    name = f"{profile}, simulated {wide}: balanced accuracy over training, inference and idle"
    found = at_least(name, bar, figures.balanced_without_other, why)
    measured = f"{found.measured} (with other: {figures.balanced.format()})"
    return Bar(name=found.name, bar=found.bar, measured=measured, gap=found.gap, why=found.why)


def _real(results: Results) -> list[Bar]:
    found: list[Bar] = []
    for profile in ("U", "P"):
        by_name = dict(real_methods(results, profile, 60.0))
        shipped = by_name.get("shipped model")
        idle = idle_against_busy(shipped.units, seed=results.config.seed) if shipped else None
        why = (
            "Recordings are labelled as a whole and hold stretches in which nothing ran; marked phases would settle it."
        )
        found.append(at_least(f"{profile}, real, 60 s: idle against busy, balanced accuracy", 0.95, idle, why))
        late = dict(real_methods(results, profile, 300.0))
        for name in ("shipped model", "each source left out"):
            figures = late.get(name)
            bar = at_least(
                f"{profile}, real, 300 s, {name}: class-balanced accuracy of the answers",
                0.8,
                figures.right if figures else None,
                _COLUMNS_WHY,
            )
            found.append(_with_coverage(bar, figures))
    return found


def _with_coverage(bar: Bar, figures: RealFigures | None) -> Bar:
    if figures is None or figures.answered.value is None:
        return bar
    text = f"{bar.measured} at {figures.answered.value:.2f} coverage"
    if bar.gap is None:
        text = f"no class answered in one class of sources at least; coverage {figures.answered.value:.2f}"
    return Bar(name=bar.name, bar=bar.bar, measured=text, gap=bar.gap, why=bar.why)


def _steady(results: Results) -> Bar:
    steady = results.recorded.steady if results.recorded else ()
    wrong, unknown = steady_counts(steady)
    gap = None if not steady else float(wrong + max(0, unknown - 1))
    return Bar(
        name="G, real: steady phases of the H100 recordings, commonest decision",
        bar="all right, at most one unknown",
        measured=f"{len(steady) - wrong - unknown} right, {unknown} unknown, {wrong} wrong of {len(steady)}",
        gap=gap,
        why=_STEADY_WHY,
    )


def steady_counts(steady: Sequence[Steady]) -> tuple[int, int]:
    """Return how many steady phases are wrong, and how many unknown, where the board's power limit is known."""
    verdicts = [(one.recording.label, Steady.verdict(one.with_limit)) for one in steady]
    unknown = sum(said == "unknown" for _, said in verdicts)
    return sum(said not in (label, "unknown") for label, said in verdicts), unknown


def _declared(results: Results) -> list[Bar]:
    why = (
        "Where telemetry and a declaration contradict each other and both are wrong at times, no weighing is right in "
        "all cases. Families of the class that is mistaken, or a measured error rate of declarations, settle it."
    )
    return [
        at_least(
            f"{name}, simulated families held out, 60 s, declared with 95 % reliability: accuracy at full coverage",
            0.95,
            declared_of_profile(results, name),
            why,
        )
        for name in PROFILE_NAMES
    ]


def _never(results: Results) -> list[Bar]:
    return [
        Bar(
            name=f"called training: {name}",
            bar="never",
            measured=f"{said} of {total} decisions",
            gap=float(said) if total else None,
            why="The decisions in question are to be looked at one by one.",
        )
        for name, said, total in never_training(results)
    ]


def _unknown(results: Results) -> list[Bar]:
    rows, overall, coverage = unknown_figures(results)
    families = ", ".join(results.unknown.families)
    why = "A family that nothing like it was seen of looks like training. Recordings of such programs settle it."
    return [
        at_most(f"N, unknown families ({families}): called training", 0.1, Estimate(overall) if rows else None, why),
        at_least(
            "N, known busy classes beside them: coverage",
            0.8,
            Estimate(coverage),
            "The model is less sure than its threshold asks. More simulated scenarios, or recordings, settle it.",
        ),
    ]


def _speed(results: Results) -> list[Bar]:
    speed = results.speed
    why = "Fewer trees or features settle it, at some cost in accuracy."

    def below(name: str, unit: str, bar: float, value: float) -> Bar:
        return Bar(name=name, bar=f"under {bar:g} {unit}", measured=f"{value:.3g} {unit}", gap=value - bar, why=why)

    return [
        below("features and prediction, 16 GPUs, CPU time", "ms", 10.0, 1000 * speed.decision_s),
        below("bundle on disk", "kB", 1000.0, speed.bundle_bytes / 1000),
        below("loading the bundle", "ms", 50.0, 1000 * speed.load_s),
    ]
