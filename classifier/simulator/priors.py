"""Ranges that workloads draw from, each with where it comes from.

Sources are short names, spelt out here:
- `H100`: public DCGM recordings of 8x H100 SXM5 at 10 Hz (atharvanihalani/gpu-telemetry-exploration); the run follows,
  for instance `H100 T13` (tensor parallel 8, pipeline parallel 2).
- `Acme`: production distributions of AcmeTrace (arXiv:2403.07648); `gwtrain`: recordings of rank-0 checkpoints.
- `Splitwise` arXiv:2311.18677, `POLCA` arXiv:2308.12908, `DS-Analyzer` VLDB'21 (CoorDL), `H200 decode` public power
  study of LLM decoding.
- `prior`: an engineering prior that no measurement at hand confirms; wide on purpose.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from classifier.simulator.scenario import Draws


@dataclass(frozen=True, slots=True)
class Prior:
    """A range of a parameter (5 to 95 % across configurations), how it is drawn, and its source."""

    low: float
    high: float
    source: str
    #: Whether the draw is even in the logarithm.
    log: bool = False


Priors = Mapping[str, Prior]


def even(low: float, high: float, source: str = "prior") -> Prior:
    """Return a prior that is even between `low` and `high`."""
    return Prior(low, high, source)


def log(low: float, high: float, source: str = "prior") -> Prior:
    """Return a prior that is even in the logarithm."""
    return Prior(low, high, source, log=True)


def take(draws: Draws, priors: Priors, name: str, scale: float = 1.0) -> float:
    """Draw `name` from its prior, both ends multiplied by `scale`."""
    prior = priors[name]
    if prior.log:
        return draws.log_uniform(name, prior.low * scale, prior.high * scale)
    return draws.uniform(name, prior.low * scale, prior.high * scale)


GB: Final = 1e9
