"""Records as JSON values and back: what a line of a trace holds. Every field is checked by its kind when it is read."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Mapping
from typing import Any, Final

from agent.records import RECORD_TYPES, GpuKey, GpuProcess, Holder, Record

#: What `json.loads` returns.
Json = Any

_TYPE_NAMES: Final = {cls: name for name, cls in RECORD_TYPES.items()}


def encode_records(records: tuple[Record, ...]) -> dict[str, list[dict[str, Any]]]:
    """Return the records by type name as JSON values; the times are the tick's and are left out."""
    encoded: dict[str, list[dict[str, Any]]] = {}
    for record in records:
        fields: dict[str, Any] = {}
        for name in record.__dataclass_fields__:
            value = getattr(record, name)
            if name in ("monotonic_s", "wall_s") or value is None or value == {}:
                continue
            fields[name] = list(map(_plain, value)) if isinstance(value, tuple) else value
        encoded.setdefault(_TYPE_NAMES[type(record)], []).append(fields)
    return encoded


def _plain(item: object) -> object:
    """Return a process without its utilisation where that is not known, as traces had it before there was any."""
    return item[:2] if isinstance(item, GpuProcess) and item[2:] == (None, None) else item


def decode_records(
    encoded: Mapping[str, Any], monotonic_s: float, wall_s: float, warn: Callable[[str], None]
) -> tuple[Record, ...]:
    """Return the records of one line; unknown types and fields are left out and reported.

    Raises TypeError or ValueError where a value is not what its field holds: the line is damaged.
    """
    records: list[Record] = []
    for name, values in encoded.items():
        cls = RECORD_TYPES.get(name)
        if cls is None:
            warn(f"unknown record type {name!r} left out")
            continue
        decoders = _DECODERS[cls]
        for value in values:
            fields: dict[str, Any] = {}
            for field_name, content in value.items():
                decode = decoders.get(field_name)
                if decode is None:
                    warn(f"unknown field {name}.{field_name} left out")
                elif content is not None:
                    fields[field_name] = decode(content)
            records.append(cls(**fields, monotonic_s=monotonic_s, wall_s=wall_s))
    return tuple(records)


def decode_number(value: Json) -> float | int:
    """Return a finite number; raises TypeError or ValueError for anything else."""
    if type(value) is not float and type(value) is not int:
        raise TypeError("not a number")
    if not math.isfinite(value):  # 1e999 is JSON, and read as infinity
        raise ValueError("not finite")
    return value


def _decode_text(value: Json) -> str:
    if not isinstance(value, str):
        raise TypeError("not a text")
    return value


def _decode_key(value: Json) -> GpuKey:
    key = GpuKey(*value)
    if not isinstance(key.gpu, int) or not isinstance(key.uuid, str | None) or not isinstance(key.gpu_i_id, int | None):
        raise TypeError("not a GPU key")
    return key


def _decode_texts(value: Json) -> tuple[str, ...]:
    return tuple(map(_decode_text, value))


def _decode_processes(value: Json) -> tuple[GpuProcess, ...]:
    processes = tuple(GpuProcess(*process) for process in value)
    for process in processes:
        if not isinstance(process.pid, int) or not isinstance(process.memory_used_bytes, int | None):
            raise TypeError("not a process")
        for ratio in process[2:]:
            if ratio is not None and not 0 <= decode_number(ratio) <= 1:
                raise ValueError("not a ratio")
    return processes


def _decode_holders(value: Json) -> tuple[Holder, ...]:
    holders = tuple(Holder(*holder) for holder in value)
    for holder in holders:
        if not all(isinstance(text, str) for text in holder[:7]) or not isinstance(holder.declared_class, str | None):
            raise TypeError("not a holder")
        for number in (holder.share_ratio, holder.checkpoint_interval_seconds, holder.processes):
            if number is not None:
                decode_number(number)
    return holders


def _decode_numbers(value: Json) -> tuple[float, ...]:
    return tuple(map(decode_number, value))


def _decode_bool(value: Json) -> bool:
    if not isinstance(value, bool):
        raise TypeError("not true or false")
    return value


def _decode_by_word(value: Json) -> dict[str, float]:
    return {_decode_text(name): decode_number(number) for name, number in value.items()}


def _decode_by_code(value: Json) -> dict[int, float]:
    # JSON has text for keys alone.
    return {int(code): decode_number(number) for code, number in value.items()}


_FIELD_DECODERS: Final[Mapping[str, Callable[[Any], Any]]] = {
    "float": decode_number,
    "int": decode_number,
    "str": _decode_text,
    "GpuKey": _decode_key,
    "tuple[str, ...]": _decode_texts,
    "tuple[GpuProcess, ...]": _decode_processes,
    "tuple[Holder, ...]": _decode_holders,
    "tuple[float, ...]": _decode_numbers,
    "bool": _decode_bool,
    "Mapping[str, float]": _decode_by_word,
    "Mapping[str, int]": _decode_by_word,
    "Mapping[int, int]": _decode_by_code,
    "Mapping[int, float]": _decode_by_code,
}
#: By record type and field, what checks and converts its JSON value; a new kind of field fails here, at import.
_DECODERS: Final = {
    cls: {
        f.name: _FIELD_DECODERS[str(f.type).removesuffix(" | None")]
        for f in dataclasses.fields(cls)
        if f.name not in ("monotonic_s", "wall_s")
    }
    for cls in RECORD_TYPES.values()
}
