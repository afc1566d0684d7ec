"""The GPUs as the driver enumerates them, each with a thread for its calls, and who they are by UUID."""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import partial
from typing import Final

from agent.clock import Instant
from agent.records import GpuKey
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_config import NvmlConfig
from agent.samplers.nvml_device import AttachError, Identity, NvmlDevice, Reading
from agent.samplers.nvml_known import KnownGpu, free_number
from agent.samplers.nvml_worker import Answer, Answers, Deadline, Worker, collect

_log = logging.getLogger(__name__)

#: A GPU that was not read in so many ticks is not visible.
_UNREAD_TICKS: Final = 3
#: States in which a GPU is read.
_READ: Final = ("ok", "reset_required")
#: What the code of a GPU that cannot be attached says of its state; other codes leave it as it was.
_CAUSES: Final = {nvml.RESET_REQUIRED: "reset_required", nvml.GPU_IS_LOST: "lost", nvml.TIMEOUT: "hung"}
#: A GPU that takes longer no longer keeps the next one from being called.
_AT_ONCE_S: Final = 0.02


@dataclass(slots=True, kw_only=True, eq=False)
class Slot:
    """A position in the driver's enumeration, with the thread for its calls."""

    index: int
    worker: Worker[NvmlDevice | Reading]
    device: NvmlDevice | None = None
    gpu: KnownGpu | None = None
    may_call: bool = True  # False from a loss until the next start of the library
    due: Deadline = field(default_factory=lambda: Deadline(0.0))  # of the task under way
    is_late: bool = False  # the task under way is past its deadline: the GPU is hung
    failure: tuple[int, Identity] | None = None  # why it could not be attached, as it was logged

    @property
    def name(self) -> str:
        """What to call this GPU in a sentence."""
        return f"the GPU at position {self.index}" if self.gpu is None else self.gpu.name


class Slots:
    """The positions of now, and all GPUs that were seen since the start. Used by one thread.

    A position that is gone while its call hangs keeps its slot aside, and has it back when it is there again: however
    often the library is started, no position holds more than one thread.
    """

    def __init__(self, config: NvmlConfig) -> None:
        self._config = config
        self.tolerance_s = config.period_s / 2  # ticks jitter
        self.errors: Counter[str] = Counter()
        self.driver_seconds = 0.0
        self.gpus: dict[str, KnownGpu] = {}
        self._nameless: list[KnownGpu] = []  # never told their UUID
        self._tick = 0
        self._slots: list[Slot] = []
        self._aside: dict[int, Slot] = {}
        self._answers: Answers[NvmlDevice | Reading] = queue.SimpleQueue()

    def __iter__(self) -> Iterator[Slot]:
        return iter(self._slots)

    @property
    def busy(self) -> bool:
        """Whether a call is under way."""
        return bool(self._aside) or any(slot.worker.busy for slot in self._slots)

    @property
    def hung(self) -> int:
        """Number of threads whose call hangs."""
        return len(self._aside) + sum(slot.worker.busy and slot.is_late for slot in self._slots)

    def waits(self) -> list[str]:
        """Return a short sentence for each call that is under way."""
        slots = [*self._aside.values(), *(slot for slot in self._slots if slot.worker.busy)]
        verb = {True: "hangs in a driver call", False: "is in a driver call"}
        return [f"{slot.name} {verb[slot.is_late]}" for slot in slots]

    @property
    def visible(self) -> int:
        """Number of GPUs that were read within the last ticks and are neither lost nor hung; for any thread."""
        return sum(
            gpu.state in _READ and gpu.answered_tick is not None and self._tick - gpu.answered_tick < _UNREAD_TICKS
            for gpu in tuple(self.gpus.values())
        )

    @property
    def attached(self) -> int:
        """Number of GPUs that are called, hung ones too: starting the library anew brings no more of these."""
        return sum(slot.gpu is not None and slot.may_call for slot in self._slots)

    def slot_of(self, gpu: KnownGpu) -> Slot | None:
        """Return the position of a GPU."""
        return next((slot for slot in self._slots if slot.gpu is gpu), None)

    def by_number(self) -> list[KnownGpu]:
        """Return the GPUs in the order of their numbers."""
        return sorted(self._all(), key=lambda gpu: gpu.key.gpu)

    def _all(self) -> list[KnownGpu]:
        return [*self.gpus.values(), *self._nameless]

    def forget_answers(self) -> None:
        """Have no GPU visible until it is read again: the driver as a whole does not answer."""
        for gpu in self._all():
            gpu.answered_tick = None

    def closers(self) -> list[Callable[[], None]]:
        """Return what frees the library's memory."""
        return [slot.device.close for slot in self._slots if slot.device is not None]

    def lay_out(self, count: int) -> None:
        """Forget the handles and have `count` positions; one whose call hangs keeps its thread until that returns."""
        for slot in self._slots:
            slot.device = None
            slot.may_call = True
        for slot in self._slots[count:]:
            if slot.worker.busy:
                self._aside[slot.index] = slot
            else:
                slot.worker.stop()
        del self._slots[count:]
        for index in range(len(self._slots), count):
            if index in self._aside:
                self._slots.append(self._aside.pop(index))
            else:
                self._slots.append(Slot(index=index, worker=Worker(f"nvml-gpu-{index}", self._answers)))

    def end(self) -> None:
        """End the threads; those that hang end with their calls."""
        self.lay_out(0)
        for slot in self._aside.values():
            slot.worker.stop()
        self._aside.clear()

    def read_all(
        self, now: Instant, earlier: Mapping[KnownGpu, Reading], driver_version: str | None
    ) -> dict[KnownGpu, Reading]:
        """Return what each GPU brings in this tick, attaching those that are new.

        The GPUs are called one after the other as long as each answers at once: eight threads that all come back from
        the driver every few microseconds cost more in waiting for each other than they gain. One that does not answer
        holds the tick up by `tick_wait_s` at most, so that the others' readings are never late; its own comes with a
        later tick, by `drain` as `earlier`, or shows that it hangs.
        """
        readings = dict(earlier)
        self._tick += 1
        ready = [slot for slot in self._slots if not slot.worker.busy and slot.may_call]
        for slot in ready:
            if slot.gpu not in earlier:
                self._submit(slot, now, driver_version)
                self._gather(readings, now, Deadline(_AT_ONCE_S), driver_version)
        wait_s = min(self._config.tick_wait_s, self._config.deadline_s)
        self._gather(readings, now, Deadline(wait_s), driver_version)
        for slot in self._waited():
            if slot.due.left_s() > 0:
                continue
            self.errors["hung"] += 1
            slot.is_late = True
            if slot.gpu is None:
                _log.warning("the GPU at position %d of the driver does not answer and is not named yet", slot.index)
        for slot in ready:
            if slot.gpu in earlier and not slot.worker.busy and slot.may_call:
                self._submit(slot, now, driver_version)  # after the others: it will not answer in this tick either
        for gpu, reading in readings.items():
            if reading.state in _READ:
                gpu.answered_tick = self._tick
            if not reading.is_stale:
                gpu.absent_state = "lost" if reading.state == "ok" else reading.state
        return readings

    def _gather(
        self, readings: dict[KnownGpu, Reading], now: Instant, deadline: Deadline, driver_version: str | None
    ) -> None:
        """Take answers until all are there, or until the deadline."""
        for answer in collect(self._answers, deadline, lambda: not self._waited()):
            answered = self._take_slot(answer)
            if answered is None:
                continue
            was_late = answered.is_late
            reading = self._take(answered, answer)
            if reading is not None and answered.gpu is not None and not was_late:
                readings[answered.gpu] = reading
            elif answered.may_call and deadline.left_s() > 0:
                self._submit(answered, now, driver_version)  # attached, or back from a hang: read it in this tick

    def drain(self) -> dict[KnownGpu, Reading]:
        """Return the readings that came since the last tick; those of calls that hung are too old to be of use."""
        readings: dict[KnownGpu, Reading] = {}
        for answer in collect(self._answers, Deadline(0), lambda: False):
            slot = self._take_slot(answer)
            if slot is None:
                continue
            was_late = slot.is_late
            reading = self._take(slot, answer)
            if reading is not None and slot.gpu is not None and not was_late:
                readings[slot.gpu] = reading
        return readings

    def state_of(self, gpu: KnownGpu, readings: Mapping[KnownGpu, Reading]) -> str:
        """Return the state of a GPU after a tick."""
        reading, slot = readings.get(gpu), self.slot_of(gpu)
        if reading is not None:
            return reading.state
        if slot is not None and slot.is_late:
            return "hung"
        if slot is None:
            return "lost"  # not enumerated any more
        # Called, but without an answer: attached too late in this tick to be read.
        return gpu.state if slot.may_call else gpu.absent_state

    def _waited(self) -> list[Slot]:
        return [slot for slot in self._slots if slot.worker.busy and not slot.is_late]

    def _submit(self, slot: Slot, now: Instant, driver_version: str | None) -> None:
        slot.due = Deadline(self._config.deadline_s)
        if slot.device is None or slot.gpu is None:
            fast_most_s = self._config.fast_most_s if self._config.fast_hertz > 0 else 0.0
            options = {"fast_most_s": fast_most_s, "mig_period_s": self._config.mig_period_s}
            slot.worker.submit(partial(NvmlDevice, slot.index, driver_version, **options))
            return
        gpu = slot.gpu
        slow = gpu.slow.take(now, self._config.slow_period_s, self.tolerance_s)
        limits = gpu.limits.take(now, self._config.limits_period_s, self.tolerance_s)
        slot.worker.submit(partial(slot.device.read, gpu.key, now, slow=slow, limits=limits))

    def _take_slot(self, answer: Answer[NvmlDevice | Reading]) -> Slot | None:
        """Return who answers; a slot that was set aside is done with."""
        for index, slot in self._aside.items():
            if slot.worker is answer.worker:
                slot.worker.stop()
                del self._aside[index]
                return None
        return next((slot for slot in self._slots if slot.worker is answer.worker), None)

    def _take(self, slot: Slot, answer: Answer[NvmlDevice | Reading]) -> Reading | None:
        """Note an answer: attach a device, or count a reading and return it."""
        slot.is_late = False
        try:
            result = answer.result()
        except nvml.NvmlError as error:
            self.errors[error.reason] += 1
            slot.may_call = False  # a GPU that cannot be attached waits for the next start of the library
            if isinstance(error, AttachError):
                self._cannot_attach(slot, error)
            return None
        if isinstance(result, NvmlDevice):
            self._attach(slot, result)
            return None
        self.errors.update(result.errors)
        self.driver_seconds += result.driver_seconds
        if result.state == "lost" or result.is_stale:
            slot.device = None
            slot.may_call = False
        return result

    def _cannot_attach(self, slot: Slot, error: AttachError) -> None:
        """Find out which GPU it is, as far as that can be read, and note why."""
        seen = len(self._all())
        gpu = self._failing(slot, error.identity)
        is_new = len(self._all()) > seen
        if gpu is not None:
            gpu.absent_state = _CAUSES.get(error.code, gpu.absent_state)
        if gpu is None or is_new or gpu.state != gpu.absent_state:
            self._log_failure(slot, error)
        if gpu is None:
            return  # one that is only counted: fewer are visible than expected
        if is_new:
            gpu.state = gpu.absent_state  # it never was in another
        for other in self._slots:
            if other.gpu is gpu and other is not slot:
                if other.device is not None:
                    return
                other.gpu = None
        slot.gpu = gpu

    def _log_failure(self, slot: Slot, error: AttachError) -> None:
        identity = error.identity
        if slot.failure == (error.code, identity):
            return
        slot.failure = (error.code, identity)
        _log.warning(
            "the GPU at position %d of the driver (UUID %s, PCI address %s) cannot be attached: %s; see dmesg",
            slot.index,
            identity.uuid or "not readable",
            identity.pci_bus_id or "not readable",
            error,
        )

    def _failing(self, slot: Slot, identity: Identity) -> KnownGpu | None:
        """Return the GPU that cannot be attached: one that is known, or a new one where UUID or address was read."""
        known = self._all()
        if identity.uuid is not None or identity.pci_bus_id is not None:
            found = next((gpu for gpu in known if gpu.is_same(identity)), None)
            if found is None or (found.key.uuid is None and identity.uuid is not None):
                return self._add(slot.index, identity)
            return found
        if len(self._slots) < len(known):
            return None  # another may have moved up to its position
        if slot.gpu is not None:
            return slot.gpu
        return next((gpu for gpu in known if gpu.key.gpu == slot.index and self.slot_of(gpu) is None), None)

    def _add(self, index: int, identity: Identity) -> KnownGpu:
        """Note a GPU that is new; one that did not tell its UUID before hands its number on."""
        before = next((gpu for gpu in self._nameless if gpu.is_same(identity)), None)
        if before is not None:
            self._nameless.remove(before)
        number = free_number(index, (gpu.key.gpu for gpu in self._all()))
        gpu = KnownGpu(key=GpuKey(number if before is None else before.key.gpu, identity.uuid), identity=identity)
        if identity.uuid is None:
            self._nameless.append(gpu)
        else:
            self.gpus[identity.uuid] = gpu
        return gpu

    def _attach(self, slot: Slot, device: NvmlDevice) -> None:
        gpu = self.gpus.get(device.uuid) or self._add(slot.index, device.identity)
        slot.failure = None
        for other in self._slots:
            if other.gpu is gpu and other is not slot:
                if other.device is not None:
                    slot.may_call = False  # a driver that shows one GPU twice
                    return
                other.gpu = None
        gpu.attached(device.identity)
        slot.device, slot.gpu = device, gpu
