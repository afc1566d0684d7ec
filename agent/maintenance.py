"""Maintenance: silence for a time, for GPUs or the whole node, by files that a person writes and the agent reads.

Each is one small JSON file in `maintenance.d` of the state directory, and so outlives the agent and a boot. It ends by
itself, by the wall clock. Findings are made and shown as ever; what changes is that metrics say so, at which the
shipped rules are silent.
"""

from __future__ import annotations

import json
import math
import re
import secrets
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Final

from agent.clock import Clock, Instant
from agent.errors import UsageError
from agent.owners.job_file import JobFileError, device_name
from agent.owners.job_files import JobFilesConfig, SmallFiles
from agent.records import GpuKey
from agent.state_folder import StateFolder
from agent.vocabulary import ANOMALIES

#: Seconds between two looks of the agent at the folder.
READ_PERIOD_S: Final = 5.0
#: The longest maintenance: what lasts longer is no maintenance.
LONGEST_S: Final = 31 * 86400.0
_FOLDER: Final = "maintenance.d"
_FILES: Final = 256
_FILE_BYTES: Final = 8192
_GPUS: Final = 64
_REASON: Final = 200
_KEYS: Final = frozenset({"id", "gpus", "node", "anomalies", "start", "expires", "reason"})
_ID: Final = re.compile(r"[0-9a-f]{8}")
_INDEX: Final = re.compile(r"\d{1,3}")
_DURATION: Final = re.compile(r"(\d+(?:\.\d+)?)(s|m|h|d)")
_UNIT_S: Final = {"s": 1.0, "m": 60.0, "h": 3600.0, "d": 86400.0}


@dataclass(frozen=True, slots=True, kw_only=True)
class Maintenance:
    """One maintenance as its file says."""

    id: str
    #: Indices and UUIDs (lower case) of cards; empty where it is of the node.
    gpus: tuple[str, ...]
    #: Anomalies that it is confined to; empty for all.
    anomalies: tuple[str, ...]
    start_wall_s: float
    expires_wall_s: float
    reason: str = ""
    unknown_keys: tuple[str, ...] = ()

    @property
    def is_of_node(self) -> bool:
        """Whether it is of the whole node."""
        return not self.gpus

    def names(self, key: GpuKey) -> bool:
        """Return whether it is of this card."""
        return str(key.gpu) in self.gpus or (key.uuid is not None and key.uuid.lower() in self.gpus)


def parse_duration(text: str) -> float:
    """Return seconds of a text such as 90s, 30m, 2h, 1d; raises UsageError for another, or one that is too long."""
    found = _DURATION.fullmatch(text.strip())
    seconds = float(found[1]) * _UNIT_S[found[2]] if found else 0.0
    if not 1 <= seconds <= LONGEST_S:
        raise UsageError(f"--for is {text!r}; write how long, as in 90s, 30m, 2h or 1d, 31d at most")
    return seconds


def parse_gpus(texts: Sequence[str]) -> tuple[str, ...]:
    """Return GPUs as a file names them; raises UsageError for what is neither an index nor the UUID of a card."""
    found = []
    for text in texts:
        name = text if _INDEX.fullmatch(text) else device_name(text)
        if name is None or not (name.isdecimal() or name.startswith("gpu-")):
            raise UsageError(
                f"--gpu is {text!r}; name a card by its index or its GPU-... UUID, as nvidia-smi -L shows it"
            )
        found.append(str(int(name)) if name.isdecimal() else name)
    return tuple(dict.fromkeys(found))


def parse_maintenance(data: bytes) -> Maintenance:
    """Return what a file says, or raise JobFileError."""
    try:
        value = json.loads(data.decode("utf-8"))
    except (ValueError, RecursionError) as error:
        raise JobFileError("malformed", f"it is no JSON: {str(error)[:80]}") from error
    if not isinstance(value, dict):
        raise JobFileError("malformed", "it has to hold one JSON object")
    gpus = _texts(value, "gpus")
    is_of_node = value.get("node", False)
    if is_of_node not in (True, False) or bool(gpus) == is_of_node or len(gpus) > _GPUS:
        raise JobFileError("bad_value", 'it has to name either "gpus" or "node": true')
    anomalies = _texts(value, "anomalies")
    if not set(anomalies) <= set(ANOMALIES):
        raise JobFileError("bad_value", '"anomalies" holds a word that is none')
    start_s, expires_s = _time(value, "start"), _time(value, "expires")
    if not 0 < expires_s - start_s <= LONGEST_S + 1:
        raise JobFileError("bad_value", '"expires" has to be later than "start", by 31 days at most')
    reason, name = value.get("reason", ""), value.get("id")
    if not isinstance(reason, str) or len(reason) > _REASON or not reason.isprintable():
        raise JobFileError("bad_value", f'"reason" has to be a text of {_REASON} characters at most')
    if not isinstance(name, str) or not _ID.fullmatch(name):
        raise JobFileError("bad_value", '"id" has to be eight hexadecimal digits')
    return Maintenance(
        id=name,
        gpus=tuple(gpu.lower() for gpu in gpus),
        anomalies=anomalies,
        start_wall_s=start_s,
        expires_wall_s=expires_s,
        reason=reason,
        unknown_keys=tuple(sorted(str(key) for key in value if key not in _KEYS)),
    )


def _texts(value: Mapping[str, object], key: str) -> tuple[str, ...]:
    texts = value.get(key, [])
    if isinstance(texts, list) and all(isinstance(text, str) and len(text) <= 64 for text in texts):
        return tuple(texts)
    raise JobFileError("bad_type", f'"{key}" has to be a list of short texts')


def _time(value: Mapping[str, object], key: str) -> float:
    seconds = value.get(key)
    if isinstance(seconds, bool) or not isinstance(seconds, int | float) or not 0 < seconds < 1e11:
        raise JobFileError("bad_value", f'"{key}" has to be a time in Unix seconds')
    return float(seconds) if math.isfinite(seconds) else 0.0


class MaintenanceFiles:
    """The files of one state directory, for commands and for the agent; not for two threads at a time."""

    def __init__(self, state_directory: Path) -> None:
        self._written = StateFolder(state_directory, _FOLDER)
        self.folder = self._written.path
        config = JobFilesConfig(folder=str(self.folder), files=_FILES, file_bytes=_FILE_BYTES)
        self._files = SmallFiles(config, parse_maintenance, "maintenance file")

    def read(self, now: Instant) -> tuple[Maintenance, ...]:
        """Return what holds now, the one that ends first before the others."""
        # A clock that is set back does not make a maintenance longer.
        held = [one for one in self._files.read(now) if one.start_wall_s <= now.wall_s + 1.0]
        return tuple(sorted(held, key=lambda one: (one.expires_wall_s, one.id)))

    def start(
        self, now: Instant, seconds: float, *, gpus: Sequence[str], anomalies: Sequence[str], reason: str
    ) -> Maintenance:
        """Write a file and return what it says; raises UsageError for unknown words, FaultError where it fails."""
        unknown = sorted(set(anomalies) - set(ANOMALIES))
        if unknown:
            raise UsageError(f"--anomaly is {unknown[0]!r}; choose one of {', '.join(ANOMALIES)}")
        if len(reason) > _REASON or not reason.isprintable():
            raise UsageError(f"--reason has to be one line of {_REASON} characters at most")
        name = secrets.token_hex(4)
        start_s = math.floor(now.wall_s)
        said: dict[str, object] = {"id": name, "start": start_s, "expires": start_s + seconds, "reason": reason}
        said |= {"gpus": list(gpus)} if gpus else {"node": True}
        if anomalies:
            said["anomalies"] = sorted(set(anomalies))
        data = json.dumps(said).encode()
        self._written.write(f"{name}.json", data)
        return parse_maintenance(data)

    def end(self, ids: Sequence[str]) -> None:
        """Remove these; one that is gone already is no fault. Raises FaultError where that fails."""
        # Files are called by their id; whoever wrote one by hand may have called it otherwise.
        self._written.remove([f"{name}.json" for name in ids])


class MaintenanceWatch:
    """What is in maintenance, for the agent: read every few seconds, asked by any thread."""

    def __init__(self, state_directory: Path, clock: Clock) -> None:
        self._files = MaintenanceFiles(state_directory)
        self._clock = clock
        self._held: tuple[Maintenance, ...] = ()

    def read(self) -> None:
        """Look at the folder."""
        self._held = self._files.read(self._clock.now())

    def held(self, now: Instant) -> tuple[Maintenance, ...]:
        """Return what holds now."""
        return tuple(
            one for one in self._held if one.start_wall_s <= now.wall_s + 1.0 and now.wall_s < one.expires_wall_s
        )
