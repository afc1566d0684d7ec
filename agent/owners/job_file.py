"""What one job file says: JSON, checked key by key. docs/jobs.md is the description for those who write one."""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final, NoReturn

from agent.vocabulary import CLASSES

#: Keys whose value is a text, with the longest that is taken; a label value longer than this is no name.
_TEXTS: Final = {
    "job_key": 256,
    "job_id": 256,
    "scheduler": 32,
    "namespace": 256,
    "pod": 256,
    "container": 256,
    "user": 256,
}
_GPUS: Final = 128
_WORD: Final = re.compile(r"[a-z0-9][a-z0-9_.-]*")
_UUID: Final = r"[0-9a-f]{8}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{4}-[0-9a-f]{12}"
#: A GPU, a MIG instance, and a MIG instance as drivers before R470 wrote it.
_DEVICE: Final = re.compile(rf"(?i)(GPU-{_UUID}|MIG-{_UUID}|MIG-GPU-{_UUID}/\d{{1,4}}/\d{{1,4}})")
_ADDRESS: Final = re.compile(r"(?i)(?:([0-9a-f]{4,8}):)?([0-9a-f]{2}):([0-9a-f]{2})(?:\.[0-7])?")
_CHECKPOINT_SECONDS: Final = (1.0, 31 * 86400.0)
#: Later than the year 5138: a time in milliseconds.
_EXPIRES_END_S: Final = 1e11


class JobFileError(Exception):
    """A job file that cannot be used; `reason` is a short fixed word, `str(error)` says what to change."""

    def __init__(self, reason: str, message: str) -> None:
        super().__init__(message)
        self.reason = reason


@dataclass(frozen=True, slots=True, kw_only=True)
class JobFile:
    """A job and the GPUs that it holds; texts are "" where the file does not say."""

    job_key: str
    job_id: str = ""
    scheduler: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    user: str = ""
    #: As `device_name` writes them; None where the file names no GPUs, so that its job's processes have to show them.
    gpus: frozenset[str] | None = None
    declared_class: str | None = None  # a word of vocabulary.CLASSES
    checkpoint_interval_seconds: float | None = None
    expires_wall_s: float | None = None
    unknown_keys: tuple[str, ...] = ()


def device_name(text: str) -> str | None:
    """Return a UUID or PCI address in the one form in which they are compared, or None where it is neither.

    UUIDs in lower case, PCI addresses as domain of 8 digits, bus and device: 00000000:1b:00; the function is left out.
    """
    if _DEVICE.fullmatch(text):
        return text.lower()
    if address := _ADDRESS.fullmatch(text):
        return f"{(address[1] or '').rjust(8, '0')}:{address[2]}:{address[3]}".lower()
    return None


def parse_job_file(data: bytes) -> JobFile:
    """Return what a job file says, or raise JobFileError."""
    try:
        value = json.loads(data.decode("utf-8"), parse_constant=_refuse_constant, object_pairs_hook=_unique)
    except UnicodeDecodeError as error:
        raise JobFileError("malformed", "it is not UTF-8") from error
    except RecursionError as error:
        raise JobFileError("malformed", "its JSON is nested too deep") from error
    except ValueError as error:
        raise JobFileError("malformed", f"it is no JSON: {error}") from error
    if not isinstance(value, dict):
        raise JobFileError("malformed", "it has to hold one JSON object")
    texts = {key: _text(value, key, longest) for key, longest in _TEXTS.items()}
    if not texts["job_key"]:
        raise JobFileError("no_job_key", '"job_key" is missing: name the job, alike on all its nodes')
    if texts["job_key"] == "other":
        raise JobFileError("bad_value", '"job_key" may not be "other", which stands for the holders beyond the bound')
    if texts["scheduler"] and not _WORD.fullmatch(texts["scheduler"]):
        raise JobFileError("bad_value", '"scheduler" has to be one word in lower case, such as "slurm"')
    known = {*_TEXTS, "gpus", "workload", "expected_checkpoint_seconds", "expires"}
    return JobFile(
        **texts,
        gpus=_gpus(value.get("gpus")),
        declared_class=_workload(value.get("workload")),
        checkpoint_interval_seconds=_number(value, "expected_checkpoint_seconds", _is_interval, "1 to 2678400 seconds"),
        expires_wall_s=_number(value, "expires", _is_time, "a time in Unix seconds"),
        unknown_keys=tuple(sorted(str(key) for key in value if key not in known)),
    )


def _refuse_constant(name: str) -> NoReturn:
    raise JobFileError("malformed", f"{name} is no JSON")


def _unique(pairs: list[tuple[str, object]]) -> dict[str, object]:
    found = dict(pairs)
    if len(found) != len(pairs):
        raise JobFileError("malformed", "a key stands in it twice")
    return found


def _text(value: Mapping[str, object], key: str, longest: int) -> str:
    text = value.get(key)
    if text is None:
        return ""
    if not isinstance(text, str):
        raise JobFileError("bad_type", f'"{key}" has to be text in quotes')
    if len(text) > longest:
        raise JobFileError("bad_value", f'"{key}" is longer than {longest} characters')
    # Lone surrogates, control characters, line ends and marks that turn the direction of writing are not printable.
    if not text.isprintable() or text != text.strip():
        raise JobFileError("bad_value", f'"{key}" has blanks at an end, or characters that cannot be printed')
    return text


def _gpus(value: object) -> frozenset[str] | None:
    if value is None:
        return None
    if not isinstance(value, list):
        raise JobFileError("bad_type", '"gpus" has to be a list of UUIDs or PCI addresses')
    if len(value) > _GPUS:
        raise JobFileError("bad_value", f'"gpus" names more than {_GPUS}')
    found = set()
    for item in value:
        if isinstance(item, int) or (isinstance(item, str) and item.isdecimal()):
            raise JobFileError(
                "gpu_index", f'"gpus" holds {str(item)[:20]!r}: an index differs between programs, write the UUID'
            )
        if not isinstance(item, str):
            raise JobFileError("bad_type", '"gpus" has to hold texts')
        name = device_name(item)
        if name is None:
            raise JobFileError(
                "bad_gpu", f'"gpus" holds {item[:60]!r}, which is no GPU-... or MIG-... UUID and no PCI address'
            )
        found.add(name)
    return frozenset(found)


def _workload(value: object) -> str | None:
    if value is None or (isinstance(value, str) and value in CLASSES):
        return value
    raise JobFileError("bad_value", f'"workload" has to be one of {", ".join(CLASSES)}')


def _is_interval(seconds: float) -> bool:
    return _CHECKPOINT_SECONDS[0] <= seconds <= _CHECKPOINT_SECONDS[1]


def _is_time(seconds: float) -> bool:
    return 0 < seconds < _EXPIRES_END_S


def _number(value: Mapping[str, object], key: str, is_allowed: Callable[[float], bool], allowed: str) -> float | None:
    number = value.get(key)
    if number is None:
        return None
    if isinstance(number, bool) or not isinstance(number, int | float):
        raise JobFileError("bad_type", f'"{key}" has to be a number')
    # An integer of hundreds of digits fits no float; it is compared as it is.
    if (isinstance(number, float) and not math.isfinite(number)) or not is_allowed(number):
        raise JobFileError("bad_value", f'"{key}" has to be {allowed}')
    return float(number)
