"""NVML as a whole: start, shutdown and count, each with its cost. Run in the driver's thread, for each may hang."""

from __future__ import annotations

from dataclasses import dataclass

from agent.clock import stopwatch
from agent.samplers import nvml_binding as nvml


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the driver answered to one of the functions below."""

    count: int
    version: str | None
    references: int  # successful nvmlInit without nvmlShutdown
    seconds: float


def start(references: int, *, stop_first: bool) -> Driver:
    """Start the library, after `references` shutdowns where asked for; raises NvmlError."""
    begin = stopwatch()
    if stop_first and references:
        references = stop(references).references
    nvml.start()
    try:
        count = nvml.device_count()
    except nvml.NvmlError:
        stop(1)
        raise
    try:
        version: str | None = nvml.driver_version()
    except nvml.NvmlError:
        version = None
    return Driver(count=count, version=version, references=references + 1, seconds=stopwatch() - begin)


def stop(references: int) -> Driver:
    """Shut the library down as often as it was started."""
    begin = stopwatch()
    try:
        for _ in range(references):
            nvml.stop()
    except nvml.NvmlError:
        pass  # not initialised any more: that is what was wanted
    return Driver(count=0, version=None, references=0, seconds=stopwatch() - begin)


def count_gpus(driver: Driver) -> Driver:
    """Return `driver` with the number of GPUs of now; raises NvmlError."""
    begin = stopwatch()
    count = nvml.device_count()
    return Driver(count=count, version=driver.version, references=driver.references, seconds=stopwatch() - begin)
