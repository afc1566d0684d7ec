"""Ids of nvmlDeviceGetFieldValues, each with the scope that is asked for; docs/nvml.md says what they mean.

The ids 251 to 273 mean one thing up to driver 580.65 and another from 580.82 on, and a wrong one is answered with a
wrong quantity and no error: they are chosen by the version of the driver.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from typing import Final

from agent.samplers.nvml_binding import ALL_LINKS, FieldId

NVLINK_CRC_FLIT_ERRORS: Final = (38, 0)
NVLINK_CRC_DATA_ERRORS: Final = (45, 0)
NVLINK_REPLAY_ERRORS: Final = (52, 0)
NVLINK_RECOVERY_ERRORS: Final = (59, 0)
POWER_CAP_TIME: Final = (74, 0)
THERMAL_TIME: Final = (75, 0)
MEMORY_TEMPERATURE: Final = (82, 0)
NVLINK_COUNT: Final = (91, 0)
PCIE_REPLAYS: Final = (94, 0)
NVLINK_TRANSMIT: Final = (138, ALL_LINKS)
NVLINK_RECEIVE: Final = (139, ALL_LINKS)
REMAPPED_CORRECTABLE: Final = (142, 0)
REMAPPED_UNCORRECTABLE: Final = (143, 0)
REMAP_PENDING: Final = (144, 0)
REMAP_FAILURE: Final = (145, 0)
POWER_INSTANT: Final = (186, 0)
PCIE_TRANSMIT: Final = (197, 0)
PCIE_RECEIVE: Final = (198, 0)
#: NVLink 5 counts bytes per link in fields of its own; the scope is the link.
NVLINK5_TRANSMIT: Final = 202
NVLINK5_RECEIVE: Final = 204
NVLINK5_RECEIVE_ERRORS: Final = 208
NVLINK5_INTEGRITY_ERRORS: Final = 211
NVLINK5_FAILED_RECOVERIES: Final = 214
NVLINK5_RECOVERIES: Final = 215
NVLINK5_EFFECTIVE_ERRORS: Final = 219
RECOVERY_ACTION: Final = (230, 0)

#: Nanoseconds for which a reason held the clocks down, by the first driver version of a numbering.
EVENT_TIMES: Final[tuple[tuple[tuple[int, int], Mapping[str, FieldId]], ...]] = (
    ((580, 82), {"sw_thermal": (269, 0), "hw_thermal": (270, 0), "hw_power_brake": (271, 0)}),
    ((570, 0), {"sw_thermal": (251, 0), "hw_thermal": (252, 0), "hw_power_brake": (253, 0)}),
)


def event_time_fields(driver_version: str | None) -> Mapping[str, FieldId]:
    """Return the renumbered fields by clock event reason; none for a driver that is too old or does not tell."""
    match = re.match(r"(\d+)\.(\d+)", driver_version or "")
    if match is None:
        return {}
    version = (int(match[1]), int(match[2]))
    return next((fields for since, fields in EVENT_TIMES if version >= since), {})
