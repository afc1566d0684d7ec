"""How the NVML sampler lives with lost, hung, vanishing and late GPUs; real calls into the emulator's library."""

from __future__ import annotations

import itertools
import threading
from collections.abc import Iterator, Sequence

import pynvml
import pytest

from agent.clock import Instant, stopwatch
from agent.records import GpuInfo, GpuSample, GpuSlowSample, GpuState, Record
from agent.samplers import SourceUnavailableError
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from tests.conftest import EmulatorFactory
from tests.nvml_emulator.emulator import (
    DRIVER_NOT_LOADED,
    GPU_IS_LOST,
    INVALID_ARGUMENT,
    LIB_RM_VERSION_MISMATCH,
    RESET_REQUIRED,
    TIMEOUT,
    UNINITIALIZED,
    UNKNOWN,
    Emulator,
)

DEADLINE_S = 0.8


def script(gpus: int, milliwatts: int = 100_000) -> str:
    """GPU n draws 100 + n watts."""
    values = "utilization_gpu_percent=5 memory_total_bytes=1000 sm_clock_megahertz=1500 temperature_celsius=50"
    return "@ 0\n" + "".join(f"{n} power_milliwatts={milliwatts + 1000 * n} {values}\n" for n in range(gpus))


def shall_not_restart(emulator: Emulator) -> None:
    """Let every GPU show 900 watts and more once the library was shut down and started anew."""
    emulator.script.write_text(script(16, 900_000), encoding="utf-8")


@pytest.fixture
def sampler() -> Iterator[NvmlSampler]:
    # Without the fast channel: how often a call is made, and which, is part of what is tested.
    sampler = NvmlSampler(
        NvmlConfig(fast_hertz=0, tick_wait_s=DEADLINE_S, deadline_s=DEADLINE_S, start_deadline_s=DEADLINE_S)
    )
    yield sampler
    sampler.close()


def at(seconds: float) -> Instant:
    return Instant(seconds, 1.8e9 + seconds)


def until(seconds: float) -> Iterator[int]:
    """Count for so long, in real time: a hung call returns when its thread is given the processor."""
    begin = stopwatch()
    for number in itertools.count():
        if stopwatch() - begin > seconds:
            return
        yield number


def states(records: Sequence[Record]) -> dict[int, str]:
    return {record.key.gpu: record.state for record in records if isinstance(record, GpuState)}


def watts(records: Sequence[Record]) -> dict[int, float | None]:
    return {record.key.gpu: record.power_watts for record in records if isinstance(record, GpuSample)}


def test_sixteen_gpus_each_with_its_own_numbers(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    nvml_emulator(script(16))
    records = sampler.sample(at(0))
    assert watts(records) == {n: 100.0 + n for n in range(16)}
    assert [record.key.gpu for record in records if isinstance(record, GpuInfo)] == list(range(16))
    assert len({record.pci_bus_id for record in records if isinstance(record, GpuInfo)}) == 16
    assert (sampler.expected_gpus, sampler.visible_gpus) == (16, 16)


def test_a_lost_gpu_is_reported_every_tick_and_the_others_go_on(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(3))
    sampler.sample(at(0))
    emulator.fail(GPU_IS_LOST, gpu=1)
    for second in (1, 2, 3):
        records = sampler.sample(at(second))
        assert states(records) == {0: "ok", 1: "lost", 2: "ok"}
        assert watts(records) == {0: 100.0, 2: 102.0}
    assert sampler.errors == {"gpu_is_lost": 1}  # a lost GPU is not called again
    assert (sampler.expected_gpus, sampler.visible_gpus) == (3, 2)


def test_a_lost_gpu_is_still_named(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(2))
    infos = [record for record in sampler.sample(at(0)) if isinstance(record, GpuInfo)]
    emulator.fail(GPU_IS_LOST, gpu=1)
    for second in range(1, 60):
        sampler.sample(at(second))
    named = [record for record in sampler.sample(at(60)) if isinstance(record, GpuInfo) and record.key.gpu == 1]
    assert [(record.model_name, record.pci_bus_id) for record in named] == [(infos[1].model_name, infos[1].pci_bus_id)]


def test_a_lost_gpu_comes_back_with_its_number_after_a_growing_pause(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.fail(GPU_IS_LOST, gpu=0)
    # Lost at 1 s: the library is started anew at 1 + 10 s, in vain, and then at 11 + 20 s.
    tried = []
    for second in range(1, 40):
        before = sampler.errors.get("gpu_is_lost", 0)
        assert states(sampler.sample(at(second))) == {0: "lost", 1: "ok"}
        if sampler.errors["gpu_is_lost"] > before:
            tried.append(second)
    assert tried == [1, 11, 31]
    emulator.clear()
    back = next(second for second in range(40, 400) if states(sampler.sample(at(second)))[0] == "ok")
    assert back == 71  # 31 + 40
    records = sampler.sample(at(back + 1))
    assert watts(records) == {0: 100.0, 1: 101.0}
    assert sampler.visible_gpus == 2


def test_a_gpu_that_needs_a_reset_says_so(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.fail(RESET_REQUIRED, gpu=1)
    assert states(sampler.sample(at(1))) == {0: "ok", 1: "reset_required"}
    assert sampler.errors["reset_required"] > 0
    emulator.clear()
    assert states(sampler.sample(at(2))) == {0: "ok", 1: "ok"}


@pytest.mark.parametrize(("code", "state"), [(UNKNOWN, "lost"), (TIMEOUT, "hung")])
def test_a_gpu_that_answers_nothing_but_errors_is_not_ok_for_long(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler, code: int, state: str
) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.fail(code, gpu=1)
    ticks = [sampler.sample(at(second)) for second in (1, 2, 3)]
    assert [states(records)[1] for records in ticks] == ["ok", "ok", state]
    assert watts(ticks[-1]) == {0: 100.0}  # no sample of a GPU that is not there
    emulator.clear()
    assert states(sampler.sample(at(20)))[1] == "ok"


def test_a_hung_gpu_costs_the_others_one_deadline_and_no_more(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(3))
    sampler.sample(at(0))
    emulator.hang(60, gpu=1, call="nvmlDeviceGetPowerUsage")
    begin = stopwatch()
    records = sampler.sample(at(1))
    assert DEADLINE_S <= stopwatch() - begin < DEADLINE_S + 2
    assert states(records) == {0: "ok", 1: "hung", 2: "ok"}
    assert watts(records) == {0: 100.0, 2: 102.0}
    for second in (2, 3, 4):
        begin = stopwatch()
        assert states(sampler.sample(at(second))) == {0: "ok", 1: "hung", 2: "ok"}
        assert stopwatch() - begin < DEADLINE_S / 2
    assert sampler.errors == {"hung": 1}
    assert sampler.visible_gpus == 2  # enumerated, but nobody could read it
    emulator.clear()
    ticks = (states(sampler.sample(at(5 + number / 1000))) for number in until(10))
    assert next(seen for seen in ticks if seen[1] != "hung") == {0: "ok", 1: "ok", 2: "ok"}
    assert sampler.errors == {"hung": 1}
    assert sampler.visible_gpus == 3


def test_a_gpu_that_hangs_while_it_is_found_keeps_no_other_from_being_found(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(3))
    emulator.hang(60, gpu=0, call="nvmlDeviceGetHandleByIndex")
    assert watts(sampler.sample(at(0))) == {1: 101.0, 2: 102.0}
    assert (sampler.expected_gpus, sampler.visible_gpus) == (3, 2)
    emulator.clear()
    ticks = (watts(sampler.sample(at(1 + number / 1000))) for number in until(10))
    assert next(seen for seen in ticks if 0 in seen) == {0: 100.0, 1: 101.0, 2: 102.0}
    shall_not_restart(emulator)  # it is all here now
    for second in range(20, 60):
        assert watts(sampler.sample(at(second))) == {0: 100.0, 1: 101.0, 2: 102.0}


def test_the_library_is_not_shut_down_under_a_call_that_hangs(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(3))
    sampler.sample(at(0))
    emulator.hang(60, gpu=1, call="nvmlDeviceGetPowerUsage")
    sampler.sample(at(1))
    shall_not_restart(emulator)
    emulator.fail(GPU_IS_LOST, gpu=0)
    assert states(sampler.sample(at(2))) == {0: "lost", 1: "hung", 2: "ok"}
    emulator.clear("fail")
    # At 12 s the GPUs are enumerated anew, by one more start and no shutdown; the hung one stays with its thread.
    records = sampler.sample(at(12))
    assert states(records) == {0: "ok", 1: "hung", 2: "ok"}
    assert watts(records) == {0: 100.0, 2: 102.0}
    emulator.clear()
    ticks = (watts(sampler.sample(at(13 + number / 1000))) for number in until(10))
    assert next(seen for seen in ticks if 1 in seen) == {0: 100.0, 1: 101.0, 2: 102.0}
    # What was started twice is shut down twice.
    sampler.close()
    assert watts(sampler.sample(at(30)))[0] == 900.0


def test_a_driver_that_hangs_at_the_start_is_waited_for_once(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(1))
    emulator.hang_system(60, call="nvmlInit")
    assert not sampler.probe()
    begin = stopwatch()
    with pytest.raises(SourceUnavailableError) as error:
        sampler.sample(at(1))
    assert error.value.reason == "hung"
    assert stopwatch() - begin < DEADLINE_S / 2
    emulator.clear()
    assert any(sampler.probe() for _ in until(10))
    assert watts(sampler.sample(at(2))) == {0: 100.0}


def test_a_count_that_hangs_stops_nothing(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.hang_system(60, call="nvmlDeviceGetCount")
    assert watts(sampler.sample(at(11))) == {0: 100.0, 1: 101.0}
    begin = stopwatch()
    assert watts(sampler.sample(at(22))) == {0: 100.0, 1: 101.0}
    assert stopwatch() - begin < DEADLINE_S / 2
    assert sampler.errors == {"hung": 1}
    # Counting goes on when the call has returned.
    emulator.clear()
    emulator.vanish(0)
    ticks = (states(sampler.sample(at(40 + number))) for number in until(10))
    assert next(seen for seen in ticks if seen[0] != "ok") == {0: "lost", 1: "ok"}


def test_a_gpu_vanishes_and_returns_and_every_gpu_keeps_its_number(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(3))
    uuids = {record.key.gpu: record.key.uuid for record in sampler.sample(at(0))}
    emulator.vanish(1)
    seen = [sampler.sample(at(second)) for second in range(1, 15)]
    assert states(seen[-1]) == {0: "ok", 1: "lost", 2: "ok"}
    assert watts(seen[-1]) == {0: 100.0, 2: 102.0}  # GPU 2 is at position 1 of the driver now
    assert (sampler.expected_gpus, sampler.visible_gpus) == (3, 2)
    emulator.clear()
    seen = [sampler.sample(at(second)) for second in range(15, 100)]
    assert states(seen[-1]) == {0: "ok", 1: "ok", 2: "ok"}
    assert watts(seen[-1]) == {0: 100.0, 1: 101.0, 2: 102.0}
    assert {record.key.gpu: record.key.uuid for record in seen[-1]} == uuids
    assert sampler.errors == {}


def test_a_gpu_seen_later_takes_a_free_number(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(3))
    emulator.vanish(0)
    # At first the driver's positions 0 and 1 are GPUs 1 and 2 of the script.
    assert watts(sampler.sample(at(0))) == {0: 101.0, 1: 102.0}
    emulator.clear()
    emulator.fail(UNINITIALIZED, gpu=1)  # makes the sampler enumerate anew
    sampler.sample(at(1))
    emulator.clear()
    assert watts(sampler.sample(at(2))) == {0: 101.0, 1: 102.0, 2: 100.0}
    assert sampler.expected_gpus == 3


@pytest.mark.parametrize("code", [UNINITIALIZED, INVALID_ARGUMENT])
def test_a_void_handle_is_renewed_in_the_next_tick(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler, code: int
) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.fail(code)
    sampler.sample(at(1))
    emulator.clear()
    records = sampler.sample(at(2))
    assert states(records) == {0: "ok", 1: "ok"}
    assert watts(records) == {0: 100.0, 1: 101.0}
    assert {record.key.gpu for record in records if isinstance(record, GpuSlowSample)} == {0, 1}


@pytest.mark.parametrize(
    ("code", "reason", "is_fault"),
    [
        (DRIVER_NOT_LOADED, "driver_not_loaded", False),
        (LIB_RM_VERSION_MISMATCH, "lib_rm_version_mismatch", True),
        (UNKNOWN, "unknown", True),
        (23, "other", True),
    ],
)
def test_a_driver_that_cannot_be_started_has_a_reason_and_may_come_later(
    nvml_emulator: EmulatorFactory,
    sampler: NvmlSampler,
    caplog: pytest.LogCaptureFixture,
    code: int,
    reason: str,
    is_fault: bool,
) -> None:
    emulator = nvml_emulator(script(1))
    emulator.fail_system(code, call="nvmlInit")
    assert (sampler.probe(), sampler.probe()) == (False, False)
    assert sampler.errors == ({reason: 2} if is_fault else {})
    with pytest.raises(SourceUnavailableError) as error:
        sampler.sample(at(0))
    assert error.value.reason == reason
    assert (sampler.expected_gpus, sampler.visible_gpus) == (0, 0)
    emulator.clear()
    assert sampler.probe()
    assert watts(sampler.sample(at(1))) == {0: 100.0}
    warnings = [record.getMessage() for record in caplog.records if record.levelname == "WARNING"]
    assert warnings == ([str(error.value)] if is_fault else [])


def test_a_driver_that_starts_but_cannot_count_is_let_go(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(1))
    emulator.fail_system(UNKNOWN, call="nvmlDeviceGetCount")
    assert not sampler.probe()
    emulator.clear()
    with pytest.raises(pynvml.NVMLError_Uninitialized):
        pynvml.nvmlDeviceGetCount()
    assert watts(sampler.sample(at(0))) == {0: 100.0}


def test_a_driver_without_gpus_is_no_source(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(1))
    emulator.vanish(0)
    assert not sampler.probe()
    with pytest.raises(SourceUnavailableError) as error:
        sampler.sample(at(0))
    assert error.value.reason == "no_gpus"
    emulator.clear()
    assert watts(sampler.sample(at(1))) == {0: 100.0}


def test_a_driver_that_is_unloaded_is_a_lost_source_and_comes_back(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.fail(UNINITIALIZED)
    emulator.fail_system(DRIVER_NOT_LOADED)
    sampler.sample(at(1))
    with pytest.raises(SourceUnavailableError) as error:
        sampler.sample(at(2))
    assert error.value.reason == "driver_not_loaded"
    assert (sampler.expected_gpus, sampler.visible_gpus) == (2, 0)
    assert not sampler.probe()
    emulator.clear()
    assert sampler.probe()
    assert watts(sampler.sample(at(3))) == {0: 100.0, 1: 101.0}


def test_close_ends_the_threads_and_lets_the_driver_go(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    threads = [thread for thread in threading.enumerate() if thread.name.startswith("nvml-")]
    assert len(threads) >= 3
    sampler.close()
    sampler.close()
    for thread in threads:
        thread.join(5)
        assert not thread.is_alive()
    # The library reads its script again only after the last shutdown.
    emulator.script.write_text(script(1), encoding="utf-8")
    assert watts(sampler.sample(at(1))) == {0: 100.0}


def test_close_does_not_wait_for_a_hung_gpu(nvml_emulator: EmulatorFactory, sampler: NvmlSampler) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.hang(60, gpu=1)
    sampler.sample(at(1))
    begin = stopwatch()
    sampler.close()
    assert stopwatch() - begin < DEADLINE_S / 2
    assert pynvml.nvmlDeviceGetCount() == 2  # not shut down under the call


def test_hang_after_hang_parks_no_more_than_one_thread_for_each_gpu(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(2))
    sampler.sample(at(0))
    emulator.hang(600, gpu=1, call="nvmlDeviceGetPowerUsage")
    sampler.sample(at(1))
    for number in range(5):
        # The library is lost and comes back while the call still hangs.
        emulator.fail(UNINITIALIZED, gpu=0)
        emulator.fail_system(UNKNOWN, call="nvmlInit")
        for second in range(2 + 1000 * number, 500 + 1000 * number, 10):
            try:
                sampler.sample(at(second))
            except SourceUnavailableError:
                break
        emulator.clear("fail")
        assert sampler.probe()
        assert states(sampler.sample(at(500 + 1000 * number)))[0] == "ok"
    threads = [thread for thread in threading.enumerate() if thread.name == "nvml-gpu-1"]
    assert len([thread for thread in threads if thread.is_alive()]) == 1
    assert sampler.parked_threads == 1
    emulator.clear()
    ticks = (states(sampler.sample(at(9000 + number / 1000))) for number in until(10))
    assert next(seen for seen in ticks if seen.get(1) != "hung") == {0: "ok", 1: "ok"}
    assert sampler.parked_threads == 0


def test_gpus_whose_driver_is_slow_are_waited_for_together(
    nvml_emulator: EmulatorFactory, sampler: NvmlSampler
) -> None:
    emulator = nvml_emulator(script(6))
    sampler.sample(at(0))
    emulator.latency(0.1, call="nvmlDeviceGetPowerUsage")
    begin = stopwatch()
    assert watts(sampler.sample(at(1))) == {n: 100.0 + n for n in range(6)}
    # 0.1 s after the last one is called, which is 5 x 0.02 s after the first: not 6 x 0.1 s.
    assert 0.1 <= stopwatch() - begin < 0.5
