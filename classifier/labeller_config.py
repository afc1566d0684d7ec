"""Tunables of the labeller."""

from __future__ import annotations

from dataclasses import dataclass, field

from classifier.config_checks import require
from classifier.declared import DeclaredConfig
from classifier.smoothing import SmoothingConfig


@dataclass(frozen=True, slots=True, kw_only=True)
class LabellerConfig:
    """Tunables of the labeller."""

    #: Least time of evidence before a label.
    minimum_s: float = 15.0
    #: Least measured samples of evidence before a label.
    minimum_samples: int = 5
    #: Core samples further apart than this many usual periods are a gap.
    gap_periods: float = 3.0
    #: Shortest period a gap is measured by: a fast log that pauses for a second has no gap.
    shortest_period_s: float = 1.0
    #: Window of the idle rule, and its limits: high quantile of utilisation, SM activity and memory utilisation (of SM
    #: and DRAM activity where no utilisation is measured); median of power.
    idle_window_s: float = 60.0
    #: Share of the window's samples that must be as low as that, and the one it takes to be idle once more.
    idle_share: float = 0.95
    idle_return_share: float = 0.975
    idle_utilization_ratio: float = 0.02
    idle_power_ratio: float = 0.5
    #: Probability of `idle` where the rule says so; the rest is shared by the other classes.
    idle_probability: float = 0.97
    #: Window of the waiting rule.
    waiting_window_s: float = 15.0
    #: Least probability of training, inference or other where only nvidia-smi's columns are measured. On sources never
    #: seen these columns alone do not tell training from inference, however sure a model is: hence so high.
    basic_threshold: float = 0.97
    #: Least time of evidence in that case: the longest window of the features.
    basic_minimum_s: float = 300.0
    smoothing: SmoothingConfig = field(default_factory=SmoothingConfig)
    declared: DeclaredConfig = field(default_factory=DeclaredConfig)
    #: What decided is found anew this often while a label holds, for one GPU a decision; the numbers are always of now.
    explanation_refresh_s: float = 60.0

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.minimum_s > 0, "minimum_s", self.minimum_s, "above 0")
        require(self.minimum_samples >= 1, "minimum_samples", self.minimum_samples, "at least 1")
        require(self.gap_periods > 1, "gap_periods", self.gap_periods, "above 1, since samples come one period apart")
        require(self.idle_window_s > 0, "idle_window_s", self.idle_window_s, "above 0")
        require(self.waiting_window_s > 0, "waiting_window_s", self.waiting_window_s, "above 0")
        share, back = self.idle_share, self.idle_return_share
        require(0.5 <= share <= 1, "idle_share", share, "between 0.5 and 1")
        require(share <= back <= 1, "idle_return_share", back, f"between idle_share ({share}) and 1")
        is_half = 0.5 <= self.idle_probability <= 1
        require(is_half, "idle_probability", self.idle_probability, "between 0.5 and 1, since idle is the likeliest")
        is_probability = 0 <= self.basic_threshold <= 1
        require(is_probability, "basic_threshold", self.basic_threshold, "a probability between 0 and 1")
