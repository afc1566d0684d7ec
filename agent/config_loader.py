"""Maps one TOML file onto frozen dataclasses, strictly: the dataclasses are the schema and hold the defaults.

Every error names the file, the key in full and its line where it can be found, and what is allowed. No quantity of any
table may be negative or infinite, what ends in _ratio or _probability lies between 0 and 1, and a path is absolute: a
service has no folder of its own to start from. What else holds for a key is checked by its dataclass.
"""

from __future__ import annotations

import dataclasses
import difflib
import math
import tomllib
import types
import typing
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, TypeVar

from agent.admin_file import read_admin_file
from agent.errors import UsageError

T = TypeVar("T")


def load_toml(schema: type[T], path: Path) -> T:
    """Return `schema` with the values of the file; what the file leaves out keeps its default.

    Raises UsageError for an unreadable file, broken TOML, an unknown key, a wrong type, or a value that the dataclass
    refuses (a ValueError of its `__post_init__`).
    """
    text = read_admin_file(path, "configuration").replace("\r\n", "\n")
    try:
        values = tomllib.loads(text)
    except ValueError as error:  # also of a whole number with thousands of digits
        raise UsageError(f"configuration {path} is not valid TOML: {_short(str(error))}") from error
    except RecursionError as error:
        raise UsageError(f"configuration {path} is nested too deeply") from error
    return _Loader(path, text).build(schema, values, "")


def dump_toml(config: object, sources: Mapping[str, str] | None = None) -> str:
    """Return `config` as TOML text that `load_toml` reads back to an equal object.

    None values are left out. With `sources`, each key has a comment that says where its value comes from: what stands
    for its full name there, else `default`. A key without a value stands there as a comment.
    """
    return "\n".join(_dump_table(config, "", sources)).strip() + "\n"


def sources_of(path: Path) -> dict[str, str]:
    """Return `FILE:LINE` for the full name of each key that the file sets; the file is one that `load_toml` read."""
    text = read_admin_file(path, "configuration").replace("\r\n", "\n")
    found: dict[str, str] = {}
    for table, key, number in _assignments(text):
        found[f"{table}.{key}" if table else key] = f"{path}:{number}"
    return {name: found.get(name, str(path)) for name in _names(tomllib.loads(text), "")}


def _assignments(text: str) -> Iterator[tuple[str, str, int]]:
    """Yield table, key and line of each assignment that begins a line."""
    table = ""
    for number, line in enumerate(text.split("\n"), start=1):
        stripped = line.strip()
        if stripped.startswith("[") and stripped.partition("#")[0].strip().endswith("]") and "=" not in stripped:
            table = _plain(stripped.partition("#")[0].strip().strip("[]"))
        elif "=" in stripped and not stripped.startswith("#"):
            yield table, _plain(stripped.partition("=")[0]), number


def _plain(dotted: str) -> str:
    return ".".join(part.strip().strip("\"'") for part in dotted.split("."))


def _names(values: Mapping[str, Any], prefix: str) -> Iterator[str]:
    for key, value in values.items():
        if isinstance(value, dict):
            yield from _names(value, f"{prefix}{key}.")
        else:
            yield prefix + key


class _Loader:
    def __init__(self, path: Path, text: str) -> None:
        self._path = path
        self._lines = text.splitlines()

    def build(self, schema: type[T], values: Mapping[str, Any], prefix: str) -> T:
        fields = {field.name: field for field in dataclasses.fields(schema)}  # type: ignore[arg-type]
        hints = typing.get_type_hints(schema)
        arguments: dict[str, Any] = {}
        for key, value in values.items():
            if key not in fields:
                raise self._unknown(key, prefix, fields)
            arguments[key] = self._convert(hints[key], value, prefix + key)
        for key, value in arguments.items():
            self._check_range(key, value, prefix + key)
        try:
            return schema(**arguments)
        except (ValueError, UsageError) as error:
            raise UsageError(f"{self._path}: [{prefix.rstrip('.') or 'top level'}] {error}") from error

    def _convert(self, hint: Any, value: Any, key: str) -> Any:  # noqa: ANN401 - type hints are plain objects
        if dataclasses.is_dataclass(hint) and isinstance(hint, type):
            if not isinstance(value, dict):
                raise self._wrong(key, value, "a table")
            return self.build(hint, value, key + ".")
        if typing.get_origin(hint) in (typing.Union, types.UnionType):
            (hint,) = (choice for choice in typing.get_args(hint) if choice is not types.NoneType)
        if typing.get_origin(hint) is typing.Literal:
            allowed = typing.get_args(hint)
            if value not in allowed:
                raise self._wrong(key, value, "one of " + ", ".join(map(repr, allowed)))
            return value
        if typing.get_origin(hint) is tuple:
            (item, _) = typing.get_args(hint)
            if not isinstance(value, list) or not all(_is(entry, item) for entry in value):
                raise self._wrong(key, value, f"a list of {_KIND_NAMES[item]}s")
            return tuple(item(entry) for entry in value)
        if not _is(value, hint):
            raise self._wrong(key, value, f"a {_KIND_NAMES[hint]}")
        if hint is Path and not (value.startswith("/") and "\0" not in value):
            raise self._wrong(key, value, "an absolute path, which begins with / and holds no NUL")
        try:
            return hint(value)
        except OverflowError as error:
            raise self._wrong(key, value, "a finite number") from error

    def _check_range(self, name: str, value: object, key: str) -> None:
        """Refuse what no quantity of this unit can be: units stand in names, so the name says what is allowed."""
        if isinstance(value, bool) or not isinstance(value, int | float):
            return
        if not math.isfinite(value):
            raise self._wrong(key, value, "a finite number")
        if name.endswith(_SHARES) and not 0 <= value <= 1:
            raise self._wrong(key, value, "from 0 to 1")
        if value < 0:
            raise self._wrong(key, value, "0 or more")

    def _unknown(self, key: str, prefix: str, allowed: Mapping[str, object]) -> UsageError:
        near = difflib.get_close_matches(key, allowed, n=1)
        hint = f"did you mean {prefix + near[0]!r}?" if near else "allowed here: " + ", ".join(allowed)
        return UsageError(f"{self._place(key)}: unknown key {_short(prefix + key)!r}; {hint}")

    def _wrong(self, key: str, value: object, wanted: str) -> UsageError:
        name = key.rpartition(".")[2]
        return UsageError(f"{self._place(name)}: {key} is {_short(repr(value))}; it must be {wanted}")

    def _place(self, key: str) -> str:
        for number, line in enumerate(self._lines, start=1):
            stripped = line.strip()
            if stripped.split("=")[0].strip().strip("\"'") == key or stripped.strip("[] ").endswith(key):
                return f"{self._path}, line {number}"
        return str(self._path)


#: Nobody reads more of a value in a sentence.
_SHOWN_MAX = 120
#: Ends of names whose values are shares of a whole.
_SHARES = ("_ratio", "_probability")
_KIND_NAMES: dict[type, str] = {bool: "boolean", int: "whole number", float: "number", str: "string", Path: "path"}


def _short(text: str) -> str:
    return text if len(text) <= _SHOWN_MAX else text[: _SHOWN_MAX - 1] + "…"


def _is(value: object, kind: type) -> bool:
    if isinstance(value, bool):
        return kind is bool
    if kind is float:
        return isinstance(value, int | float)
    if kind is Path:
        return isinstance(value, str)
    return isinstance(value, kind)


def _dump_table(config: object, prefix: str, sources: Mapping[str, str] | None) -> list[str]:
    lines: list[str] = []
    tables: list[str] = []
    for field in dataclasses.fields(config):  # type: ignore[arg-type]
        value, name = getattr(config, field.name), prefix + field.name
        if dataclasses.is_dataclass(value):
            tables += ["", f"[{name}]", *_dump_table(value, f"{name}.", sources)]
            continue
        origin = "" if sources is None else f"  # {sources.get(name, 'default')}"
        if value is not None:
            lines.append(f"{field.name} = {_dump_value(value)}{origin}")
        elif sources is not None:
            lines.append(f"# {field.name} is not set{origin}")
    return lines + tables


def _dump_value(value: object) -> str:
    if isinstance(value, bool):
        return "true" if value else "false"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, tuple):
        return "[" + ", ".join(map(_dump_value, value)) + "]"
    escaped = "".join(f"\\u{ord(c):04x}" if ord(c) < 32 or c in '"\\' else c for c in str(value))
    return f'"{escaped}"'
