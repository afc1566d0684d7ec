"""Error counters, marks and limits of one GPU: what changes rarely and says whether the board is well."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Final

from agent.clock import Instant
from agent.records import GpuHealth, GpuKey, GpuLimits
from agent.samplers import nvml_binding as nvml
from agent.samplers import nvml_fields as ids
from agent.samplers.nvml_calls import MAX_COUNTER, Calls, value_of
from agent.samplers.nvml_guards import Guards
from agent.samplers.nvml_links import Links

MAX_MILLIWATTS: Final = 100_000_000
MAX_MEGAHERTZ: Final = 100_000
#: Words by nvmlGpuFabricState_t; 0 is a GPU without a fabric.
FABRIC_STATES: Final = (None, "not_started", "in_progress", "completed")
_MAX_GENERATION: Final = 16
_MAX_LANES: Final = 64
_MAX_ACTION: Final = 16


def read_limits(calls: Calls, key: GpuKey, now: Instant) -> GpuLimits:
    """Return limits and maxima, the state of the PCIe link and of the fabric, and what the driver asks for."""
    power = calls.read("power_limit", nvml.power_limit_milliwatts)
    sm_clock = calls.read("sm_clock_max", lambda handle: nvml.max_clock_megahertz(handle, nvml.CLOCK_SM))
    memory_clock = calls.read("memory_clock_max", lambda handle: nvml.max_clock_megahertz(handle, nvml.CLOCK_MEMORY))
    action = value_of(calls.fields("recovery action", (ids.RECOVERY_ACTION,)).get(ids.RECOVERY_ACTION))
    fabric = _whole(calls, calls.read("fabric", nvml.fabric_state, nvml.fabric_state_v2), 0, len(FABRIC_STATES))
    return GpuLimits(
        monotonic_s=now.monotonic_s,
        wall_s=now.wall_s,
        key=key,
        power_limit_watts=calls.scaled(power, 1e-3, 0, MAX_MILLIWATTS),
        sm_clock_max_hertz=calls.scaled(sm_clock, 1e6, 0, MAX_MEGAHERTZ),
        memory_clock_max_hertz=calls.scaled(memory_clock, 1e6, 0, MAX_MEGAHERTZ),
        pcie_generation=_whole(calls, calls.read("pcie_generation", nvml.pcie_generation), 1, _MAX_GENERATION),
        pcie_generation_max=_whole(
            calls, calls.read("pcie_generation_max", nvml.pcie_generation_max), 1, _MAX_GENERATION
        ),
        pcie_width=_whole(calls, calls.read("pcie_width", nvml.pcie_width), 1, _MAX_LANES),
        pcie_width_max=_whole(calls, calls.read("pcie_width_max", nvml.pcie_width_max), 1, _MAX_LANES),
        recovery_action=_whole(calls, action, 0, _MAX_ACTION),
        fabric_state=None if fabric is None else FABRIC_STATES[fabric],
    )


def read_health(calls: Calls, links: Links, guards: Guards, key: GpuKey, now: Instant) -> GpuHealth | None:
    """Return error counters and marks, None for a board that has none of them."""
    rows = _remapped_rows(calls)
    replays = calls.fields("PCIe replays", (ids.PCIE_REPLAYS,)).get(ids.PCIE_REPLAYS)
    link_errors = links.errors()

    def believed(name: str, total: int | None, bits: int = 64) -> int | None:
        return guards.whole(name, total, now.monotonic_s, bits=bits)

    health = GpuHealth(
        monotonic_s=now.monotonic_s,
        wall_s=now.wall_s,
        key=key,
        ecc_corrected_volatile_total=believed("ecc cv", _ecc(calls, uncorrected=False, aggregate=False)),
        ecc_uncorrected_volatile_total=believed("ecc uv", _ecc(calls, uncorrected=True, aggregate=False)),
        ecc_corrected_aggregate_total=believed("ecc ca", _ecc(calls, uncorrected=False, aggregate=True)),
        ecc_uncorrected_aggregate_total=believed("ecc ua", _ecc(calls, uncorrected=True, aggregate=True)),
        remapped_rows_correctable_total=believed("rows c", calls.count(rows[0])),
        remapped_rows_uncorrectable_total=believed("rows u", calls.count(rows[1])),
        is_row_remap_pending=rows[2],
        is_row_remap_failed=rows[3],
        pcie_replays_total=believed("replays", calls.count(value_of(replays)), 64 if replays is None else replays.bits),
        nvlink_crc_errors_total=believed("nvlink crc", link_errors["crc"]),
        nvlink_replay_errors_total=believed("nvlink replay", link_errors["replay"]),
        nvlink_recovery_errors_total=believed("nvlink recovery", link_errors["recovery"]),
        nvlink_integrity_errors_total=believed("nvlink integrity", link_errors["integrity"]),
        nvlink_failed_recoveries_total=believed("nvlink failed", link_errors["failed recovery"]),
        nvlink_effective_errors_total=believed("nvlink effective", link_errors["effective"]),
    )
    return health if health != GpuHealth(monotonic_s=now.monotonic_s, wall_s=now.wall_s, key=key) else None


def event_seconds(
    calls: Calls, fields: Mapping[nvml.FieldId, nvml.FieldReading], renumbered: Mapping[str, nvml.FieldId]
) -> dict[str, float | None]:
    """Return how long each reason has held the clocks down; of two fields for one reason the newer where offered."""
    chosen = {"sw_power_cap": ids.POWER_CAP_TIME, "sw_thermal": ids.THERMAL_TIME}
    chosen |= {reason: field for reason, field in renumbered.items() if calls.offers_field(field)}
    return {reason: calls.scaled(value_of(fields.get(field)), 1e-9, 0, MAX_COUNTER) for reason, field in chosen.items()}


def _ecc(calls: Calls, *, uncorrected: bool, aggregate: bool) -> int | None:
    name = f"ECC {uncorrected:d}{aggregate:d}"
    value = calls.read(name, lambda handle: nvml.ecc_errors(handle, uncorrected=uncorrected, aggregate=aggregate))
    return calls.count(value)


def _remapped_rows(calls: Calls) -> tuple[float | None, float | None, bool | None, bool | None]:
    rows = calls.read("remapped_rows", nvml.remapped_rows)
    if rows is not None or calls.offers("remapped_rows"):
        return rows or (None, None, None, None)
    wanted = (ids.REMAPPED_CORRECTABLE, ids.REMAPPED_UNCORRECTABLE, ids.REMAP_PENDING, ids.REMAP_FAILURE)
    found = calls.fields("remapped row fields", wanted)
    correctable, uncorrectable, pending, failure = (value_of(found.get(field)) for field in wanted)
    return (
        correctable,
        uncorrectable,
        None if pending is None else bool(pending),
        None if failure is None else bool(failure),
    )


def _whole(calls: Calls, value: float | None, low: int, high: int) -> int | None:
    number = calls.scaled(value, 1, low, high)
    return None if number is None else int(number)
