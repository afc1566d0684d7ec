"""The budgets of DESIGN.md on the emulated 8-GPU node, for minutes; `make bench` measures them with full windows.

CPU time depends little on what else the machine does, but it does: the least of three half minutes counts, and a
machine that is slower at a fixed piece of work may take longer by as much. Windows of
300 s are not full here, and a decision is cheaper for it: FULL_WINDOWS_SECONDS are added before it is compared. CPU
time inside driver calls is part of it, since it cannot be told apart from outside: the test is stricter than the budget
by that. How long a scrape takes depends on the other programs too: the best of 10 to 40 rounds counts, which
they left alone, and of the scrapes that build the page the median.
"""

from __future__ import annotations

from dataclasses import dataclass

import pytest

from tests.end_to_end import budget_node as budget

pytestmark = [pytest.mark.end_to_end, pytest.mark.alone]

WARM_UP_SECONDS = 20.0
MEASURED_SECONDS = 30.0
#: What a minute with full windows costs more than one of this test. Measured: none to 0.02 s, of 0.75 s (2026-12-01).
FULL_WINDOWS_SECONDS = 0.05
#: Room for the machine: an agent that sleeps most of the time finds its caches in other hands. Code that took 0.75 s
#: took 1.22 s some hours later with the calibration unchanged, and 1.34 s with one 1.6 times slower (2026-12-01).
ROOM = 1.5
#: How much more may be allowed, room included, where the calibration shows a slower machine than that of
#: docs/budgets.md; `make bench` judges the budget itself.
SLOWER_MACHINE = 2.0


@dataclass(frozen=True)
class Measured:
    cpu_seconds_a_minute: float
    slowness: float
    resident_bytes: int
    rounds: list[budget.Scrapes]
    series_by_gpu: dict[str, int]
    series_of_node: int
    probabilities: int
    errors: dict[str, float]


def _is_glitch(errors: str) -> bool:
    """Whether these are readings of all zeros: one in a thousand of the trace, and the sampler takes none."""
    return 'sampler="nvml",reason="implausible"' in errors


@pytest.fixture(scope="module")
def measured(tmp_path_factory, nvml_emulator_library):
    with budget.busy_node(tmp_path_factory.mktemp("budget")) as agent:
        budget.cpu_over(agent, WARM_UP_SECONDS)
        calibrations = [budget.calibration_seconds()]
        cpu = []
        for _ in range(3):
            cpu.append(budget.cpu_over(agent, MEASURED_SECONDS))
            calibrations.append(budget.calibration_seconds())
        metrics = agent.metrics()
        by_gpu, others = budget.series_counts(agent)
        return Measured(
            cpu_seconds_a_minute=min(cpu),
            slowness=sorted(calibrations)[len(calibrations) // 2] / budget.CALIBRATION_SECONDS,
            rounds=budget.scrape_rounds(agent, most=40),
            # Last, so that what serving needs is in it.
            resident_bytes=budget.resident_bytes(agent.process.pid),
            series_by_gpu=by_gpu,
            series_of_node=others,
            probabilities=sum(key.startswith("warpwatch_gpu_workload_probability{") for key in metrics),
            errors={
                key: value
                for key, value in metrics.items()
                if key.startswith("warpwatch_sampler_errors_total{") and value and not _is_glitch(key)
            },
        )


def test_the_node_is_at_work_or_its_cost_would_mean_nothing(measured):
    assert len(measured.series_by_gpu) == budget.GPUS
    assert measured.probabilities == 4 * budget.GPUS  # the model was asked about each of them
    assert measured.errors == {}


def test_own_cpu_time(measured, record_property):
    record_property("cpu_seconds_a_minute", measured.cpu_seconds_a_minute)
    record_property("slowness", measured.slowness)
    allowed = min(SLOWER_MACHINE, ROOM * max(1.0, measured.slowness)) * budget.CPU_SECONDS_A_MINUTE
    assert measured.cpu_seconds_a_minute + FULL_WINDOWS_SECONDS < allowed


def test_resident_memory(measured, record_property):
    record_property("resident_bytes", measured.resident_bytes)
    assert measured.resident_bytes < budget.RESIDENT_BYTES


def test_a_scrape_of_a_page_that_is_there(measured):
    assert min(scrapes.cached_p99() for scrapes in measured.rounds) < budget.CACHED_SCRAPE_SECONDS
    # Of CPU time a scrape takes a fraction of that, however busy the machine is: the median round, 100 scrapes each.
    assert sorted(scrapes.cpu for scrapes in measured.rounds)[len(measured.rounds) // 2] < budget.CACHED_SCRAPE_SECONDS


def test_a_scrape_that_builds_the_page(measured):
    cold = [seconds for scrapes in measured.rounds for seconds in scrapes.cold]
    assert len(cold) >= 8  # a snapshot is taken each second, and so far apart are the ten rounds
    assert sorted(cold)[len(cold) // 2] < budget.COLD_SCRAPE_SECONDS


def test_series_per_gpu_and_per_node(measured):
    assert max(measured.series_by_gpu.values()) <= budget.SERIES_PER_GPU
    assert measured.series_of_node <= budget.SERIES_PER_NODE
