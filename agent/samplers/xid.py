"""XIDs of GPUs and SXIDs of NVSwitches, from NVML's events and from the kernel's log, each event counted once.

Both sources tell the same event, a second apart while all is well. So an event of one source is matched with one of the
other that has its GPU and code and no match yet, and what has no match counts. How long a match is waited for is not a
matter of the clock alone: a driver that hangs tells its events when it is back, and until then the kernel's lines wait.

NVML tells of several XIDs between two waits the newest code for each, as its documentation says: of 62 and then 45, it
may tell 45 twice. Where the kernel's log is read, an event that has no match by code is taken for one of the lines that
have none, and the log is believed.

What came before the sampler was opened is not counted, but the time of the last event by code is told, see `kmsg`.
The log names a GPU by its PCI address; lines about an address that no GPU has yet are kept until one has it.
"""

from __future__ import annotations

import logging
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from collections.abc import Set as AbstractSet
from dataclasses import dataclass, field
from pathlib import Path
from typing import Final, Protocol

from agent.clock import Clock, Instant
from agent.records import GpuKey, GpuXids, NvswitchSxids, Record
from agent.samplers import SourceUnavailableError
from agent.samplers.kmsg import KernelEvent, KmsgReader, pci_address
from agent.samplers.nvml_events import EventBatch, NvmlEvents
from agent.samplers.xid_tally import Tally, Unmatched
from agent.xids import XIDS, XidCatalogue

_log = logging.getLogger(__name__)

#: The GPUs known now, lost ones too, by UUID: key of the whole card, and PCI address where it is known.
Gpus = Callable[[], Mapping[str, tuple[GpuKey, str | None]]]


#: More seconds, codes or devices than anybody can mean.
_MOST: Final = 86_400


@dataclass(frozen=True, slots=True, kw_only=True)
class XidConfig:
    """Bounds and distances of the XID sampler."""

    match_window_s: float = 3.0
    """How far apart the two sources may tell one event, beyond what a hanging driver explains."""
    send_period_s: float = 5.0
    """Longest distance of two records of one GPU; where an event came, one is sent at once."""
    codes_per_device: int = 64
    """Different codes counted per GPU and per NVSwitch; more are counted as errors of the sampler."""
    unknown_devices: int = 64
    """PCI addresses without a GPU whose lines are kept, and NVSwitches that are counted."""
    log_retry_s: float = 60.0
    """Distance of attempts to open the kernel's log."""
    deaf_s: float = 15.0
    """After so long without an answer from the driver, a GPU whose events come from it alone is left out."""
    report_period_s: float = 60.0
    """Distance of lines in the agent's log about one code of one GPU."""

    def __post_init__(self) -> None:
        """Raise ValueError where a bound or a distance cannot be meant."""
        for key in self.__dataclass_fields__:
            value = getattr(self, key)
            if not 0 < value <= _MOST:
                raise ValueError(f"{key} is {value}; it must be above 0 and at most {_MOST}")


class EventSource(Protocol):
    """What the sampler needs of `NvmlEvents`."""

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failures by reason."""
        ...

    def watch(self, uuids: AbstractSet[str]) -> None:
        """Tell events of these GPUs from now on."""
        ...

    def take(self) -> EventBatch:
        """Return what came since the last call."""
        ...

    def release(self, wait_s: float) -> bool:
        """Let go of the driver's library."""
        ...

    def resume(self) -> None:
        """Take the library up again."""
        ...

    def close(self) -> None:
        """End for good."""
        ...


@dataclass(slots=True, kw_only=True, eq=False)
class _Gpu:
    """What is known of one GPU, or of a PCI address that no GPU has yet."""

    tally: Tally
    from_log: Unmatched = field(default_factory=Unmatched)
    from_nvml: Unmatched = field(default_factory=Unmatched)
    reported_s: dict[int, float] = field(default_factory=dict)
    sent_s: float = float("-inf")
    is_changed: bool = False


@dataclass(slots=True, kw_only=True, eq=False)
class _Switch:
    """What is known of one NVSwitch."""

    tally: Tally
    fatal: Tally


class XidSampler:
    """Counts XIDs by GPU and SXIDs by NVSwitch, of source "xid"."""

    name = "xid"
    period_s = 1.0

    def __init__(
        self,
        gpus: Gpus,
        clock: Clock,
        kmsg_path: Path = Path("/dev/kmsg"),
        *,
        catalogue: XidCatalogue = XIDS,
        config: XidConfig | None = None,
        events: EventSource | None = None,
        log: KmsgReader | None = None,
        on_xid: Callable[[str], object] = lambda _: None,
    ) -> None:
        """Count what `events` and the log at `kmsg_path` tell; `on_xid` is called with the UUID when an XID arrives."""
        self._list_gpus = gpus
        self._clock = clock
        self._catalogue = catalogue
        self._config = config or XidConfig()
        self._events: EventSource = events if events is not None else NvmlEvents(clock)
        self._kernel_log = log if log is not None else KmsgReader(kmsg_path)
        self._on_xid = on_xid
        self._errors: Counter[str] = Counter()
        self._gpus: dict[str, _Gpu] = {}  # by UUID
        self._unknown: dict[str, _Gpu] = {}  # by PCI address
        self._switches: dict[str, _Switch] = {}  # by PCI address
        self._log_retry_s = float("-inf")
        self._log_reason: str | None = None

    @property
    def errors(self) -> Mapping[str, int]:
        """Count of failures since the start, by reason, of both sources."""
        return dict(self._errors + self._kernel_log.errors + Counter(self._events.errors))

    def probe(self) -> bool:
        """Return whether there is a GPU; opens the sources, so that what comes from now on is counted."""
        now = self._clock.now()
        uuids = self._list_gpus().keys()
        self._events.watch(frozenset(uuids))
        self._open_log(now)
        return bool(uuids)

    def sample(self, now: Instant) -> Sequence[Record]:
        """Return the counts of the GPUs with news and of some others in turn, each every 5 s at least.

        Raises SourceUnavailableError with the reason no_source where neither source tells anything about any GPU.
        """
        gpus = self._list_gpus()
        self._events.watch(frozenset(gpus))
        # NVML first: the kernel has then logged all that NVML has told.
        batch = self._events.take()
        self._open_log(now)
        self._learn(gpus)
        self._count_lines(self._read_log(), gpus, batch, now)
        self._count_events(batch, now)
        self._expire(batch, now)
        counted = [uuid for uuid in gpus if self._is_counted(uuid, batch, now)]
        if not counted and batch.is_settled and gpus:
            raise SourceUnavailableError(
                "no_source", "XIDs: NVML tells no events, and the kernel log is not read; CAP_SYSLOG allows it"
            )
        return [*self._gpu_records(counted, gpus, now), *self._switch_records(now)]

    def release(self, wait_s: float) -> bool:
        """Let go of NVML before a shutdown of the library, see `NvmlEvents.release`; any thread may call it."""
        return self._events.release(wait_s)

    def resume(self) -> None:
        """Take NVML up again after `release`."""
        self._events.resume()

    def close(self) -> None:
        """Close both sources; a thread that hangs in the driver is left behind."""
        self._events.close()
        self._kernel_log.close()

    # The kernel's log.

    def _open_log(self, now: Instant) -> None:
        if self._kernel_log.is_open or now.monotonic_s < self._log_retry_s:
            return
        self._log_retry_s = now.monotonic_s + self._config.log_retry_s
        try:
            history = self._kernel_log.open()
        except SourceUnavailableError as error:
            self._note_log_fault(error)
            return
        self._log_reason = None
        gpus = self._list_gpus()
        for event, age_s in history.items():
            wall_s = now.wall_s - age_s
            tallies = self._tallies(event, gpus)
            if not all(tally.remember(event.code, wall_s) for tally in tallies):
                self._errors["too_many_codes"] += 1

    def _read_log(self) -> Mapping[KernelEvent, int]:
        try:
            return self._kernel_log.read()
        except SourceUnavailableError as error:
            self._note_log_fault(error)
            return {}

    def _note_log_fault(self, error: SourceUnavailableError) -> None:
        """Say once why the log is not read; that this host does not offer it is no failure."""
        is_offered = error.reason not in ("absent", "no_permission")
        if is_offered:
            self._errors[error.reason] += 1
        if error.reason != self._log_reason:
            level = logging.WARNING if is_offered else logging.INFO
            _log.log(level, "XIDs come from NVML alone: %s", error)
        self._log_reason = error.reason

    # Counting.

    def _learn(self, gpus: Mapping[str, tuple[GpuKey, str | None]]) -> None:
        """Give GPUs that are new what was kept about their address."""
        for uuid, (_, bus_id) in gpus.items():
            if uuid not in self._gpus:
                self._gpus[uuid] = self._new_gpu()
            kept = self._unknown.pop(pci_address(bus_id), None) if bus_id and self._unknown else None
            if kept is not None:
                self._gpus[uuid].tally.join(kept.tally)
                self._gpus[uuid].is_changed = True

    def _new_gpu(self) -> _Gpu:
        return _Gpu(tally=Tally(self._config.codes_per_device, self._catalogue.critical()))

    def _new_switch(self) -> _Switch:
        return _Switch(tally=Tally(self._config.codes_per_device), fatal=Tally(self._config.codes_per_device))

    def _count_lines(
        self,
        lines: Mapping[KernelEvent, int],
        gpus: Mapping[str, tuple[GpuKey, str | None]],
        batch: EventBatch,
        now: Instant,
    ) -> None:
        by_address = _by_address(gpus) if lines else {}
        for event, count in lines.items():
            uuid = None if event.is_switch else by_address.get(event.address)
            if uuid is None:
                self._count_elsewhere(event, count, now)
                continue
            gpu = self._gpus[uuid]
            new = count - gpu.from_nvml.take(event.code, count)
            self._count(uuid, gpu, event.code, new, now)
            if uuid in batch.watched:
                gpu.from_log.add(event.code, new, now.monotonic_s)

    def _count_elsewhere(self, event: KernelEvent, count: int, now: Instant) -> None:
        """Count lines about a switch or about a GPU that NVML does not show."""
        tallies = self._tallies(event, {})
        if not all(tally.add(event.code, count, now.wall_s) for tally in tallies):
            self._errors["too_many_codes"] += count
        if not event.is_switch:
            self._errors["unknown_gpu"] += count
        elif tallies:
            _log.log(
                logging.WARNING if event.is_fatal else logging.INFO,
                "NVSwitch %s: SXID %d, %d times, %s",
                event.address,
                event.code,
                count,
                "fatal" if event.is_fatal else "not fatal",
            )

    def _tallies(self, event: KernelEvent, gpus: Mapping[str, tuple[GpuKey, str | None]]) -> list[Tally]:
        """Return where an event of the log belongs; nowhere where there are too many addresses."""
        if event.is_switch:
            switch = self._switches.get(event.address)
            if switch is None and len(self._switches) < self._config.unknown_devices:
                switch = self._switches[event.address] = self._new_switch()
            return [] if switch is None else [switch.tally, *([switch.fatal] if event.is_fatal else [])]
        uuid = _by_address(gpus).get(event.address)
        if uuid is not None:
            return [self._gpus.setdefault(uuid, self._new_gpu()).tally]
        if event.address not in self._unknown and len(self._unknown) >= self._config.unknown_devices:
            return []
        return [self._unknown.setdefault(event.address, self._new_gpu()).tally]

    def _count_events(self, batch: EventBatch, now: Instant) -> None:
        left: Counter[tuple[str, int]] = Counter()
        for (uuid, code), count in batch.counts.items():
            gpu = self._gpus.setdefault(uuid, self._new_gpu())
            left[uuid, code] = count - gpu.from_log.take(code, count)
        for (uuid, code), count in left.items():
            gpu = self._gpus[uuid]
            # What has a line of another code is that line's event: the driver tells the newest code for all.
            new = count - gpu.from_log.take_any(count)
            self._count(uuid, gpu, code, new, now)
            if self._kernel_log.is_open:
                gpu.from_nvml.add(code, new, now.monotonic_s)

    def _count(self, uuid: str, gpu: _Gpu, code: int, count: int, now: Instant) -> None:
        if count <= 0:
            return
        self._on_xid(uuid)
        if not gpu.tally.add(code, count, now.wall_s):
            self._errors["too_many_codes"] += count
            return
        gpu.is_changed = True
        if now.monotonic_s - gpu.reported_s.get(code, float("-inf")) < self._config.report_period_s:
            return
        gpu.reported_s[code] = now.monotonic_s
        meaning = self._catalogue[code]
        level = logging.WARNING if meaning.kind == "hardware" else logging.INFO
        _log.log(level, "%s: XID %d (%s); action: %s", uuid, code, meaning.name, meaning.action)

    def _expire(self, batch: EventBatch, now: Instant) -> None:
        window_s = self._config.match_window_s
        for uuid, gpu in self._gpus.items():
            if len(gpu.from_nvml):
                gpu.from_nvml.expire(now.monotonic_s - window_s)
            if len(gpu.from_log):
                until_s = batch.complete_until_s if uuid in batch.watched else float("inf")
                gpu.from_log.expire(until_s - window_s)

    # What is sent.

    def _is_counted(self, uuid: str, batch: EventBatch, now: Instant) -> bool:
        """Return whether a 0 of this GPU would mean that nothing happened."""
        return self._kernel_log.is_open or (
            uuid in batch.watched and now.monotonic_s - batch.heard_s <= self._config.deaf_s
        )

    def _gpu_records(
        self, counted: Sequence[str], gpus: Mapping[str, tuple[GpuKey, str | None]], now: Instant
    ) -> list[Record]:
        # Some in each tick rather than all in every fifth: a tick without any record would count as a failure.
        in_turn = -(-len(counted) // max(1, round(self._config.send_period_s / self.period_s)))
        waiting = sorted(counted, key=lambda uuid: self._gpus[uuid].sent_s)
        due = set(waiting[:in_turn])
        records: list[Record] = []
        for uuid in counted:
            gpu = self._gpus[uuid]
            is_overdue = now.monotonic_s - gpu.sent_s >= self._config.send_period_s
            if not (uuid in due or gpu.is_changed or is_overdue):
                continue
            gpu.sent_s, gpu.is_changed = now.monotonic_s, False
            records.append(
                GpuXids(
                    monotonic_s=now.monotonic_s,
                    wall_s=now.wall_s,
                    key=gpus[uuid][0],
                    totals=dict(sorted(gpu.tally.totals.items())),
                    last_wall_s=dict(sorted(gpu.tally.last_wall_s.items())),
                )
            )
        return records

    def _switch_records(self, now: Instant) -> list[Record]:
        return [
            NvswitchSxids(
                monotonic_s=now.monotonic_s,
                wall_s=now.wall_s,
                device=address,
                totals=dict(sorted(switch.tally.totals.items())),
                fatal_totals=dict(sorted(switch.fatal.totals.items())),
                last_wall_s=dict(sorted(switch.tally.last_wall_s.items())),
            )
            for address, switch in sorted(self._switches.items())
        ]


def _by_address(gpus: Mapping[str, tuple[GpuKey, str | None]]) -> dict[str, str]:
    """Return the UUIDs by PCI address; of two GPUs at one address, the one that was seen later has it."""
    return {pci_address(bus_id): uuid for uuid, (_, bus_id) in gpus.items() if bus_id}
