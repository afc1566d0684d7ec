"""What differs between boards: limits, idle power, sizes, links, clocks and how their sensors average.

Power limits, idle powers, multiprocessors and links are from vendor data sheets and public measurements: idle with a
CUDA context from arXiv:2605.23918 (H100, A100, L40S) and NVIDIA/open-gpu-kernel-modules#874 (A40), the others are
interpolated. The power coefficients are those of a linear fit on 8x H100 SXM5 recordings and scale with the board.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Final, TypedDict

from agent.errors import UsageError

_GIB: Final = 1024**3


@dataclass(frozen=True, slots=True, kw_only=True)
class Board:
    """Constants of one GPU model; `profiling` tells whether GPM ratios exist (Hopper and later)."""

    model_name: str
    power_limit_watts: float
    bare_idle_watts: float
    context_idle_watts: float
    multiprocessors: int
    memory_bytes: int
    nvlink_bytes_per_second: float  # per direction, all links; 0 where there is none
    pcie_bytes_per_second: float
    sm_clock_max_hertz: float
    sm_clock_idle_hertz: float
    memory_clock_max_hertz: float
    #: Window of the power reading: 1 s on Ampere and later except GA100, instant elsewhere (nvml.h).
    power_window_s: float
    #: Window of the utilisation reading: 1/6 to 1 s by product (nvml.h).
    utilization_window_s: float
    profiling: bool
    #: Share of the time that the power sensor sees: a quarter on A100 and H100 (arXiv:2312.02741).
    power_seen_share: float
    #: Whether the temperature of the memory is offered: HBM has it, GDDR does not.
    memory_temperature: bool

    @property
    def power_scale(self) -> float:
        """Dynamic range of this board against the H100 SXM the power fit was made on."""
        return (self.power_limit_watts - self.context_idle_watts) / (700.0 - 121.0)


class _Gddr(TypedDict):
    seen: float
    memory_temperature: bool


def _board(
    name: str,
    power: tuple[float, float, float],
    size: tuple[int, float],
    links: tuple[float, float],
    clocks_mhz: tuple[float, float, float],
    *,
    windows: tuple[float, float] = (1.0, 0.2),
    profiling: bool = False,
    seen: float = 0.25,
    memory_temperature: bool = True,
) -> Board:
    return Board(
        model_name=name,
        power_limit_watts=power[0],
        bare_idle_watts=power[1],
        context_idle_watts=power[2],
        multiprocessors=size[0],
        memory_bytes=int(size[1] * _GIB),
        nvlink_bytes_per_second=links[0] * 1e9,
        pcie_bytes_per_second=links[1] * 1e9,
        sm_clock_max_hertz=clocks_mhz[0] * 1e6,
        sm_clock_idle_hertz=clocks_mhz[1] * 1e6,
        memory_clock_max_hertz=clocks_mhz[2] * 1e6,
        power_window_s=windows[0],
        utilization_window_s=windows[1],
        profiling=profiling,
        power_seen_share=seen,
        memory_temperature=memory_temperature,
    )


#: What boards with GDDR memory have in common: a sensor that sees all the time, no memory temperature.
_GDDR: Final[_Gddr] = {"seen": 1.0, "memory_temperature": False}

#: Boards by the short name that scenarios use.
BOARDS: Final[dict[str, Board]] = {
    "V100": _board(
        "Tesla V100-SXM2-32GB",
        (300, 40, 60),
        (80, 32),
        (150, 14),
        (1530, 135, 877),
        windows=(0.1, 1 / 6),
        seen=1.0,
    ),
    "A100": _board(
        "NVIDIA A100-SXM4-80GB", (400, 53.7, 80), (108, 80), (300, 26), (1410, 210, 1593), windows=(0.1, 0.5)
    ),
    "H100": _board("NVIDIA H100 80GB HBM3", (700, 71, 121), (132, 79.6), (450, 55), (1980, 345, 2619), profiling=True),
    "H100 PCIe": _board("NVIDIA H100 PCIe", (350, 45, 70), (114, 79.6), (300, 55), (1755, 210, 1593), profiling=True),
    "H200": _board("NVIDIA H200", (700, 75, 121), (132, 140.4), (450, 55), (1980, 345, 3201), profiling=True),
    "L40S": _board("NVIDIA L40S", (350, 35.6, 102), (142, 45), (0, 26), (2520, 210, 9001), windows=(1, 0.5), **_GDDR),
    "L4": _board("NVIDIA L4", (72, 12, 30), (58, 22.5), (0, 26), (2040, 210, 6251), windows=(1, 0.5), **_GDDR),
    "A40": _board("NVIDIA A40", (300, 30, 110), (84, 45), (0, 26), (1740, 210, 7251), windows=(1, 0.5), **_GDDR),
    # Workstation and desktop boards, of which most public logs are. Idle powers are priors.
    "T4": _board("Tesla T4", (70, 10, 27), (40, 15), (0, 13), (1590, 300, 5001), windows=(0.1, 1 / 6), **_GDDR),
    "RTX A6000": _board(
        "NVIDIA RTX A6000", (300, 22, 75), (84, 48), (0, 26), (1800, 210, 8001), windows=(1, 0.5), **_GDDR
    ),
    "RTX A5000": _board(
        "NVIDIA RTX A5000", (230, 18, 62), (64, 24), (0, 26), (1695, 210, 8001), windows=(1, 0.5), **_GDDR
    ),
    "RTX 3090": _board(
        "NVIDIA GeForce RTX 3090", (350, 22, 105), (82, 24), (0, 26), (1695, 210, 9751), windows=(1, 0.5), **_GDDR
    ),
    "RTX 4090": _board(
        "NVIDIA GeForce RTX 4090", (450, 15, 60), (128, 24), (0, 26), (2520, 210, 10501), windows=(1, 0.5), **_GDDR
    ),
}


def board_named(name: str) -> Board:
    """Return the board of a short name; raises UsageError where there is none."""
    try:
        return BOARDS[name]
    except KeyError:
        raise UsageError(f"unknown board {name!r}; choose one of {', '.join(BOARDS)}") from None
