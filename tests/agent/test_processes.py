"""The sampler of the processes on the GPUs, on trees of /proc."""

from __future__ import annotations

import sys

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.clock import Instant
from agent.records import ProcessSample
from agent.samplers import SourceUnavailableError
from agent.samplers.process_files import PAGE_BYTES, ProcessIo, ProcessStat, parse_io, parse_stat
from agent.samplers.processes import ProcessesSampler
from tests.agent.process_trees import Processes, gpu_with, stat_line

NOW = Instant(100.0, 1_700_000_000.0)


def sampler_on(root, *gpus, programs=True):
    sampler = ProcessesSampler(root, lambda: gpus, look_at_programs=programs)
    assert sampler.probe()
    return sampler


def one_of(sampler, now=NOW):
    (record,) = sampler.sample(now)
    return record


# Whole machines.


def test_slurm_node(machine):
    root = machine("dgx_slurm") / "proc"
    sampler = sampler_on(root, *(gpu_with(41000 + index, index=index) for index in range(8)))
    records = sampler.sample(NOW)
    assert [record.pid for record in records] == list(range(41000, 41008))
    assert records[0] == ProcessSample(
        monotonic_s=100.0,
        wall_s=1_700_000_000.0,
        pid=41000,
        started_monotonic_s=3605.0,  # 360 500 ticks of 10 ms
        state="R",
        cpu_seconds_total=12_000.0,  # 1 000 000 + 200 000 ticks
        # Waited for: 3000 + 1000 ticks. Four loaders with 50 000 + 10 000 each: 244 000 ticks in all.
        descendants_cpu_seconds_total=2440.0,
        threads=128,
        resident_bytes=2_000_000 * PAGE_BYTES,
        descendants=4,
        blocked=1,  # the fourth loader
        read_bytes_total=30_000_000_000,  # 10 GB of its own, 5 GB of each loader
        written_bytes_total=2_000_000_000,
        program="torchrun",  # of its parent: nobody knows train.py
        declared_class="training",
    )
    assert {record.written_bytes_total for record in records[1:]} == {0}
    assert sampler.declared(41003) == "training"
    assert sampler.declared(41100) is None
    assert dict(sampler.errors) == {}


def test_kubernetes_node_without_lists_of_children(machine):
    root = machine("roce_kubernetes") / "proc"
    training = [gpu_with(51000 + index, index=index) for index in range(4)]
    serving = [gpu_with(52000 + index, index=4 + index) for index in range(2)]
    sampler = sampler_on(root, *training, *serving)
    found = {record.pid: record for record in sampler.sample(NOW)}
    assert [(found[pid].program, found[pid].declared_class) for pid in (51000, 51003, 52000, 52001)] == [
        ("torchrun", "training"),
        ("torchrun", "training"),
        ("vllm", "inference"),
        ("vllm", "inference"),
    ]
    assert [found[pid].descendants for pid in (51000, 51003, 52000)] == [2, 2, 0]
    # 500 + 100 ticks waited for, two loaders of 20 000 + 5000.
    assert found[51001].descendants_cpu_seconds_total == 506.0
    assert found[52001].descendants_cpu_seconds_total == 0.0


def test_cloud_machine_and_desktop(machine):
    sampler = sampler_on(machine("cloud_efa_fuse") / "proc", gpu_with(61000, 61001))
    first, second = sampler.sample(NOW)
    # Rank 0 sleeps uninterruptibly: its command line waits until it does not, for reading it could wait too.
    assert (first.blocked, first.program, first.declared_class) == (1, None, None)
    assert (second.blocked, second.program, second.declared_class) == (0, "accelerate", "training")
    record = one_of(sampler_on(machine("desktop") / "proc", gpu_with(71000)))
    assert (record.program, record.declared_class, record.started_monotonic_s) == ("graphics", "other", 5000.0)


# One process.


@pytest.mark.parametrize(
    "name",
    [
        b"a b",
        b"a) S 1 (b",
        b")",
        b"((",
        b") R 2 3 4 5 6 7 8 9",
        b"a\nb",
        b"\xff\xfe",
        b"",
        b"tab\tname\x00",
    ],
)
def test_names_in_stat_do_not_shift_fields(name):
    line = stat_line(7, name=name, state="D", parent=5, own=11, waited=12, threads=13, start=14, pages=15)
    assert parse_stat(7, line) == ProcessStat(7, "D", 5, 11, 12, 13, 14, 15)


@given(st.binary(max_size=200))
def test_any_bytes_are_a_stat_or_none(data):
    parse_stat(1, data)
    parse_io(data)


def test_every_cut_of_a_stat_is_none():
    line = stat_line(7, name=b"a) S 1 (b", own=11)
    assert all(parse_stat(7, line[:end]) is None for end in range(len(line)))


@pytest.mark.parametrize(
    ("text", "found"),
    [
        (b"rchar: 1\nread_bytes: 5\nwrite_bytes: 6\ncancelled_write_bytes: 2\n", ProcessIo(5, 6)),
        (b"read_bytes: 5\nwrite_bytes: 6", None),  # cut: 6 may be 60
        (b"read_bytes: 5\n", None),
        (b"read_bytes: -5\nwrite_bytes: 6\n", None),
        (b"", None),
    ],
)
def test_io(text, found):
    assert parse_io(text) == found


def test_a_malformed_stat_costs_its_process_only(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10)
    tree.add(11)
    (tmp_path / "10" / "stat").write_text("10 (x) S 1\n")
    sampler = sampler_on(tmp_path, gpu_with(10, 11))
    assert one_of(sampler).pid == 11
    assert dict(sampler.errors) == {"malformed": 1}


def test_a_process_that_ends_costs_itself_only_and_is_no_error(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10)
    tree.add(11)
    gpus = [gpu_with(10, 11)]
    sampler = ProcessesSampler(tmp_path, lambda: gpus)
    assert len(sampler.sample(NOW)) == 2
    tree.end(10)
    assert one_of(sampler, NOW.later(5)).pid == 11  # the driver's list is as it was
    gpus[0] = gpu_with(11, listed_s=106.0)
    assert one_of(sampler, NOW.later(10)).pid == 11
    assert dict(sampler.errors) == {}


def test_a_process_that_the_driver_names_again_and_proc_does_not_show_is_invisible(tmp_path):
    """As under hidepid and in another PID namespace; counted once, and found where it shows up."""
    tree = Processes(tmp_path)
    gpus = [gpu_with(10)]
    sampler = ProcessesSampler(tmp_path, lambda: gpus)
    assert sampler.sample(NOW) == ()
    assert sampler.sample(NOW.later(5)) == ()
    assert dict(sampler.errors) == {}  # the same list: it may have ended
    for step in range(2, 6):
        gpus[0] = gpu_with(10, listed_s=100.0 + 5 * step)
        assert sampler.sample(NOW.later(5.0 * step)) == ()
    assert dict(sampler.errors) == {"invisible": 1}
    tree.add(10)
    assert one_of(sampler, NOW.later(40)).pid == 10


def test_an_id_that_is_given_again_is_another_process(tmp_path):
    """With the driver's old list it is not on the GPU; with a new one it is, and its sums begin anew."""
    tree = Processes(tmp_path)
    tree.add(10, start=500, waited=9000)
    gpus = [gpu_with(10)]
    sampler = ProcessesSampler(tmp_path, lambda: gpus)
    assert one_of(sampler).descendants_cpu_seconds_total == 90.0
    tree.set(10, start=9900, waited=100)
    assert sampler.sample(NOW.later(5)) == ()
    assert sampler.sample(NOW.later(10)) == ()
    gpus[0] = gpu_with(10, listed_s=111.0)
    record = one_of(sampler, NOW.later(15))
    assert (record.started_monotonic_s, record.descendants_cpu_seconds_total) == (99.0, 1.0)


def test_one_process_on_several_gpus_is_one_record(tmp_path):
    Processes(tmp_path).add(10)
    sampler = sampler_on(tmp_path, gpu_with(10), gpu_with(10, index=1))
    assert one_of(sampler).pid == 10


def test_no_lists_no_records(tmp_path):
    Processes(tmp_path)
    unknown = gpu_with()
    assert sampler_on(tmp_path).sample(NOW) == ()
    assert sampler_on(tmp_path, unknown).sample(NOW) == ()


def test_without_a_process_file_system_the_source_is_absent(tmp_path):
    sampler = ProcessesSampler(tmp_path / "none", lambda: ())
    assert not sampler.probe()
    with pytest.raises(SourceUnavailableError):
        sampler.sample(NOW)


# Programs.


class Opened:
    """Names of all files that are opened while this is entered, as the interpreter's audit events tell."""

    current: Opened | None = None

    def __init__(self):
        self.names = []

    def __enter__(self):
        Opened.current = self
        return self

    def __exit__(self, *_):
        Opened.current = None


def _audit(event, arguments):
    if event == "open" and Opened.current is not None:
        Opened.current.names.append(str(arguments[0]))


sys.addaudithook(_audit)  # stays for the rest of the process, idle


@pytest.mark.parametrize("programs", [False, True])
def test_with_programs_off_no_command_line_is_opened(machine, programs):
    root = machine("dgx_slurm") / "proc"
    sampler = sampler_on(root, gpu_with(41000, 41001), programs=programs)
    with Opened() as opened:
        records = sampler.sample(NOW)
    private = {name for name in opened.names if name.rpartition("/")[2] in ("cmdline", "comm", "environ")}
    if programs:
        # Both ranks and their parent, once each; no loader, and no parent beyond the one that decides.
        assert private == {f"{root}/{pid}/{name}" for pid in (41000, 41001, 40990) for name in ("cmdline", "comm")}
        assert [record.program for record in records] == ["torchrun"] * 2
    else:
        assert private == set()
        assert {(record.program, record.declared_class) for record in records} == {(None, None)}
    assert any(name.endswith("/41000/stat") for name in opened.names)


def test_nothing_of_a_command_line_is_in_a_record(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10, command=b"vllm\0serve\0--api-key\0sk-secret\0")
    sampler = sampler_on(tmp_path, gpu_with(10))
    record = one_of(sampler)
    assert record.program == "vllm"
    kept = repr(record) + repr(vars(sampler)) + repr(vars(sampler._programs))
    assert "secret" not in kept
    assert "serve" not in kept


@pytest.mark.parametrize(
    ("commands", "program"),
    [
        # From the process itself upwards.
        ([b"python3\0train.py\0", b"torchrun\0train.py\0"], ("torchrun", "training")),
        ([b"python3\0t.py\0", b"bash\0run.sh\0", b"bash\0x\0", b"sh\0y\0", b"torchrun\0"], ("torchrun", "training")),
        # The fifth parent is not asked.
        ([b"python3\0t.py\0", b"a\0", b"b\0", b"c\0", b"d\0", b"torchrun\0"], (None, None)),
        # The nearest that declares a class.
        ([b"python3\0t.py\0", b"accelerate\0launch\0", b"torchrun\0"], ("accelerate", "training")),
        ([b"VLLM::Worker_TP0\0", b"torchrun\0"], ("vllm", "inference")),
        # One that declares none leaves the word to a launcher that does.
        ([b"ray::Worker\0", b"raylet\0"], ("ray", None)),
        ([b"python3\0t.py\0", b"mpirun\0-n\x008\0", b"torchrun\0"], ("torchrun", "training")),
        # What is started from a desktop or by a miner's shell is not thereby graphics or mining.
        ([b"python3\0train.py\0", b"gnome-shell\0"], (None, None)),
        ([b"python3\0train.py\0", b"xmrig\0"], (None, None)),
    ],
)
def test_parents_tell_the_program(tmp_path, commands, program):
    tree = Processes(tmp_path)
    for distance, command in enumerate(commands):
        tree.add(100 - distance, parent=99 - distance if distance + 1 < len(commands) else 1, command=command)
    record = one_of(sampler_on(tmp_path, gpu_with(100)))
    assert (record.program, record.declared_class) == program


def test_a_title_that_comes_later_is_seen_and_looks_become_rare(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10)
    sampler = sampler_on(tmp_path, gpu_with(10))
    assert one_of(sampler).program is None
    (tmp_path / "10" / "cmdline").write_bytes(b"VLLM::EngineCore\0\0\0\0")
    looks = 0
    for step in range(1, 121):  # 10 minutes
        with Opened() as opened:
            record = one_of(sampler, NOW.later(5.0 * step))
        looks += any(name.endswith("cmdline") for name in opened.names)
        assert record.program == (None if step < 6 else "vllm")
    assert looks == 3  # at 30, 90 and 390 s


def test_a_process_that_sleeps_uninterruptibly_keeps_what_was_known(tmp_path):
    tree = Processes(tmp_path)
    tree.add(10, command=b"vllm\0serve\0")
    sampler = sampler_on(tmp_path, gpu_with(10))
    one_of(sampler)
    tree.set(10, state="D")
    with Opened() as opened:
        record = one_of(sampler, NOW.later(1000))
    assert (record.program, record.blocked) == ("vllm", 1)
    assert not any(name.endswith("cmdline") for name in opened.names)
