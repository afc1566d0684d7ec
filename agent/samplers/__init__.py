"""Samplers: one file per source, all behind one small protocol."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Protocol

from agent.clock import Instant
from agent.records import Record


class SourceUnavailableError(Exception):
    """The whole source cannot be read now (driver gone, file absent).

    `reason` is a short fixed word for the `reason` label of `warpwatch_sampler_errors_total`, never a message;
    `str(error)` is the sentence for the log.
    """

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


class Sampler(Protocol):
    """One source of records.

    The schedule calls `probe` at the start and, with back-off, after a loss; while it answers True, it calls
    `sample` every `period_s`. Calls of one sampler never overlap; samplers run in threads of their own.
    """

    @property
    def name(self) -> str:
        """Value of the `sampler` label: the name of the source."""
        ...

    @property
    def period_s(self) -> float:
        """Seconds between two calls of `sample`."""
        ...

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings since the start, by reason (a short fixed word)."""
        ...

    def probe(self) -> bool:
        """Return whether the source is here; opens it where that is needed, and may be called again."""
        ...

    def sample(self, now: Instant) -> Sequence[Record]:
        """Return the records of this tick; none where there is nothing to tell, as of a host without network mounts.

        A field that cannot be read is None and counted in `errors`; raises SourceUnavailableError where nothing
        can be read at all.
        """
        ...

    def close(self) -> None:
        """Release handles and buffers; idempotent."""
        ...


@dataclass(frozen=True, slots=True, kw_only=True)
class SamplerStatus:
    """How one sampler fared: what `warpwatch_sampler_*` export. Kept by the schedule."""

    name: str
    success: bool  # the last run read its source
    duration_s: float | None = None  # of the last run
    last_success_wall_s: float | None = None  # None before the first
    errors: Mapping[str, int] = field(default_factory=dict)  # failed readings by reason, since the start
