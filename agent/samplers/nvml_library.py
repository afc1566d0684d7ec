"""NVML as a whole: start, shutdown and count, each with its cost. Run in the driver's thread, for each may hang."""

from __future__ import annotations

import queue
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial

from agent.clock import stopwatch
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_worker import Answers, Deadline, Worker, collect


@dataclass(frozen=True, slots=True, kw_only=True)
class Driver:
    """What the driver answered to one of the functions below."""

    count: int
    version: str | None
    references: int  # successful nvmlInit without nvmlShutdown
    seconds: float


def start(references: int, closers: Sequence[Callable[[], None]], *, stop_first: bool) -> Driver:
    """Start the library, after `references` shutdowns where asked for; raises NvmlError.

    The closers free what the library holds for each GPU; it has to be there for that.
    """
    begin = stopwatch()
    if stop_first and references:
        references = stop(references, closers).references
    else:
        close(closers)
    nvml.start()
    try:
        count = nvml.device_count()
    except nvml.NvmlError:
        stop(1, ())
        raise
    try:
        version: str | None = nvml.driver_version()
    except nvml.NvmlError:
        version = None
    return Driver(count=count, version=version, references=references + 1, seconds=stopwatch() - begin)


def stop(references: int, closers: Sequence[Callable[[], None]]) -> Driver:
    """Shut the library down as often as it was started, after the closers."""
    begin = stopwatch()
    close(closers)
    try:
        for _ in range(references):
            nvml.stop()
    except nvml.NvmlError:
        pass  # not initialised any more: that is what was wanted
    return Driver(count=0, version=None, references=0, seconds=stopwatch() - begin)


def close(closers: Sequence[Callable[[], None]]) -> None:
    """Free what is held for each GPU."""
    for closer in closers:
        closer()


def count_gpus(driver: Driver) -> Driver:
    """Return `driver` with the number of GPUs of now; raises NvmlError."""
    begin = stopwatch()
    count = nvml.device_count()
    return Driver(count=count, version=driver.version, references=driver.references, seconds=stopwatch() - begin)


class DriverThread:
    """The thread of the calls that concern all GPUs, and what they said last."""

    def __init__(self) -> None:
        self._answers: Answers[Driver] = queue.SimpleQueue()
        self._worker: Worker[Driver] = Worker("nvml-driver", self._answers)
        self._references = 0
        self.current: Driver | None = None  # None before a start has succeeded, and after a stop
        self.seconds = 0.0  # inside driver calls

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return self._worker.busy

    @property
    def is_started(self) -> bool:
        """Whether there is something to shut down."""
        return self._references > 0

    def start(self, wait_s: float, closers: Sequence[Callable[[], None]], *, stop_first: bool) -> Driver | None:
        """Start the library and return what it says, None where it does not answer in time; raises NvmlError.

        A start that hangs goes on: the next call of this waits for it no more, and takes its answer.
        """
        self.current = None
        if self.busy:
            wait_s = 0.0  # it hangs, and has been waited for
        else:
            self._worker.submit(partial(start, self._references, closers, stop_first=stop_first))
        try:
            driver = self._await(wait_s)
        except nvml.NvmlError:
            self._references = 0
            raise
        if driver is not None:
            self._references = driver.references
            self.current = driver
        return driver

    def stop(self, wait_s: float, closers: Sequence[Callable[[], None]]) -> bool:
        """Shut the library down; return whether that was done in time."""
        self.current = None
        if not self._references:
            return True
        self._worker.submit(partial(stop, self._references, closers))
        if self._await(wait_s) is None:
            return False
        self._references = 0
        return True

    def ask_count(self) -> bool:
        """Have the GPUs counted, unless a call is under way; return whether `take_count` is to be called."""
        if self.busy or self.current is None:
            return False
        self._worker.submit(partial(count_gpus, self.current))
        return True

    def take_count(self, wait_s: float) -> Driver | None:
        """Return the count that was asked for, None where there is no answer in time; raises NvmlError."""
        return self._await(wait_s)

    def drop_late(self) -> None:
        """Drop the answer of a count that came too late; that of a start is kept."""
        if self.current is not None:
            for _ in collect(self._answers, Deadline(0), lambda: False):
                pass

    def settle(self) -> None:
        """Take the answer of any call that came too late: what it started is to be shut down, what it shut down is."""
        for answer in collect(self._answers, Deadline(0), lambda: False):
            if answer.worker is not self._worker:
                continue
            try:
                self._references = answer.result().references
            except nvml.NvmlError:
                if self.current is None:
                    self._references = 0  # a start that failed; a count that failed changes nothing

    def end(self) -> None:
        """End the thread, or leave it behind where it hangs, and begin anew."""
        self._worker.stop()
        self._worker = Worker("nvml-driver", self._answers)
        self._references = 0
        self.current = None

    def _await(self, seconds: float) -> Driver | None:
        for answer in collect(self._answers, Deadline(seconds), lambda: False):
            if answer.worker is self._worker:
                driver = answer.result()
                self.seconds += driver.seconds
                return driver
        return None
