"""Samples the GPUs of the host through the NVIDIA driver's library NVML (nvidia-ml-py).

Each GPU has a thread of its own: a driver call that hangs costs that GPU only. The tick waits for it until a deadline
once, reports it as hung, and does not call it again until the call returns. Start, shutdown and enumeration have a
thread, too. GPUs are known by UUID: handles are void after a loss, so the library is started anew, with growing pauses,
when a GPU is lost or missing, when the number of GPUs changes, or when the driver says that it is not initialised.
"""

from __future__ import annotations

import logging
import queue
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Final

from agent.clock import Instant
from agent.records import GpuKey, GpuState, Record
from agent.samplers import SourceUnavailableError
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_device import NvmlDevice, Reading
from agent.samplers.nvml_known import KnownGpu, free_number
from agent.samplers.nvml_library import Driver, count_gpus, start, stop
from agent.samplers.nvml_worker import Answer, Answers, Deadline, Worker, collect

_log = logging.getLogger(__name__)

_MESSAGES: Final = {
    "driver_not_loaded": "the NVIDIA driver is not loaded; GPUs are sampled once it is",
    "library_not_found": "libnvidia-ml.so.1 is not installed; GPUs are sampled once it is",
    "lib_rm_version_mismatch": "libnvidia-ml.so.1 and the loaded driver differ in version; restart the agent",
    "no_gpus": "the NVIDIA driver is loaded but has no GPU; see nvidia-smi -L and dmesg",
    "hung": "the NVIDIA driver does not answer",
}
#: Reasons that are no fault: a host without GPUs, or before its driver is loaded.
_ABSENT: Final = frozenset({"driver_not_loaded", "library_not_found", "no_gpus"})


@dataclass(frozen=True, slots=True, kw_only=True)
class NvmlConfig:
    """Periods, deadlines and pauses of the NVML sampler."""

    period_s: float = 1.0
    """Distance of core ticks."""
    slow_period_s: float = 5.0
    """Distance of readings that are slow to change or dear: energy, temperatures, PCIe bytes, processes."""
    limits_period_s: float = 60.0
    """Distance of identity and limits."""
    deadline_s: float = 3.0
    """Time for all calls of one tick on one GPU; a GPU that takes longer is hung."""
    start_deadline_s: float = 15.0
    """Time for nvmlInit, which initialises GPUs without persistence mode."""
    stop_deadline_s: float = 0.5
    """Time for nvmlShutdown when the agent ends."""
    count_period_s: float = 10.0
    """Distance of looks at the number of GPUs."""
    restart_first_s: float = 10.0
    """First pause before the library is started anew for a lost GPU; doubles while that does not help."""
    restart_most_s: float = 300.0
    """Longest such pause."""


@dataclass(slots=True, kw_only=True, eq=False)
class _Slot:
    """A position in the driver's enumeration, with the thread for its calls."""

    index: int
    worker: Worker[NvmlDevice | Reading]
    device: NvmlDevice | None = None
    gpu: KnownGpu | None = None
    may_call: bool = True  # False from a loss until the next start of the library
    is_late: bool = False  # the task under way is past its deadline: the GPU is hung


class NvmlSampler:
    """Sampler of all GPUs that the driver shows, of source "nvml"."""

    name = "nvml"

    def __init__(self, config: NvmlConfig | None = None) -> None:
        self._config = config or NvmlConfig()
        self._tolerance_s = self._config.period_s / 2  # ticks jitter
        self._errors: Counter[str] = Counter()
        self._driver_seconds = 0.0
        self._expected = 0
        self._gpus: dict[str, KnownGpu] = {}
        self._slots: list[_Slot] = []
        self._answers: Answers[NvmlDevice | Reading] = queue.SimpleQueue()
        self._driver_answers: Answers[Driver] = queue.SimpleQueue()
        self._driver_thread: Worker[Driver] = Worker("nvml-driver", self._driver_answers)
        self._driver: Driver | None = None
        self._references = 0
        self._count_at_s = 0.0
        self._restart_at_s: float | None = None
        self._restart_pause_s = 0.0
        self._is_restart_certain = False
        self._logged_reason: str | None = None

    @property
    def period_s(self) -> float:
        """Seconds between two calls of `sample`."""
        return self._config.period_s

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings since the start, by reason; what a GPU does not offer is no failure."""
        return dict(self._errors)

    @property
    def driver_seconds(self) -> float:
        """Time spent inside driver calls since the start, summed over the GPUs' threads."""
        return self._driver_seconds

    @property
    def expected_gpus(self) -> int:
        """Largest number of GPUs seen at a time since the start."""
        return self._expected

    @property
    def visible_gpus(self) -> int:
        """Number of GPUs that the driver enumerates and that are not lost."""
        return sum(slot.gpu is not None and slot.gpu.state != "lost" for slot in self._slots)

    def probe(self) -> bool:
        """Return whether the driver is here and shows a GPU; starts the library where that is not done.

        Says why not in the log, once; what is more than an absence is counted in `errors`.
        """
        try:
            self._ensure_started()
        except SourceUnavailableError as error:
            is_absent = error.reason in _ABSENT
            if not is_absent:
                self._errors[error.reason] += 1
            if error.reason != self._logged_reason:
                _log.log(logging.INFO if is_absent else logging.WARNING, "%s", error)
            self._logged_reason = error.reason
            return False
        self._logged_reason = None
        return True

    def sample(self, now: Instant) -> Sequence[Record]:
        """Return the state of every GPU seen since the start, and the records of those that answer.

        Raises SourceUnavailableError with the reason driver_not_loaded, library_not_found, lib_rm_version_mismatch,
        no_gpus, hung, or another short word for the driver's code.
        """
        self._take_late()
        if self._restart_at_s is not None and now.monotonic_s >= self._restart_at_s:
            self._restart_at_s = None
            self._start(self._config.deadline_s)
        self._ensure_started()
        deadline = Deadline(self._config.deadline_s)
        is_counting = self._ask_count(now)
        readings = self._read_all(now, deadline)
        if is_counting:
            self._take_count(now, deadline)
        records = [record for gpu in self._by_index() for record in self._records(gpu, readings, now)]
        self._plan_restart(now)
        return records

    def close(self) -> None:
        """End the threads and shut the library down, unless a hung call still uses it."""
        is_idle = not any(slot.worker.busy for slot in self._slots) and not self._driver_thread.busy
        if is_idle and self._references:
            self._driver_thread.submit(partial(stop, self._references))
            self._await_driver(self._config.stop_deadline_s)
        for slot in self._slots:
            slot.worker.stop()
        self._slots.clear()
        self._driver_thread.stop()
        self._driver_thread = Worker("nvml-driver", self._driver_answers)
        self._driver = None
        self._references = 0

    # The library as a whole.

    def _ensure_started(self) -> None:
        if self._driver is None or self._driver.count == 0:
            self._start(self._config.start_deadline_s)

    def _start(self, wait_s: float) -> None:
        """Start the library, after a shutdown where it runs, and lay out the slots; raises SourceUnavailableError."""
        self._driver = None
        if self._driver_thread.busy:
            wait_s = 0.0  # it hangs, and has been waited for
        else:
            # A shutdown under a call that hangs is not safe; another start is, and is counted.
            is_hung = any(slot.worker.busy for slot in self._slots)
            self._driver_thread.submit(partial(start, self._references, stop_first=not is_hung))
        try:
            driver = self._await_driver(wait_s)
        except nvml.NvmlError as error:
            self._references = 0
            self._detach_all(0)
            raise self._unavailable(error.reason) from error
        if driver is None:
            raise self._unavailable("hung")
        self._references = driver.references
        self._driver = driver
        self._expected = max(self._expected, driver.count)
        self._detach_all(driver.count)
        if driver.count == 0:
            raise self._unavailable("no_gpus")

    def _await_driver(self, seconds: float) -> Driver | None:
        """Return the answer of the driver's thread, None where there is none in time; raises NvmlError."""
        for answer in collect(self._driver_answers, Deadline(seconds), lambda: False):
            if answer.worker is self._driver_thread:
                driver = answer.result()
                self._driver_seconds += driver.seconds
                return driver
        return None

    def _unavailable(self, reason: str) -> SourceUnavailableError:
        return SourceUnavailableError(
            reason, _MESSAGES.get(reason, f"the NVIDIA driver answers with the error {reason}")
        )

    def _detach_all(self, count: int) -> None:
        """Forget the handles and lay out `count` slots; one whose call hangs keeps its thread until that returns."""
        for slot in self._slots[count:]:
            slot.worker.stop()
        del self._slots[count:]
        for slot in self._slots:
            slot.device = None
            slot.may_call = True
        for index in range(len(self._slots), count):
            self._slots.append(_Slot(index=index, worker=Worker(f"nvml-gpu-{index}", self._answers)))

    def _ask_count(self, now: Instant) -> bool:
        if now.monotonic_s < self._count_at_s or self._driver_thread.busy or self._driver is None:
            return False
        self._count_at_s = now.monotonic_s + self._config.count_period_s
        self._driver_thread.submit(partial(count_gpus, self._driver))
        return True

    def _take_count(self, now: Instant, deadline: Deadline) -> None:
        try:
            driver = self._await_driver(deadline.left_s())
        except nvml.NvmlError as error:
            self._errors[error.reason] += 1
            if error.code == nvml.UNINITIALIZED:
                self._restart(now)
            return
        if driver is None:
            self._errors["hung"] += 1
        elif self._driver is not None and driver.count != self._driver.count:
            _log.warning("the driver shows %d GPUs in place of %d", driver.count, self._driver.count)
            self._restart(now)

    def _restart(self, now: Instant, *, is_certain: bool = True) -> None:
        """Start the library anew in the next tick, or after a pause where that was tried just now."""
        self._is_restart_certain = is_certain or (self._is_restart_certain and self._restart_at_s is not None)
        if self._restart_at_s is None:
            self._restart_at_s = now.monotonic_s + self._restart_pause_s
            self._restart_pause_s = min(
                max(2 * self._restart_pause_s, self._config.restart_first_s), self._config.restart_most_s
            )

    def _plan_restart(self, now: Instant) -> None:
        if self.visible_gpus < self._expected:
            # A lost GPU rarely comes back at once: never without a pause.
            self._restart_pause_s = max(self._restart_pause_s, self._config.restart_first_s)
            self._restart(now, is_certain=False)
        elif self._restart_at_s is None or not self._is_restart_certain:
            self._restart_at_s = None  # whoever was missing is here: it only took long to attach
            self._restart_pause_s = 0.0

    # The GPUs.

    def _read_all(self, now: Instant, deadline: Deadline) -> dict[KnownGpu, Reading]:
        for slot in self._slots:
            if not slot.worker.busy and slot.may_call:
                self._submit(slot, now)
        readings: dict[KnownGpu, Reading] = {}
        for answer in collect(self._answers, deadline, lambda: not self._waited()):
            answered = self._slot_of(answer)
            if answered is None:
                continue
            was_late = answered.is_late
            reading = self._take(answered, answer)
            if reading is not None and answered.gpu is not None and not was_late:
                readings[answered.gpu] = reading
                if reading.is_stale:
                    self._restart(now)
            elif answered.may_call and deadline.left_s() > 0:
                self._submit(answered, now)  # attached, or back from a hang: read it in this tick
        for slot in self._waited():
            self._errors["hung"] += 1
            slot.is_late = True
        return readings

    def _waited(self) -> list[_Slot]:
        return [slot for slot in self._slots if slot.worker.busy and not slot.is_late]

    def _submit(self, slot: _Slot, now: Instant) -> None:
        if slot.device is None or slot.gpu is None:
            version = None if self._driver is None else self._driver.version
            slot.worker.submit(partial(NvmlDevice, slot.index, version))
            return
        gpu = slot.gpu
        slow = gpu.slow.take(now, self._config.slow_period_s, self._tolerance_s)
        limits = gpu.limits.take(now, self._config.limits_period_s, self._tolerance_s)
        slot.worker.submit(partial(slot.device.read, gpu.key, now, slow=slow, limits=limits))

    def _slot_of(self, answer: Answer[NvmlDevice | Reading]) -> _Slot | None:
        return next((slot for slot in self._slots if slot.worker is answer.worker), None)

    def _take(self, slot: _Slot, answer: Answer[NvmlDevice | Reading]) -> Reading | None:
        """Note an answer: attach a device, or count a reading and return it."""
        slot.is_late = False
        try:
            result = answer.result()
        except nvml.NvmlError as error:
            self._errors[error.reason] += 1
            slot.may_call = False  # a GPU that cannot be attached waits for the next start of the library
            return None
        if isinstance(result, NvmlDevice):
            self._attach(slot, result)
            return None
        self._errors.update(result.errors)
        self._driver_seconds += result.driver_seconds
        if result.state == "lost" or result.is_stale:
            slot.device = None
            slot.may_call = False
        return result

    def _take_late(self) -> None:
        """Take the answers of calls that hung; their values are too old to be of use."""
        for answer in collect(self._answers, Deadline(0), lambda: False):
            slot = self._slot_of(answer)
            if slot is not None:
                self._take(slot, answer)
        if self._driver is not None:  # else the start of the library hangs, and its answer is not to be lost
            for _ in collect(self._driver_answers, Deadline(0), lambda: False):
                pass

    def _attach(self, slot: _Slot, device: NvmlDevice) -> None:
        uuid = device.identity.uuid
        gpu = self._gpus.get(uuid)
        if gpu is None:
            number = free_number(slot.index, (known.key.gpu for known in self._gpus.values()))
            gpu = self._gpus[uuid] = KnownGpu(key=GpuKey(number, uuid), identity=device.identity)
        for other in self._slots:
            if other.gpu is gpu and other is not slot:
                if other.device is not None:
                    slot.may_call = False  # a driver that shows one GPU twice
                    return
                other.gpu = None
        gpu.attached(device.identity)
        slot.device, slot.gpu = device, gpu

    def _by_index(self) -> list[KnownGpu]:
        return sorted(self._gpus.values(), key=lambda gpu: gpu.key.gpu)

    def _records(self, gpu: KnownGpu, readings: Mapping[KnownGpu, Reading], now: Instant) -> Sequence[Record]:
        reading = readings.get(gpu)
        slot = next((slot for slot in self._slots if slot.gpu is gpu), None)
        if reading is not None:
            state = reading.state
        elif slot is not None and slot.is_late:
            state = "hung"
        elif slot is not None and slot.may_call:
            state = gpu.state  # attached too late in this tick to be read
        else:
            state = "lost"
        if state != gpu.state:
            level = logging.INFO if state == "ok" else logging.WARNING
            _log.log(level, "GPU %d (%s) is %s, was %s", gpu.key.gpu, gpu.key.uuid, state, gpu.state)
            gpu.state = state
        records: list[Record] = []
        if gpu.info.take(now, self._config.limits_period_s, self._tolerance_s):
            # Of a lost GPU too: an alert has to name it.
            records.append(gpu.info_record(now, self._driver.version if self._driver is not None else None))
        if reading is not None:
            records.extend(reading.records)
        else:
            records.append(GpuState(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=gpu.key, state=state))
        return records
