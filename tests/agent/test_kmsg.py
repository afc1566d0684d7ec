"""The reader of /dev/kmsg: lines of several driver generations, files and pipes in its place, and the real one."""

from __future__ import annotations

import os
import tracemalloc
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from agent.clock import process_cpu_seconds
from agent.samplers import SourceUnavailableError
from agent.samplers.kmsg import KernelEvent, KmsgConfig, KmsgReader, parse_kmsg, pci_address

OFF_THE_BUS = (
    "3,900,1500000,-;NVRM: Xid (PCI:0000:3b:00): 79, pid='<unknown>', name=<unknown>, GPU has fallen off the bus."
)
GPU_79 = KernelEvent("00000000:3b:00", 79)


@pytest.mark.parametrize(
    ("line", "event", "stamp_s"),
    [
        (OFF_THE_BUS, GPU_79, 1.5),
        # As drivers before R304 write it, and with the flags of CONFIG_PRINTK_CALLER.
        (
            "4,1,2000001,-,caller=T12;NVRM: Xid (0000:03:00): 13, 0001 00000000",
            KernelEvent("00000000:03:00", 13),
            2.000001,
        ),
        (
            "4,1,0,-;NVRM: Xid (PCI:0001:AF:00.0): 31, Ch 00000010, MMU Fault",
            KernelEvent("00000001:af:00", 31),
            0,
        ),
        (
            "3,7,8000000,-;nvidia-nvswitch3: SXid (PCI:0000:c1:00.0): 28006, Non-fatal, Link 46 MC TS crumbstore MCTO",
            KernelEvent("00000000:c1:00", 28006, is_switch=True),
            8.0,
        ),
        (
            "3,7,8000000,-;nvidia-nvswitch0: SXid (PCI:0000:c1:00.0): 20034, Fatal, Link 30 LTSSM Fault Up",
            KernelEvent("00000000:c1:00", 20034, is_switch=True, is_fatal=True),
            8.0,
        ),
    ],
)
def test_a_line_gives_address_code_and_stamp(line: str, event: KernelEvent, stamp_s: float):
    assert parse_kmsg(line.encode()) == (event, stamp_s)


@pytest.mark.parametrize(
    "line",
    [
        "6,1,0,-;usb 1-1: new device",
        " SUBSYSTEM=pci",
        " NVRM: Xid (PCI:0000:3b:00): 79, a continuation line",
        "NVRM: Xid (PCI:0000:3b:00): 79, no prefix",
        "3,900,1500000,-;systemd: NVRM: Xid (PCI:0000:3b:00): 79, quoted by another",
        "3,900,1500000,-;NVRM: Xid (PCI:0000:3b:00): 123456, no such code",
        "3,900,1500000,-;NVRM: Xid (PCI:zz): 79, no address",
        "3,900,1500000,-;NVRM: Xid (PCI:0000:3b:00): ",
        "3,900,x,-;NVRM: Xid (PCI:0000:3b:00): 79, no stamp",
        "3,900",
        "",
    ],
)
def test_other_lines_give_nothing(line: str):
    assert parse_kmsg(line.encode("utf-8", "surrogateescape")) is None


def test_what_a_program_wrote_to_the_log_counts_only_where_asked():
    # Facility 1 (user), level 3: 1 * 8 + 3.
    line = OFF_THE_BUS.replace("3,900", "11,900").encode()
    assert parse_kmsg(line) is None
    assert parse_kmsg(line, kernel_only=False) == (GPU_79, 1.5)


@pytest.mark.parametrize(
    ("text", "address"),
    [
        ("00000000:3B:00.0", "00000000:3b:00"),
        ("0000:3b:00", "00000000:3b:00"),
        ("3b:00", "00000000:3b:00"),
        ("0014:00", "00000000:14:00"),
        ("00010000:01:1f.7", "00010000:01:1f"),
    ],
)
def test_addresses_of_all_writings_are_one(text: str, address: str):
    assert pci_address(text) == address


@pytest.fixture
def log(tmp_path: Path) -> Path:
    path = tmp_path / "kmsg"
    path.write_text("6,1,1000000,-;Linux version 6.8\n")
    return path


def append(path: Path, *lines: str) -> None:
    with path.open("a") as file:
        file.writelines(f"{line}\n" for line in lines)


def test_what_was_logged_before_is_told_with_its_age_and_never_counted(log: Path):
    append(log, OFF_THE_BUS, OFF_THE_BUS.replace("1500000", "2500000"))
    reader = KmsgReader(log, awake_s=lambda: 10.0)
    assert reader.open() == {GPU_79: 7.5}  # 10 - 2.5, the newer of two
    assert reader.read() == {}
    append(log, OFF_THE_BUS)
    assert reader.read() == {GPU_79: 1}
    assert reader.read() == {}
    reader.close()
    # A restart of the agent.
    again = KmsgReader(log, awake_s=lambda: 20.0)
    assert again.open() == {GPU_79: 18.5}
    assert again.read() == {}
    again.close()


def test_a_stamp_ahead_of_the_clock_is_no_age_below_0(log: Path):
    append(log, OFF_THE_BUS)
    reader = KmsgReader(log, awake_s=lambda: 1.0)
    assert reader.open() == {GPU_79: 0.0}
    reader.close()


def test_equal_and_different_lines_are_counted_each(log: Path):
    reader = KmsgReader(log)
    reader.open()
    other = OFF_THE_BUS.replace("3b", "5e")
    append(log, OFF_THE_BUS, " SUBSYSTEM=pci", other, OFF_THE_BUS)
    assert reader.read() == {GPU_79: 2, KernelEvent("00000000:5e:00", 79): 1}
    reader.close()


@pytest.fixture
def pipe(tmp_path: Path) -> Iterator[tuple[KmsgReader, Callable[[str], int]]]:
    path = tmp_path / "fifo"
    os.mkfifo(path)
    reader = KmsgReader(path)
    assert reader.open() == {}
    writer = os.open(path, os.O_WRONLY | os.O_NONBLOCK)
    yield reader, lambda text: os.write(writer, text.encode())
    os.close(writer)
    reader.close()


def test_reading_does_not_wait_and_a_line_in_two_pieces_is_one(pipe: tuple[KmsgReader, Callable[[str], int]]):
    reader, write = pipe
    assert reader.read() == {}
    write(OFF_THE_BUS[:50])
    assert reader.read() == {}
    write(OFF_THE_BUS[50:] + "\n")
    assert reader.read() == {GPU_79: 1}


def test_a_pipe_without_a_writer_gives_nothing(tmp_path: Path):
    os.mkfifo(tmp_path / "fifo")
    reader = KmsgReader(tmp_path / "fifo")
    reader.open()
    assert reader.read() == {}
    reader.close()


def test_a_line_without_end_is_not_kept(pipe: tuple[KmsgReader, Callable[[str], int]]):
    reader, write = pipe
    for _ in range(4):
        write("x" * 10_000)
        reader.read()
    write("\n" + OFF_THE_BUS + "\n")
    assert reader.read() == {GPU_79: 1}


def test_a_flood_of_100_000_equal_lines_costs_little_and_each_counts(log: Path):
    reader = KmsgReader(log, KmsgConfig(records_per_read=20_000))
    reader.open()
    append(log, *[OFF_THE_BUS] * 100_000)
    counts = []
    tracemalloc.start()
    started_s = process_cpu_seconds()
    while counts[-1:] != [0]:
        counts.append(reader.read().get(GPU_79, 0))
    spent_s = process_cpu_seconds() - started_s
    _, peak_bytes = tracemalloc.get_traced_memory()
    tracemalloc.stop()
    reader.close()
    assert sum(counts) == 100_000
    assert max(counts) < 20_200  # a read of a plain file holds up to 16 KiB of lines beyond the bound
    assert peak_bytes < 200_000
    assert spent_s < 10  # some 0.3 s, and more under tracemalloc


def test_a_flood_of_different_codes_is_bounded(log: Path):
    reader = KmsgReader(log, KmsgConfig(codes=100))
    reader.open()
    append(log, *[OFF_THE_BUS.replace(": 79", f": {code}") for code in range(1, 1001)])
    assert len(reader.read()) == 100
    assert reader.errors["too_many_codes"] == 900
    reader.close()


def test_no_log_and_no_permission_have_their_reason(tmp_path: Path, log: Path):
    with pytest.raises(SourceUnavailableError, match="is not there") as raised:
        KmsgReader(tmp_path / "none").open()
    assert raised.value.reason == "absent"
    with pytest.raises(SourceUnavailableError) as raised:
        KmsgReader(tmp_path).open()  # a folder opens, but does not read
    assert raised.value.reason == "unreadable"
    assert not KmsgReader(log).is_open
    if os.geteuid() == 0:
        pytest.skip("root may read every file")
    log.chmod(0)
    with pytest.raises(SourceUnavailableError, match="dmesg_restrict") as raised:
        KmsgReader(log).open()
    assert raised.value.reason == "no_permission"


KMSG = Path("/dev/kmsg")


def can_use_the_real_log() -> bool:
    try:
        for flags in (os.O_RDONLY | os.O_NONBLOCK, os.O_WRONLY):
            os.close(os.open(KMSG, flags))
    except OSError:
        return False
    return KMSG.is_char_device()


real_log = pytest.mark.skipif(not can_use_the_real_log(), reason="/dev/kmsg cannot be read and written here")


def write_test_line(code: int, padding: str = "") -> None:
    # Facility 1: no agent that runs on this host takes it for the kernel's.
    file = os.open(KMSG, os.O_WRONLY)
    os.write(file, f"<12>NVRM: Xid (PCI:fffe:fe:1f): {code}, a test of warpwatch, no fault{padding}\n".encode())
    os.close(file)


def ours(found: object) -> dict[int, object]:
    assert isinstance(found, dict)
    return {event.code: value for event, value in found.items() if event.address == "0000fffe:fe:1f"}


@real_log
def test_the_kernels_own_log_gives_what_is_written_to_it_and_counts_it_once():
    write_test_line(901)
    reader = KmsgReader(config=KmsgConfig(kernel_only=False))
    age_s = ours(reader.open())[901]
    assert isinstance(age_s, float)
    assert 0 <= age_s < 5  # written just now: its stamp and CLOCK_MONOTONIC agree
    assert ours(reader.read()) == {}
    write_test_line(901)
    write_test_line(902)
    write_test_line(901)
    assert ours(reader.read()) == {901: 2, 902: 1}
    assert ours(reader.read()) == {}
    reader.close()


@real_log
def test_the_kernels_own_log_hides_what_programs_wrote():
    reader = KmsgReader()
    reader.open()
    write_test_line(903)
    assert ours(reader.read()) == {}
    reader.close()


@real_log
def test_a_record_longer_than_the_buffer_is_counted_and_the_next_one_is_read():
    reader = KmsgReader(config=KmsgConfig(kernel_only=False, buffer_bytes=8))
    write_test_line(904)
    reader.open()
    # 8 bytes hold no record; the buffer has grown by 4 at each that was too long.
    assert reader.errors["short_buffer"] >= 2
    write_test_line(905)
    assert ours(reader.read()) == {905: 1}
    reader.close()


@real_log
def test_records_overwritten_unread_are_counted_as_an_overrun():
    size = len(os.environ.get("WARPWATCH_TEST_KMSG_OVERRUN", ""))
    if not size:
        pytest.skip("would push everything else out of this host's kernel log; set WARPWATCH_TEST_KMSG_OVERRUN=1")
    reader = KmsgReader(config=KmsgConfig(kernel_only=False))
    reader.open()
    for _ in range(40_000):
        write_test_line(906, padding="." * 700)
    assert ours(reader.read())[906] > 0
    assert reader.errors["overrun"] == 1
    reader.close()
