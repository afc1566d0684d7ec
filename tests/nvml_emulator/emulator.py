"""Builds the NVML emulator, writes its scripts and switches its faults.

A process that is started with `Emulator.environment()` finds the emulator as libnvidia-ml.so.1, whatever it uses to
load it. The format of scripts is described in script.c, that of the control file in control.c.
"""

from __future__ import annotations

import os
import shutil
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import ClassVar, Literal, NamedTuple

from tests.nvml_emulator.call_log import Call, CallLog, read_calls
from tests.nvml_emulator.codes import (
    DRIVER_NOT_LOADED,
    EVENT_REASON_BITS,
    FUNCTION_NOT_FOUND,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    LIB_RM_VERSION_MISMATCH,
    NO_PERMISSION,
    NOT_FOUND,
    NOT_SUPPORTED,
    RESET_REQUIRED,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    XID_EVENT,
)
from tests.nvml_emulator.scripts import script_from_ticks, script_from_trace

__all__ = [
    "DRIVER_NOT_LOADED",
    "EVENT_REASON_BITS",
    "FUNCTION_NOT_FOUND",
    "GPU_IS_LOST",
    "INVALID_ARGUMENT",
    "LIB_RM_VERSION_MISMATCH",
    "NOT_FOUND",
    "NOT_SUPPORTED",
    "NO_PERMISSION",
    "RESET_REQUIRED",
    "TIMEOUT",
    "UNINITIALIZED",
    "UNKNOWN",
    "XID_EVENT",
    "Call",
    "CallLog",
    "Emulator",
    "MigInstance",
    "build",
    "script_from_ticks",
    "script_from_trace",
]

HERE = Path(__file__).resolve().parent
#: As many as control.c keeps, less some.
MAX_HAPPENINGS = 1000
LIBRARY = HERE / "build" / "libnvidia-ml.so.1"


def build() -> Path:
    """Return the folder of the built library, after building it where a source is newer."""
    for program in ("make", "cc"):
        if shutil.which(program) is None:
            raise RuntimeError(f"{program} is missing: the NVML emulator needs the packages make and gcc")
    made = subprocess.run(["make", "-s", "-C", str(HERE)], capture_output=True, text=True, check=False)
    if made.returncode != 0:
        raise RuntimeError(f"the NVML emulator does not build: {made.stderr}")
    return LIBRARY.parent


class MigInstance(NamedTuple):
    """One MIG device of a layout."""

    gpu_i_id: int
    profile: str  # as nvidia-smi prints it: 1g.10gb
    uuid: str  # MIG-...


class Emulator:
    """One emulated host: its script, its control file and the environment of processes that see it.

    The methods that switch faults take effect at the next call into the library, in every process that runs on it.
    `gpu` is the number of the GPU in the script, None for all of them; `gpu_i_id` one GPU instance on it.
    """

    #: Of what happens next; one row for all, as a process takes a lower number than it has seen for past.
    _next_number: ClassVar[int] = 1

    def __init__(self, directory: Path, script: str) -> None:
        self.directory = directory
        self.script = directory / "nvml-script.txt"
        self.control = directory / "nvml-control.txt"
        self.call_log = directory / "nvml-calls.txt"
        self.script.write_text(script, encoding="utf-8")
        self._statements: list[str] = []
        self._happenings: list[str] = []  # what happened once stays, with its number
        self._logs = False
        self._write()

    def environment(self, base: Mapping[str, str] | None = None) -> dict[str, str]:
        """Return `base` (this process's environment by default) with what makes a new process see the emulator."""
        environment = dict(os.environ if base is None else base)
        paths = [str(build()), environment.get("LD_LIBRARY_PATH", "")]
        environment["LD_LIBRARY_PATH"] = ":".join(path for path in paths if path)
        return environment | self.variables()

    def variables(self) -> dict[str, str]:
        """Return only the variables that name the script, the control file and the call log."""
        return {
            "WARPWATCH_NVML_SCRIPT": str(self.script),
            "WARPWATCH_NVML_CONTROL": str(self.control),
            "WARPWATCH_NVML_CALLS": str(self.call_log),
        }

    def log_calls(self) -> None:
        """Have every call written down from now on, for `calls`."""
        self._logs = True
        self._write()

    def calls(self) -> CallLog:
        """Return every call that has returned since `log_calls`, in all processes that run on the emulator."""
        if not self._logs:
            raise RuntimeError("calls are not logged: call log_calls() first")
        return read_calls(self.call_log)

    def forget_calls(self) -> None:
        """Empty the call log."""
        if self.call_log.exists():
            os.truncate(self.call_log, 0)

    def fail(self, code: int, *, gpu: int | None = None, call: str = "*", gpu_i_id: int | None = None) -> None:
        """Let `call` (a symbol without its _vN, "field:82", or "gpm:2") return `code`."""
        self._add(f"fail {_who(gpu, gpu_i_id)} {call} {code}")

    def fail_system(self, code: int, *, call: str = "*") -> None:
        """Let a call that names no GPU return `code`: "nvmlInit", "nvmlDeviceGetCount", ..."""
        self._add(f"fail system {call} {code}")

    def hang(self, seconds: float, *, gpu: int | None = None, call: str = "*") -> None:
        """Let `call` block for so long, or until `clear`."""
        self._add(f"hang {_who(gpu)} {call} {seconds}")

    def hang_system(self, seconds: float, *, call: str = "*") -> None:
        """Let a call that names no GPU block for so long, or until `clear`."""
        self._add(f"hang system {call} {seconds}")

    def latency(
        self, seconds: float, *, mode: Literal["burn", "wait"] = "wait", gpu: int | None = None, call: str = "*"
    ) -> None:
        """Let `call` take so much longer, as CPU time of its thread (burn) or asleep (wait).

        Of several statements for a call the first holds; "field:82" delays that field within the call.
        """
        self._add(f"latency {_who(gpu)} {call} {seconds:.9f} {mode}")

    def latency_system(self, seconds: float, *, mode: Literal["burn", "wait"] = "wait", call: str = "*") -> None:
        """Let a call that names no GPU take so much longer."""
        self._add(f"latency system {call} {seconds:.9f} {mode}")

    def override(self, name: str, number: float, *, gpu: int | None = None, gpu_i_id: int | None = None) -> None:
        """Give a value (name as in values.h) in place of the script's, to raw sentinels such as 2**32 - 1."""
        self._add(f"value {_who(gpu, gpu_i_id)} {name} {number}")

    def shift(self, name: str, amount: float, *, gpu: int | None = None, gpu_i_id: int | None = None) -> None:
        """Add to the script's value: errors that come, or with a negative amount a counter that goes backwards."""
        self._add(f"shift {_who(gpu, gpu_i_id)} {name} {amount}")

    def wrap(self, name: str, bits: int, *, gpu: int | None = None) -> None:
        """Let a value count modulo 2**bits."""
        self._add(f"wrap {_who(gpu)} {name} {bits}")

    def reset_counter(self, name: str, *, gpu: int | None = None) -> None:
        """Let a counter start again at 0, once, when a process sees it."""
        self._happen(f"reset {{}} {_who(gpu)} {name}")

    def reload_driver(self, version: str | None = None) -> None:
        """Load the driver anew: nothing answers until the next nvmlInit, and counters start at 0.

        With a `version`, processes that run now are refused for good (LIB_RM_VERSION_MISMATCH); those that start later
        see that driver.
        """
        self._happen("reload {} " + (version or ""))

    def xid(self, gpu: int, code: int, *, count: int = 1, gpu_i_id: int | None = None) -> None:
        """Let `count` XID events happen, each of which goes once to every event set that waits for them."""
        self.event(gpu, XID_EVENT, code, count=count, gpu_i_id=gpu_i_id)

    def event(self, gpu: int, event_type: int, data: int = 0, *, count: int = 1, gpu_i_id: int | None = None) -> None:
        """Let events of a type (a bit of nvmlEventType...) happen."""
        self._happen(f"event {{}} {_who(gpu, gpu_i_id)} {event_type} {data} {count}", count=count)

    def mig(self, gpu: int, layout: Sequence[MigInstance] | None) -> None:
        """Give a GPU this MIG layout in place of the one before: empty for MIG mode without instances, None for off."""
        self._statements = [line for line in self._statements if not line.startswith(f"mig {gpu} ")]
        self._statements.append(f"mig {gpu} " + ("off" if layout is None else "enabled"))
        self._statements += [f"mig {gpu} {i.gpu_i_id} {i.profile} {i.uuid}" for i in layout or ()]
        self._write()

    def vanish(self, gpu: int) -> None:
        """Take a GPU out of the enumeration; its handle answers until the next nvmlInit."""
        self._add(f"gone {gpu}")

    def freeze(self, elapsed_s: float) -> None:
        """Let the script stand still at this moment, so that every value is known exactly."""
        self._statements = [line for line in self._statements if not line.startswith("at ")]
        self._add(f"at {elapsed_s}")

    def clear(self, verb: str | None = None, *, gpu: int | None = None) -> None:
        """Take back the statements of one verb of control.c ("fail", "hang", ...) and of one GPU, or all of them.

        What happened (events, resets, reloads) stays.
        """
        self._statements = [
            line
            for line in self._statements
            if (verb is not None and not line.startswith(f"{verb} "))
            or (gpu is not None and line.split(" ")[1].partition(":")[0] != str(gpu))
        ]
        self._write()

    def _add(self, statement: str) -> None:
        self._statements.append(statement)
        self._write()

    def _happen(self, statement: str, *, count: int = 1) -> None:
        self._happenings = [*self._happenings, statement.format(Emulator._next_number)][-MAX_HAPPENINGS:]
        Emulator._next_number += count
        self._write()

    def _write(self) -> None:
        part = self.control.with_suffix(".part")
        lines = [*(["log"] if self._logs else []), *self._statements, *self._happenings]
        part.write_text("".join(line + "\n" for line in lines), encoding="utf-8")
        part.replace(self.control)


def _who(gpu: int | None, gpu_i_id: int | None = None) -> str:
    if gpu is None:
        return "*"
    return str(gpu) if gpu_i_id is None else f"{gpu}:{gpu_i_id}"
