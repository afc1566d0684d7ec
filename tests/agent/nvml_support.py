"""What the tests of the NVML sampler share."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TypeVar

from agent.clock import Instant
from agent.records import GpuHealth, GpuKey, GpuLimits, GpuSample, GpuSlowSample, Record
from agent.samplers.nvml import NvmlConfig, NvmlSampler
from tests.nvml_emulator.emulator import Emulator

R = TypeVar("R", bound=Record)

UUID = "GPU-11111111-2222-4333-8444-555555555555"
KEY = GpuKey(0, UUID)
#: No readings between the ticks: what a tick brings is known exactly.
WITHOUT_FAST = NvmlConfig(fast_hertz=0, tick_wait_s=1.0, deadline_s=1.0, start_deadline_s=1.0)


def at(seconds: float) -> Instant:
    return Instant(1000.0 + seconds, 1.8e9 + seconds)


def sample_at(emulator: Emulator, sampler: NvmlSampler, seconds: float) -> Sequence[Record]:
    """Sample at this moment of the script and of the agent."""
    emulator.freeze(seconds)
    return sampler.sample(at(seconds))


def of(records: Sequence[Record], kind: type[R], key: GpuKey = KEY) -> R:
    """Return the only record of a kind for a GPU or instance."""
    found = [record for record in records if type(record) is kind and record.key == key]
    assert len(found) == 1, records
    return found[0]


def given(record: GpuSample | GpuSlowSample | GpuHealth | GpuLimits) -> dict[str, object]:
    """Return the values that a record has, without its time and key."""
    names = [name for name in record.__dataclass_fields__ if name not in ("monotonic_s", "wall_s", "key")]
    return {name: getattr(record, name) for name in names if getattr(record, name) not in (None, {})}
