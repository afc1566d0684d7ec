"""Words for features: `say` turns a name of the feature table and its value into a few plain words.

A name is `<signal>__<statistic>__<window in seconds>`. Words are by signal and by statistic, so that a new feature of
known parts needs nothing here; parts that are not known are written as they are called, without underscores.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Final

from classifier.features import FEATURES
from classifier.signals import SIGNALS


@dataclass(frozen=True, slots=True)
class _Noun:
    """How a signal is called: as such, and what its share is a share of."""

    word: str
    of: str = ""


#: By the name of the signal without `_rate` and its step, as in `_5s`.
_NOUNS: Final[Mapping[str, _Noun]] = {
    "util": _Noun("utilisation"),
    "memutil": _Noun("memory utilisation"),
    "power": _Noun("power", " of its limit"),
    "watts": _Noun("power"),
    "watts_peers": _Noun("power of the other GPUs"),
    "fast": _Noun("power at 10 Hz"),
    "memory": _Noun("memory held", " of the card"),
    "sm": _Noun("multiprocessors active", " of the time"),
    "occupancy": _Noun("multiprocessor occupancy"),
    "tensor": _Noun("tensor cores active", " of the time"),
    "hmma": _Noun("half-precision tensor cores active", " of the time"),
    "imma": _Noun("integer tensor cores active", " of the time"),
    "dfma": _Noun("double-precision tensor cores active", " of the time"),
    "fp64": _Noun("FP64 pipe active", " of the time"),
    "fp32": _Noun("FP32 pipe active", " of the time"),
    "fp16": _Noun("FP16 pipe active", " of the time"),
    "dram": _Noun("memory bandwidth used"),
    "nvlink": _Noun("NVLink"),
    "nvlink_rx": _Noun("NVLink receiving"),
    "nvlink_tx": _Noun("NVLink sending"),
    "nvlink_tx_peers": _Noun("NVLink of the other GPUs"),
    "pcie": _Noun("PCIe"),
    "pcie_rx": _Noun("PCIe to the GPU"),
    "pcie_tx": _Noun("PCIe from the GPU"),
    "processes": _Noun("processes"),
    "process_cpu": _Noun("CPU cores of its processes"),
    "process_read": _Noun("storage read by its processes"),
    "process_written": _Noun("storage written by its processes"),
    "network": _Noun("network"),
    "network_rx": _Noun("network receiving"),
    "network_tx": _Noun("network sending"),
    "infiniband": _Noun("InfiniBand"),
    "infiniband_rx": _Noun("InfiniBand receiving"),
    "infiniband_tx": _Noun("InfiniBand sending"),
    "disk": _Noun("disks"),
    "disk_read": _Noun("disks reading"),
    "disk_written": _Noun("disks writing"),
    "filesystem": _Noun("network file systems"),
    "filesystem_read": _Noun("network file systems reading"),
    "filesystem_written": _Noun("network file systems writing"),
}
_SUFFIXES: Final = ("_rate", "_1s", "_5s", "_10s")
#: Signals that belong together where one thing is told of each, by the beginning of their name.
_FAMILIES: Final[Mapping[str, str]] = {
    "watts": "power",
    "fast": "power",
    "occupancy": "sm",
    "hmma": "tensor",
    "imma": "tensor",
    "dfma": "tensor",
}
#: Statistics that are about steps, or about the other GPUs, whatever signal shows it.
_CADENCES: Final = ("cadence", "band_", "peak_")
_UNITS: Final[Mapping[str, str]] = {feature.name: feature.unit for feature in FEATURES}
_SMALL: Final = 0.005
#: Statistics that measure a distance and no level.
_SPREADS: Final = frozenset({"mad", "swing", "step_change"})


def say(name: str, value: float) -> str:
    """Return feature `name` with its value in words, such as "tensor cores active 58 % of the time (60 s)"."""
    signal, statistic, window = _parts(name)
    nouns = _nouns(signal)
    first, second = nouns[0], nouns[-1]
    words = _STATISTICS.get(statistic)
    number = _number(name, value)
    if words is None:
        text = f"{' and '.join(noun.word for noun in nouns)}: {statistic.replace('_', ' ')} {number}"
    else:
        text = words(_Said(first, second, value, number))
    return f"{text} ({_window(window)})" if window else text


def family(name: str) -> str:
    """Return what feature `name` is about, so that three reasons are about three things: a signal, or the cadence."""
    signal, statistic, _ = _parts(name)
    if statistic.startswith(_CADENCES):
        return "cadence"
    if statistic.startswith("sync_"):
        return "sync"
    start = signal.partition("_")[0]
    return _FAMILIES.get(start, start)


def noun(signal: str) -> str:
    """Return how a signal is called."""
    return " and ".join(one.word for one in _nouns(signal))


@dataclass(frozen=True, slots=True)
class _Said:
    first: _Noun
    second: _Noun  # the same one where the feature is of one signal
    value: float
    number: str

    @property
    def both(self) -> str:
        return f"{self.first.word} and {self.second.word}"


def _parts(name: str) -> tuple[str, str, str]:
    signal, _, rest = name.partition("__")
    statistic, _, window = rest.rpartition("__") if "__" in rest else (rest, "", "")
    return signal, statistic, window


def _nouns(signal: str) -> tuple[_Noun, ...]:
    """Return the signals in a name: one, or two that are joined by an underscore."""
    found = _NOUNS.get(_plain(signal))
    if found is not None:
        return (found,)
    words = signal.split("_")
    for cut in range(len(words) - 1, 0, -1):
        first, second = _NOUNS.get(_plain("_".join(words[:cut]))), _NOUNS.get(_plain("_".join(words[cut:])))
        if first is not None and second is not None:
            return (first, second)
    return (_Noun(signal.replace("_", " ")),)


def _plain(signal: str) -> str:
    for suffix in _SUFFIXES:
        signal = signal.removesuffix(suffix)
    return signal


def _number(name: str, value: float) -> str:
    unit = _UNITS.get(name, "")
    signal, statistic, _ = _parts(name)
    if statistic in _SPREADS and signal in SIGNALS and SIGNALS[signal].decades:
        return f"{value:.1f} decades"
    if unit == "ratio":
        return _percent(value)
    if unit == "decades":
        return _bytes_per_second(1e6 * (10.0 ** min(max(value, 0.0), 12.0) - 1.0))
    if unit == "seconds":
        return f"{value:.2g} s" if value < 10 else f"{value:.0f} s"
    if unit in ("count", "cores"):
        return f"{value:.3g}"
    return f"{value:.2g}"


def _window(seconds: str) -> str:
    whole = int(seconds) if seconds.isdecimal() else 0
    return f"{whole // 60} min" if whole >= 120 and whole % 60 == 0 else f"{seconds} s"


def _percent(value: float) -> str:
    share = 100.0 * value
    return f"{share:.0f} %" if abs(share) >= 10 or abs(share) < 0.05 else f"{share:.1f} %"


def _bytes_per_second(value: float) -> str:
    if value < 1e6:
        return "under 1 MB/s"
    return f"{value / 1e6:.0f} MB/s" if value < 1e9 else f"{value / 1e9:.1f} GB/s"


def _level(said: _Said) -> str:
    return f"{said.first.word} {said.number}{said.first.of}"


def _varies(said: _Said) -> str:
    steady = f"{said.first.word} steady, "
    return f"{steady if said.value < _SMALL else said.first.word + ' varies by '}± {said.number}{said.first.of}"


def _swings(said: _Said) -> str:
    return f"{said.first.word} {'flat, swing' if said.value < _SMALL else 'swings by'} {said.number}{said.first.of}"


def _moves(said: _Said) -> str:
    if abs(said.value) < _SMALL:
        return f"{said.first.word} neither rises nor falls"
    way = "rises" if said.value > 0 else "falls"
    return f"{said.first.word} {way} by {_percent(abs(said.value))}{said.first.of} in 5 min"


def _steps(way: str) -> Callable[[_Said], str]:
    def words(said: _Said) -> str:
        if said.value < 0.5:
            return f"{said.first.word} never {way}s in steps"
        return f"{said.first.word} {way}s in steps, {said.value:.0f} in 5 min"

    return words


def _cadence(said: _Said) -> str:
    strength = "regular" if said.value >= 0.5 else "faint" if said.value >= 0.2 else "no regular"
    return f"{strength} steps in {said.first.word}, strength {said.value:.2f}"


def _agreement(said: _Said) -> str:
    if said.value < 0.2:
        return f"{said.both} do not step together, {said.value:.2f}"
    return f"{said.both} step together, {said.value:.2f}"


def _symmetry(said: _Said) -> str:
    if said.value < 0.1:
        return f"as much sent as received over {said.first.word}, {said.value:.2f} apart"
    return f"{said.first.word} carries more one way than the other, {said.value:.2f} apart"


def _direction(said: _Said) -> str:
    if abs(said.value) < 0.1:
        return f"{said.first.word} carries as much out as in, {said.value:+.2f}"
    return f"{said.first.word} carries more {'out than in' if said.value > 0 else 'in than out'}, {said.value:+.2f}"


def _correlation(said: _Said) -> str:
    if said.value >= 0.3:
        return f"{said.both} rise and fall together, {said.value:+.2f}"
    if said.value > -0.3:
        return f"{said.both} go their own ways, {said.value:+.2f}"
    return f"{said.second.word} rests while {said.first.word} is high, {said.value:+.2f}"


def _sync(who: str) -> Callable[[_Said], str]:
    def words(said: _Said) -> str:
        how = "moves as" if said.value >= 0.5 else "moves a little as" if said.value >= 0.2 else "does not move as"
        return f"{said.first.word} {how} {who}, {said.value:+.2f}"

    return words


def _ratio(said: _Said) -> str:
    if said.first.of == said.second.of == " of the time" and said.second.word == "multiprocessors active":
        return f"{said.first.word} {_percent(said.value)} of SM time"
    return f"{said.first.word} is {said.value:.2f} times {said.second.word}"


#: By the name of the statistic, as in classifier.statistics.
_STATISTICS: Final[Mapping[str, Callable[[_Said], str]]] = {
    "mean": lambda said: f"{said.first.word} {said.number}{said.first.of} on average",
    "p50": _level,
    "p05": lambda said: f"{said.first.word} rarely below {said.number}{said.first.of}",
    "p95": lambda said: f"{said.first.word} rarely above {said.number}{said.first.of}",
    "mad": _varies,
    "swing": _swings,
    "relative_swing": lambda said: f"{said.first.word} swings by {_percent(said.value)} of its median",
    "step_change": lambda said: f"{said.first.word} changes by {said.number}{said.first.of} from sample to sample",
    "idle_share": lambda said: f"{said.first.word} at most 2 % in {_percent(said.value)} of the samples",
    "saturated_share": lambda said: f"{said.first.word} 95 % or more in {_percent(said.value)} of the samples",
    "busy_share": lambda said: f"{said.first.word} above 2 % in {_percent(said.value)} of the samples",
    "burst_rate": lambda said: f"{said.first.word} in bursts, {said.value:.1f} in 5 min",
    "burst_share": lambda said: f"{said.first.word} in bursts for {_percent(said.value)} of the time",
    "burst_spacing": lambda said: f"{said.first.word} in bursts every {said.number}",
    "band_share": lambda said: f"{_percent(said.value)} of the movement of {said.first.word} is steps of 0.3 to 5 s",
    "band_depth": lambda said: f"steps of 0.3 to 5 s move {said.first.word} by {_percent(said.value)}",
    "peak_share": lambda said: (
        f"{'clockwork' if said.value >= 0.5 else 'uneven'} steps in {said.first.word}, "
        f"{_percent(said.value)} in one period"
    ),
    "peak_period": lambda said: f"{said.first.word} swings every {said.number}",
    "correlation": _correlation,
    "sync_max": _sync("the GPU most like it"),
    "sync_median": _sync("the other GPUs"),
    "sync_share": lambda said: f"{said.first.word} moves as {_percent(said.value)} of the other GPUs do",
    "silent_share": lambda said: f"{said.first.word} nothing in {_percent(said.value)} of the samples",
    "mean_ratio": _ratio,
    "symmetry": _symmetry,
    "direction": _direction,
    "pinned_without_memory": lambda said: f"busy without memory traffic in {_percent(said.value)} of the samples",
    "slope": _moves,
    "rising_steps": _steps("rise"),
    "falling_steps": _steps("fall"),
    "cadence_height": _cadence,
    "cadence_lag": lambda said: f"steps every {said.number} in {said.first.word}",
    "cadence_agreement": _agreement,
}
