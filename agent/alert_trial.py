"""A trial of the way to the pager: a marked alert for a time, by a file that `warpwatch test-alert` writes.

It is a series of its own with a rule of its own, so that nobody can take it for a finding: no detector, no label, no
baseline and no series of a GPU knows of it. It takes the way of an alert of its severity: scrape, rule, route,
receiver.
"""

from __future__ import annotations

import contextlib
import json
import logging
import math
import secrets
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.clock import Clock, Instant
from agent.errors import UsageError
from agent.owners.job_file import JobFileError
from agent.owners.job_files import JobFilesConfig, SmallFiles
from agent.state_folder import StateFolder
from agent.vocabulary import ANOMALIES, SEVERITIES

log = logging.getLogger("warpwatch")

#: The longest one: whoever waits for longer has an answer.
LONGEST_S: Final = 3600.0
_FOLDER: Final = "test-alerts.d"
_FILES: Final = 16
_FILE_BYTES: Final = 1024
_KEYS: Final = frozenset({"anomaly", "severity", "start", "expires"})


@dataclass(frozen=True, slots=True, kw_only=True)
class Trial:
    """One marked alert as its file says."""

    anomaly: str
    severity: str
    start_wall_s: float
    expires_wall_s: float
    unknown_keys: tuple[str, ...] = ()


def parse_trial(data: bytes) -> Trial:
    """Return what a file says, or raise JobFileError."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise JobFileError("malformed", f"it is no JSON: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise JobFileError("malformed", "it has to hold one JSON object")
    if value.get("anomaly") not in ANOMALIES or value.get("severity") not in SEVERITIES[1:]:
        raise JobFileError("bad_value", '"anomaly" or "severity" is no such word')
    start_s, expires_s = _time(value, "start"), _time(value, "expires")
    if not 0 < expires_s - start_s <= LONGEST_S:
        raise JobFileError("bad_value", '"expires" has to be later than "start", by an hour at most')
    return Trial(
        anomaly=value["anomaly"],
        severity=value["severity"],
        start_wall_s=start_s,
        expires_wall_s=expires_s,
        unknown_keys=tuple(sorted(str(key) for key in value if key not in _KEYS)),
    )


def _time(value: Mapping[str, object], key: str) -> float:
    seconds = value.get(key)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e11:
        raise JobFileError("bad_value", f'"{key}" has to be a time in Unix seconds')
    return float(seconds)


def begin_trial(state_directory: Path, now: Instant, anomaly: str, severity: str, seconds: float) -> Trial:
    """Write the file of a trial and return what it says; UsageError for unknown words, FaultError where it fails.

    Files of trials that have ended are removed.
    """
    check_trial(anomaly, seconds)
    start_s = math.floor(now.wall_s)
    data = json.dumps({"anomaly": anomaly, "severity": severity, "start": start_s, "expires": start_s + seconds})
    folder = StateFolder(state_directory, _FOLDER)
    folder.write(f"{secrets.token_hex(4)}.json", data.encode())
    folder.remove(_ended(folder.path, now))
    return parse_trial(data.encode())


def check_trial(anomaly: str, seconds: float) -> None:
    """Raise UsageError for a word or a length that no trial may have."""
    if anomaly not in ANOMALIES:
        raise UsageError(f"there is no anomaly {anomaly!r}; choose one of {', '.join(ANOMALIES)}")
    if seconds > LONGEST_S:
        raise UsageError(f"--for is longer than {LONGEST_S / 60:.0f} minutes")


def _ended(folder: Path, now: Instant) -> list[str]:
    """Return the names of files so old that their trials have ended: the agent reads a few files only."""
    names = []
    for path in folder.glob("*.json"):
        with contextlib.suppress(OSError):
            if path.lstat().st_mtime < now.wall_s - LONGEST_S:
                names.append(path.name)
    return names


class TrialWatch:
    """The trials that last, for the agent: read every few seconds, asked by any thread."""

    def __init__(self, state_directory: Path, clock: Clock) -> None:
        config = JobFilesConfig(folder=str(state_directory / _FOLDER), files=_FILES, file_bytes=_FILE_BYTES)
        self._files = SmallFiles(config, parse_trial, "test alert")
        self._clock = clock
        self._held: frozenset[Trial] = frozenset()

    def read(self) -> None:
        """Look at the folder; say what has begun."""
        now = self._clock.now()
        held = frozenset(one for one in self._files.read(now) if one.start_wall_s <= now.wall_s + 1.0)
        for one in held - self._held:
            log.warning("a test alert of %s (%s) lasts now: nothing is wrong", one.anomaly, one.severity)
        self._held = held

    def held(self, now: Instant) -> tuple[tuple[str, str], ...]:
        """Return anomaly and severity of what lasts, in the order of their vocabulary."""
        lasting = {(one.anomaly, one.severity) for one in self._held if now.wall_s < one.expires_wall_s}
        return tuple(sorted(lasting, key=lambda pair: (ANOMALIES.index(pair[0]), SEVERITIES.index(pair[1]))))
