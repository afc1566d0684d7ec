"""One fault of the driver after the other against one running agent: what /metrics shows during and after each.

FAULTS of fault_table.py is the matrix. While a fault lasts, what cannot be known is absent and counted, the other GPUs
are fresh and right, and the page answers; when it is over, every value is right again within a period and the
documented pause of a new start. All the while a second client scrapes and keeps every counter: none may fall but where
the driver was loaded anew. A library of another version than the driver ends the agent: test_driver.py.
"""

from __future__ import annotations

import re
import time
from collections.abc import Iterable, Mapping

import pytest

from tests.end_to_end.fault_node import (
    CONFIG,
    CORE,
    COUNTERS,
    GPUS,
    OF_THE_DRIVER,
    PERIOD_S,
    RESTART_S,
    SHOWN_S,
    SLOW,
    SLOW_STALE_S,
    Node,
    Watcher,
    get,
    is_counted,
    script,
)
from tests.end_to_end.fault_table import EVERY_GPU, FAULTS, Fault, fail
from tests.end_to_end.programs import Agent, wait_for
from tests.nvml_emulator.emulator import DRIVER_NOT_LOADED, FUNCTION_NOT_FOUND, GPU_IS_LOST, Emulator

pytestmark = pytest.mark.end_to_end


@pytest.fixture(scope="module")
def node(nvml_emulator_library, tmp_path_factory):
    folder = tmp_path_factory.mktemp("matrix")
    emulator = Emulator(folder, script())
    with Agent(folder, config=CONFIG, environment=emulator.environment()) as agent:
        agent.wait_until_ready()
        watcher = Watcher(agent)
        node = Node(agent, emulator, watcher)
        joules = wait_for("energy", lambda: get(agent.metrics(), "energy", 0))
        node.zero_s = time.time() - joules / COUNTERS["energy"][2](0)
        watcher.start()
        node.wait_until_right(10)
        node.threads_at_start = node.threads()
        yield node
        watcher.end()


@pytest.fixture
def calm(node):
    """Give the node without faults, and put it right again after a test that failed."""
    node.is_right = False
    yield node
    if not node.is_right:
        node.emulator.clear()
        node.wait_until_right(40)


@pytest.mark.parametrize("name", FAULTS)
def test_fault(calm, name):
    meet(calm, FAULTS[name])


def meet(node: Node, fault: Fault) -> None:
    """Switch a fault on, check what shows, switch it off, and check that all is right again."""
    before = node.agent.metrics()
    others = tuple(gpu for gpu in EVERY_GPU if gpu not in fault.gpus)

    def problems(metrics: Mapping[str, float]) -> list[str]:
        found = node.wrong(metrics, others)
        for gpu in fault.gpus:
            found += [f"{item} of GPU {gpu} is there" for item in fault.absent if get(metrics, item, gpu) is not None]
            state = [
                word
                for word in ("ok", "lost", "hung", "reset_required")
                for series, value in metrics.items()
                if value == 1 and re.match(rf'warpwatch_gpu_state{{gpu="{gpu}",.*state="{word}"', series)
            ]
            found += [] if state == [fault.state] else [f"GPU {gpu} is {state}, not {fault.state}"]
            if fault.state == "ok":
                found += node.wrong(metrics, [gpu], but=fault.absent)
        found += [f"{r} is not counted" for r in fault.reasons if not is_counted(before, metrics, r)]
        if metrics.get('warpwatch_sampler_success{sampler="nvml"}') != float(fault.is_up):
            found.append("the sampler's success")
        if metrics.get("warpwatch_gpus_expected") != GPUS:
            found.append("GPUs expected")
        if fault.state in ("ok", "lost") and metrics.get("warpwatch_gpus_visible") != fault.visible:
            found.append(f"{metrics.get('warpwatch_gpus_visible')} GPUs visible")

        return found + fault.also(before, metrics)

    fault.begin(node.emulator)
    node.expect(problems, fault.shown_s)
    # It stays so: nothing old comes back, and the others go on.
    node.ticks(1, others[0] if others else None)
    node.expect(problems, 2.5)
    if fault.is_remembered:
        # Found anew, the GPU is asked again: lose it once.
        node.emulator.clear()
        node.emulator.fail(GPU_IS_LOST, gpu=1)
        node.expect(lambda metrics: [] if get(metrics, "state", 1) == 0 else ["GPU 1 is not lost"])
    node.emulator.clear()
    node.wait_until_right(PERIOD_S + fault.back_s + (RESTART_S if fault.restarts or fault.is_remembered else 0))
    node.is_calm()


def test_a_driver_without_the_newest_process_list_is_asked_for_the_one_before(calm):
    calm.emulator.log_calls()
    without = fail(FUNCTION_NOT_FOUND, "nvmlDeviceGetComputeRunningProcesses_v3")

    def problems(_before: Mapping[str, float], _metrics: Mapping[str, float]) -> list[str]:
        old = calm.emulator.calls().of("nvmlDeviceGetComputeRunningProcesses_v2", gpu=1)
        return [] if len([call for call in old if call.code == 0]) >= 2 else [f"{len(old)} calls of version 2"]

    meet(calm, Fault(begin=without, also=problems, is_remembered=True))


def reload(node: Node) -> None:
    """Load the driver anew; its counters are 0 now."""
    node.watcher.may_fall = OF_THE_DRIVER
    node.emulator.reload_driver()
    node.zero_s = time.time()


def is_reloaded(node: Node, seconds: float) -> None:
    """Wait for right values after a reload; no counter may fall from then on."""
    node.wait_until_right(seconds)
    node.ticks(1, None)
    node.watcher.may_fall = None
    node.is_calm()


def test_a_reloaded_driver_starts_its_counters_again_and_no_other_falls(calm):
    before = calm.agent.metrics()
    reload(calm)
    is_reloaded(calm, PERIOD_S + RESTART_S)
    assert get(calm.agent.metrics(), "energy", 0) < get(before, "energy", 0)


def test_errors_of_memory_and_links_are_counted_until_the_driver_is_loaded_anew(calm):
    more = {"ecc_uncorrected": 2, "ecc_aggregate": 9, "remapped": 2, "crc_errors": 5, "remap_pending": 1}
    for name in ("ecc_uncorrected_volatile", "ecc_uncorrected_aggregate"):
        calm.emulator.shift(name, 2, gpu=1)
    calm.emulator.shift("remapped_rows_uncorrectable", 1, gpu=1)
    calm.emulator.shift("nvlink_crc_errors", 5, gpu=1)
    calm.emulator.override("row_remap_pending", 1, gpu=1)
    calm.emulator.override("recovery_action", 1, gpu=1)
    more["recovery_action"] = 1
    calm.expect(
        lambda metrics: (
            calm.wrong(metrics, (0, 2))
            + calm.wrong(metrics, (1,), but=more)
            + [f"{n}: {get(metrics, n, 1)}" for n, right in more.items() if get(metrics, n, 1) != right]
        )
    )
    calm.is_calm()
    calm.emulator.clear()
    reload(calm)
    is_reloaded(calm, PERIOD_S + RESTART_S)


def test_a_driver_that_cannot_be_started_leaves_nothing_but_the_page(calm):
    def problems(metrics: Mapping[str, float], absent: Iterable[str]) -> list[str]:
        found = [f"{n} of GPU {gpu}" for gpu in EVERY_GPU for n in absent if get(metrics, n, gpu) is not None]
        found += [f"GPU {gpu} is ok" for gpu in EVERY_GPU if get(metrics, "state", gpu) == 1]
        if metrics.get('warpwatch_sampler_success{sampler="nvml"}') != 0:
            found.append("the sampler has success")
        if metrics.get("warpwatch_gpus_expected") != GPUS:
            found.append("GPUs expected")
        return found

    calm.emulator.hang_system(60, call="nvmlInit")
    reload(calm)
    calm.expect(lambda metrics: problems(metrics, CORE))
    calm.ticks(2, None)
    # The start that hung returns, and now there is no driver.
    calm.emulator.fail_system(DRIVER_NOT_LOADED, call="nvmlInit")
    calm.emulator.clear("hang")
    calm.expect(lambda metrics: problems(metrics, CORE | SLOW), SHOWN_S + SLOW_STALE_S)
    calm.emulator.clear()
    # A source that is away is looked for every 30 s at most.
    is_reloaded(calm, 30 + PERIOD_S)


def test_after_all_of_them_nothing_is_left_behind(calm):
    # One thread for each GPU and one for each other task: as many as at the start, and no file more.
    wait_for("threads to end", lambda: calm.threads() <= calm.threads_at_start, 10)
    assert calm.watcher.slowest_s < 2.0
    calm.is_calm()
