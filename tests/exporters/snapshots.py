"""Snapshots for tests of whatever reads them: all values are made up, and said so by their simple numbers."""

from __future__ import annotations

import dataclasses

from agent.clock import Instant
from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuDirectStorageSample,
    GpuHealth,
    GpuInfo,
    GpuKey,
    GpuLimits,
    GpuMigInfo,
    GpuOwners,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    GpuXids,
    Holder,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    NvswitchSxids,
    PressureSample,
)
from agent.samplers import SamplerStatus
from agent.samplers.infiniband_counters import COUNTER_BITS, HW_COUNTERS
from agent.vocabulary import ANOMALIES, CLASSES, CLOCK_EVENT_REASONS, WORKLOADS
from agent.xids import XIDS
from classifier.results import Assessment, CheckpointStatus, Decision
from exporters.snapshot import GpuView, ModelInfo, NodeSnapshot

#: The moment of every snapshot here: 2026-01-01 00:00:00 UTC, 1000 s after boot.
NOW = Instant(monotonic_s=1000.0, wall_s=1_767_225_600.0)
GIB = 1 << 30
#: The words that a GPU can have; the others are of a job and of the node.
GPU_ANOMALIES = tuple(word for word in ANOMALIES if word not in {"missed_checkpoint", "storage_stall"})


def key_of(index: int) -> GpuKey:
    """Return the key of GPU `index` of the full snapshot."""
    return GpuKey(index, f"GPU-00000000-0000-0000-0000-{index:012d}")


def full_snapshot(gpus: int = 8, anomalies: tuple[str, ...] = GPU_ANOMALIES) -> NodeSnapshot:
    """Return a node on which everything is offered, fresh and judged: the most series that can be.

    GPU 0 has a stalled collective (critical, the suspect), GPU 1 low utilisation (a warning) and memory that fails; the
    rest is well.
    """
    keys = [key_of(index) for index in range(gpus)]
    return NodeSnapshot(
        built=NOW,
        replay=False,
        gpus=tuple(full_view(key) for key in keys),
        **full_host(),
        assessments=(
            *(assess(key, anomaly) for key in keys for anomaly in anomalies),
            Assessment(anomaly="storage_stall", scope="node", severity=0, device="nvme0n1"),
            Assessment(anomaly="gpu_lost", scope="node", severity=0, device=""),
            Assessment(
                anomaly="missed_checkpoint",
                scope="job",
                severity=2,
                job_key="slurm:42",
                since_monotonic_s=400.0,
                since_wall_s=NOW.wall_s - 600.0,
                action="contact_user",
                summary="No checkpoint for 2400 s; the job wrote one every 1200 s.",
            ),
        ),
        checkpoints=(
            CheckpointStatus(
                job_key="slurm:42",
                last_wall_s=NOW.wall_s - 2400.0,
                deadline_wall_s=NOW.wall_s - 900.0,
                interval_s=1200.0,
                last_size_bytes=64e9,
                total=17,
            ),
        ),
        finding_totals={
            ("stalled_collective", "gpu", keys[0]): 1,
            ("low_utilization", "gpu", keys[min(1, gpus - 1)]): 3,
            ("storage_stall", "node", "nvme0n1"): 2,
            ("storage_stall", "node", "nvme1n1"): 1,
            ("missed_checkpoint", "job", "slurm:42"): 1,
        },
        xid_actions={13: "restart_app", 48: "reset_gpu"},
        samplers=tuple(
            SamplerStatus(
                name=name, success=True, duration_s=0.002, last_success_wall_s=NOW.wall_s, errors={"timeout": 1}
            )
            for name in ("nvml", "nvml_slow", "net_dev", "infiniband", "diskstats")
        ),
        gpus_expected=gpus,
        gpus_visible=gpus,
        model=ModelInfo(version="2026.1", sha256="ab" * 32),
        version="0.1.0",
        ready=True,
    )


def full_host() -> dict[str, object]:
    """Return what a snapshot holds of the host: 8 interfaces, 8 ports, 10 disks and 3 file systems."""
    at = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    return {
        "networks": tuple(
            NetworkSample(
                **at,
                device=f"eth{n}",
                receive_bytes_total=1000 + n,
                transmit_bytes_total=2000 + n,
                receive_packets_total=30 + n,
                transmit_packets_total=40 + n,
                receive_errors_total=n,
                transmit_errors_total=0,
                receive_drops_total=2 * n,
                transmit_drops_total=0,
            )
            for n in range(8)
        ),
        "network_links": tuple(
            NetworkLink(
                **at,
                device=f"eth{n}",
                speed_bytes_per_second=12.5e9 if n < 7 else None,
                is_up=n < 7,
                carrier_changes_total=2,
                is_default_route=n == 0,
            )
            for n in range(8)
        ),
        "infiniband": tuple(
            InfinibandSample(**at, device=f"ib{n}", port=1, receive_bytes_total=4096, transmit_bytes_total=8192)
            for n in range(8)
        ),
        "infiniband_ports": tuple(full_port(n) for n in range(8)),
        "disks": tuple(
            DiskSample(
                **at,
                device=f"nvme{n}n1",
                read_bytes_total=512 * n,
                written_bytes_total=1024 * n,
                reads_total=n,
                writes_total=2 * n,
                busy_seconds_total=1.5 * n,
                transport="pcie" if n else "tcp",
            )
            for n in range(10)
        ),
        "filesystems": (
            FilesystemSample(
                **at,
                mountpoint="/home",
                fstype="nfs4",
                read_bytes_total=10**12,
                written_bytes_total=2 * 10**12,
                source="mountstats",
                is_rdma=True,
                major_timeouts_total=3,
            ),
            FilesystemSample(**at, mountpoint="/lustre/scratch", fstype="lustre"),
            FilesystemSample(
                **at,
                mountpoint="/mnt/bucket",
                fstype="fuse.s3fs",
                read_bytes_total=0,
                written_bytes_total=5,
                source="fuse_daemon",
            ),
        ),
        "gpu_direct_storage": GpuDirectStorageSample(**at, read_bytes_total=3 << 30, written_bytes_total=0),
        "pressure": PressureSample(
            **at,
            cpu_some_seconds_total=30.5,
            io_some_seconds_total=720.0,
            io_full_seconds_total=200.25,
            memory_some_seconds_total=0.0,
            memory_full_seconds_total=0.0,
            dirty_bytes=1_234_000_000,
            writeback_bytes=0,
            memory_available_bytes=1_500_000_000_000,
            blocked_tasks=2,
        ),
        "sxids": (
            NvswitchSxids(
                **at,
                device="00000000:05:00.0",
                totals={12028: 3, 20034: 1},
                fatal_totals={20034: 1},
                last_wall_s={12028: NOW.wall_s, 20034: NOW.wall_s},
            ),
        ),
    }


def full_port(number: int) -> InfinibandPort:
    """Return port 1 of an adapter beside one GPU; the link of ib3 went down twice."""
    return InfinibandPort(
        monotonic_s=NOW.monotonic_s,
        wall_s=NOW.wall_s,
        device=f"ib{number}",
        port=1,
        link_layer="infiniband",
        state="active",
        rate_bytes_per_second=50e9,
        receive_packets_total=7,
        transmit_packets_total=8,
        counters={**dict.fromkeys(COUNTER_BITS, 0), "link_downed": 2 * (number == 3)},
        hw_counters=dict.fromkeys(HW_COUNTERS, 1),
        near_gpus=(f"00000000:{number:02x}:00.0",),
    )


def full_owners(key: GpuKey) -> GpuOwners:
    """Return one Slurm job on even GPUs, a pod on odd ones; GPU 6 is shared by two, and nobody holds GPU 7."""
    job = Holder(
        "slurm:812345",
        job_id="812345",
        scheduler="slurm",
        user="mmuster",
        declared_class="training",
        processes=1,
    )
    pod = Holder(
        "kubernetes:serving/vllm",
        job_id="vllm",
        scheduler="kubernetes",
        namespace="serving",
        pod="vllm-70b-0",
        container="server",
        user="1000",
        processes=0,
    )
    holders = (pod,) if key.gpu % 2 else (job,)
    if key.gpu == 6:
        holders = (job._replace(share_ratio=0.75), pod._replace(share_ratio=0.25))
    at = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    return GpuOwners(**at, key=key, holders=() if key.gpu == 7 else holders)


def assess(key: GpuKey, anomaly: str) -> Assessment:
    """Return the assessment of one anomaly that `full_snapshot` describes."""
    if (key.gpu, anomaly) == (0, "stalled_collective"):
        return Assessment(
            anomaly=anomaly,
            scope="gpu",
            severity=3,
            key=key,
            since_monotonic_s=940.0,
            since_wall_s=NOW.wall_s - 60.0,
            evidence={"power_watts": 240.0, "busy_power_watts": 610.0},
            action="restart_app",
            summary="Busy at 100 % but at 240 W against 610 W, no link and no disk traffic for 60 s.",
            suspect=True,
        )
    if (key.gpu, anomaly) == (1, "low_utilization"):
        return Assessment(
            anomaly=anomaly,
            scope="gpu",
            severity=2,
            key=key,
            since_monotonic_s=100.0,
            since_wall_s=NOW.wall_s - 900.0,
            action="contact_user",
            summary="Utilisation 4 % on average for 900 s while 20 GiB are held.",
        )
    return Assessment(anomaly=anomaly, scope="gpu", severity=0, key=key)


def full_view(key: GpuKey) -> GpuView:
    """Return one GPU of the full snapshot: training on even indexes, inference on odd ones."""
    at = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    workload = "training" if key.gpu % 2 == 0 else "inference"
    probabilities = {word: 0.85 if word == workload else 0.05 for word in CLASSES}
    return GpuView(
        key=key,
        state="ok",
        info=GpuInfo(
            **at,
            key=key,
            model_name="NVIDIA H200",
            pci_bus_id=f"00000000:{key.gpu:02X}:00.0",
            device=f"nvidia{key.gpu}",
            driver_version="570.86.15",
        ),
        sample=GpuSample(
            **at,
            key=key,
            utilization_ratio=0.97,
            memory_utilization_ratio=0.5,
            memory_used_bytes=60 * GIB,
            memory_total_bytes=140 * GIB,
            power_watts=600.5 + key.gpu,
            sm_clock_hertz=1.98e9,
            memory_clock_hertz=3.201e9,
            clock_event_reasons=("sw_power_cap",),
            nvlink_receive_bytes_total=7_000_000_000_000_000 + key.gpu,
            nvlink_transmit_bytes_total=7_100_000_000_000_000 + key.gpu,
            sm_active_ratio=0.8,
            sm_occupancy_ratio=0.3,
            tensor_active_ratio=0.4,
            dram_active_ratio=0.45,
        ),
        slow=GpuSlowSample(
            **at,
            key=key,
            energy_joules_total=123456.789,
            temperature_celsius=61.0,
            memory_temperature_celsius=70.0,
            pcie_receive_bytes_total=10**12,
            pcie_transmit_bytes_total=2 * 10**12,
            processes=(GpuProcess(4242, 20 * GIB),),
            clock_event_seconds_total=dict.fromkeys(CLOCK_EVENT_REASONS, 1.5),
        ),
        limits=GpuLimits(
            **at,
            key=key,
            power_limit_watts=700.0,
            sm_clock_max_hertz=1.98e9,
            memory_clock_max_hertz=3.2e9,
            recovery_action=int(key.gpu == 1),
        ),
        health=full_health(key),
        xids=full_xids(key),
        owners=full_owners(key),
        mig=None
        if key.gpu_i_id is None
        else GpuMigInfo(**at, key=key, profile="1g.10gb", mig_uuid=f"MIG-{key.gpu_i_id}"),
        decision=Decision(
            key=key,
            monotonic_s=NOW.monotonic_s,
            wall_s=NOW.wall_s,
            workload=workload,
            probabilities=probabilities,
            telemetry_probabilities=probabilities,
            window_s=60.0,
            reason=None,
            since_monotonic_s=NOW.monotonic_s - 300.0,
            since_wall_s=NOW.wall_s - 300.0,
            out_of_domain_ratio=0.4 if key.gpu else 1.2,
            declared_class="training",
            mismatch=workload != "training",
        ),
        sample_wall_s=NOW.wall_s,
        workload_seconds=dict.fromkeys(WORKLOADS, 10.0),
        workload_energy_joules=dict.fromkeys(WORKLOADS, 5000.0),
        power_baseline_watts={"context_idle": 118.0, "busy": 610.0},
        # GPU 0 stands in a collective: it has no steps.
        training_step_seconds=0.42 if workload == "training" and key.gpu else None,
    )


def full_health(key: GpuKey) -> GpuHealth:
    """Return a GPU without an error but GPU 1, on which every counter has another number."""
    bad = int(key.gpu == 1)
    return GpuHealth(
        monotonic_s=NOW.monotonic_s,
        wall_s=NOW.wall_s,
        key=key,
        ecc_corrected_volatile_total=2 * bad,
        ecc_uncorrected_volatile_total=3 * bad,
        ecc_corrected_aggregate_total=40 * bad,
        ecc_uncorrected_aggregate_total=5 * bad,
        remapped_rows_correctable_total=6 * bad,
        remapped_rows_uncorrectable_total=7 * bad,
        is_row_remap_pending=bool(bad),
        is_row_remap_failed=False,
        pcie_replays_total=8 * bad,
        nvlink_crc_errors_total=9 * bad,
        nvlink_replay_errors_total=10 * bad,
        nvlink_recovery_errors_total=11 * bad,
    )


def full_xids(key: GpuKey) -> GpuXids:
    """Return the critical codes at 0; GPU 1 had XID 48 twice, and XID 13 once, which is not one of them."""
    totals = dict.fromkeys(XIDS.critical(), 0)
    last = {}
    if key.gpu == 1:
        totals |= {48: 2, 13: 1}
        last = {48: NOW.wall_s - 30.0, 13: NOW.wall_s - 7200.0}
    return GpuXids(monotonic_s=NOW.monotonic_s, wall_s=NOW.wall_s, key=key, totals=totals, last_wall_s=last)


def mig_snapshot() -> NodeSnapshot:
    """Return the full node with GPU 0 divided into two instances, which bring what instances can."""
    full = full_snapshot(gpus=3)
    card, *others = full.gpus
    instances = []
    for gpu_i_id in (1, 2):
        view = full_view(card.key._replace(gpu_i_id=gpu_i_id))
        sample = dataclasses.replace(
            view.sample,
            utilization_ratio=None,
            memory_utilization_ratio=None,
            memory_used_bytes=4 * GIB,
            memory_total_bytes=20 * GIB,
            power_watts=None,
        )
        instances.append(
            dataclasses.replace(view, info=None, sample=sample, slow=None, limits=None, health=None, xids=None)
        )
    whole = dataclasses.replace(card, decision=None, workload_seconds={}, workload_energy_joules=None)
    assessments = tuple(
        dataclasses.replace(item, key=instances[0].key) if item.key == card.key else item for item in full.assessments
    )
    return dataclasses.replace(full, gpus=(whole, *instances, *others), assessments=assessments)
