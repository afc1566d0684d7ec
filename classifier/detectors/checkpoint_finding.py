"""What is said about checkpoints that are late, missed, truncated or long."""

from __future__ import annotations

from agent.clock import Instant
from classifier.detectors.checkpoint_streams import Stream
from classifier.results import Assessment, Evidence


def finding_of(
    now: Instant,
    stream: Stream,
    variant: str,
    *,
    severity: int,
    job_key: str,
    clock_s: float,
    open_since_s: float | None,
    total: int,
    last_s: float | None,
) -> Assessment:
    """Return the assessment of a job with something wrong: `variant` is late, missed, truncated or long.

    `clock_s` is the clock of the job, `open_since_s` when the burst began that goes on.
    """
    cadence, truncated = stream.cadence, stream.truncated if variant == "truncated" else None
    ago_s = max(0.0, clock_s - (cadence.expected_s or clock_s))
    if variant == "long" and open_since_s is not None:
        ago_s = now.monotonic_s - open_since_s
    elif truncated is not None:
        ago_s = now.monotonic_s - truncated.start_s
    evidence: Evidence = {
        "variant": variant,
        "source": stream.source,
        "interval_seconds": cadence.period_s,
        "interval_source": "learned" if cadence.declared_s is None else "declared",
        "confidence_ratio": cadence.confidence,
        "overdue_seconds": ago_s if variant in {"late", "missed"} else None,
        "tolerance_seconds": cadence.tolerance_s,
        "checkpoints": float(total),
        "seconds_since_last": None if last_s is None else now.monotonic_s - last_s,
        "written_bytes": None if truncated is None else truncated.written_bytes,
        "usual_bytes": stream.usual_bytes,
        "usual_seconds": stream.usual_seconds,
    }
    return Assessment(
        anomaly="missed_checkpoint",
        scope="job",
        severity=severity,
        job_key=job_key,
        since_monotonic_s=now.monotonic_s - ago_s,
        since_wall_s=now.wall_s - ago_s,
        evidence=evidence,
        action="contact_user",
        summary=_sentence(variant, evidence, ago_s),
    )


def _sentence(variant: str, evidence: Evidence, ago_s: float) -> str:
    known = f"{evidence['interval_source']} interval {_duration(evidence['interval_seconds'])}"
    if variant == "truncated":
        written, usual = evidence["written_bytes"], evidence["usual_bytes"]
        return f"The last checkpoint has {_gigabytes(written)}, the ones before had {_gigabytes(usual)} ({known})."
    if variant == "long":
        usual_time = _duration(evidence["usual_seconds"])
        return f"A checkpoint has been written for {_duration(ago_s)}; usually it takes {usual_time} ({known})."
    return f"A checkpoint was due {_duration(ago_s)} ago and has not been written ({known})."


def _gigabytes(value: float | str | None) -> str:
    return f"{value / 1e9:.1f} GB" if isinstance(value, float) else "?"


def _duration(value: float | str | None) -> str:
    if not isinstance(value, float):
        return "?"
    return f"{value:.0f} s" if value < 120 else f"{value / 60:.0f} min"
