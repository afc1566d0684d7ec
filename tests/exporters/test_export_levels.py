"""What of the host is exported at each level, and that node_exporter's names are kept."""

from __future__ import annotations

import dataclasses
import re

from agent.records import InfinibandPort, NetworkLink, NetworkSample
from agent.samplers.infiniband_counters import COUNTER_BITS, HW_COUNTERS
from exporters.exposition import series_of
from exporters.metrics import METRICS, SECTIONS, metric_table
from exporters.metrics_infiniband import OTHER_COUNTER_SERIES
from exporters.prometheus import PrometheusPage
from exporters.snapshot import NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot

FULL = {row.name: row for row in metric_table("full")}
#: Of the full level what node_exporter 1.9 has, by its names without `node_`; written down from its sources
#: (netdev_common.go, netclass_linux.go, infiniband_linux.go, diskstats_linux.go, pressure_linux.go, meminfo_linux.go,
#: stat_linux.go).
NODE_EXPORTER = """
network_receive_packets_total network_transmit_packets_total network_receive_errs_total network_transmit_errs_total
network_receive_drop_total network_transmit_drop_total network_speed_bytes network_up network_carrier_changes_total
disk_reads_completed_total disk_writes_completed_total disk_io_time_seconds_total
pressure_cpu_waiting_seconds_total pressure_io_waiting_seconds_total pressure_io_stalled_seconds_total
pressure_memory_waiting_seconds_total pressure_memory_stalled_seconds_total
memory_Dirty_bytes memory_Writeback_bytes memory_MemAvailable_bytes procs_blocked
infiniband_state_id infiniband_rate_bytes_per_second
infiniband_port_packets_received_total infiniband_port_packets_transmitted_total
infiniband_symbol_error_total infiniband_link_error_recovery_total infiniband_link_downed_total
infiniband_local_link_integrity_errors_total infiniband_excessive_buffer_overrun_errors_total
infiniband_port_errors_received_total infiniband_port_receive_remote_physical_errors_total
infiniband_port_receive_switch_relay_errors_total infiniband_port_constraint_errors_received_total
infiniband_port_constraint_errors_transmitted_total infiniband_port_discards_transmitted_total
infiniband_port_transmit_wait_total infiniband_vl15_dropped_total
infiniband_duplicate_requests_packets_total infiniband_implied_nak_seq_errors_total
infiniband_local_ack_timeout_errors_total infiniband_np_cnp_packets_sent_total
infiniband_np_ecn_marked_roce_packets_received_total infiniband_out_of_buffer_drops_total
infiniband_out_of_sequence_packets_received_total infiniband_packet_sequence_errors_total
infiniband_req_cqes_errors_total infiniband_req_remote_access_errors_total
infiniband_req_remote_invalid_request_errors_total infiniband_resp_cqes_errors_total
infiniband_resp_local_length_errors_total infiniband_resp_remote_access_errors_total
infiniband_rnr_nak_retry_packets_received_total infiniband_roce_adp_retransmits_total
infiniband_roce_adp_retransmits_timeout_total infiniband_roce_slow_restart_used_total
infiniband_roce_slow_restart_cnps_total infiniband_roce_slow_restart_total infiniband_rp_cnp_packets_handled_total
infiniband_rp_cnp_ignored_packets_received_total infiniband_rx_icrc_encapsulated_errors_total
"""
#: EFA's counters, which it does not read.
OF_EFA = {
    f"infiniband_{name}_total"
    for name in (
        "send_bytes",
        "recv_bytes",
        "rdma_read_bytes",
        "rdma_read_resp_bytes",
        "rdma_write_bytes",
        "rdma_write_recv_bytes",
        "retrans_bytes",
        "retrans_packets",
        "retrans_timeout_events",
        "rdma_read_errors",
        "rdma_write_errors",
        "rx_drops",
        "impaired_remote_conn_events",
        "unresponsive_remote_events",
    )
}
#: What else it has not, or by other names that have no place for a mountpoint.
OF_OUR_OWN = OF_EFA | {
    "network_default_route",
    "infiniband_port_info",
    "infiniband_near_gpu_info",
    "infiniband_hw_total",
    "filesystem_major_timeouts_total",
    "nvidia_fs_read_bytes_total",
    "nvidia_fs_written_bytes_total",
}
SUMMARY = {
    f"{name}_bytes_total"
    for name in (
        "network_receive",
        "network_transmit",
        "infiniband_receive",
        "infiniband_transmit",
        "disk_read",
        "disk_written",
        "filesystem_read",
        "filesystem_written",
    )
}


def of(name: str, snapshot: NodeSnapshot) -> dict[tuple[str, ...], float]:
    return dict(series_of(FULL[name], snapshot))


def test_the_levels_hold_what_they_should():
    always = {row.name for row in metric_table("off")}
    assert not [name for name in always if re.match(r"(network|infiniband|disk|filesystem|pressure|memory)_", name)]
    assert {row.name for row in metric_table("summary")} - always == SUMMARY
    assert [row.name for row in METRICS] == [row.name for row in metric_table()]
    assert {row.name for row in METRICS} == always | SUMMARY
    assert set(FULL) - always - SUMMARY == set(NODE_EXPORTER.split()) | OF_OUR_OWN
    assert {row.name for row in metric_table("full")} == {row.name for _, rows in SECTIONS for row in rows}


def test_a_page_holds_the_families_of_its_table():
    def families(host) -> set[str]:
        page = PrometheusPage(full_snapshot, table=metric_table(host), own_process=False).text().decode()
        return set(re.findall(r"^# TYPE warpwatch_(\w+)", page, re.MULTILINE))

    # No card of the full node is divided, and nothing is in maintenance.
    absent = {
        "gpu_mig_info",
        "test_alert",
        *(f"{of}_maintenance" for of in ("gpu", "node", "gpu_anomaly", "node_anomaly")),
    }
    assert families("off") == {row.name for row in metric_table("off")} - absent
    assert families("summary") - families("off") == SUMMARY
    assert families("full") == set(FULL) - absent


def test_numbers_of_the_full_level_in_base_units():
    snapshot = full_snapshot()
    assert of("network_speed_bytes", snapshot)["eth0",] == 12.5e9  # 100 Gbit/s
    assert ("eth7",) not in of("network_speed_bytes", snapshot)  # down
    assert of("network_up", snapshot)["eth7",] == 0
    assert of("network_default_route", snapshot)["eth0",] == 1
    assert of("network_receive_errs_total", snapshot)["eth3",] == 3
    assert of("network_receive_drop_total", snapshot)["eth3",] == 6
    assert of("infiniband_state_id", snapshot)["ib0", "1"] == 4
    assert of("infiniband_rate_bytes_per_second", snapshot)["ib0", "1"] == 50e9  # 400 Gbit/s
    assert of("infiniband_link_downed_total", snapshot)["ib3", "1"] == 2
    assert of("infiniband_port_info", snapshot)["ib0", "1", "infiniband"] == 1
    assert of("disk_io_time_seconds_total", snapshot)["nvme3n1",] == 4.5  # 3 x 1.5
    assert of("filesystem_major_timeouts_total", snapshot) == {("/home", "nfs4"): 3}
    assert of("nvidia_fs_read_bytes_total", snapshot) == {(): 3 << 30}
    assert of("pressure_io_stalled_seconds_total", snapshot) == {(): 200.25}
    assert of("memory_Dirty_bytes", snapshot) == {(): 1_234_000_000}
    assert of("procs_blocked", snapshot) == {(): 2}


def test_a_file_system_whose_bytes_cannot_be_read_has_no_series_of_them():
    assert of("filesystem_read_bytes_total", full_snapshot()) == {
        ("/home", "nfs4"): 1e12,
        ("/mnt/bucket", "fuse.s3fs"): 0,
    }
    assert of("filesystem_written_bytes_total", full_snapshot())["/mnt/bucket", "fuse.s3fs"] == 5


def test_what_is_not_known_of_a_link_or_port_is_absent():
    at = {"monotonic_s": 0.0, "wall_s": 0.0}
    snapshot = NodeSnapshot(
        built=NOW,
        replay=False,
        networks=(NetworkSample(**at, device="eth0", receive_bytes_total=1, transmit_bytes_total=1),),
        network_links=(NetworkLink(**at, device="eth0"),),
        infiniband_ports=(InfinibandPort(**at, device="efa0", port=1, state="new word"),),
    )
    found = {name for name in FULL if FULL[name].host == "full" and of(name, snapshot)}
    assert found == {"infiniband_port_info"}


def test_a_port_can_be_joined_with_the_gpus_near_it():
    def address(view) -> str:
        return view.info.pci_bus_id

    snapshot = full_snapshot()
    pairs = {(labels[0], labels[2]) for labels in of("infiniband_near_gpu_info", snapshot)}
    # The sampler writes addresses small, the driver large: the label is as in warpwatch_gpu_info.
    assert pairs == {(f"ib{view.key.gpu}", address(view)) for view in snapshot.gpus}
    shown = {labels[3] for labels in of("gpu_info", snapshot)}
    assert {pci for _, pci in pairs} == shown


def test_every_counter_that_the_sampler_reads_is_exported_once():
    port = dataclasses.replace(
        full_snapshot().infiniband_ports[0],
        counters={name: 1000 + n for n, name in enumerate(sorted(COUNTER_BITS))},
        hw_counters={name: 2000 + n for n, name in enumerate(sorted(HW_COUNTERS))},
    )
    snapshot = NodeSnapshot(built=NOW, replay=False, infiniband_ports=(port,))
    numbers = [
        number
        for name in FULL
        if name.startswith("infiniband_")
        for number in of(name, snapshot).values()
        if number >= 1000 and number < 1e6
    ]
    assert sorted(numbers) == sorted((*port.counters.values(), *port.hw_counters.values()))
    # Those without a family of their own are two of mlx5 and all of other vendors.
    others = {labels[2] for labels in of("infiniband_hw_total", snapshot)}
    assert {"req_rnr_retries_exceeded", "req_transport_retries_exceeded", "cnpSent"} <= others
    assert len(others) <= OTHER_COUNTER_SERIES
    assert of("infiniband_rdma_read_bytes_total", snapshot) == {
        ("ib0", "1"): port.hw_counters["rdma_read_bytes"],
    }
