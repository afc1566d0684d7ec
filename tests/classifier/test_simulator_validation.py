"""The simulator against recordings: each recorded condition of 8x H100, played, gives what was measured there.

Figures are means per GPU over the steady phase of public recordings (8x H100 SXM5, limit 700 W, DCGM at 10 Hz, of the
repository atharvanihalani/gpu-telemetry-exploration; those of T11, T14 and T15 are from its documentation). Activity
levels, step time and traffic are parameters of a condition (`presets`); power, memory utilisation, spread, cadence and
correlation have to come out of the physics and the sensors. Tolerances are stated beside what they are for.
"""

from __future__ import annotations

import dataclasses
from functools import cache

import numpy as np
import pytest

from classifier.simulator import simulate_arrays
from classifier.simulator.presets import PRESETS

#: Relative tolerance by channel. Power is a linear fit with 6 to 45 W of error on the recordings themselves, boards
#: differ by 5 %, and workloads by 10 %; traffic is spread over the pieces of a step with ceilings.
TOLERANCES = {
    "power_watts": 0.1,
    "utilization_ratio": 0.05,
    "memory_utilization_ratio": 0.08,
    "sm_active_ratio": 0.05,
    "tensor_active_ratio": 0.05,
    "dram_active_ratio": 0.05,
    "nvlink_transmit_bytes_per_second": 0.07,
    "pcie_receive_bytes_per_second": 0.1,
    "infiniband_transmit_bytes_per_second": 0.1,
}
#: A server's load is random: requests of minutes, measured as a range over four GPUs.
LOOSE = {"E2_serving": 3.0, "I4": 1.6}
#: Where seconds differ: condition, spread of the one-second power over time in watts as measured, and the factor
#: by which the simulation may differ.
SPREADS = {
    "B1": (0.14, 1.4),
    "I4": (9.3, 2.0),
    "E2_serving": (1.7, 4.0),
    "T2": (20.0, 2.0),
    "T6": (92.0, 1.25),
    "T13": (14.0, 2.0),
}
#: Cadence: condition, channel, seconds and autocorrelation as measured at 10 Hz. The lag is right within a sample or
#: 4 %; the height within 0.4, since steps of the simulation are more alike than real ones.
CADENCES = [
    ("T3", "nvlink_transmit_bytes_per_second", 5.8, 0.82),
    ("E2_training", "nvlink_transmit_bytes_per_second", 0.4, 0.72),
    ("T6", "power_watts", 3.5, 0.94),
    ("T13", "nvlink_transmit_bytes_per_second", 0.4, 0.71),
    ("I4", "sm_active_ratio", 0.4, 0.61),
]


@cache
def _played(name, interval_s=1.0, recorder="agent", duration_s=400.0):
    scenario = PRESETS[name].scenario(duration_s=duration_s, interval_s=interval_s)
    return simulate_arrays(dataclasses.replace(scenario, recorder=recorder), seed=5)


def _mean(run, channel):
    if channel in run.host_channels:
        return float(run.host_channels[channel].values.mean())
    return float(np.mean([gpu.channels[channel].values.mean() for gpu in run.gpus]))


@pytest.mark.parametrize("name", PRESETS)
def test_means_are_as_measured(name):
    run = _played(name)
    for channel, measured in PRESETS[name].measured.items():
        tolerance = TOLERANCES[channel] * LOOSE.get(name, 1.0)
        assert _mean(run, channel) == pytest.approx(measured, rel=tolerance, abs=1e-9), channel


@pytest.mark.parametrize("name", ["E2_serving", "I4", "T2", "T3", "E2_training", "T6", "T13"])
def test_memory_utilization_is_1_27_to_1_31_times_dram_activity(name):
    run = _played(name)
    for gpu in run.gpus:
        dram = gpu.channels["dram_active_ratio"].values.mean()
        # Whole per cent: a mean of rounded values may be off by most of a half, which is much at 3 % of DRAM activity.
        slack = max(0.02, 0.004 / dram)
        assert 1.27 - slack < gpu.channels["memory_utilization_ratio"].values.mean() / dram < 1.31 + slack


@pytest.mark.parametrize("name", SPREADS)
def test_power_varies_as_much_as_measured(name):
    measured, factor = SPREADS[name]
    simulated = float(np.mean([gpu.channels["power_watts"].values.std() for gpu in _played(name).gpus]))
    assert measured / factor < simulated < measured * factor


def test_offload_training_rests_at_121_watts_and_bursts_to_348():
    power = np.concatenate([gpu.channels["power_watts"].values for gpu in _played("T6").gpus])
    assert np.quantile(power, 0.3) == pytest.approx(121, rel=0.12)
    assert np.quantile(power, 0.97) == pytest.approx(348, rel=0.12)


def _height(values, lag):
    centred = values - values.mean()
    return float(np.mean(centred[:-lag] * centred[lag:]) / centred.var())


def _cadence(values, most):
    """Return lag (in samples) and height of the highest peak of the autocorrelation from 3 samples on."""
    heights = np.array([_height(values, lag) for lag in range(2, most)])
    peaks = [i for i in range(1, heights.size - 1) if heights[i] >= heights[i - 1] and heights[i] >= heights[i + 1]]
    best = max(peaks, key=lambda i: heights[i])
    return best + 2, heights[best]


@pytest.mark.parametrize(("name", "channel", "period_s", "measured"), CADENCES)
def test_cadence_is_where_it_was_measured(name, channel, period_s, measured):
    values = _played(name, 0.1, "dcgm", 120.0).gpus[0].channels[channel].values
    lag, height = _cadence(values, int(period_s * 10 * 1.6) + 4)
    assert lag / 10 == pytest.approx(period_s, abs=max(0.1, 0.04 * period_s))
    assert height == pytest.approx(measured, abs=0.4)


def test_fast_power_shows_the_cadence_that_one_second_hides():
    """Measured in T13: 2.54 Hz, 220 to 525 W inside a step by the energy counter, gone from readings once a second."""
    gpu = _played("T13").gpus[0]
    fast, slow = gpu.channels["power_fast_watts"].values, gpu.channels["power_watts"].values
    lag, height = _cadence(fast, 8)
    assert lag == 4
    assert height > 0.5
    assert slow.std() < 0.3 * fast.std()


def test_cadences_of_seconds_survive_one_reading_a_second_and_short_ones_do_not():
    """Measured at 1 Hz: T6 at 3.5 s (seen at 7 s, its double) with r .91; 0.4 s cadences of E2 and T13 are lost."""
    offload = _played("T6").gpus[0].channels["power_watts"].values
    assert _height(offload, 7) > 0.7
    for name in ("E2_training", "T13"):
        links = _played(name).gpus[0].channels["nvlink_transmit_bytes_per_second"].values
        tenths = _played(name, 0.1, "dcgm", 120.0).gpus[0].channels["nvlink_transmit_bytes_per_second"].values
        # Measured: the coefficient of variation falls from .65 to .125 (E2) and from .35 to .07 (T13).
        assert links.std() / links.mean() < 0.35 * tenths.std() / tenths.mean()


def _correlation(name):
    power = np.array([gpu.channels["power_watts"].values for gpu in _played(name).gpus])
    return float(np.corrcoef(power)[np.triu_indices(len(power), 1)].mean())


def test_ranks_of_a_job_move_together_and_servers_do_not():
    """Measured: .955 (T2), .988 (T6), .68 (T13); .08 (B1), about 0 (E2, serving), .31 (I4, eight processes).

    Within 0.35 of that: in the simulation each GPU drifts by itself with 0.4 of what all share.
    """
    for name, measured in (("T2", 0.955), ("T6", 0.988), ("T13", 0.68)):
        assert _correlation(name) == pytest.approx(measured, abs=0.35)
    for name in ("B1", "E2_serving", "I4"):
        assert abs(_correlation(name)) < 0.35


def test_a_fabric_is_never_silent_for_long_in_steady_training():
    """Measured in six conditions: at most 0.2 s; at one reading a second none is zero."""
    for name in ("T11", "T13", "T14", "T15"):
        assert _played(name).host_channels["infiniband_transmit_bytes_per_second"].values.min() > 1e6
