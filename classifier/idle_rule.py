"""The idle rule: a GPU that does nothing, said from physics and not from statistics."""

from __future__ import annotations

from classifier.labeller_config import LabellerConfig
from classifier.signals import LONGEST_WINDOW_S, Signals


def looks_idle(signals: Signals, config: LabellerConfig, *, share: float | None = None) -> bool:
    """Return whether a GPU is idle by physics: no utilisation, no activity elsewhere, no power as under load.

    `share` of the samples has to be as low as that; without it, `config.idle_share`.
    """
    share = config.idle_share if share is None else share
    name = activity(signals, config)
    spacing_s = signals.window(name, LONGEST_WINDOW_S).spacing_s
    needed_s = config.minimum_samples * spacing_s if spacing_s > 0 else 0.0
    window_s = min(LONGEST_WINDOW_S, max(config.idle_window_s, needed_s))
    # Without utilisation both profiling channels are needed: copies keep DRAM busy and no SM.
    for needed in ("util",) if name == "util" else ("sm", "dram"):
        window = signals.window(needed, window_s)
        if not _is_fresh(signals, needed, config):
            return False
        if window.size < config.minimum_samples or window.quantile(share) > config.idle_utilization_ratio:
            return False
    for other in ("sm", "memutil"):
        window = signals.window(other, window_s)
        if window.size and window.quantile(share) > config.idle_utilization_ratio:
            return False
    power = signals.window("power", window_s)
    return not (power.size and power.quantile(0.5) > config.idle_power_ratio)


def activity(signals: Signals, config: LabellerConfig) -> str:
    """Return the signal that says whether a GPU does anything: utilisation, or SM activity where there is none now."""
    return "util" if _is_fresh(signals, "util", config) else "sm"


def _is_fresh(signals: Signals, name: str, config: LabellerConfig) -> bool:
    """Return whether `name` is still measured: a channel may turn [N/A] while others go on."""
    window = signals.window(name, LONGEST_WINDOW_S)
    if not window.size:
        return False
    period_s = max(config.shortest_period_s, window.spacing_s) if window.size > 1 else config.shortest_period_s
    return signals.now_s - float(window.times[-1]) <= config.gap_periods * period_s


def idle_features(signals: Signals, config: LabellerConfig) -> dict[str, float]:
    """Return the features that say a GPU is idle: its activity, then power and the memory it holds where measured."""
    windows = ((activity(signals, config), "p95", 0.95), ("power", "p50", 0.5), ("memory", "p50", 0.5))
    found = {}
    for name, statistic, share in windows:
        window = signals.window(name, config.idle_window_s)
        if window.size:
            found[f"{name}__{statistic}__60"] = window.quantile(share)
    return found
