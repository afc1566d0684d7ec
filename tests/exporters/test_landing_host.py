"""The landing page: who holds each GPU, and the host around the GPUs."""

from __future__ import annotations

import dataclasses

import pytest

from agent.records import GpuOwners, Holder
from exporters.landing_text import byte_size, rate_text, shortened
from exporters.snapshot import NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot, full_view, key_of
from tests.exporters.test_landing import read


def with_holders(*holders: Holder) -> NodeSnapshot:
    owners = GpuOwners(monotonic_s=0.0, wall_s=0.0, key=key_of(0), holders=holders)
    view = dataclasses.replace(full_view(key_of(0)), owners=owners)
    return NodeSnapshot(built=NOW, replay=False, gpus=(view,), ready=True)


def test_the_holder_of_each_gpu_is_named_and_the_user_only_on_demand():
    text = read(full_snapshot()).text
    assert "0 NVIDIA H200 ✓ ok slurm:812345 training" in text
    assert "1 NVIDIA H200 ✓ ok kubernetes:serving/vllm serving/vllm-70b-0 no process on it inference" in text
    assert "slurm:812345 75 % kubernetes:serving/vllm 25 %" in text
    assert "7 NVIDIA H200 ✓ ok nobody inference" in text
    assert "mmuster" not in text
    assert "slurm:812345 user mmuster training" in read(full_snapshot(), owner_user=True).text


def test_many_holders_are_cut_short_and_one_without_a_name_is_no_one():
    text = read(with_holders(*(Holder(f"slurm:{n}", share_ratio=0.2) for n in range(5)))).text
    assert "slurm:0 20 % slurm:1 20 % slurm:2 20 % and 2 more" in text
    # Twelve of which eight are told: the one for all others is no job, though its share is the largest.
    shown = with_holders(
        *(Holder(f"slurm:{n}", share_ratio=1 / 12) for n in range(7)), Holder("other", share_ratio=5 / 12)
    )
    (view,) = shown.gpus
    assert view.owners is not None
    view = dataclasses.replace(view, owners=dataclasses.replace(view.owners, holder_count=12))
    text = read(dataclasses.replace(shown, gpus=(view,))).text
    assert "slurm:0 8 % slurm:1 8 % slurm:2 8 % and 9 more" in text
    assert "✓ ok not known who" in read(with_holders(Holder(""))).text


def test_what_is_declared_shows_where_telemetry_disagrees():
    text = read(full_snapshot(gpus=2)).text
    assert "inference 85 % declared training" in text
    assert "training 85 % declared" not in text


def test_links_disks_and_file_systems_with_what_is_odd_about_them():
    text = read(full_snapshot()).text
    for part in (
        "8 network interfaces · 8 InfiniBand ports · 10 disks · 3 network file systems",
        "eth0 ✓ up 100 Gbit/s 1.00 kB 2.00 kB default route",
        "eth7 ▲ down – 1.01 kB 2.01 kB receive errors × 7, receive drops × 14",
        "ib3 / 1 ✓ active 400 Gbit/s 4.10 kB 8.19 kB InfiniBand, near GPU 3, link_downed × 2",
        "nvme0n1 NVMe over tcp 0 B 0 B busy for 0 s",
        "nvme9n1 NVMe 4.61 kB 9.22 kB busy for 13 s",
        "/home nfs4 1.00 TB 2.00 TB over RDMA, 3 times no answer from the server",
        "/lustre/scratch lustre – – its bytes cannot be read here",
        "GPUDirect Storage by GPUs themselves 3.22 GB 0 B",
        "CPU 30 s, I/O 12 min (every program 3 min), memory 0 s (every program 0 s).",
        "1.50 TB memory available · 1.23 GB to be written · 0 B being written · 2 tasks blocked on I/O",
        "00000000:05:00.0: SXID 20034 × 1 (fatal), SXID 12028 × 3",
    ):
        assert part in text


def test_a_host_of_which_nothing_is_sampled_has_no_empty_headings():
    text = read(NodeSnapshot(built=NOW, replay=False, ready=True)).text
    assert not [word for word in ("Network", "Storage", "Pressure", "NVSwitches", "Held by") if word in text]


@pytest.mark.parametrize(
    ("size", "expected"),
    [
        (None, "–"),
        (0, "0 B"),
        (999, "999 B"),
        (1000, "1.00 kB"),
        (9_994, "9.99 kB"),
        (9_996, "10.0 kB"),
        (99_960, "100 kB"),
        (999_600, "1.00 MB"),
        (45_600_000_000_000, "45.6 TB"),
        (2**64 - 1, "18.4 EB"),
    ],
)
def test_sizes_have_three_digits(size, expected):
    assert byte_size(size) == expected


def test_speeds_as_links_are_sold():
    # 400 Gbit/s NDR, 100 Mbit/s, 2.5 Gbit/s.
    assert [rate_text(rate) for rate in (50e9, 12.5e6, 312.5e6, None)] == [
        "400 Gbit/s",
        "100 Mbit/s",
        "2.5 Gbit/s",
        "–",
    ]


def test_a_long_name_is_cut():
    assert shortened("x" * 64) == "x" * 64
    assert shortened("x" * 65) == "x" * 63 + "…"
