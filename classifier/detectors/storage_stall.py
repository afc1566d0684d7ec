"""storage_stall: programs of the host wait for storage, and nothing is written or read for a minute.

Sees, of the host as a whole: dirty pages that do not go out while tasks are blocked (state D) and neither disks nor
file systems write; all programs that could run wait for I/O (pressure, full) while nothing is read or written; and NFS
requests that time out while tasks are blocked. Each of them alone is everyday: dirty pages wait 30 s on purpose, tasks
are blocked for milliseconds, an idle host writes nothing.

Cannot see: which program waits; a file system whose bytes are not read, which looks as if nothing moved: while one is
mounted, traffic on the network or the fabric counts as progress. Without pressure, blocked tasks and disks: absent.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

from agent.clock import Instant
from agent.history import CounterRate, History, HostHistory
from agent.records import GpuKey
from classifier.config_checks import require
from classifier.results import Assessment, Decision

_WRITTEN: Final = ("disk_written_bytes_per_second", "filesystem_written_bytes_per_second")
_READ: Final = ("disk_read_bytes_per_second", "filesystem_read_bytes_per_second")
_WIRE: Final = ("network_transmit_bytes_per_second", "infiniband_transmit_bytes_per_second")
#: A reading older than this says nothing.
_STALE_S: Final = 20.0


@dataclass(frozen=True, slots=True, kw_only=True)
class StorageStallConfig:
    """When storage stands still (SIGNALS 6d)."""

    enabled: bool = True
    #: It has to last this long.
    confirm_seconds: float = 60.0
    #: So long without any sign of it ends it.
    clear_seconds: float = 15.0
    #: Dirty pages and pages under writeback that are many.
    dirty_bytes: float = 256e6
    #: Tasks in uninterruptible sleep that are needed beside them.
    blocked_tasks: int = 1
    #: A rate below this is nothing: journals and logs.
    still_bytes_per_second: float = 1e6
    #: Traffic above this is progress where bytes of a file system cannot be read.
    wire_bytes_per_second: float = 10e6
    #: Share of time in which all programs wait for I/O.
    pressure_ratio: float = 0.8

    def __post_init__(self) -> None:
        """Raise ValueError for values that make no sense."""
        require(self.confirm_seconds > 0, "confirm_seconds", self.confirm_seconds, "above 0")
        require(self.blocked_tasks >= 1, "blocked_tasks", self.blocked_tasks, "at least 1")
        require(0 < self.pressure_ratio <= 1, "pressure_ratio", self.pressure_ratio, "a share above 0, at most 1")


@dataclass(frozen=True, slots=True, kw_only=True)
class _Look:
    """The host at one moment; None is not measured."""

    written: float
    read: float
    pages_bytes: float | None  # dirty or under writeback
    blocked: float | None
    full_ratio: float | None
    timeouts: int
    mount: str | None  # where the timeouts are


class StorageStallDetector:
    """Says of the node whether its storage stands still."""

    anomalies: tuple[str, ...] = ("storage_stall",)

    def __init__(self, config: StorageStallConfig) -> None:
        self._config = config
        self._full = CounterRate()
        self._full_s: float | None = None  # time of the newest reading
        self._full_ratio: float | None = None
        self._timeouts: dict[tuple[str, str], int] = {}
        self._pages_bytes: float | None = None
        self._since: Instant | None = None
        self._shown_s = 0.0
        self._seen_s: float | None = None
        self._reason = ""

    def assess(self, now: Instant, history: History, decisions: Mapping[GpuKey, Decision]) -> Sequence[Assessment]:  # noqa: ARG002
        """Return one assessment of the node, where pressure or blocked tasks and the disks are measured."""
        look = self._look(now, history.host)
        if look is None:
            self._since = None
            return ()
        elapsed_s = 0.0 if self._seen_s is None else now.monotonic_s - self._seen_s
        if elapsed_s > _STALE_S:
            self._since = None  # nobody knows what was between
        self._seen_s = now.monotonic_s
        reason = self._reason_of(look, elapsed_s, is_unseen=self._moves_unseen(now, history.host))
        if reason is not None:
            self._reason, self._shown_s = reason, now.monotonic_s
            self._since = self._since or now
        elif self._since is not None and now.monotonic_s - self._shown_s >= self._config.clear_seconds:
            self._since = None
        self._pages_bytes = look.pages_bytes
        lasted_s = 0.0 if self._since is None else now.monotonic_s - self._since.monotonic_s
        if self._since is None or lasted_s < self._config.confirm_seconds:
            return (Assessment(anomaly="storage_stall", scope="node", severity=0, device=""),)
        return (self._finding(look, self._since, lasted_s),)

    def _look(self, now: Instant, host: HostHistory) -> _Look | None:
        def fresh(channel: str) -> float | None:
            return host.latest(channel, now.monotonic_s, _STALE_S)

        written = fresh(_WRITTEN[0])
        blocked, pages = fresh("blocked_tasks"), fresh("dirty_bytes")
        full_ratio = self._pressure(now, host)
        if written is None or (blocked is None and full_ratio is None):
            return None
        timeouts, mount = self._new_timeouts(host)
        return _Look(
            written=written + (fresh(_WRITTEN[1]) or 0.0),
            read=(fresh(_READ[0]) or 0.0) + (fresh(_READ[1]) or 0.0),
            pages_bytes=None if pages is None else pages + (fresh("writeback_bytes") or 0.0),
            blocked=blocked,
            full_ratio=full_ratio,
            timeouts=timeouts,
            mount=mount,
        )

    def _pressure(self, now: Instant, host: HostHistory) -> float | None:
        pressure = host.pressure
        if pressure is None or now.monotonic_s - pressure.monotonic_s > _STALE_S:
            return None
        if pressure.io_full_seconds_total is None:
            return None
        if pressure.monotonic_s != self._full_s:
            self._full_s = pressure.monotonic_s
            self._full_ratio = self._full.update(pressure.monotonic_s, pressure.io_full_seconds_total)
        return self._full_ratio

    def _new_timeouts(self, host: HostHistory) -> tuple[int, str | None]:
        """Return how many NFS requests timed out since the last call, and on which mount most of them."""
        most, mount, total = 0, None, 0
        known: dict[tuple[str, str], int] = {}
        for identity, record in host.filesystems.items():
            if record.major_timeouts_total is None:
                continue
            known[identity] = record.major_timeouts_total
            new = record.major_timeouts_total - self._timeouts.get(identity, record.major_timeouts_total)
            total += max(new, 0)
            if new > most:
                most, mount = new, record.mountpoint
        self._timeouts = known
        return total, mount

    def _reason_of(self, look: _Look, elapsed_s: float, *, is_unseen: bool) -> str | None:
        config = self._config
        is_blocked = look.blocked is not None and look.blocked >= config.blocked_tasks
        if look.timeouts and (is_blocked or look.blocked is None):
            return "nfs_timeouts"
        if look.written > config.still_bytes_per_second or is_unseen:
            return None
        pages, before = look.pages_bytes, self._pages_bytes
        # Pages that become fewer went somewhere.
        stays = pages is not None and (before is None or before - pages <= config.still_bytes_per_second * elapsed_s)
        if is_blocked and stays and pages is not None and pages >= config.dirty_bytes:
            return "dirty_pages"
        is_full = look.full_ratio is not None and look.full_ratio >= config.pressure_ratio
        if is_full and look.read <= config.still_bytes_per_second:
            return "pressure"
        # Timeouts come minutes apart; between two of them the blocked tasks say that it goes on.
        return "nfs_timeouts" if is_blocked and self._since is not None and self._reason == "nfs_timeouts" else None

    def _moves_unseen(self, now: Instant, host: HostHistory) -> bool:
        """Return whether bytes may go to a file system that does not tell."""
        if not host.unreadable_filesystems(now.monotonic_s, _STALE_S):
            return False
        rates = (host.latest(channel, now.monotonic_s, _STALE_S) for channel in _WIRE)
        return any(rate is not None and rate > self._config.wire_bytes_per_second for rate in rates)

    def _finding(self, look: _Look, since: Instant, lasted_s: float) -> Assessment:
        what = {
            "dirty_pages": f"{(look.pages_bytes or 0.0) / 1e9:.1f} GB wait to be written and nothing is",
            "pressure": "all programs wait for I/O and nothing is read or written",
            "nfs_timeouts": f"requests to the NFS server of {look.mount or 'a mount'} time out",
        }[self._reason]
        blocked = "" if look.blocked is None else f", with {look.blocked:.0f} tasks blocked"
        return Assessment(
            anomaly="storage_stall",
            scope="node",
            severity=2,
            device="",
            since_monotonic_s=since.monotonic_s,
            since_wall_s=since.wall_s,
            evidence={
                "reason": self._reason,
                "stalled_seconds": lasted_s,
                "dirty_bytes": look.pages_bytes,
                "blocked_tasks": look.blocked,
                "written_bytes_per_second": look.written,
                "read_bytes_per_second": look.read,
                "io_full_ratio": look.full_ratio,
            },
            action="look",
            summary=f"For {lasted_s:.0f} s {what}{blocked}.",
        )
