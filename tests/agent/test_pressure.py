"""The pressure sampler on trees of /proc, and on this host's own files."""

from __future__ import annotations

from pathlib import Path

import pytest

from agent.clock import Instant
from agent.records import PressureSample
from agent.samplers import SourceUnavailableError
from agent.samplers.pressure import PressureSampler, parse_blocked, parse_meminfo, parse_pressure
from tests.machines import unpack_machine

NOW = Instant(100.0, 1_700_000_000.0)


def test_node_gives_everything_in_base_units(machine):
    sampler = PressureSampler(machine("dgx_slurm") / "proc")
    assert sampler.probe()
    (record,) = sampler.sample(NOW)
    sampler.close()
    assert record == PressureSample(
        monotonic_s=100.0,
        wall_s=1_700_000_000.0,
        cpu_some_seconds_total=120.0,  # 120 000 000 µs
        io_some_seconds_total=45.5,
        io_full_seconds_total=30.25,
        memory_some_seconds_total=0.0,  # a measurement, not a gap
        memory_full_seconds_total=0.0,
        dirty_bytes=51_200 * 1024,
        writeback_bytes=2048 * 1024,
        memory_available_bytes=1_900_000_000 * 1024,
        blocked_tasks=3,
    )
    assert dict(sampler.errors) == {}


def test_desktop_without_pressure_files_gives_the_rest(machine):
    sampler = PressureSampler(machine("desktop") / "proc")
    (record,) = sampler.sample(NOW)
    sampler.close()
    assert (record.cpu_some_seconds_total, record.io_full_seconds_total) == (None, None)
    assert (record.dirty_bytes, record.blocked_tasks) == (128 * 1024, 0)
    assert dict(sampler.errors) == {}  # absent is not broken


@pytest.mark.parametrize("name", ["pressure/cpu", "pressure/io", "pressure/memory", "meminfo", "stat"])
def test_a_missing_file_costs_its_own_fields_and_is_found_a_minute_later(tmp_path, name):
    root = unpack_machine("dgx_slurm", tmp_path) / "proc"
    content = (root / name).read_text()
    (root / name).unlink()
    sampler = PressureSampler(root)
    fields = {
        "pressure/cpu": ["cpu_some_seconds_total"],
        "pressure/io": ["io_some_seconds_total", "io_full_seconds_total"],
        "pressure/memory": ["memory_some_seconds_total", "memory_full_seconds_total"],
        "meminfo": ["dirty_bytes", "writeback_bytes", "memory_available_bytes"],
        "stat": ["blocked_tasks"],
    }[name]
    (record,) = sampler.sample(NOW)
    missing = [field for field in PressureSample.__slots__ if getattr(record, field) is None]
    assert missing == fields
    (root / name).write_text(content)
    (early,) = sampler.sample(NOW.later(5))
    (late,) = sampler.sample(NOW.later(60))
    sampler.close()
    assert getattr(early, fields[0]) is None
    assert None not in [getattr(late, field) for field in PressureSample.__slots__]


def test_a_file_that_cannot_be_read_is_counted_when_that_begins(tmp_path):
    """Where PSI is compiled in and switched off the kernel answers EOPNOTSUPP; a folder answers EISDIR."""
    root = unpack_machine("dgx_slurm", tmp_path) / "proc"
    (root / "pressure" / "io").unlink()
    (root / "pressure" / "io").mkdir()
    sampler = PressureSampler(root)
    for step in range(30):  # 150 s: three attempts
        (record,) = sampler.sample(NOW.later(5.0 * step))
    sampler.close()
    assert record.io_some_seconds_total is None
    assert record.cpu_some_seconds_total == 120.0
    assert dict(sampler.errors) == {"unreadable": 1}


def test_nothing_at_all_is_an_absent_source(tmp_path):
    with pytest.raises(SourceUnavailableError) as raised:
        PressureSampler(tmp_path).sample(NOW)
    assert raised.value.reason == "absent"


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=1500000\n", {"some": 1.5}),  # cpu before Linux 5.13
        ("some avg10=0.00 total=1\nfull avg10=0.00 total=2\n", {"some": 1e-6, "full": 2e-6}),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=15", {}),  # cut: 15 may be 1 500 000
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=\n", {}),
        ("some avg10=0.00 avg60=0.00 avg300=0.00 total=-5\n", {}),
        ("some avg10=0.00\n", {}),
        ("other total=5\n", {}),
        ("", {}),
    ],
)
def test_pressure_lines(text, found):
    assert parse_pressure(text) == found


def test_meminfo_lines():
    text = (
        "MemTotal:       5 kB\nDirty:             0 kB\nHugePages_Total:       7\nActive(anon):  3 kB\nWriteback:  12"
    )
    # A count without a unit, a name with parentheses and a line that is cut give nothing.
    assert parse_meminfo(text) == {"MemTotal": 5120, "Dirty": 0}


@pytest.mark.parametrize(
    ("text", "blocked"),
    [("cpu 1\nprocs_blocked 12\nsoftirq 1\n", 12), ("procs_blocked 1", None), ("xprocs_blocked 1\n", None), ("", None)],
)
def test_blocked_line(text, blocked):
    assert parse_blocked(text) == blocked


class Watch:
    """A stopwatch on which each read takes the same time."""

    def __init__(self, seconds):
        self.seconds = seconds
        self.reading = 0.0

    def __call__(self):
        self.reading += self.seconds
        return self.reading


@pytest.mark.parametrize(
    ("seconds", "blocked"),
    [
        (0.0001, [3, 3, 3, 3, 3, 3, 3]),
        # Every third tick of 5 s where a read takes 2 ms.
        (0.002, [3, None, None, 3, None, None, 3]),
    ],
)
def test_a_dear_stat_is_read_every_15_seconds(machine, seconds, blocked):
    sampler = PressureSampler(machine("dgx_slurm") / "proc", stopwatch=Watch(seconds))
    # Ticks come up to 0.2 s early or late.
    found = [sampler.sample(NOW.later(5.0 * step + (-1) ** step * 0.2))[0].blocked_tasks for step in range(7)]
    sampler.close()
    assert found == blocked


def test_this_host():
    """The kernel's own files: memory is available, times do not go back."""
    if not Path("/proc/pressure/cpu").exists():
        pytest.skip("this kernel has no pressure files")
    sampler = PressureSampler()
    (first,) = sampler.sample(NOW)
    (second,) = sampler.sample(NOW.later(5))
    sampler.close()
    assert first.memory_available_bytes > 1 << 20
    assert first.blocked_tasks >= 0
    if first.cpu_some_seconds_total is None:
        pytest.skip("pressure stall information is switched off (psi=0)")
    assert 0 < first.cpu_some_seconds_total <= second.cpu_some_seconds_total
