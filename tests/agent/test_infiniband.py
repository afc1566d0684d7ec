"""The InfiniBand sampler on trees of /sys made after the kernel's documentation."""

from __future__ import annotations

import errno
import os
import shutil
import stat

import pytest

from agent.clock import Instant
from agent.records import InfinibandPort, InfinibandSample
from agent.samplers import SourceUnavailableError
from agent.samplers.infiniband import MAX_PORTS, InfinibandSampler
from agent.samplers.infiniband_counters import parse_rate, parse_state
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)
#: GPUs of the machine dgx_slurm as the driver writes their addresses; mlx5_<n> is beside the n-th.
DGX_GPUS = tuple(f"00000000:{bus}:00.0" for bus in ("1B", "43", "52", "61", "9D", "C3", "D1", "DF"))


@pytest.fixture
def sampler_of():
    made = []

    def make(root, gpus=()):
        made.append(InfinibandSampler(gpus if callable(gpus) else lambda: gpus, root / "sys"))
        return made[-1]

    yield make
    for sampler in made:
        sampler.close()
        sampler.close()  # closing is idempotent


def samples(sampler, now=NOW):
    found = [record for record in sampler.sample(now) if isinstance(record, InfinibandSample)]
    return {(record.device, record.port): (record.receive_bytes_total, record.transmit_bytes_total) for record in found}


def ports(sampler, now=NOW):
    found = [record for record in sampler.sample(now) if isinstance(record, InfinibandPort)]
    return {(record.device, record.port): record for record in found}


def write(root, device, number, **files):
    """Write files of one port; a double underscore in a name stands for the slash of a folder."""
    folder = root / "sys" / "class" / "infiniband" / device / "ports" / str(number)
    folder.mkdir(parents=True, exist_ok=True)
    for name, text in files.items():
        path = folder / name.replace("__", "/")
        path.parent.mkdir(exist_ok=True)
        path.write_text(f"{text}\n")
    return folder


def test_rails_of_a_node(machine, sampler_of):
    """Words of 4 bytes: rail 3 received 61,003,000,000,000 and sent 60,003,000,000,000 of them."""
    sampler = sampler_of(machine("dgx_slurm"), DGX_GPUS)
    assert sampler.probe()
    found = samples(sampler)
    assert list(found) == [(f"mlx5_{index}", 1) for index in range(8)]
    assert found["mlx5_3", 1] == (244_012_000_000_000, 240_012_000_000_000)
    rails = ports(sampler, NOW.later(5.0))
    assert [rail.near_gpus for rail in rails.values()] == [(gpu,) for gpu in DGX_GPUS]
    errors = dict.fromkeys(
        (
            "link_error_recovery",
            "port_rcv_errors",
            "port_rcv_remote_physical_errors",
            "port_rcv_switch_relay_errors",
            "port_xmit_discards",
            "port_xmit_constraint_errors",
            "port_rcv_constraint_errors",
            "local_link_integrity_errors",
            "excessive_buffer_overrun_errors",
            "VL15_dropped",
        ),
        0,
    )
    assert rails["mlx5_3", 1] == InfinibandPort(
        monotonic_s=105.0,
        wall_s=1_700_000_005.0,
        device="mlx5_3",
        port=1,
        link_layer="infiniband",
        state="active",
        rate_bytes_per_second=50e9,  # 400 Gbit/s
        receive_packets_total=59_000_000_003,
        transmit_packets_total=58_000_000_003,
        counters={**errors, "symbol_error": 0, "link_downed": 1, "port_xmit_wait": 987_654_321},
        hw_counters={
            **dict.fromkeys(
                (
                    "duplicate_request",
                    "implied_nak_seq_err",
                    "local_ack_timeout_err",
                    "out_of_buffer",
                    "packet_seq_err",
                    "req_cqe_error",
                    "resp_cqe_error",
                    "rnr_nak_retry_err",
                ),
                0,
            ),
            "out_of_sequence": 12,
        },
        near_gpus=(DGX_GPUS[3],),
    )


def test_counter_that_stopped_is_left_out_and_counted_once(machine, sampler_of):
    """symbol_error of mlx5_5 stands at 65535, the most that its 16 bits hold."""
    sampler = sampler_of(machine("dgx_slurm"), DGX_GPUS)
    for second in (0, 5, 60, 120):
        rails = ports(sampler, NOW.later(second))
        assert "symbol_error" not in rails["mlx5_5", 1].counters
        assert rails["mlx5_4", 1].counters["symbol_error"] == 0
    assert dict(sampler.errors) == {"saturated": 1}


@pytest.mark.parametrize(
    ("name", "most"),
    [
        ("symbol_error", 65535),
        ("link_downed", 255),
        ("link_error_recovery", 255),
        ("port_rcv_errors", 65535),
        ("port_xmit_constraint_errors", 255),
        ("local_link_integrity_errors", 15),
        ("excessive_buffer_overrun_errors", 15),
        ("VL15_dropped", 65535),
        ("port_xmit_wait", 4294967295),
    ],
)
def test_each_counter_stops_at_its_own_width(tmp_path, sampler_of, name, most):
    """Widths of the attributes PortCounters of the InfiniBand specification."""
    folder = write(tmp_path, "mlx4_0", 1, **{f"counters__{name}": most - 1})
    sampler = sampler_of(tmp_path)
    assert ports(sampler)["mlx4_0", 1].counters == {name: most - 1}
    (folder / "counters" / name).write_text(f"{most}\n")
    assert ports(sampler, NOW.later(5.0))["mlx4_0", 1].counters == {}
    (folder / "counters" / name).write_text("0\n")  # perfquery -R
    assert ports(sampler, NOW.later(10.0))["mlx4_0", 1].counters == {name: 0}
    (folder / "counters" / name).write_text(f"{most}\n")
    ports(sampler, NOW.later(15.0))
    assert dict(sampler.errors) == {"saturated": 2}


def test_data_of_an_old_adapter_that_stopped_is_unknown(tmp_path, sampler_of):
    """32-bit words stop after 17 GB; zero bytes per second would be a lie."""
    words = {"counters__port_rcv_data": 2**32 - 1, "counters__port_xmit_data": 2**32 - 2}
    write(tmp_path, "mlx4_0", 1, counters__port_rcv_packets=2**32 - 1, counters__port_xmit_packets=7, **words)
    sampler = sampler_of(tmp_path)
    assert samples(sampler)["mlx4_0", 1] == (None, 17_179_869_176)
    port = ports(sampler, NOW.later(5.0))["mlx4_0", 1]
    assert (port.receive_packets_total, port.transmit_packets_total) == (None, 7)
    assert dict(sampler.errors) == {"saturated": 2}


def test_large_counters_of_64_bits_are_no_maximum(tmp_path, sampler_of):
    write(tmp_path, "mlx5_0", 1, counters__port_rcv_data=2**32, counters__port_xmit_data=2**64 - 1)
    assert samples(sampler_of(tmp_path))["mlx5_0", 1] == (17_179_869_184, None)


def test_roce_ports(machine, sampler_of):
    """An Ethernet link layer; each adapter is beside a pair of GPUs."""
    gpus = tuple(f"00000000:{bus}:00.0" for bus in ("07", "0B", "48", "4C", "88", "8B", "C8", "CB"))
    sampler = sampler_of(machine("roce_kubernetes"), gpus)
    assert samples(sampler)["mlx5_1", 1] == (4 * 31_000_001_000_000, 4 * 30_000_001_000_000)
    found = ports(sampler, NOW.later(5.0))
    assert [port.near_gpus for port in found.values()] == [gpus[0:2], gpus[2:4], gpus[4:6], gpus[6:8]]
    port = found["mlx5_2", 1]
    assert (port.link_layer, port.state, port.rate_bytes_per_second) == ("ethernet", "active", 25e9)
    assert {name: value for name, value in port.hw_counters.items() if value} == {
        "np_cnp_sent": 41_002,
        "np_ecn_marked_roce_packets": 52_002,
        "rp_cnp_handled": 39_002,
        "out_of_sequence": 240,
        "packet_seq_err": 77,
        "roce_adp_retrans": 19,
    }
    assert "lifespan" not in port.hw_counters  # a setting, no counter


def test_efa(machine, sampler_of):
    """Bytes, not words, from hw_counters; the only adapter is the nearest one of every GPU."""
    gpus = tuple(f"00000000:{bus}:00.0" for bus in ("53", "64", "75", "86"))
    sampler = sampler_of(machine("cloud_efa_fuse"), gpus)
    assert samples(sampler) == {("rdmap85s0", 1): (923_456_789_012_345, 912_345_678_901_234)}
    port = ports(sampler, NOW.later(5.0))["rdmap85s0", 1]
    assert (port.link_layer, port.state, port.rate_bytes_per_second) == ("efa", "active", 12.5e9)
    assert (port.receive_packets_total, port.transmit_packets_total) == (111_000_000_002, 110_000_000_001)
    assert port.counters == {}
    assert port.hw_counters["rdma_write_bytes"] == 899_999_999_999_999
    assert port.hw_counters["rx_drops"] == 3
    assert port.near_gpus == gpus


def test_efa_whose_driver_cannot_be_seen(tmp_path, sampler_of):
    """It is known by its counters and by the link layer that it does not have."""
    data = {"hw_counters__tx_bytes": 5, "hw_counters__rx_bytes": 6}
    write(tmp_path, "rdmap0s31", 1, link_layer="Unknown", **data)
    write(tmp_path, "bnxt_re0", 1, link_layer="Ethernet", **data)  # counts in the same files
    sampler = sampler_of(tmp_path)
    found = ports(sampler)
    assert found["rdmap0s31", 1].link_layer == "efa"
    assert found["bnxt_re0", 1].link_layer == "ethernet"
    assert samples(sampler, NOW.later(1.0)) == {("bnxt_re0", 1): (6, 5), ("rdmap0s31", 1): (6, 5)}


def test_port_without_some_files(tmp_path, sampler_of):
    """What is not there is None and no error; a port that counts no bytes has no record of bytes."""
    write(tmp_path, "mlx5_0", 1, counters__port_rcv_data=2, state="1: DOWN")
    write(tmp_path, "rxe0", 1, state="4: ACTIVE", hw_counters__duplicate_request=3)
    (tmp_path / "sys/class/infiniband/mlx5_9/ports").mkdir(parents=True)  # a device without ports
    (tmp_path / "sys/class/infiniband/mlx5_8").mkdir()
    sampler = sampler_of(tmp_path)
    assert samples(sampler) == {("mlx5_0", 1): (8, None)}
    found = ports(sampler, NOW.later(5.0))
    assert set(found) == {("mlx5_0", 1), ("rxe0", 1)}
    assert found["mlx5_0", 1] == InfinibandPort(
        monotonic_s=105.0, wall_s=1_700_000_005.0, device="mlx5_0", port=1, state="down"
    )
    assert found["rxe0", 1].hw_counters == {"duplicate_request": 3}
    assert dict(sampler.errors) == {}


def test_ports_and_devices_are_in_the_order_of_their_numbers(tmp_path, sampler_of):
    for device, number in (("mlx5_10", 1), ("mlx5_2", 10), ("mlx5_2", 2), ("mlx5_2", "x")):
        write(tmp_path, device, number, counters__port_rcv_data=1)
    assert list(samples(sampler_of(tmp_path))) == [("mlx5_2", 2), ("mlx5_2", 10), ("mlx5_10", 1)]


def test_garbage_costs_itself_only(tmp_path, sampler_of):
    write(
        tmp_path,
        "mlx5_0",
        1,
        counters__port_rcv_data="-4",
        counters__port_xmit_data=9,
        counters__symbol_error="0x10",
        counters__link_downed=2,
        counters__port_xmit_wait="N/A (no PMA)",  # kernels before 5.13, where there is no such counter
        hw_counters__out_of_sequence="",
        hw_counters__out_of_buffer=4,
        state="ACTIVE",
        rate="fast",
        link_layer="<b>",
    )
    sampler = sampler_of(tmp_path)
    assert samples(sampler) == {("mlx5_0", 1): (None, 36)}
    port = ports(sampler, NOW.later(5.0))["mlx5_0", 1]
    assert (port.state, port.rate_bytes_per_second, port.link_layer) == (None, None, None)
    assert (port.counters, port.hw_counters) == ({"link_downed": 2}, {"out_of_buffer": 4})
    # Twice: the first tick had both records, as the last one; received data, error, sequence, state and rate.
    assert dict(sampler.errors) == {"malformed": 10}


def test_name_that_is_not_utf8_is_escaped(tmp_path, sampler_of):
    write(tmp_path, os.fsdecode(b"mlx\xff_0"), 1, counters__port_rcv_data=1)
    assert list(samples(sampler_of(tmp_path))) == [("mlx\\xff_0", 1)]


def test_file_that_cannot_be_read_is_counted(tmp_path, sampler_of):
    """A directory in its place: reading it fails with EISDIR, for root too."""
    folder = write(tmp_path, "mlx5_0", 1, counters__port_rcv_data=1, state="4: ACTIVE")
    (folder / "rate").mkdir()
    sampler = sampler_of(tmp_path)
    port = ports(sampler)["mlx5_0", 1]
    assert (port.state, port.rate_bytes_per_second) == ("active", None)
    assert dict(sampler.errors) == {"unreadable": 1}


def test_rates_and_states():
    """What drivers/infiniband/core/sysfs.c can write, and what it cannot."""
    assert parse_rate("2.5 Gb/sec (1X SDR)\n") == 312_500_000
    assert parse_rate("800 Gb/sec (4X XDR)") == 100e9
    assert parse_rate("56 Gb/sec (4X FDR)") == 7e9
    for text in ("", "400", "400 Mb/sec", "-400 Gb/sec", "1e9 Gb/sec", "٤ Gb/sec", "400 Gb/second"):
        assert parse_rate(text) is None
    assert [parse_state(text) for text in ("1: DOWN", "2: INIT", "3: ARMED", "4: ACTIVE\n", "5: ACTIVE_DEFER")] == [
        "down",
        "init",
        "armed",
        "active",
        "active_defer",
    ]
    for text in ("", "4:", "ACTIVE", "4: <b>", "4: Ä"):
        assert parse_state(text) is None


def test_ports_come_every_five_seconds(machine, sampler_of):
    sampler = sampler_of(machine("cloud_efa_fuse"))
    ticks = [second for second in range(16) if ports(sampler, NOW.later(second - 0.01 * (second % 3)))]
    assert ticks == [0, 5, 10, 15]


def test_device_that_goes_and_one_that_comes_are_seen_within_a_minute(machine, tmp_path, sampler_of):
    root = unpack_machine("roce_kubernetes", tmp_path / "root")
    sampler = sampler_of(root)
    assert len(samples(sampler)) == 4
    (root / "sys/class/infiniband/mlx5_3").unlink()
    write(root, "mlx5_4", 1, counters__port_rcv_data=1)
    assert len(samples(sampler, NOW.later(59.0))) == 4
    assert ("mlx5_3", 1) not in (found := samples(sampler, NOW.later(60.0)))
    assert found["mlx5_4", 1] == (4, None)


def test_device_of_a_reloaded_driver_is_read_anew_at_the_next_tick(tmp_path, sampler_of, monkeypatch):
    """The kernel answers ENODEV to a file of a device that is gone, though its name may be there again."""
    folder = write(tmp_path, "mlx5_0", 1, counters__port_rcv_data=1000)
    sampler = sampler_of(tmp_path)
    assert samples(sampler) == {("mlx5_0", 1): (4000, None)}
    (folder / "counters" / "port_rcv_data").unlink()
    write(tmp_path, "mlx5_0", 1, counters__port_rcv_data=5)
    pread = os.pread

    def gone(descriptor, length, offset):
        if os.fstat(descriptor).st_nlink == 0:
            raise OSError(errno.ENODEV, "No such device")
        return pread(descriptor, length, offset)

    monkeypatch.setattr(os, "pread", gone)
    assert samples(sampler, NOW.later(1.0)) == {("mlx5_0", 1): (None, None)}
    assert dict(sampler.errors) == {"unreadable": 1}
    assert samples(sampler, NOW.later(2.0)) == {("mlx5_0", 1): (20, None)}


def test_host_without_ports_is_absent(machine, tmp_path, sampler_of):
    sampler = sampler_of(machine("desktop"))
    assert not sampler.probe()
    with pytest.raises(SourceUnavailableError, match="infiniband has no port") as caught:
        sampler.sample(NOW)
    assert caught.value.reason == "absent"
    root = unpack_machine("cloud_efa_fuse", tmp_path / "root")
    sampler = sampler_of(root)
    assert len(samples(sampler)) == 1
    shutil.rmtree(root / "sys/class/infiniband")
    with pytest.raises(SourceUnavailableError):
        sampler.sample(NOW.later(60.0))
    with pytest.raises(SourceUnavailableError):  # and not only once
        sampler.sample(NOW.later(61.0))


def test_ports_are_bounded_and_their_files_are_closed(tmp_path, sampler_of):
    for index in range(100):
        write(tmp_path, f"mlx5_{index}", 1, counters__port_rcv_data=1, counters__port_xmit_data=1)
    before = _open_files(tmp_path)
    sampler = sampler_of(tmp_path)
    for second in range(0, 200, 20):
        assert len(samples(sampler, NOW.later(second))) == MAX_PORTS == 64
        assert _open_files(tmp_path) == before + 2 * MAX_PORTS
    assert dict(sampler.errors) == {"too_many_ports": 36}
    sampler.close()
    assert _open_files(tmp_path) == before


def _open_files(root):
    found = 0
    for descriptor in os.listdir("/proc/self/fd"):  # noqa: PTH208 -- the folder of this process changes while it is read
        try:
            target = os.readlink(f"/proc/self/fd/{descriptor}")  # noqa: PTH115 -- no path of a file
        except OSError:
            continue
        found += target.startswith(str(root)) and stat.S_ISREG(os.stat(int(descriptor)).st_mode)  # noqa: PTH116 -- a descriptor
    return found


def test_near_gpus_follow_the_roster(machine, sampler_of):
    """The driver comes up later and shows GPUs one by one; those given to others are not there."""
    gpus = []
    sampler = sampler_of(machine("dgx_slurm"), lambda: gpus)
    assert {port.near_gpus for port in ports(sampler).values()} == {()}
    gpus.append(DGX_GPUS[2])
    near = {device: port.near_gpus for (device, _), port in ports(sampler, NOW.later(5.0)).items()}
    assert near == {"mlx5_2": (DGX_GPUS[2],), **{f"mlx5_{index}": () for index in (0, 1, 3, 4, 5, 6, 7)}}


def test_this_machine(sampler_of):
    """Where there are ports, their counters never fall."""
    sampler = InfinibandSampler(lambda: ())
    if not sampler.probe():
        pytest.skip("no RDMA device here")
    first = samples(sampler)
    for port, (receive, transmit) in samples(sampler, NOW.later(1.0)).items():
        assert receive is None or receive >= first[port][0]
        assert transmit is None or transmit >= first[port][1]
    sampler.close()
