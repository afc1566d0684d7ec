"""What the landing page says of the host around the GPUs: links, disks, file systems, pressure, NVSwitches."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Final

from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuDirectStorageSample,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    PressureSample,
)
from exporters.landing_text import NOTHING, SIGNS, byte_size, duration, rate_text, shortened
from exporters.markup import Html, join, table, tag, text
from exporters.snapshot import NodeSnapshot

#: Counters of a port that are shown where they are not zero.
_PORT_ERRORS: Final = (
    "symbol_error",
    "link_error_recovery",
    "link_downed",
    "port_rcv_errors",
    "port_xmit_discards",
    "local_link_integrity_errors",
    "excessive_buffer_overrun_errors",
)
_LAYERS: Final = {"infiniband": "InfiniBand", "ethernet": "RoCE", "efa": "EFA"}
#: SXIDs of one NVSwitch that are shown.
_SXIDS_SHOWN: Final = 4

Row = tuple[str | None, list[Html]]


def host_section(snapshot: NodeSnapshot) -> Html:
    """Return the part of the page about the host; nothing where nothing of it is sampled."""
    parts = [
        _section("Network", ("Link", "State", "Speed", "Received", "Sent", "Notes"), _links(snapshot)),
        _section("Storage", ("Storage", "Type", "Read", "Written", "Notes"), _storage(snapshot)),
        _lines("Pressure", tuple(_pressure(snapshot.pressure)) if snapshot.pressure else ()),
        _lines("NVSwitches", tuple(_switches(snapshot))),
    ]
    return join(*parts)


def _section(heading: str, headings: tuple[str, ...], rows: list[Row]) -> Html:
    return join(tag("h2", heading), table(headings, rows, class_="host")) if rows else Html()


def _lines(heading: str, lines: Sequence[str]) -> Html:
    return join(tag("h2", heading), *(tag("p", line) for line in lines)) if lines else Html()


def _links(snapshot: NodeSnapshot) -> list[Row]:
    links = {link.device: link for link in snapshot.network_links}
    ports = {(port.device, port.port): port for port in snapshot.infiniband_ports}
    gpus = {view.info.pci_bus_id.upper(): view.key.gpu for view in snapshot.gpus if view.info and view.info.pci_bus_id}
    rows = [_interface(sample, links.get(sample.device)) for sample in snapshot.networks]
    rows += [_port(sample, ports.get((sample.device, sample.port)), gpus) for sample in snapshot.infiniband]
    return rows


def _interface(sample: NetworkSample, link: NetworkLink | None) -> Row:
    is_up = link.is_up if link else None
    notes = ["default route"] if link and link.is_default_route else []
    errors = (
        (sample.receive_errors_total, "receive errors"),
        (sample.transmit_errors_total, "transmit errors"),
        (sample.receive_drops_total, "receive drops"),
        (sample.transmit_drops_total, "transmit drops"),
    )
    notes += [f"{word} × {count}" for count, word in errors if count]
    cells = [
        text(shortened(sample.device)),
        _state(is_up, "up" if is_up else "down"),
        _number(rate_text(link.speed_bytes_per_second if link else None)),
        _number(byte_size(sample.receive_bytes_total)),
        _number(byte_size(sample.transmit_bytes_total)),
        text(", ".join(notes) or NOTHING),
    ]
    return None, cells


def _port(sample: InfinibandSample, port: InfinibandPort | None, gpus: Mapping[str, int]) -> Row:
    state = port.state if port else None
    cells = [
        text(f"{shortened(sample.device)} / {sample.port}"),
        _state(None if state is None else state == "active", shortened(state or "")),
        _number(rate_text(port.rate_bytes_per_second if port else None)),
        _number(byte_size(sample.receive_bytes_total)),
        _number(byte_size(sample.transmit_bytes_total)),
        text(", ".join(_port_notes(port, gpus)) if port else NOTHING),
    ]
    return None, cells


def _port_notes(port: InfinibandPort, gpus: Mapping[str, int]) -> Iterator[str]:
    if port.link_layer is not None:
        yield _LAYERS.get(port.link_layer, shortened(port.link_layer))
    near = sorted(gpus[address.upper()] for address in port.near_gpus if address.upper() in gpus)
    if near:
        yield f"near GPU {', '.join(map(str, near))}"
    for name in _PORT_ERRORS:
        if count := port.counters.get(name):
            yield f"{name} × {count}"


def _storage(snapshot: NodeSnapshot) -> list[Row]:
    rows = [_disk(sample) for sample in snapshot.disks]
    rows += [_filesystem(sample) for sample in snapshot.filesystems]
    if snapshot.gpu_direct_storage is not None:
        rows.append(_direct_storage(snapshot.gpu_direct_storage))
    return rows


def _disk(sample: DiskSample) -> Row:
    kind = "disk" if sample.transport is None else "NVMe"
    if sample.transport not in {None, "pcie"}:
        kind = f"NVMe over {sample.transport}"
    busy = f"busy for {duration(sample.busy_seconds_total)}" if sample.busy_seconds_total is not None else NOTHING
    return _storage_row(sample.device, kind, sample.read_bytes_total, sample.written_bytes_total, busy)


def _filesystem(sample: FilesystemSample) -> Row:
    notes = ["over RDMA"] if sample.is_rdma else []
    if sample.major_timeouts_total:
        notes.append(f"{sample.major_timeouts_total} times no answer from the server")
    if sample.read_bytes_total is None and sample.written_bytes_total is None:
        notes.append("its bytes cannot be read here")
    return _storage_row(
        sample.mountpoint,
        sample.fstype,
        sample.read_bytes_total,
        sample.written_bytes_total,
        ", ".join(notes) or NOTHING,
    )


def _direct_storage(sample: GpuDirectStorageSample) -> Row:
    kind = "by GPUs themselves"
    return _storage_row("GPUDirect Storage", kind, sample.read_bytes_total, sample.written_bytes_total, NOTHING)


def _storage_row(name: str, kind: str, read: int | None, written: int | None, notes: str) -> Row:
    sizes = [_number(byte_size(read)), _number(byte_size(written))]
    return None, [text(shortened(name)), text(shortened(kind)), *sizes, text(notes)]


def _pressure(sample: PressureSample) -> Iterator[str]:
    waits = (
        ("CPU", sample.cpu_some_seconds_total, None),
        ("I/O", sample.io_some_seconds_total, sample.io_full_seconds_total),
        ("memory", sample.memory_some_seconds_total, sample.memory_full_seconds_total),
    )
    found = [
        f"{word} {duration(some)}" + (f" (every program {duration(full)})" if full is not None else "")
        for word, some, full in waits
        if some is not None
    ]
    if found:
        yield f"Programs waited since the host started: {', '.join(found)}."
    amounts = (
        (sample.memory_available_bytes, "memory available"),
        (sample.dirty_bytes, "to be written"),
        (sample.writeback_bytes, "being written"),
    )
    facts = [f"{byte_size(size)} {word}" for size, word in amounts if size is not None]
    if sample.blocked_tasks is not None:
        facts.append(f"{sample.blocked_tasks} tasks blocked on I/O")
    if facts:
        yield " · ".join(facts)


def _switches(snapshot: NodeSnapshot) -> Iterator[str]:
    for switch in sorted(snapshot.sxids, key=lambda switch: switch.device):
        # Fatal ones first, then the newest.
        codes = sorted(
            (code for code, count in switch.totals.items() if count),
            key=lambda code: (code not in switch.fatal_totals, -switch.last_wall_s.get(code, 0.0), code),
        )
        shown = [
            f"SXID {code} × {switch.totals[code]}{' (fatal)' if code in switch.fatal_totals else ''}"
            for code in codes[:_SXIDS_SHOWN]
        ]
        if len(codes) > _SXIDS_SHOWN:
            shown.append(f"and {len(codes) - _SXIDS_SHOWN} more")
        if shown:
            yield f"{shortened(switch.device)}: {', '.join(shown)}"


def _state(is_up: bool | None, word: str) -> Html:
    if is_up is None:
        return text(word if word and word != "down" else NOTHING)
    level = "good" if is_up else "warning"
    return tag("span", f"{SIGNS[level]} {word}", class_=f"badge {level}")


def _number(written: str) -> Html:
    return tag("span", written, class_="number")
