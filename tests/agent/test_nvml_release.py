"""Letting go of the driver for an operator, and asking for a new process where only that helps."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator

import pynvml
import pytest

from agent.records import GpuKey, GpuSample
from agent.samplers import SourceUnavailableError
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from agent.samplers.nvml_worker import Deadline
from tests.agent.nvml_support import KEY, UUID, at, of, sample_at
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import DRIVER_NOT_LOADED, LIB_RM_VERSION_MISMATCH, UNKNOWN, Emulator

SCRIPT = f"""\
# simulated
driver 580.95.05
gpu 0 uuid {UUID}
gpu 0 pci_bus_id 00000000:3B:00.0
gpu 0 name NVIDIA H100 80GB HBM3
@ 0
0 power_milliwatts=100000 gpm_sm_active_percent=50
"""


class Seconds:
    """A stopwatch that is set by hand."""

    def __init__(self) -> None:
        self.now = 500.0

    def __call__(self) -> float:
        return self.now


class Neighbour:
    """Somebody else who uses the library."""

    def __init__(self) -> None:
        self.calls: list[str] = []
        self.lets_go = True

    def release(self, wait_s: float) -> bool:
        self.calls.append("release")
        return self.lets_go

    def resume(self) -> None:
        self.calls.append("resume")


@pytest.fixture
def seconds() -> Seconds:
    return Seconds()


@pytest.fixture
def neighbour() -> Neighbour:
    return Neighbour()


@pytest.fixture
def sampler(seconds: Seconds, neighbour: Neighbour) -> Iterator[NvmlSampler]:
    config = NvmlConfig(deadline_s=0.5, start_deadline_s=0.5)
    sampler = NvmlSampler(config, companions=[neighbour], seconds=seconds)
    yield sampler
    sampler.close()


@pytest.fixture
def emulator(nvml_emulator: EmulatorFactory) -> Emulator:
    return nvml_emulator(SCRIPT)


def refused(sampler: NvmlSampler, second: float) -> str:
    with pytest.raises(SourceUnavailableError) as error:
        sampler.sample(at(second))
    return error.value.reason


def is_open() -> bool:
    try:
        pynvml.nvmlDeviceGetCount()
    except pynvml.NVMLError_Uninitialized:
        return False
    return True


def test_a_release_closes_the_driver_until_it_is_resumed(emulator, sampler, seconds, caplog):
    emulator.log_calls()
    for second in range(3):
        sample_at(emulator, sampler, second)
    assert is_open()
    assert not sampler.is_released
    with caplog.at_level(logging.INFO):
        sampler.release(600)
        assert refused(sampler, 3) == "released"
        assert sampler.is_released
        assert not is_open()
        assert emulator.calls().gpm_samples_alive == 0
        assert sampler.visible_gpus is None  # nobody looks: none is missing
        for _ in range(20):
            seconds.now += 10
            assert not sampler.probe()
    assert sampler.errors == {}
    messages = [record.getMessage() for record in caplog.records]
    assert len(messages) == 2, messages  # released, and why there is no source now
    sampler.resume()
    assert sampler.probe()
    assert not sampler.is_released
    assert of(sampler.sample(at(300)), GpuSample).power_watts == 100.0
    assert sampler.visible_gpus == 1


def test_a_release_ends_by_itself(emulator, sampler, seconds):
    sampler.sample(at(0))
    sampler.release(600)
    assert refused(sampler, 1) == "released"
    seconds.now += 599
    assert not sampler.probe()
    seconds.now += 1
    assert sampler.probe()
    assert of(sampler.sample(at(700)), GpuSample).power_watts == 100.0


def test_others_let_go_before_and_go_on_after(emulator, sampler, neighbour):
    sampler.sample(at(0))
    assert neighbour.calls == ["resume"]
    sampler.release(600)
    refused(sampler, 1)
    assert neighbour.calls == ["resume", "release"]
    sampler.resume()
    sampler.sample(at(2))
    assert neighbour.calls == ["resume", "release", "resume"]


def test_nothing_is_closed_while_another_holds_it(emulator, sampler, neighbour):
    sampler.sample(at(0))
    neighbour.lets_go = False
    sampler.release(600)
    assert refused(sampler, 1) == "releasing"
    assert sampler.waits_for == ("another thread has not let go of it",)
    assert not sampler.is_released
    assert is_open()
    neighbour.lets_go = True
    assert not sampler.probe()
    assert sampler.is_released
    assert sampler.waits_for == ()
    assert not is_open()


def test_a_release_that_never_came_about_leaves_nobody_waiting(emulator, sampler, neighbour):
    sampler.sample(at(0))
    neighbour.lets_go = False
    sampler.release(600)
    assert refused(sampler, 1) == "releasing"
    sampler.resume()
    assert of(sampler.sample(at(2)), GpuSample).power_watts == 100.0
    assert neighbour.calls == ["resume", "release", "resume"]
    assert sampler.waits_for == ()
    sampler.sample(at(3))
    assert neighbour.calls == ["resume", "release", "resume"]


def test_a_shutdown_that_hangs_when_it_is_resumed_is_followed_by_a_start(emulator, sampler):
    sampler.sample(at(0))
    emulator.hang_system(60, call="nvmlShutdown")
    sampler.release(600)
    assert refused(sampler, 1) == "releasing"
    sampler.resume()
    emulator.clear()
    wait_until(sampler.probe)
    assert of(sampler.sample(at(3)), GpuSample).power_watts == 100.0


def test_nothing_is_closed_under_a_call_that_hangs(emulator, sampler, caplog):
    sampler.sample(at(0))
    emulator.hang(60, gpu=0)
    sampler.sample(at(1))
    sampler.release(600)
    with pytest.raises(SourceUnavailableError, match=rf"GPU 0 \({UUID}\) hangs in a driver call") as error:
        sampler.sample(at(2))
    assert error.value.reason == "releasing"
    assert sampler.waits_for[0] == f"GPU 0 ({UUID}) hangs in a driver call"
    assert sampler.is_held
    assert sampler.visible_gpus is None
    assert is_open()
    assert not sampler.is_released
    # Said once, and no fault of the driver's: nobody reads it now.
    caplog.clear()
    for _ in range(5):
        assert not sampler.probe()
    assert len(caplog.records) == 1
    assert "cannot be yet" in caplog.records[0].getMessage()
    assert sampler.errors == {"hung": 1}
    emulator.clear()
    wait_until(lambda: not sampler.probe() and sampler.is_released)
    assert not is_open()


def wait_until(condition: Callable[[], bool]) -> None:
    deadline = Deadline(5.0)
    while not condition():
        assert deadline.left_s() > 0


@pytest.mark.parametrize("call", ["nvmlInit", "nvmlShutdown"])
def test_a_start_or_shutdown_that_returns_late_is_released_all_the_same(emulator, sampler, call):
    if call == "nvmlShutdown":
        sampler.sample(at(0))
    emulator.hang_system(60, call=call)
    if call == "nvmlInit":
        with pytest.raises(SourceUnavailableError):
            sampler.sample(at(0))
    sampler.release(600)
    assert refused(sampler, 1) == "releasing"
    assert sampler.waits_for == ("a call that concerns all GPUs does not return",)
    emulator.clear()
    wait_until(lambda: not sampler.probe() and sampler.is_released)
    assert not is_open()
    sampler.resume()
    assert sampler.probe()
    assert of(sampler.sample(at(2)), GpuSample).power_watts == 100.0


def test_a_release_of_what_is_not_open_is_kept(emulator, sampler):
    sampler.release(600)
    assert not sampler.probe()
    assert sampler.is_released
    sampler.resume()
    assert sampler.probe()


def test_a_gpu_keeps_its_number_over_a_release(nvml_emulator, sampler):
    emulator = nvml_emulator(SCRIPT + "1 power_milliwatts=7000\n")
    before = {record.key for record in sampler.sample(at(0))}
    sampler.release(600)
    refused(sampler, 1)
    emulator.vanish(0)
    sampler.resume()
    after = {record.key for record in sampler.sample(at(2))}
    assert after == before


@pytest.mark.parametrize(
    ("code", "reason"), [(LIB_RM_VERSION_MISMATCH, "lib_rm_version_mismatch"), (UNKNOWN, "unknown")]
)
def test_a_new_process_is_asked_for_after_five_failed_starts(emulator, sampler, caplog, code, reason):
    emulator.fail_system(code, call="nvmlInit")
    for _ in range(4):
        assert not sampler.probe()
        assert sampler.wants_restart is None
    assert not sampler.probe()
    assert sampler.wants_restart == reason
    assert [record.getMessage() for record in caplog.records if record.levelno == logging.ERROR] == [
        f"NVML cannot be started ({reason}, tried 5 times): this process has to end"
    ]
    assert not sampler.probe()
    assert sampler.errors == {reason: 6}
    emulator.clear()
    assert sampler.probe()  # it came back all the same
    assert sampler.wants_restart is None


def test_a_driver_upgraded_under_a_running_agent_asks_for_a_new_process(emulator, sampler):
    sampler.sample(at(0))
    emulator.reload_driver("590.44.01")
    sampler.sample(at(1))
    assert refused(sampler, 2) == "lib_rm_version_mismatch"
    for _ in range(4):
        assert not sampler.probe()
    assert sampler.wants_restart == "lib_rm_version_mismatch"


def test_a_container_that_lost_its_devices_asks_for_a_new_process(emulator, sampler):
    sampler.sample(at(0))
    emulator.fail(UNKNOWN)
    emulator.fail_system(UNKNOWN)
    for second in range(1, 60):
        try:
            sampler.sample(at(second))
        except SourceUnavailableError:
            break
    while sampler.wants_restart is None and sampler.errors["unknown"] < 100:
        sampler.probe()
    assert sampler.wants_restart == "unknown"


def test_a_driver_that_is_not_there_never_asks_for_a_new_process(emulator, sampler):
    emulator.fail_system(DRIVER_NOT_LOADED, call="nvmlInit")
    for _ in range(20):
        assert not sampler.probe()
    assert sampler.wants_restart is None


@pytest.mark.parametrize("address", ["00000000:3B:00.0", "0000:3b:00.0", "0000:3b:00", "3b:00.0", "00000000:3b:00"])
def test_a_gpu_is_found_by_its_pci_address_in_any_notation(emulator, sampler, address):
    sampler.sample(at(0))
    assert sampler.key_of(pci_bus_id=address) == KEY


def test_a_gpu_that_was_never_seen_has_no_key(emulator, sampler):
    assert sampler.key_of(uuid=UUID) is None
    sampler.sample(at(0))
    assert sampler.key_of(uuid=UUID) == GpuKey(0, UUID)
    for address in ("0000:3c:00", "0001:3b:00", "", "no address", None):
        assert sampler.key_of(pci_bus_id=address) is None
