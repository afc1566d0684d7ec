"""Rows of InfiniBand, RoCE and EFA ports that `[export] host = "full"` adds, named as node_exporter names them.

A file of the kernel and the name of its series differ; both stand in one line of the tables below.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Final

from agent.records import InfinibandPort
from exporters.metric_def import Kind, MetricDef, Number, Series
from exporters.snapshot import NodeSnapshot

_LABELS: Final = ("device", "port")
#: Numbers of the state file; from include/rdma/ib_verbs.h, enum ib_port_state.
_STATES: Final = {"nop": 0, "down": 1, "init": 2, "armed": 3, "active": 4, "active_defer": 5}
#: GPUs near one port that have series; so many are in a node.
_NEAR_GPUS: Final = 8
#: Series of hardware counters of one port that have no family of their own.
OTHER_COUNTER_SERIES: Final = 12

#: Files of counters/ that the sampler reads: the name of the series, and what it counts.
_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "symbol_error": ("symbol_error_total", "Minor errors of the link on one or more lanes."),
    "link_error_recovery": ("link_error_recovery_total", "Times that the link recovered from an error state."),
    "link_downed": ("link_downed_total", "Times that the link went down for an error state it did not recover from."),
    "local_link_integrity_errors": (
        "local_link_integrity_errors_total",
        "Times that local physical errors were more than the threshold.",
    ),
    "excessive_buffer_overrun_errors": (
        "excessive_buffer_overrun_errors_total",
        "Times that buffers overran in several flow control periods one after the other.",
    ),
    "port_rcv_errors": ("port_errors_received_total", "Packets received with an error."),
    "port_rcv_remote_physical_errors": (
        "port_receive_remote_physical_errors_total",
        "Packets received that were marked as bad on their way.",
    ),
    "port_rcv_switch_relay_errors": (
        "port_receive_switch_relay_errors_total",
        "Packets received that the switch could not forward.",
    ),
    "port_rcv_constraint_errors": (
        "port_constraint_errors_received_total",
        "Packets received and discarded by the rules of the switch port.",
    ),
    "port_xmit_constraint_errors": (
        "port_constraint_errors_transmitted_total",
        "Packets not sent by the rules of the switch port.",
    ),
    "port_xmit_discards": (
        "port_discards_transmitted_total",
        "Packets to be sent that were discarded: the port is down or congested.",
    ),
    "port_xmit_wait": (
        "port_transmit_wait_total",
        "Ticks in which the port had data to send and could not: back-pressure from the fabric.",
    ),
    "VL15_dropped": ("vl15_dropped_total", "Management packets dropped for want of room."),
}

#: Files of hw_counters/ that node_exporter has a name for, likewise.
_HW_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "duplicate_request": ("duplicate_requests_packets_total", "Requests received that had been carried out before."),
    "implied_nak_seq_err": (
        "implied_nak_seq_errors_total",
        "Acknowledgements beyond the expected packet of an RDMA read or response.",
    ),
    "local_ack_timeout_err": ("local_ack_timeout_errors_total", "Times that no acknowledgement came in time."),
    "np_cnp_sent": ("np_cnp_packets_sent_total", "Congestion notifications sent, for marked packets that came in."),
    "np_ecn_marked_roce_packets": (
        "np_ecn_marked_roce_packets_received_total",
        "RoCE packets received that the network had marked for congestion.",
    ),
    "out_of_buffer": ("out_of_buffer_drops_total", "Packets dropped for want of a posted receive buffer."),
    "out_of_sequence": ("out_of_sequence_packets_received_total", "Packets received out of sequence."),
    "packet_seq_err": ("packet_sequence_errors_total", "Negative acknowledgements received for a wrong sequence."),
    "req_cqe_error": ("req_cqes_errors_total", "Completions with an error at the requester."),
    "req_remote_access_errors": ("req_remote_access_errors_total", "Remote access errors at the requester."),
    "req_remote_invalid_request": (
        "req_remote_invalid_request_errors_total",
        "Requests that the remote side called invalid.",
    ),
    "resp_cqe_error": ("resp_cqes_errors_total", "Completions with an error at the responder."),
    "resp_local_length_error": ("resp_local_length_errors_total", "Local length errors at the responder."),
    "resp_remote_access_errors": ("resp_remote_access_errors_total", "Remote access errors at the responder."),
    "rnr_nak_retry_err": (
        "rnr_nak_retry_packets_received_total",
        "Answers that the receiver was not ready.",
    ),
    "roce_adp_retrans": ("roce_adp_retransmits_total", "Adaptive retransmissions of RoCE."),
    "roce_adp_retrans_to": (
        "roce_adp_retransmits_timeout_total",
        "Times that RoCE ran into a timeout by adaptive retransmission.",
    ),
    "roce_slow_restart": ("roce_slow_restart_used_total", "Times that the slow restart of RoCE was used."),
    "roce_slow_restart_cnps": (
        "roce_slow_restart_cnps_total",
        "Congestion notifications made by the slow restart of RoCE.",
    ),
    "roce_slow_restart_trans": ("roce_slow_restart_total", "Times that RoCE went over to slow restart."),
    "rp_cnp_handled": (
        "rp_cnp_packets_handled_total",
        "Congestion notifications that made the port send more slowly.",
    ),
    "rp_cnp_ignored": ("rp_cnp_ignored_packets_received_total", "Congestion notifications that were ignored."),
    "rx_icrc_encapsulated": ("rx_icrc_encapsulated_errors_total", "RoCE packets received with a wrong checksum."),
}

#: Files of hw_counters/ of EFA, which node_exporter does not read, likewise.
_EFA_COUNTERS: Final[Mapping[str, tuple[str, str]]] = {
    "send_bytes": ("send_bytes_total", "Bytes sent by send requests."),
    "recv_bytes": ("recv_bytes_total", "Bytes received by send requests of others."),
    "rdma_read_bytes": ("rdma_read_bytes_total", "Bytes read from others by RDMA."),
    "rdma_read_resp_bytes": ("rdma_read_resp_bytes_total", "Bytes that others read by RDMA."),
    "rdma_write_bytes": ("rdma_write_bytes_total", "Bytes written to others by RDMA."),
    "rdma_write_recv_bytes": ("rdma_write_recv_bytes_total", "Bytes that others wrote by RDMA."),
    "retrans_bytes": ("retrans_bytes_total", "Bytes sent again."),
    "retrans_pkts": ("retrans_packets_total", "Packets sent again."),
    "retrans_timeout_events": ("retrans_timeout_events_total", "Times that a packet was sent again for a timeout."),
    "rdma_read_wr_err": ("rdma_read_errors_total", "RDMA reads that ended in an error."),
    "rdma_write_wr_err": ("rdma_write_errors_total", "RDMA writes that ended in an error."),
    "rx_drops": ("rx_drops_total", "Packets received and dropped."),
    "impaired_remote_conn_events": ("impaired_remote_conn_events_total", "Times that a connection became bad."),
    "unresponsive_remote_events": ("unresponsive_remote_events_total", "Times that a remote side did not answer."),
}


def _ports(snapshot: NodeSnapshot) -> Sequence[InfinibandPort]:
    return sorted(snapshot.infiniband_ports, key=lambda port: (port.device, port.port))


def _port(name: str, kind: Kind, unit: str, text: str, read: Callable[[InfinibandPort], Number]) -> MetricDef:
    def values(snapshot: NodeSnapshot) -> Series:
        return [((port.device, str(port.port)), read(port)) for port in _ports(snapshot)]

    return MetricDef(
        name=f"infiniband_{name}", kind=kind, unit=unit, help=text, labels=_LABELS, values=values, host="full"
    )


def _counter(file: str, name: str, text: str) -> MetricDef:
    return _port(name, "counter", "", f"{text[:-1]} ({file} of counters).", lambda port: port.counters.get(file))


def _hw_counter(file: str, name: str, text: str) -> MetricDef:
    unit = "bytes" if name.endswith("_bytes_total") else ""
    return _port(
        name, "counter", unit, f"{text[:-1]} ({file} of hw_counters).", lambda port: port.hw_counters.get(file)
    )


def _other_counters(snapshot: NodeSnapshot) -> Series:
    for port in _ports(snapshot):
        others = sorted(file for file in port.hw_counters if file not in _HW_COUNTERS and file not in _EFA_COUNTERS)
        for file in others[:OTHER_COUNTER_SERIES]:
            yield (port.device, str(port.port), file), port.hw_counters[file]


def _info(snapshot: NodeSnapshot) -> Series:
    return [((port.device, str(port.port), port.link_layer or ""), 1) for port in _ports(snapshot)]


def _near_gpus(snapshot: NodeSnapshot) -> Series:
    # Spelled as in warpwatch_gpu_info, so that the two can be joined: drivers write hexadecimal digits large.
    spelled = {
        view.info.pci_bus_id.upper(): view.info.pci_bus_id
        for view in snapshot.gpus
        if view.info and view.info.pci_bus_id
    }
    for port in _ports(snapshot):
        for address in sorted(address.upper() for address in port.near_gpus)[:_NEAR_GPUS]:
            yield (port.device, str(port.port), spelled.get(address, address)), 1


INFINIBAND_FULL_METRICS: Final[tuple[MetricDef, ...]] = (
    MetricDef(
        name="infiniband_port_info",
        kind="gauge",
        unit="",
        help="What a port is; always 1. `link_layer` is infiniband, ethernet (RoCE) or efa.",
        labels=(*_LABELS, "link_layer"),
        values=_info,
        host="full",
    ),
    MetricDef(
        name="infiniband_near_gpu_info",
        kind="gauge",
        unit="",
        help="Which GPU a port is near, by the PCI tree; always 1, one series for each of at most "
        f"{_NEAR_GPUS} GPUs of a port. Join on `pci_bus_id` with warpwatch_gpu_info.",
        labels=(*_LABELS, "pci_bus_id"),
        values=_near_gpus,
        host="full",
    ),
    _port(
        "state_id",
        "gauge",
        "",
        "State of the port: 0 no change, 1 down, 2 init, 3 armed, 4 active, 5 act defer.",
        lambda port: None if port.state is None else _STATES.get(port.state),
    ),
    _port(
        "rate_bytes_per_second",
        "gauge",
        "bytes_per_second",
        "Signalling rate of the port (rate of sysfs).",
        lambda port: port.rate_bytes_per_second,
    ),
    _port(
        "port_packets_received_total",
        "counter",
        "",
        "Packets received, with those in error (port_rcv_packets of counters).",
        lambda port: port.receive_packets_total,
    ),
    _port(
        "port_packets_transmitted_total",
        "counter",
        "",
        "Packets sent, with those in error (port_xmit_packets of counters).",
        lambda port: port.transmit_packets_total,
    ),
    *(_counter(file, name, text) for file, (name, text) in _COUNTERS.items()),
    *(_hw_counter(file, name, text) for file, (name, text) in {**_HW_COUNTERS, **_EFA_COUNTERS}.items()),
    MetricDef(
        name="infiniband_hw_total",
        kind="counter",
        unit="",
        help="Events and packets that other hardware counts (bnxt_re, irdma), by the file in hw_counters. "
        f"At most {OTHER_COUNTER_SERIES} series a port.",
        labels=(*_LABELS, "counter"),
        values=_other_counters,
        host="full",
    ),
)
