"""The plots of the report as small PNG files; matplotlib (extra `train`) is imported here only."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from io import BytesIO
from typing import Any, Final

import numpy as np

from agent.errors import UsageError
from agent.vocabulary import CLASSES
from classifier.profiles import PROFILE_NAMES
from classifier.report.experiment import Results
from classifier.report.figures import simulated_figures, simulated_methods, usable
from classifier.report.metrics import ABSTAINED, reliability, risk_coverage

#: Distinct also without colour vision, and each with a dash of its own.
_COLOURS: Final = {"U": "#7a7f87", "P": "#c1662f", "G": "#2c7fb8", "N": "#1b3a5c"}
_DASHES: Final = {"U": ":", "P": "--", "G": "-.", "N": "-"}
_CLASS_COLOURS: Final = dict(zip(CLASSES, ("#1b3a5c", "#c1662f", "#8a9099", "#5b8c5a"), strict=True))
_DPI: Final = 90


def plots(results: Results) -> dict[str, tuple[bytes, str]]:
    """Return PNG bytes and caption by file name; what was not measured has no plot."""
    _import_pyplot()
    found = {
        "accuracy.png": (_accuracy(results), "Simulated families held out, 60 s: balanced accuracy by channel profile"),
        "reliability.png": (_reliability(results), "Simulated families held out, 60 s: share right against confidence"),
        "risk.png": (_risk(results), "Simulated families held out, 60 s: share wrong against share answered"),
        "families.png": (_families(results), "Simulated families held out, profile N, 60 s: what each is called"),
        "delay.png": (_delay(results), "Simulated jobs: share with the right label by seconds since the job began"),
    }
    if results.recorded is not None:
        found["sources.png"] = (_sources(results), "Real sources, 60 s: what the shipped model calls each")
    return found


def _accuracy(results: Results) -> bytes:
    figure, axes = _import_pyplot().subplots(figsize=(7, 3.6))
    methods = list(simulated_methods(results))
    width = 0.8 / len(methods)
    shades = ("#1b3a5c", "#8fb3d1", "#c1a58a")
    for number, name in enumerate(methods):
        estimates = [simulated_figures(results, profile, 60.0, name).balanced for profile in PROFILE_NAMES]
        values = [estimate.value or 0.0 for estimate in estimates]
        spread = [
            [v - (e.low if e.low is not None else v) for v, e in zip(values, estimates, strict=True)],
            [(e.high if e.high is not None else v) - v for v, e in zip(values, estimates, strict=True)],
        ]
        places = np.arange(len(PROFILE_NAMES)) + (number - (len(methods) - 1) / 2) * width
        axes.bar(places, values, width * 0.95, color=shades[number % 3], label=name)
        axes.errorbar(places, values, np.maximum(spread, 0.0), fmt="none", ecolor="#333333", elinewidth=1, capsize=2)
    axes.axhline(1 / len(CLASSES), color="#8a9099", linestyle=":", linewidth=1)
    axes.text(len(PROFILE_NAMES) - 0.5, 1 / len(CLASSES), " chance", color="#4a545e", fontsize=8, va="center")
    axes.set_xticks(range(len(PROFILE_NAMES)), PROFILE_NAMES)
    axes.set(
        xlabel="channel profile", ylabel="balanced accuracy", ylim=(0, 1.02), xlim=(-0.5, len(PROFILE_NAMES) - 0.5)
    )
    axes.legend(loc="upper center", bbox_to_anchor=(0.5, 1.16), ncols=3, frameon=False, fontsize=9)
    return _png(figure)


def _by_profile(results: Results, axes: Any, line: Callable[[Any, Any], tuple[Any, Any]], **style: Any) -> None:  # noqa: ANN401 - untyped plots
    for profile in PROFILE_NAMES:
        chosen = usable(results, profile, 60.0)
        if not chosen.any():
            continue
        answers = results.simulated.answers[profile].where(chosen)
        right = answers.forced == results.simulated.windows.labels[chosen]
        x, y = line(answers.confidence, right)
        axes.plot(x, y, color=_COLOURS[profile], linestyle=_DASHES[profile], label=profile, **style)


def _reliability(results: Results) -> bytes:
    figure, axes = _import_pyplot().subplots(figsize=(4.6, 4.2))

    def line(confidence: Any, right: Any) -> tuple[Any, Any]:  # noqa: ANN401 - arrays
        bins = reliability(confidence, right)
        return [mean for mean, _, _ in bins], [share for _, share, _ in bins]

    axes.plot([0, 1], [0, 1], color="#b8bec5", linewidth=1)
    _by_profile(results, axes, line, marker="o", markersize=3)
    axes.set(xlabel="mean confidence of a bin", ylabel="share right", xlim=(0.2, 1.01), ylim=(0, 1.02))
    axes.legend(title="profile", frameon=False, fontsize=9)
    return _png(figure)


def _risk(results: Results) -> bytes:
    figure, axes = _import_pyplot().subplots(figsize=(6, 3.8))
    _by_profile(results, axes, risk_coverage, linewidth=1.6)
    axes.set(xlabel="share of windows answered, the surest first", ylabel="share wrong of these", xlim=(0, 1.01))
    axes.set_ylim(0, max(0.1, axes.get_ylim()[1]))
    axes.legend(title="profile", frameon=False, fontsize=9)
    return _png(figure)


def _stacked(axes: Any, names: Sequence[str], shares: Sequence[Sequence[float]]) -> None:  # noqa: ANN401 - untyped plots
    """Draw one horizontal bar per name: the share of each class said, and of nothing said."""
    places = np.arange(len(names))[::-1]
    left = np.zeros(len(names))
    for position, word in enumerate((*CLASSES, "unknown")):
        width = np.array([share[position] for share in shares])
        axes.barh(places, width, 0.75, left=left, color=_CLASS_COLOURS.get(word, "#e4e7ea"), label=word)
        left += width
    axes.set_yticks(places, names, fontsize=8)
    axes.set(xlim=(0, 1), xlabel="share of windows")
    axes.legend(loc="lower center", bbox_to_anchor=(0.4, 1.0), ncols=5, frameon=False, fontsize=8, columnspacing=1.0)
    for side in ("left", "right"):
        axes.spines[side].set_visible(False)


def _shares(said: Any) -> list[float]:  # noqa: ANN401 - an array
    return [float((said == position).mean()) for position in (*range(len(CLASSES)), ABSTAINED)]


def _families(results: Results) -> bytes:
    windows, chosen = results.simulated.windows, usable(results, "N", 60.0)
    said = results.simulated.answers["N"].said
    rows = [
        (f"{family} ({label})", _shares(said[mine]))
        for label in CLASSES
        for family, known in sorted(results.simulated.classes.items())
        if known == label and (mine := chosen & (windows.families == family)).any()
    ]
    figure, axes = _import_pyplot().subplots(figsize=(7.5, 1.2 + 0.26 * max(4, len(rows))))
    _stacked(axes, [name for name, _ in rows], [shares for _, shares in rows])
    return _png(figure)


def _sources(results: Results) -> bytes:
    rows: list[tuple[str, list[float]]] = []
    recorded = results.recorded
    if recorded is not None:
        chosen = recorded.windows.spans_s == 60.0
        windows = recorded.windows
        best = {name: recorded.shipped[name].said for name in PROFILE_NAMES}
        for position, label in enumerate(CLASSES):
            for source in np.unique(windows.families[chosen & (windows.labels == position)]):
                mine = chosen & (windows.labels == position) & (windows.families == source)
                rows.append((f"{source} ({label})", _shares(best["N"][mine])))
    figure, axes = _import_pyplot().subplots(figsize=(7.5, 1.2 + 0.26 * max(4, len(rows))))
    _stacked(axes, [name for name, _ in rows], [shares for _, shares in rows])
    return _png(figure)


def _delay(results: Results) -> bytes:
    figure, axes = _import_pyplot().subplots(figsize=(6, 3.8))
    for profile, tracks in results.simulated.tracks.items():
        delays = [delay for track in tracks for delay in track.delays]
        if not delays:
            continue
        known = np.sort([delay for delay in delays if delay is not None])
        x = np.concatenate(([0.0], known, [results.config.run_duration_s[1]]))
        y = np.concatenate((np.arange(known.size + 1), [known.size])) / len(delays)
        axes.step(x, y, where="post", color=_COLOURS[profile], linestyle=_DASHES[profile], label=profile)
    axes.set(xlabel="seconds since the job began", ylabel="share with the right label", ylim=(0, 1.02))
    axes.set_xlim(left=0)
    axes.legend(title="profile", frameon=False, fontsize=9)
    return _png(figure)


def _png(figure: Any) -> bytes:  # noqa: ANN401 - untyped plots
    for axes in figure.axes:
        for side in ("top", "right"):
            axes.spines[side].set_visible(False)
    out = BytesIO()
    # No version or date in it: equal results give equal bytes.
    figure.savefig(out, format="png", dpi=_DPI, bbox_inches="tight", facecolor="white", metadata={"Software": None})
    _import_pyplot().close(figure)
    return out.getvalue()


def _import_pyplot() -> Any:  # noqa: ANN401 - imported late
    try:
        import matplotlib as mpl

        mpl.use("Agg")
        import matplotlib.pyplot as plt
    except ImportError as error:
        raise UsageError("the report's plots need matplotlib; install warpwatch[train]") from error
    return plt
