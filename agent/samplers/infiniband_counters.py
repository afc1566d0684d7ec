"""Names, widths and forms of the files of an RDMA port.

Sources: drivers/infiniband/core/sysfs.c (widths, state, rate), drivers/infiniband/hw/mlx5/counters.c and
hw/efa/efa_verbs.c (names in hw_counters).
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

#: The unit of port_xmit_data and port_rcv_data.
WORD_BYTES: Final = 4
#: Bytes per second in one Gbit/s.
_GBIT: Final = 1e9 / 8

#: Files of counters/ by name, with their width in bits. Each read of one is a command to the device, so packets by
#: kind of address are left out.
COUNTER_BITS: Final[Mapping[str, int]] = {
    "symbol_error": 16,
    "link_error_recovery": 8,
    "link_downed": 8,
    "port_rcv_errors": 16,
    "port_rcv_remote_physical_errors": 16,
    "port_rcv_switch_relay_errors": 16,
    "port_xmit_discards": 16,
    "port_xmit_constraint_errors": 8,
    "port_rcv_constraint_errors": 8,
    "local_link_integrity_errors": 4,
    "excessive_buffer_overrun_errors": 4,
    "VL15_dropped": 16,
    "port_xmit_wait": 32,
}
#: Where data and packets stop: 32 bits in old devices, 64 in others.
DATA_MAXIMA: Final = frozenset({2**32 - 1, 2**64 - 1})
#: Files of hw_counters/ that are read where they are there; the kernel fetches them all with one command.
HW_COUNTERS: Final = frozenset(
    {
        # Congestion, as mlx5 names it.
        "np_cnp_sent",
        "np_ecn_marked_roce_packets",
        "rp_cnp_handled",
        "rp_cnp_ignored",
        # Loss and what was sent again, mlx5.
        "duplicate_request",
        "implied_nak_seq_err",
        "local_ack_timeout_err",
        "out_of_buffer",
        "out_of_sequence",
        "packet_seq_err",
        "rnr_nak_retry_err",
        "roce_adp_retrans",
        "roce_adp_retrans_to",
        "roce_slow_restart",
        "roce_slow_restart_cnps",
        "roce_slow_restart_trans",
        "rx_icrc_encapsulated",
        # Requests that ended in an error, mlx5.
        "req_cqe_error",
        "req_remote_access_errors",
        "req_remote_invalid_request",
        "req_rnr_retries_exceeded",
        "req_transport_retries_exceeded",
        "resp_cqe_error",
        "resp_local_length_error",
        "resp_remote_access_errors",
        # All of EFA that tells of data and loss.
        "impaired_remote_conn_events",
        "rdma_read_bytes",
        "rdma_read_resp_bytes",
        "rdma_read_wr_err",
        "rdma_write_bytes",
        "rdma_write_recv_bytes",
        "rdma_write_wr_err",
        "recv_bytes",
        "retrans_bytes",
        "retrans_pkts",
        "retrans_timeout_events",
        "rx_drops",
        "send_bytes",
        "unresponsive_remote_events",
        # Congestion and loss, bnxt_re and irdma.
        "cnpHandled",
        "cnpIgnored",
        "cnpSent",
        "max_retry_exceeded",
        "rnr_naks_rcvd",
        "seq_err_naks_rcvd",
        "to_retransmits",
    }
)
#: 400 Gb/sec (4X NDR), 2.5 Gb/sec (1X SDR)
_RATE: Final = re.compile(r"(\d{1,6}(?:\.\d{1,3})?) Gb/sec\b.*", re.ASCII)
#: 4: ACTIVE
_STATE: Final = re.compile(r"\d+: ([A-Z_]{1,32})", re.ASCII)


def parse_rate(text: str) -> float | None:
    """Return bytes per second from the text of a rate file, None where it makes no sense."""
    match = _RATE.fullmatch(text.strip())
    return float(match[1]) * _GBIT if match else None


def parse_state(text: str) -> str | None:
    """Return the lower-case word from the text of a state file (active, down, init, armed), None without one."""
    match = _STATE.fullmatch(text.strip())
    return match[1].lower() if match else None
