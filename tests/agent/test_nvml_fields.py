"""The renumbering of NVML's fields in driver 580.82: both tables, and which driver has which."""

from __future__ import annotations

import pynvml
import pytest

from agent.samplers import nvml_fields as ids

OLD = {"sw_thermal": (251, 0), "hw_thermal": (252, 0), "hw_power_brake": (253, 0)}
NEW = {"sw_thermal": (269, 0), "hw_thermal": (270, 0), "hw_power_brake": (271, 0)}


@pytest.mark.parametrize(
    ("version", "expected"),
    [
        ("570.26", OLD),
        ("570.124.06", OLD),
        ("575.57.08", OLD),
        ("580.65.06", OLD),
        ("580.82", NEW),
        ("580.82.07", NEW),
        ("580.95.05", NEW),
        ("590.44.01", NEW),
        ("610.57", NEW),
        ("565.57.01", {}),
        ("470.256.02", {}),
        ("", {}),
        ("simulated", {}),
        (None, {}),
    ],
)
def test_each_driver_is_asked_by_its_own_numbers(version, expected):
    assert ids.event_time_fields(version) == expected


def test_the_new_table_is_that_of_the_installed_binding():
    assert NEW["sw_thermal"][0] == pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_SW_THERM_SLOWDOWN
    assert NEW["hw_thermal"][0] == pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_THERM_SLOWDOWN
    assert NEW["hw_power_brake"][0] == pynvml.NVML_FI_DEV_CLOCKS_EVENT_REASON_HW_POWER_BRAKE_SLOWDOWN


@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        (ids.NVLINK_CRC_FLIT_ERRORS, "NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL"),
        (ids.NVLINK_CRC_DATA_ERRORS, "NVLINK_CRC_DATA_ERROR_COUNT_TOTAL"),
        (ids.NVLINK_REPLAY_ERRORS, "NVLINK_REPLAY_ERROR_COUNT_TOTAL"),
        (ids.NVLINK_RECOVERY_ERRORS, "NVLINK_RECOVERY_ERROR_COUNT_TOTAL"),
        (ids.POWER_CAP_TIME, "PERF_POLICY_POWER"),
        (ids.THERMAL_TIME, "PERF_POLICY_THERMAL"),
        (ids.MEMORY_TEMPERATURE, "MEMORY_TEMP"),
        (ids.NVLINK_COUNT, "NVLINK_LINK_COUNT"),
        (ids.PCIE_REPLAYS, "PCIE_REPLAY_COUNTER"),
        (ids.NVLINK_TRANSMIT, "NVLINK_THROUGHPUT_DATA_TX"),
        (ids.NVLINK_RECEIVE, "NVLINK_THROUGHPUT_DATA_RX"),
        (ids.REMAPPED_CORRECTABLE, "REMAPPED_COR"),
        (ids.REMAPPED_UNCORRECTABLE, "REMAPPED_UNC"),
        (ids.REMAP_PENDING, "REMAPPED_PENDING"),
        (ids.REMAP_FAILURE, "REMAPPED_FAILURE"),
        (ids.POWER_INSTANT, "POWER_INSTANT"),
        (ids.PCIE_TRANSMIT, "PCIE_COUNT_TX_BYTES"),
        (ids.PCIE_RECEIVE, "PCIE_COUNT_RX_BYTES"),
        ((ids.NVLINK5_TRANSMIT, 0), "NVLINK_COUNT_XMIT_BYTES"),
        ((ids.NVLINK5_RECEIVE, 0), "NVLINK_COUNT_RCV_BYTES"),
        ((ids.NVLINK5_RECEIVE_ERRORS, 0), "NVLINK_COUNT_RCV_ERRORS"),
        ((ids.NVLINK5_RECOVERIES, 0), "NVLINK_COUNT_LINK_RECOVERY_EVENTS"),
        ((ids.NVLINK5_INTEGRITY_ERRORS, 0), "NVLINK_COUNT_LOCAL_LINK_INTEGRITY_ERRORS"),
        ((ids.NVLINK5_FAILED_RECOVERIES, 0), "NVLINK_COUNT_LINK_RECOVERY_FAILED_EVENTS"),
        ((ids.NVLINK5_EFFECTIVE_ERRORS, 0), "NVLINK_COUNT_EFFECTIVE_ERRORS"),
        (ids.RECOVERY_ACTION, "GET_GPU_RECOVERY_ACTION"),
    ],
)
def test_the_other_ids_are_those_of_the_installed_binding(ours, theirs):
    assert ours[0] == getattr(pynvml, f"NVML_FI_DEV_{theirs}")
