"""Channels of the host, and of the processes of a GPU."""

from __future__ import annotations

import pytest

from agent.history import History
from agent.records import (
    FilesystemSample,
    GpuKey,
    GpuOwners,
    GpuProcess,
    GpuSample,
    GpuSlowSample,
    Holder,
    InfinibandPort,
    NetworkLink,
    PressureSample,
    ProcessSample,
    Tick,
)

KEY, OTHER = GpuKey(0, "GPU-0"), GpuKey(1, "GPU-1")


def feed(history, t, *records):
    """Ingest one tick; each record is a class and its fields."""
    times = {"monotonic_s": t, "wall_s": 1000.0 + t}
    history.ingest(Tick(**times, records=tuple(kind(**times, **fields) for kind, fields in records)))


def held(key, *pids):
    return GpuSlowSample, {"key": key, "processes": tuple(map(GpuProcess, pids))}


def process(pid, cpu_s, *, started_s=1.0, **fields):
    return ProcessSample, {"pid": pid, "started_monotonic_s": started_s, "cpu_seconds_total": cpu_s, **fields}


def values(series):
    return series.values.tolist()


def test_file_systems_are_summed_and_one_that_cannot_be_read_adds_nothing():
    history = History()
    for t, nfs, lustre in ((0.0, 0, 1000), (5.0, 500, 3000)):
        feed(
            history,
            t,
            (FilesystemSample, {"mountpoint": "/home", "fstype": "nfs4", "written_bytes_total": nfs}),
            (FilesystemSample, {"mountpoint": "/scratch", "fstype": "lustre", "written_bytes_total": lustre}),
            (FilesystemSample, {"mountpoint": "/gpfs", "fstype": "gpfs"}),
        )
    # 500 / 5 and 2000 / 5.
    assert values(history.host.series("filesystem_written_bytes_per_second", 5.0, 10.0)) == [500.0]
    assert not history.host.has("filesystem_read_bytes_per_second")


def test_a_file_system_without_bytes_is_known_until_it_has_them_or_is_gone():
    history = History(horizon_s=100.0)
    lustre = {"mountpoint": "/scratch", "fstype": "lustre"}
    feed(history, 0.0, (FilesystemSample, lustre), (FilesystemSample, {"mountpoint": "/g", "fstype": "gpfs"}))
    assert history.host.unreadable_filesystems(15.0, 15.0) == {"lustre", "gpfs"}
    assert history.host.unreadable_filesystems(15.1, 15.0) == frozenset()
    feed(history, 20.0, (FilesystemSample, lustre | {"read_bytes_total": 1, "written_bytes_total": 2}))
    feed(history, 20.0, (FilesystemSample, {"mountpoint": "/g", "fstype": "gpfs"}))
    assert history.host.unreadable_filesystems(20.0, 15.0) == {"gpfs"}
    feed(history, 130.0, (PressureSample, {}))
    assert dict(history.host.filesystems) == {}


def test_counters_that_are_gone_are_forgotten():
    """A host whose mounts all have names of their own, as pods give them, does not grow the agent."""
    history = History(horizon_s=300.0)
    for tick in range(1000):
        fields = {"fstype": "nfs4", "read_bytes_total": tick, "written_bytes_total": tick}
        feed(
            history,
            5.0 * tick,
            (FilesystemSample, {"mountpoint": f"/pods/{tick}", **fields}),
            (FilesystemSample, {"mountpoint": "/home", **fields}),
        )
        # Two counters each: /home, and the mounts of at most 300 s and the 60 s until the next look; 5 s apart.
        assert len(history.host._counters) <= 2 + 2 * (72 + 1)
    assert len(history.host._counters) >= 2 + 2 * 60
    assert history.host._counters.keys() == history.host._counted_s.keys()
    assert values(history.host.series("filesystem_read_bytes_per_second", 5000.0, 20.0)) == [0.2] * 3


def test_another_type_at_a_mountpoint_is_another_counter():
    history = History()
    for t, fstype, total in ((0.0, "nfs4", 10), (5.0, "lustre", 5_000_000_000), (10.0, "lustre", 5_000_000_050)):
        feed(history, t, (FilesystemSample, {"mountpoint": "/data", "fstype": fstype, "read_bytes_total": total}))
    assert values(history.host.series("filesystem_read_bytes_per_second", 10.0, 20.0)) == [10.0]


def test_pressure_is_the_share_of_time_and_pages_are_taken_as_they_are():
    history = History()
    feed(history, 0.0, (PressureSample, {"io_some_seconds_total": 10.0, "dirty_bytes": 4096}))
    feed(history, 5.0, (PressureSample, {"io_some_seconds_total": 12.0, "dirty_bytes": 8192}))
    assert values(history.host.series("io_pressure_ratio", 5.0, 10.0)) == [0.4]  # 2 s of 5 s
    assert values(history.host.series("dirty_bytes", 5.0, 10.0)) == [4096.0, 8192.0]
    assert not history.host.has("cpu_pressure_ratio")


def test_the_processes_of_a_gpu_are_summed_with_their_descendants():
    history = History()
    feed(history, 0.0, (GpuSample, {"key": KEY}), held(KEY, 10, 11), held(OTHER, 12))
    for t, first_s, loaders_s, second_s in ((0.0, 100.0, 50.0, 7.0), (5.0, 105.0, 55.0, 9.0)):
        feed(
            history,
            t,
            process(10, first_s, descendants_cpu_seconds_total=loaders_s),
            process(11, second_s),
            process(12, second_s),
        )
    # (5 + 5) / 5 and 2 / 5: 2.4 cores; the process of the other GPU is its own.
    assert values(history.gpus[KEY].series("process_cpu_ratio", 5.0, 10.0)) == pytest.approx([2.4])
    assert values(history.gpus[OTHER].series("process_cpu_ratio", 5.0, 10.0)) == pytest.approx([0.4])
    assert not history.gpus[KEY].has("process_written_bytes_per_second")


def test_another_process_with_the_same_id_begins_anew():
    history = History()
    feed(history, 0.0, (GpuSample, {"key": KEY}), held(KEY, 10))
    feed(history, 0.0, process(10, 100.0, written_bytes_total=0))
    feed(history, 5.0, process(10, 900.0, started_s=4.0, written_bytes_total=10**9))
    assert not history.gpus[KEY].has("process_cpu_ratio")
    feed(history, 10.0, process(10, 905.0, started_s=4.0, written_bytes_total=10**9 + 50))
    assert values(history.gpus[KEY].series("process_cpu_ratio", 10.0, 20.0)) == [1.0]
    assert values(history.gpus[KEY].series("process_written_bytes_per_second", 10.0, 20.0)) == [10.0]


def test_who_holds_a_gpu_is_kept_with_it():
    history = History()
    feed(history, 0.0, (GpuSample, {"key": KEY}), (GpuOwners, {"key": KEY, "holders": (Holder("slurm:1"),)}))
    assert history.gpus[KEY].owners.holders[0].job_key == "slurm:1"
    assert history.gpus[KEY].owners.holders[0].share_ratio == 1.0


def test_the_newest_record_of_each_port_link_and_file_system_is_kept_for_the_horizon():
    history = History(horizon_s=100.0)
    for t, state in ((0.0, "active"), (5.0, "down")):
        feed(
            history,
            t,
            (InfinibandPort, {"device": "mlx5_0", "port": 1, "state": state}),
            (InfinibandPort, {"device": "mlx5_0", "port": 2, "state": "active"}),
            (NetworkLink, {"device": "eth0", "is_up": t == 0.0}),
            (FilesystemSample, {"mountpoint": "/home", "fstype": "nfs4", "read_bytes_total": 1}),
            (PressureSample, {"blocked_tasks": int(t)}),
        )
    host = history.host
    assert [(key, port.state, port.monotonic_s) for key, port in host.infiniband_ports.items()] == [
        (("mlx5_0", 1), "down", 5.0),
        (("mlx5_0", 2), "active", 5.0),
    ]
    assert host.network_links["eth0"].is_up is False
    assert host.filesystems["/home", "nfs4"].read_bytes_total == 1
    assert host.pressure.blocked_tasks == 5
    # After the horizon without them, and a look once a minute.
    for t in (70.0, 140.0):
        feed(history, t, (PressureSample, {"blocked_tasks": 0}))
    assert (dict(host.infiniband_ports), dict(host.network_links), dict(host.filesystems)) == ({}, {}, {})
