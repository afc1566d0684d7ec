"""What every format of foreign logs is turned into first."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, NamedTuple


class Reading(NamedTuple):
    """What a log says about one GPU at one moment; values by the field of their record, absent ones left out."""

    time_s: float | None  # as in the log: since 1970, or since some start; None where it holds no time
    gpu_index: int | None
    uuid: str | None
    bus: str | None
    state: str | None  # one of vocabulary.GPU_STATES; None where the log does not show it
    sample: Mapping[str, Any]
    slow: Mapping[str, Any]
    limits: Mapping[str, Any]
    info: Mapping[str, Any]

    @property
    def says_which(self) -> bool:
        """Return whether the log says which GPU this is about."""
        return self.gpu_index is not None or self.uuid is not None or self.bus is not None
