"""Samples the GPUs of the host through the NVIDIA driver's library NVML (nvidia-ml-py).

Each GPU has a thread of its own: a driver call that hangs costs that GPU only. The tick waits for it until a deadline
once, reports it as hung, and does not call it again until the call returns. Start, shutdown and enumeration have a
thread, too. GPUs are known by UUID: handles are void after a loss, so the library is started anew, with growing pauses,
when a GPU is lost or missing, when the number of GPUs changes, or when the driver says that it is not initialised.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Final, Protocol

from agent.clock import Instant, stopwatch
from agent.records import GpuFastPower, GpuKey, GpuSample, GpuState, Record
from agent.samplers import SourceUnavailableError
from agent.samplers import nvml_binding as nvml
from agent.samplers.nvml_config import NvmlConfig
from agent.samplers.nvml_device import Reading, with_reasons
from agent.samplers.nvml_fast import FastPower
from agent.samplers.nvml_known import Due, KnownGpu, find_key
from agent.samplers.nvml_library import DriverThread
from agent.samplers.nvml_restarts import Hold, Restarts, StartFailures
from agent.samplers.nvml_slots import Slots
from agent.samplers.nvml_worker import Deadline

__all__ = ["Companion", "NvmlConfig", "NvmlSampler"]

_log = logging.getLogger(__name__)

_MESSAGES: Final = {
    "driver_not_loaded": "the NVIDIA driver is not loaded; GPUs are sampled once it is",
    "library_not_found": "libnvidia-ml.so.1 is not installed; GPUs are sampled once it is",
    "lib_rm_version_mismatch": "libnvidia-ml.so.1 and the loaded driver differ in version; restart the agent",
    "no_gpus": "the NVIDIA driver is loaded but has no GPU; see nvidia-smi -L and dmesg",
    "hung": "the NVIDIA driver does not answer",
    "released": "NVML is released at an operator's request; GPUs are sampled once that is over",
}
#: Reasons that are no fault: a host without GPUs, or before its driver is loaded, or an operator at work.
_ABSENT: Final = frozenset({"driver_not_loaded", "library_not_found", "no_gpus", "released", "releasing"})


class Companion(Protocol):
    """Somebody else in this process who uses the library, and lets go of it before it is shut down."""

    def release(self, wait_s: float) -> bool:
        """Let go, and return whether that was done in time."""
        ...

    def resume(self) -> None:
        """Use it again."""
        ...


class NvmlSampler:
    """Sampler of all GPUs that the driver shows, of source "nvml"."""

    name = "nvml"

    def __init__(
        self,
        config: NvmlConfig | None = None,
        *,
        companions: Sequence[Companion] = (),
        seconds: Callable[[], float] = stopwatch,
    ) -> None:
        """Sample by `config`; `companions` let go of the library before each shutdown, `seconds` times a release."""
        self._config = config or NvmlConfig()
        self._errors: Counter[str] = Counter()  # of the library as a whole
        self._expected = 0
        self._slots = Slots(self._config)
        self._driver = DriverThread()
        self._count_at_s = 0.0
        self._restarts = Restarts(self._config)
        self._failures = StartFailures(self._config.start_tries)
        self._hold = Hold(seconds)
        self._is_held = False  # from the first tick of a release to the first after it
        self._is_released = False
        self._waits_for: tuple[str, ...] = ()  # what a release waits for
        self._fast = FastPower(self._config.fast_hertz)
        self._companions: tuple[Companion, ...] = (self._fast, *companions)
        self._logged: str | None = None  # why there is no source, as it was logged

    @property
    def period_s(self) -> float:
        """Seconds between two calls of `sample`."""
        return self._config.period_s

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failed readings since the start, by reason; what a GPU does not offer is no failure."""
        return dict(self._errors + self._slots.errors)

    @property
    def driver_seconds(self) -> float:
        """Time spent inside driver calls since the start, summed over the GPUs' threads."""
        return self._slots.driver_seconds + self._driver.seconds

    @property
    def expected_gpus(self) -> int:
        """Largest number of GPUs seen at a time since the start."""
        return self._expected

    @property
    def visible_gpus(self) -> int | None:
        """Number of GPUs that could be read within the last three ticks and are neither lost nor hung.

        None while an operator holds the driver: nobody looks then, and no GPU is missing.
        """
        return None if self._is_held else self._slots.visible

    @property
    def wants_restart(self) -> str | None:
        """Why only a new process can sample again, None while this one can: a cause met in several starts in a row."""
        return self._failures.wants_restart

    @property
    def is_released(self) -> bool:
        """Whether an operator asked to release NVML and nothing here uses it any more."""
        return self._is_released

    @property
    def is_held(self) -> bool:
        """Whether an operator asked to release NVML and that is not over, be it released yet or not; for any thread."""
        return self._hold.left_s() > 0

    @property
    def waits_for(self) -> tuple[str, ...]:
        """What keeps NVML from being released though that was asked for, each a short sentence; for any thread."""
        return self._waits_for

    @property
    def parked_threads(self) -> int:
        """Number of threads that wait for a driver call which hangs; at most two for each GPU and one beside them."""
        return self._slots.hung + self._driver.busy + self._fast.parked_threads

    def release(self, limit_s: float) -> None:
        """Close NVML with the next tick, so that a GPU can be reset or divided; open it again after `limit_s`.

        May be called by any thread, and again to extend the limit.
        """
        self._hold.begin(limit_s)

    def resume(self) -> None:
        """Open NVML again with the next probe; may be called by any thread."""
        self._hold.end()

    def key_of(self, *, uuid: str | None = None, pci_bus_id: str | None = None) -> GpuKey | None:
        """Return the key of a GPU that was seen since the start, by UUID or by PCI address of any notation."""
        return find_key(self._slots.gpus, uuid=uuid, pci_bus_id=pci_bus_id)

    def addresses(self) -> dict[str, tuple[GpuKey, str | None]]:
        """Return key and PCI address by UUID of every GPU seen since the start, lost ones too; for any thread."""
        return {uuid: (gpu.key, gpu.identity.pci_bus_id) for uuid, gpu in tuple(self._slots.gpus.items())}

    def refresh_limits(self, uuid: str) -> None:
        """Read limits, recovery action and fabric state in the next tick: for whoever sees an event of this GPU."""
        gpu = self._slots.gpus.get(uuid)
        if gpu is not None:
            gpu.limits = Due()

    def probe(self) -> bool:
        """Return whether the driver is here and shows a GPU; starts the library where that is not done.

        Says why not in the log, once; what is more than an absence is counted in `errors`.
        """
        try:
            self._keep_hold()
            self._ensure_started()
        except SourceUnavailableError as error:
            is_absent = error.reason in _ABSENT
            if not is_absent:
                self._errors[error.reason] += 1
            if str(error) != self._logged:
                is_news = is_absent and error.reason != "releasing"
                _log.log(logging.INFO if is_news else logging.WARNING, "%s", error)
            self._logged = str(error)
            return False
        self._logged = None
        return True

    def sample(self, now: Instant) -> Sequence[Record]:
        """Return the state of every GPU seen since the start, and the records of those that answer.

        Raises SourceUnavailableError with the reason driver_not_loaded, library_not_found, lib_rm_version_mismatch,
        no_gpus, hung, releasing, released, or another short word for the driver's code.
        """
        began_s = stopwatch()
        self._keep_hold()
        earlier = self._slots.drain()
        self._driver.drop_late()
        if self._restarts.take(now.monotonic_s):
            self._start(self._config.deadline_s)
            earlier = {}  # read with handles that are void now
        self._ensure_started()
        deadline = Deadline(self._config.deadline_s)
        is_counting = self._ask_count(now)
        self._tend_fast()
        current = self._driver.current
        readings = self._slots.read_all(now, earlier, None if current is None else current.version)
        if any(reading.is_stale for reading in readings.values()):
            self._restarts.ask(now.monotonic_s)
        if is_counting:
            self._take_count(now, deadline)
        records = [record for gpu in self._slots.by_number() for record in self._records(gpu, readings, now, began_s)]
        self._restarts.settle(now.monotonic_s, is_complete=self._slots.attached >= self._expected)
        return records

    def close(self) -> None:
        """End the threads and shut the library down, unless a hung call still uses it."""
        if not self._is_busy() and self._driver.is_started:
            self._let_go(self._config.stop_deadline_s)
        self._slots.end()
        self._fast.close()
        self._driver.end()

    # The library as a whole.

    def _is_busy(self) -> bool:
        return self._driver.busy or self._slots.busy

    def _quiesce(self, wait_s: float) -> bool:
        """Have everybody else let go of the library; return whether it may be shut down."""
        return all([companion.release(wait_s) for companion in self._companions])  # noqa: C419 - each is to be asked

    def _let_go(self, wait_s: float) -> bool:
        """Shut the library down; return whether that was done in time."""
        return self._quiesce(wait_s) and self._driver.stop(wait_s, self._slots.closers())

    def _keep_hold(self) -> None:
        """Close the library while an operator holds it; raises SourceUnavailableError then."""
        left_s = self._hold.left_s()
        self._is_held = left_s > 0
        if not left_s:
            self._is_released = False
            if self._waits_for:
                # A release that never came about: whoever has let go already goes on.
                self._waits_for = ()
                self._driver.settle()
                for companion in self._companions if self._driver.current is not None else ():
                    companion.resume()
            return
        if not self._is_released:
            self._slots.drain()
            self._driver.settle()
            if self._is_busy() or not self._let_go(self._config.release_deadline_s):
                self._slots.forget_answers()
                self._waits_for = tuple(self._waits()) or ("another thread has not let go of it",)
                raise SourceUnavailableError(
                    "releasing", f"NVML is to be released, and cannot be yet: {'; '.join(self._waits_for)}"
                )
            self._slots.lay_out(0)
            self._is_released = True
            self._waits_for = ()
            _log.warning("NVML is released for %.0f s at most; no GPU is sampled until then", left_s)
        raise self._unavailable("released")

    def _waits(self) -> Iterator[str]:
        """Give a short sentence for each call that keeps the library open."""
        yield from self._slots.waits()
        if self._driver.busy:
            yield "a call that concerns all GPUs does not return"
        for uuid in self._fast.parked:
            gpu = self._slots.gpus.get(uuid)
            yield f"a reading of instant power hangs on {uuid if gpu is None else gpu.name}"

    def _ensure_started(self) -> None:
        if self._driver.current is None or self._driver.current.count == 0:
            self._start(self._config.start_deadline_s)

    def _start(self, wait_s: float) -> None:
        """Start the library, after a shutdown where it runs, and lay out the slots; raises SourceUnavailableError."""
        stop_first = False
        if not self._driver.busy and self._driver.is_started:
            # A shutdown under a call that hangs is not safe; another start is, and is counted.
            stop_first = not self._is_busy() and self._quiesce(self._config.release_deadline_s)
        try:
            driver = self._driver.start(wait_s, self._slots.closers(), stop_first=stop_first)
        except nvml.NvmlError as error:
            self._slots.lay_out(0)
            self._failures.failed(error.reason)
            raise self._unavailable(error.reason) from error
        if driver is None:
            raise self._unavailable("hung")
        self._failures.succeeded()
        self._expected = max(self._expected, driver.count)
        self._slots.lay_out(driver.count)
        if driver.count == 0:
            raise self._unavailable("no_gpus")
        for companion in self._companions:
            companion.resume()

    def _unavailable(self, reason: str) -> SourceUnavailableError:
        self._slots.forget_answers()
        return SourceUnavailableError(
            reason, _MESSAGES.get(reason, f"the NVIDIA driver answers with the error {reason}")
        )

    def _ask_count(self, now: Instant) -> bool:
        if now.monotonic_s < self._count_at_s or not self._driver.ask_count():
            return False
        self._count_at_s = now.monotonic_s + self._config.count_period_s
        return True

    def _take_count(self, now: Instant, deadline: Deadline) -> None:
        current = self._driver.current
        try:
            driver = self._driver.take_count(deadline.left_s())
        except nvml.NvmlError as error:
            self._errors[error.reason] += 1
            if error.code == nvml.UNINITIALIZED:
                self._restarts.ask(now.monotonic_s)
            return
        if driver is None:
            self._errors["hung"] += 1
        elif current is not None and driver.count != current.count:
            _log.warning("the driver shows %d GPUs in place of %d", driver.count, current.count)
            self._restarts.ask(now.monotonic_s)

    def _tend_fast(self) -> None:
        """Tell the fast channel which GPUs to read, and have it leave a call behind that hangs."""
        hung = self._fast.park_hung(self._config.deadline_s)
        if hung is not None:
            self._errors["hung"] += 1
        self._fast.watch(
            {
                slot.device.uuid: slot.device.fast
                for slot in self._slots
                if slot.gpu is not None and slot.device is not None and slot.device.fast and not slot.is_late
            }
        )

    # The GPUs.

    def _records(
        self, gpu: KnownGpu, readings: Mapping[KnownGpu, Reading], now: Instant, began_s: float
    ) -> Sequence[Record]:
        reading = readings.get(gpu)
        state = self._slots.state_of(gpu, readings)
        if state != gpu.state:
            level = logging.INFO if state == "ok" else logging.WARNING
            _log.log(level, "GPU %d (%s) is %s, was %s", gpu.key.gpu, gpu.key.uuid, state, gpu.state)
            gpu.state = state
        records: list[Record] = []
        if gpu.info.take(now, self._config.limits_period_s, self._slots.tolerance_s):
            # Of a lost GPU too: an alert has to name it.
            records.append(gpu.info_record(now, None if self._driver.current is None else self._driver.current.version))
        if reading is not None:
            # Clock events shorter than a tick show in the fast channel alone.
            bits = self._fast.take_reasons(gpu.key.uuid or "")
            records.extend(
                with_reasons(record, bits)
                if bits and isinstance(record, GpuSample) and record.key == gpu.key
                else record
                for record in reading.records
            )
            records.extend(self._fast_records(gpu, now, began_s))
        else:
            records.append(GpuState(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=gpu.key, state=state))
        return records

    def _fast_records(self, gpu: KnownGpu, now: Instant, began_s: float) -> Sequence[Record]:
        """Return the readings of the fast channel in one record; `began_s` is the stopwatch at `now`."""
        slot = self._slots.slot_of(gpu)
        if slot is None or slot.device is None:
            return ()
        if not gpu.fast.take(now, self._config.fast_period_s, self._slots.tolerance_s):
            return ()
        most = slot.device.most_watts
        readings = [reading for reading in self._fast.take(slot.device.uuid) if reading.watts < most]
        if not readings:
            return ()
        newest_s = readings[-1].at_s
        busy = tuple(reading.utilization_ratio for reading in readings if reading.utilization_ratio is not None)
        return (
            GpuFastPower(
                monotonic_s=now.monotonic_s + newest_s - began_s,
                wall_s=now.wall_s + newest_s - began_s,
                key=gpu.key,
                power_watts=tuple(reading.watts for reading in readings),
                ages_s=tuple(round(newest_s - reading.at_s, 6) for reading in readings),
                utilization_ratio=busy if len(busy) == len(readings) else None,
            ),
        )
