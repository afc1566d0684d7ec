"""Threads for calls that may never return: the caller waits until a deadline and goes on without the answer."""

from __future__ import annotations

import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Generic, TypeVar

from agent.clock import stopwatch
from agent.threads import NamedThread

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class Answer(Generic[T]):
    """What a task returned, or what it raised."""

    worker: Worker[T]
    value: T | None
    error: BaseException | None

    def result(self) -> T:
        """Return the value, or raise the error."""
        if self.error is not None:
            raise self.error
        return self.value  # type: ignore[return-value] # T itself wherever there is no error


#: Where the workers of one owner put their answers.
Answers = queue.SimpleQueue[Answer[T]]


class Worker(Generic[T]):
    """Runs one task at a time in a daemon thread, so that a task that hangs keeps no process alive.

    Used by one thread, the owner's. `busy` lasts from `submit` until `collect` has handed the answer out.
    """

    def __init__(self, name: str, answers: Answers[T]) -> None:
        self.name = name
        self.busy = False
        self._answers = answers
        self._tasks: queue.SimpleQueue[Callable[[], T] | None] = queue.SimpleQueue()
        self._thread: NamedThread | None = None

    def submit(self, task: Callable[[], T]) -> None:
        """Hand in a task; raises RuntimeError while the one before is not answered."""
        if self.busy:
            raise RuntimeError(f"{self.name} is busy")
        if self._thread is None:
            self._thread = NamedThread(self.name, self._run)
            self._thread.start()
        self.busy = True
        self._tasks.put(task)

    def stop(self) -> None:
        """Let the thread end when it has nothing more to do; does not wait."""
        self._tasks.put(None)

    def _run(self) -> None:
        while (task := self._tasks.get()) is not None:
            try:
                answer = Answer(self, task(), None)
            except BaseException as error:  # noqa: BLE001 - raised again by Answer.result
                answer = Answer(self, None, error)
            self._answers.put(answer)


class Deadline:
    """A moment that several waits share."""

    def __init__(self, seconds: float) -> None:
        self._end = stopwatch() + seconds

    def left_s(self) -> float:
        """Return the seconds until then, 0 after it."""
        return max(0.0, self._end - stopwatch())


def collect(answers: Answers[T], deadline: Deadline, is_done: Callable[[], bool]) -> Iterator[Answer[T]]:
    """Give answers in the order they come, until `is_done` or the deadline; those there already are given at once."""
    while not is_done():
        left_s = deadline.left_s()
        try:
            answer = answers.get(timeout=left_s) if left_s > 0 else answers.get_nowait()
        except queue.Empty:
            return
        answer.worker.busy = False
        yield answer
