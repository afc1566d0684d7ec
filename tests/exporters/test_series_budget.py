"""How many series a node may have: at each level, with everything there and everything broken."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence

from agent.devices import DeviceLimit
from agent.pipeline import Pipeline
from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuOwners,
    GpuXids,
    Holder,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    NvswitchSxids,
    Tick,
)
from agent.samplers import SamplerStatus
from classifier.detectors.baseline import PowerBaselines
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from exporters.exposition import series_of
from exporters.metric_def import MetricDef
from exporters.metrics import METRICS, metric_table
from exporters.metrics_health import exported_xids
from exporters.snapshot import NodeSnapshot
from tests.exporters.snapshots import NOW, full_host, full_port, full_snapshot, full_view, key_of
from tests.exporters.test_metrics import node, values


def count_series(snapshot: NodeSnapshot, rows: Sequence[MetricDef] = METRICS) -> tuple[dict[str, int], int]:
    """Return the series of each GPU, and those beside them with the 7 of the process."""
    per_gpu: dict[str, int] = {}
    per_node = 7
    for row in rows:
        for labels in series_of(row, snapshot):
            gpu = dict(zip(row.labels, labels, strict=True)).get("gpu")
            if gpu is None:
                per_node += 1
            else:
                per_gpu[gpu] = per_gpu.get(gpu, 0) + 1
    return per_gpu, per_node


def test_series_stay_within_the_budget():
    # DESIGN: at most 120 series per GPU and 150 per node beside them; every anomaly that a GPU can have is judged here.
    per_gpu, per_node = count_series(full_snapshot())
    assert len(per_gpu) == 8
    assert max(per_gpu.values()) <= 120
    assert per_node <= 150


#: The sources of a host; a node with everything runs them all.
SAMPLERS = (
    "nvml", "xid", "net_dev", "infiniband", "diskstats", "filesystems", "pressure", "processes", "owners",
)  # fmt: skip


def broken_node() -> tuple[NodeSnapshot, NodeSnapshot]:
    """Return a node that has all there can be, as the pipeline sees its host, and with all that can go wrong."""
    at = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    pipeline = Pipeline(labeller=Labeller(None, LabellerConfig()), detectors=(), baselines=PowerBaselines())
    limit = DeviceLimit()
    devices = [
        *(NetworkSample(**at, device=f"e{n}", receive_bytes_total=1, transmit_bytes_total=1) for n in range(300)),
        *(
            InfinibandSample(**at, device=f"i{n}", port=1, receive_bytes_total=1, transmit_bytes_total=1)
            for n in range(300)
        ),
        *(DiskSample(**at, device=f"d{n}", read_bytes_total=1, written_bytes_total=1) for n in range(300)),
    ]
    pipeline.ingest(Tick(**at, records=tuple(devices)))
    mounts = [
        FilesystemSample(**at, mountpoint=f"/m{n}", fstype="nfs", read_bytes_total=1, written_bytes_total=1)
        for n in range(300)
    ]
    errors = {"timeout": 1, "malformed": 1, "implausible": 1}
    statuses = [
        SamplerStatus(name=name, success=True, duration_s=0.1, last_success_wall_s=NOW.wall_s, errors=errors)
        for name in SAMPLERS
    ]
    seen = pipeline.snapshot(NOW, samplers=statuses)
    # All codes there are, on every GPU, with times, and a hundred holders.
    codes = range(1, 180)
    holders = tuple(Holder(f"slurm:{n}", share_ratio=0.01) for n in range(100))
    gpus = tuple(
        dataclasses.replace(
            view,
            xids=GpuXids(**at, key=view.key, totals=dict.fromkeys(codes, 1), last_wall_s=dict.fromkeys(codes, 5.0)),
            owners=GpuOwners(**at, key=view.key, holders=holders),
        )
        for view in full_snapshot().gpus
    )
    return seen, dataclasses.replace(
        full_snapshot(),
        networks=seen.networks,
        infiniband=seen.infiniband,
        disks=seen.disks,
        filesystems=limit.choose(FilesystemSample, mounts),
        samplers=seen.samplers,
        sxids=tuple(
            NvswitchSxids(**at, device=f"00000000:0{n}:00.0", totals=dict.fromkeys(codes, 1)) for n in range(6)
        ),
        gpus=gpus,
    )


def test_series_stay_within_the_budget_where_all_is_broken_and_devices_are_many():
    seen, snapshot = broken_node()
    assert (len(seen.networks), len(seen.infiniband), len(seen.disks), len(snapshot.filesystems)) == (10, 12, 10, 8)
    per_gpu, per_node = count_series(snapshot)
    assert max(per_gpu.values()) <= 120
    assert per_node <= 150
    # Four reasons a sampler are more than there are places for: each has one, with all that went wrong.
    assert values("sampler_errors_total", snapshot)["diskstats", "other"] == 293  # 3 + 300 - 10
    assert len(values("sampler_errors_total", snapshot)) == len(SAMPLERS)
    assert len(values("nvswitch_sxid_errors_total", snapshot)) == 4


def test_the_full_level_has_a_bound_of_its_own():
    _, snapshot = broken_node()
    at = {"monotonic_s": NOW.monotonic_s, "wall_s": NOW.wall_s}
    every = {**full_port(0).hw_counters, **{f"vendor{n}": 1 for n in range(100)}}
    near = tuple(f"00000000:{n:02X}:00.0" for n in range(100))
    full = dataclasses.replace(
        snapshot,
        networks=tuple(
            dataclasses.replace(full_host()["networks"][0], device=sample.device) for sample in snapshot.networks
        ),
        network_links=tuple(
            NetworkLink(
                **at,
                device=sample.device,
                speed_bytes_per_second=1.0,
                is_up=True,
                carrier_changes_total=1,
                is_default_route=True,
            )
            for sample in snapshot.networks
        ),
        infiniband_ports=tuple(
            dataclasses.replace(full_port(0), device=port.device, hw_counters=every, near_gpus=near)
            for port in snapshot.infiniband
        ),
        disks=tuple(dataclasses.replace(full_host()["disks"][1], device=disk.device) for disk in snapshot.disks),
        filesystems=tuple(dataclasses.replace(item, major_timeouts_total=1) for item in snapshot.filesystems),
    )
    summary, everything = count_series(full)[1], count_series(full, metric_table("full"))[1]
    # docs/metrics.md: 10 for each of 10 interfaces, 75 for each of 12 ports, 3 for each of 10 disks, 1 for each of 8
    # file systems, and 11 of the node.
    assert everything - summary <= 100 + 900 + 30 + 8 + 11
    assert everything <= 1200


def test_holders_take_the_places_of_xids_and_never_more():
    at = {"monotonic_s": 0.0, "wall_s": 0.0, "key": key_of(0)}
    totals = {**dict.fromkeys((46, 48, 79), 1), **dict.fromkeys(range(1, 20), 0)}
    counts = {}
    for holders in (0, 1, 2, 8, 100):
        owners = GpuOwners(**at, holders=tuple(Holder(f"slurm:{n}", share_ratio=0.01) for n in range(holders)))
        view = dataclasses.replace(full_view(key_of(0)), xids=GpuXids(**at, totals=totals), owners=owners)
        codes = exported_xids(view)
        assert {46, 48, 79} <= set(codes)
        counts[holders] = (len(codes), len(values("gpu_owner_share_ratio", node(view))))
    # 17 places, one less for each share beyond the first; three codes with their times take six.
    assert counts == {0: (14, 0), 1: (14, 1), 2: (13, 2), 8: (7, 8), 100: (7, 8)}


def test_sampler_errors_beyond_the_places_are_counted_as_other_and_never_fall():
    statuses = [
        SamplerStatus(name=f"s{n}", success=True, errors={"late": 5, "early": 4, "timeout": n}) for n in range(5)
    ]
    few = values("sampler_errors_total", node(samplers=tuple(statuses[:3])))
    assert list(few.items())[:3] == [(("s0", "early"), 4), (("s0", "late"), 5), (("s0", "timeout"), 0)]
    # 5 x 3 is more than 11, 5 x 2 is not: the first to come keeps its name.
    many = values("sampler_errors_total", node(samplers=tuple(statuses)))
    assert [(labels, count) for labels, count in many.items() if labels[0] == "s3"] == [
        (("s3", "late"), 5),
        (("s3", "other"), 7),  # 4 + 3
    ]
    assert len(many) == 10


def test_sxids_by_switch_and_code_fatal_ones_first():
    at = {"monotonic_s": 0.0, "wall_s": 0.0}
    first = NvswitchSxids(**at, device="00000000:05:00.0", totals={20034: 1, 12028: 7}, fatal_totals={20034: 1})
    second = NvswitchSxids(**at, device="00000000:06:00.0", totals={1: 1, 2: 2, 3: 3, 9: 9}, fatal_totals={9: 2})
    assert list(values("nvswitch_sxid_errors_total", node(sxids=(second, first))).items()) == [
        (("00000000:05:00.0", "12028"), 7),
        (("00000000:05:00.0", "20034"), 1),
        (("00000000:06:00.0", "1"), 1),
        (("00000000:06:00.0", "9"), 9),
    ]
