"""GPUs that cannot be attached, and the state of GPUs that are not read; real calls into the emulator's library."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence

import pytest

from agent.records import GpuInfo, GpuKey, GpuState, Record
from agent.samplers import SourceUnavailableError
from agent.samplers.nvml import NvmlSampler
from tests.agent.nvml_support import WITHOUT_FAST, at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import (
    GPU_IS_LOST,
    RESET_REQUIRED,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    Emulator,
)

UUIDS = [f"GPU-{n}0000000-1111-4222-8333-444444444444" for n in range(3)]
SCRIPT = "\n".join(
    [
        "# simulated",
        *(f"gpu {n} uuid {uuid}\ngpu {n} pci_bus_id 00000000:{n + 1}B:00.0" for n, uuid in enumerate(UUIDS)),
        "@ 0",
        *(f"{n} power_milliwatts=100000" for n in range(3)),
        "",
    ]
)
KEYS = [GpuKey(n, uuid) for n, uuid in enumerate(UUIDS)]


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    sampler = NvmlSampler(WITHOUT_FAST)
    yield sampler
    sampler.close()


def states(records: Sequence[Record]) -> dict[GpuKey, str]:
    found = [record for record in records if isinstance(record, GpuState)]
    assert len({record.key for record in found}) == len(found)
    return {record.key: record.state for record in found}


def infos(records: Sequence[Record]) -> dict[GpuKey, str | None]:
    return {record.key: record.pci_bus_id for record in records if isinstance(record, GpuInfo)}


def warnings(caplog: pytest.LogCaptureFixture) -> list[str]:
    return [record.getMessage() for record in caplog.records if record.levelno >= logging.WARNING]


@pytest.mark.parametrize(
    ("code", "words"),
    [(RESET_REQUIRED, "NVML error 16 (reset_required)"), (GPU_IS_LOST, "NVML error 15 (gpu_is_lost)")],
)
def test_a_gpu_of_which_nothing_can_be_read_is_logged_once_and_counted(emulator, sampler, caplog, code, words):
    emulator.fail(code, gpu=2)
    for second in range(9):
        assert states(sampler.sample(at(second))) == {KEYS[0]: "ok", KEYS[1]: "ok"}
    assert (sampler.expected_gpus, sampler.visible_gpus) == (3, 2)
    reason = "reset_required" if code == RESET_REQUIRED else "gpu_is_lost"
    assert sampler.errors == {reason: 1}
    line = (
        "the GPU at position 2 of the driver (UUID not readable, PCI address not readable) cannot be attached: "
        f"{words}; see dmesg"
    )
    assert warnings(caplog) == [line]
    for second in range(9, 60):  # the starts at 10 and 30 s are in vain
        sampler.sample(at(second))
    assert sampler.errors == {reason: 3}
    assert warnings(caplog) == [line]
    emulator.clear()
    assert states(sampler.sample(at(80))) == dict.fromkeys(KEYS, "ok")
    assert sampler.visible_gpus == 3


def test_a_gpu_that_tells_its_uuid_and_fails_then_is_named_with_its_state(emulator, sampler, caplog):
    emulator.fail(GPU_IS_LOST, gpu=1, call="nvmlDeviceGetMinorNumber")
    records = sampler.sample(at(0))
    assert states(records) == {KEYS[0]: "ok", KEYS[1]: "lost", KEYS[2]: "ok"}
    assert infos(records)[KEYS[1]] == "00000000:2B:00.0"
    (line,) = warnings(caplog)
    assert "position 1 of the driver (UUID GPU-10000000-1111-4222-8333-444444444444, PCI address 00000000:2B:00.0)" in (
        line
    )
    assert states(sampler.sample(at(1)))[KEYS[1]] == "lost"
    assert sampler.visible_gpus == 2
    assert sampler.addresses()[UUIDS[1]] == (KEYS[1], "00000000:2B:00.0")  # its XIDs are known by the address
    emulator.clear()
    assert states(sampler.sample(at(12))) == dict.fromkeys(KEYS, "ok")


def test_a_gpu_that_tells_its_address_alone_is_named_by_it_and_has_its_number_later(emulator, sampler, caplog):
    emulator.fail(RESET_REQUIRED, gpu=0, call="nvmlDeviceGetUUID")
    records = sampler.sample(at(0))
    assert states(records) == {GpuKey(0): "reset_required", KEYS[1]: "ok", KEYS[2]: "ok"}
    assert infos(records)[GpuKey(0)] == "00000000:1B:00.0"
    assert "UUID not readable, PCI address 00000000:1B:00.0" in warnings(caplog)[0]
    assert len(warnings(caplog)) == 1
    assert sampler.visible_gpus == 2
    assert set(sampler.addresses()) == set(UUIDS[1:])
    emulator.clear()
    assert states(sampler.sample(at(12))) == dict.fromkeys(KEYS, "ok")


def test_a_known_gpu_is_found_by_its_address(emulator, sampler):
    sampler.sample(at(0))
    emulator.fail(RESET_REQUIRED, gpu=2, call="nvmlDeviceGetUUID")
    emulator.fail(UNINITIALIZED, gpu=1)  # has the library started anew
    sampler.sample(at(1))
    emulator.clear("fail", gpu=1)
    assert states(sampler.sample(at(2))) == {KEYS[0]: "ok", KEYS[1]: "ok", KEYS[2]: "reset_required"}


@pytest.mark.parametrize(("code", "state"), [(RESET_REQUIRED, "reset_required"), (TIMEOUT, "hung"), (UNKNOWN, "lost")])
def test_the_loss_of_another_gpu_leaves_the_state_as_it_is(emulator, sampler, caplog, code, state):
    sampler.sample(at(0))
    emulator.fail(code, gpu=2)
    for second in (1, 2, 3):
        records = sampler.sample(at(second))
    assert states(records)[KEYS[2]] == state
    emulator.fail(GPU_IS_LOST, gpu=0)
    errors = sampler.errors
    for second in range(4, 60):
        assert states(sampler.sample(at(second))) == {KEYS[0]: "lost", KEYS[1]: "ok", KEYS[2]: state}
    assert sampler.errors["gpu_is_lost"] > errors.get("gpu_is_lost", 0) + 1  # the library was started anew
    assert warnings(caplog) == [f"GPU 2 ({UUIDS[2]}) is {state}, was ok", f"GPU 0 ({UUIDS[0]}) is lost, was ok"]
    assert sampler.visible_gpus == 1  # what needs a reset has not been read for a while either
    emulator.clear()
    # It comes back, though nothing was read of it but the old state.
    assert states(sampler.sample(at(400))) == dict.fromkeys(KEYS, "ok")


def test_a_gpu_whose_reset_failed_while_the_driver_was_released_still_needs_one(emulator, sampler):
    sampler.sample(at(0))
    emulator.fail(RESET_REQUIRED, gpu=1)
    sampler.sample(at(1))
    sampler.release(600)
    with pytest.raises(SourceUnavailableError):
        sampler.sample(at(2))
    sampler.resume()
    assert states(sampler.sample(at(3))) == {KEYS[0]: "ok", KEYS[1]: "reset_required", KEYS[2]: "ok"}


def test_a_gpu_that_vanishes_is_lost_whatever_was_wrong_with_it(emulator, sampler):
    sampler.sample(at(0))
    emulator.fail(RESET_REQUIRED, gpu=1)
    sampler.sample(at(1))
    emulator.vanish(1)
    for second in range(2, 25):
        records = sampler.sample(at(second))
    assert states(records) == {KEYS[0]: "ok", KEYS[1]: "lost", KEYS[2]: "ok"}


def test_no_gpu_is_visible_while_the_driver_hangs(emulator, sampler):
    sampler.sample(at(0))
    assert sampler.visible_gpus == 3
    emulator.hang(60)
    assert set(states(sampler.sample(at(1))).values()) == {"hung"}
    assert sampler.visible_gpus == 0


def test_no_gpu_is_visible_while_the_start_of_the_library_hangs(emulator, sampler):
    sampler.sample(at(0))
    emulator.fail(UNINITIALIZED)
    emulator.hang_system(60, call="nvmlInit")
    sampler.sample(at(1))
    with pytest.raises(SourceUnavailableError) as error:
        sampler.sample(at(2))
    assert error.value.reason == "hung"
    assert (sampler.expected_gpus, sampler.visible_gpus) == (3, 0)
    assert not sampler.probe()
    assert sampler.visible_gpus == 0


def test_a_gpu_that_hangs_at_the_start_is_logged(emulator, sampler, caplog):
    emulator.hang(60, gpu=1, call="nvmlDeviceGetUUID")
    for second in range(3):
        sampler.sample(at(second))
    assert warnings(caplog) == ["the GPU at position 1 of the driver does not answer and is not named yet"]
    assert (sampler.expected_gpus, sampler.visible_gpus) == (3, 2)
