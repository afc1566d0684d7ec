"""Reads the call log of the emulator; its format is described in call_log.c."""

from __future__ import annotations

import re
from pathlib import Path
from typing import NamedTuple


class Call(NamedTuple):
    """One call into the library that has returned."""

    began_s: float  # CLOCK_MONOTONIC, as time.monotonic()
    gpu: int | None  # number in the script, None for calls that name none
    gpu_i_id: int | None  # GPU instance, None for the whole GPU
    symbol: str
    duration_s: float
    code: int
    details: tuple[int, ...] = ()  # field ids, GPM metric ids

    @property
    def name(self) -> str:
        """The symbol without the version at its end."""
        return re.sub(r"_v\d+$", "", self.symbol)


class CallLog(tuple[Call, ...]):
    """Calls in the order in which they returned."""

    __slots__ = ()

    def of(self, name: str, *, gpu: int | None = None, detail: int | None = None) -> CallLog:
        """Return the calls of a symbol, with or without its version, of one GPU, with one field or metric id."""
        return CallLog(
            call
            for call in self
            if name in (call.name, call.symbol)
            and (gpu is None or call.gpu == gpu)
            and (detail is None or detail in call.details)
        )

    def since(self, began_s: float) -> CallLog:
        """Return the calls that began at this moment or later."""
        return CallLog(call for call in self if call.began_s >= began_s)

    @property
    def gpm_samples_alive(self) -> int:
        """How many GPM sample buffers were allocated and not freed."""
        done = [call.name for call in self if call.code == 0]
        return done.count("nvmlGpmSampleAlloc") - done.count("nvmlGpmSampleFree")


def read_calls(path: Path) -> CallLog:
    """Read a call log; a file that is not there yet holds no calls."""
    if not path.exists():
        return CallLog(())
    text = path.read_text(encoding="utf-8")
    complete = text[: text.rfind("\n") + 1]
    return CallLog(_parse_line(line) for line in complete.splitlines())


def _parse_line(line: str) -> Call:
    began, who, symbol, duration, code, details = line.split(" ")
    gpu, _, instance = who.partition(":")
    return Call(
        began_s=float(began),
        gpu=None if gpu == "-" else int(gpu),
        gpu_i_id=int(instance) if instance else None,
        symbol=symbol,
        duration_s=float(duration),
        code=int(code),
        details=() if details == "-" else tuple(int(word) for word in details.split(",") if word),
    )
