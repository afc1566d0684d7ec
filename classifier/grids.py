"""Every signal of many GPUs on a regular grid of seconds.

A grid has one row per signal and GPU and one column per step, newest last; NaN where nothing was measured. The newest
column holds the newest sample, so that a log keeps its phase however it lies to the moment of the decision.
"""

from __future__ import annotations

import math
from collections.abc import Hashable, Iterable, Sequence
from typing import Final

import numpy as np

from agent.history import Array, GpuHistory, HostHistory
from classifier.signals import FINE_S, GLITCH_RATIO, RATE_FLOOR, REACH_S, SIGNALS, Signals
from classifier.windows import Indices, Windows

#: Samples further apart than this in seconds have no glitches: a single zero is a pause of its own there.
_GLITCH_SPACING_S: Final = 2.5
#: Step of signals, and whether they are averaged to it or thinned.
_Kind = tuple[float, bool]
#: Grids hold the signals of one step. Those of a second are averaged or thinned, each in a grid of their own: what few
#: of them need is not made for many.
_Grid = tuple[float, bool]


def _grid_of(kind: _Kind) -> _Grid:
    step_s, averaged = kind
    return step_s, averaged and step_s == FINE_S


class Grids:
    """The grids of some GPUs, each at a moment of its own: all signals of SIGNALS, made once."""

    def __init__(self, batch: Sequence[Signals]) -> None:
        peers = {(id(peer), one.now_s): (peer, one) for one in batch for peer in one.peers}
        self._windows: dict[tuple[bool, float, bool, float], Windows] = {}
        own = _OWN.fill([(one, one.reach_s(math.inf)) for one in batch])
        others = _PEERS.fill([(Signals(peer, _NO_HOST, one.now_s), math.inf) for peer, one in peers.values()])
        positions = {key: position for position, key in enumerate(peers)}
        pairs = np.zeros((len(batch), len(peers)), dtype=bool)
        for row, one in enumerate(batch):
            pairs[row, [positions[id(peer), one.now_s] for peer in one.peers]] = True
        self._grids = {False: own, True: others}
        self._pairs = pairs
        self._taken: dict[tuple[str, float, bytes], Windows] = {}

    def taken(self, name: str, window_s: float, chosen: Indices, key: bytes) -> Windows:
        """Return the signals at `chosen` in the window of signal `name`, the same object for the same `key`."""
        found = self._taken.get((name, window_s, key))
        if found is None:
            found = self._taken[name, window_s, key] = self.window(name, window_s).take(chosen)
        return found

    def window(self, name: str, window_s: float) -> Windows:
        """Return the window that holds signal `name` beside all others of its step; see `position`."""
        signal = SIGNALS[name]
        which = _grid_of((signal.step_s, signal.averaged))
        key = signal.of_peers, *which, window_s
        found = self._windows.get(key)
        if found is None:
            columns = round(window_s / signal.step_s)
            grid = self._grids[signal.of_peers][which]
            found = Windows(grid[..., -columns:], signal.step_s, self._pairs if signal.of_peers else None)
            self._windows[key] = found
        return found


class _Axis:
    """Times that several channels share, and the columns they fall into."""

    def __init__(self, times: Array, now_s: float, content: bytes) -> None:
        self.times = times
        self.content = content
        self.values: list[Array] = []
        #: By kind of grid: positions in `values`, and signals and rows to fill.
        self.targets: dict[_Kind, list[tuple[range, int, list[int]]]] = {}
        self.glitchy: list[int] = []
        self.now_s = now_s

    def add(self, place: _Place, values: list[Array], rows: list[int]) -> None:
        """Take the values of a channel, one series for each of `rows`."""
        entries = range(len(self.values), len(self.values) + len(values))
        self.values += values
        if place.drop_glitches:
            self.glitchy += entries
        for kind, signal in place.targets:
            self.targets.setdefault(kind, []).append((entries, signal, rows))

    @property
    def spacing_s(self) -> float:
        size = self.times.size
        return float(self.times[-1] - self.times[0]) / (size - 1) if size > 1 else math.inf

    def fill(self, grids: dict[_Grid, Array]) -> None:
        """Write all values to their places."""
        stacked = np.concatenate(self.values).reshape(-1, self.times.size)
        if self.glitchy and self.spacing_s <= _GLITCH_SPACING_S and self.times.size > 2:
            _drop_glitches(stacked, self.glitchy)
        steps: dict[float, tuple[Indices, int, Indices]] = {}
        for (step, averaged), targets in self.targets.items():
            grid = grids[_grid_of((step, averaged))]
            if step not in steps:
                steps[step] = self._columns(step, grid.shape[-1])
            columns, first, starts = steps[step]
            if not columns.size:
                continue
            chosen = np.array([entry for entries, _, _ in targets for entry in entries])
            places = np.array([signal * grid.shape[1] + row for _, signal, rows in targets for row in rows])
            if starts.size == self.times.size - first:
                binned = stacked[chosen, first:]
            elif averaged:
                binned = np.add.reduceat(stacked[chosen, first:], starts, axis=-1)
                binned /= _lengths(starts, self.times.size - first)
            else:
                binned = stacked[chosen[:, np.newaxis], first - 1 + _ends(starts, self.times.size - first)]
            flat = grid.reshape(-1, grid.shape[-1])
            if columns[-1] - columns[0] == columns.size - 1:
                flat[places, columns[0] : columns[-1] + 1] = binned
            else:
                flat[places[:, np.newaxis], columns] = binned

    def _columns(self, step: float, size: int) -> tuple[Indices, int, Indices]:
        """Return the columns that get values, the first sample that counts, and where each column starts from it."""
        last = float(self.times[-1])
        late = math.floor((self.now_s - last) / step)
        half = min(self.spacing_s, step) / 2.0
        back = np.floor((last - self.times + half) / step).astype(np.intp) + late
        first = int(np.searchsorted(-back, -(size - 1)))  # `back` falls with time
        back = back[first:]
        if not back.size:
            return back, first, back
        changes = (back[1:] != back[:-1]).nonzero()[0]
        starts = np.zeros(changes.size + 1, dtype=np.intp)
        np.add(changes, 1, out=starts[1:])
        return size - 1 - back[starts], first, starts


def _ends(starts: Indices, size: int) -> Indices:
    """Return where each part of `size` samples ends, from where each starts."""
    ends = np.empty_like(starts)
    ends[:-1], ends[-1] = starts[1:], size
    return ends


def _lengths(starts: Indices, size: int) -> Indices:
    return _ends(starts, size) - starts


def _drop_glitches(values: Array, chosen: Iterable[int]) -> None:
    """Replace single zeros between two busy samples by the one before."""
    rows = list(chosen)
    read = values[rows]
    busy = read > GLITCH_RATIO
    glitch = (read[:, 1:-1] == 0.0) & busy[:, :-2] & busy[:, 2:]
    if glitch.any():
        read[:, 1:-1] = np.where(glitch, read[:, :-2], read[:, 1:-1])
        values[rows] = read


class _Place:
    """A channel's places in the grids of a layout."""

    def __init__(self, channel: str) -> None:
        self.channel = channel
        self.reach_s = 0.0
        self.drop_glitches = False
        self.targets: list[tuple[_Kind, int]] = []  # kind of grid, position of the signal

    def add(self, name: str, place: int) -> None:
        """Take one of the signals of the channel."""
        signal = SIGNALS[name]
        self.reach_s = max(self.reach_s, REACH_S[signal.step_s])
        self.drop_glitches |= signal.drop_glitches
        self.targets.append(((signal.step_s, signal.averaged), place))


class _Layout:
    """Where the signals of GPUs, or those of their peers, lie in the grids."""

    def __init__(self, *, of_peers: bool) -> None:
        self.names: dict[_Grid, list[str]] = {}
        # Decades last: one slice.
        for name, signal in sorted(SIGNALS.items(), key=lambda item: item[1].decades):
            if signal.of_peers == of_peers:
                self.names.setdefault(_grid_of((signal.step_s, signal.averaged)), []).append(name)
        self._of_gpu = self._places(of_host=False)
        self._of_host = self._places(of_host=True)

    def _places(self, *, of_host: bool) -> tuple[_Place, ...]:
        found: dict[str, _Place] = {}
        for names in self.names.values():
            for place, name in enumerate(names):
                channel = SIGNALS[name].channel
                if SIGNALS[name].of_host == of_host:
                    found.setdefault(channel, _Place(channel)).add(name, place)
        return tuple(found.values())

    def fill(self, batch: Sequence[tuple[Signals, float]]) -> dict[_Grid, Array]:
        """Return the grids of all signals by kind, shape (signals, rows, columns), from as far back as is said."""
        grids = {
            (step, apart): np.full((len(names), len(batch), round(REACH_S[step] / step)), np.nan)
            for (step, apart), names in self.names.items()
        }
        axes = _Axes()
        gpus: list[_Source] = [(row, one.gpu, one.now_s, reach_s) for row, (one, reach_s) in enumerate(batch)]
        for place in self._of_gpu:
            axes.gather(place, gpus)
        hosts: dict[tuple[int, float, float], _Source] = {}
        alike: list[tuple[int, int]] = []
        for row, (one, far_s) in enumerate(batch):
            reach_s = min(far_s, _LONGEST_S)
            first = hosts.setdefault((id(one.host), one.now_s, reach_s), (row, one.host, one.now_s, reach_s))
            alike.append((first[0], row))
        for place in self._of_host:
            axes.gather(place, hosts.values())
        axes.fill(grids)
        for first_row, row in alike:
            for place in self._of_host if row != first_row else ():
                for kind, signal in place.targets:
                    grid = grids[_grid_of(kind)]
                    grid[signal, row] = grid[signal, first_row]
        for which, names in self.names.items():
            _normalise(grids[which], names, [one for one, _ in batch])
        return grids


#: The row of a GPU, what holds its channels, the moment that is looked at and how far back.
_Source = tuple[int, GpuHistory | HostHistory, float, float]


class _Axes:
    """Every channel that is read, by the times it has: those of one tick share them, for all GPUs."""

    def __init__(self) -> None:
        self._known: dict[tuple[float, int, float], list[_Axis]] = {}

    def gather(self, place: _Place, sources: Iterable[_Source]) -> None:
        """Read a channel of GPUs or hosts, each with its row, its moment and how far it may look back."""
        found: dict[int, tuple[_Axis, list[Array], list[int]]] = {}
        axis: _Axis | None = None
        for row, source, now_s, reach_s in sources:
            times, values = source.series(place.channel, now_s, min(reach_s, place.reach_s))
            if not times.size:
                continue
            content = times.tobytes()
            if axis is None or axis.content != content or axis.now_s != now_s:
                axis = self._axis(times, content, now_s)
            entry = found.get(id(axis))
            if entry is None:
                found[id(axis)] = axis, [values], [row]
            else:
                entry[1].append(values)
                entry[2].append(row)
        for axis, series, rows in found.values():
            axis.add(place, series, rows)

    def _axis(self, times: Array, content: bytes, now_s: float) -> _Axis:
        same = self._known.setdefault((now_s, times.size, float(times[0])), [])
        found = next((axis for axis in same if axis.content == content), None)
        if found is None:
            found = _Axis(times, now_s, content)
            same.append(found)
        return found

    def fill(self, grids: dict[_Grid, Array]) -> None:
        """Write all values to their places."""
        for same in self._known.values():
            for axis in same:
                axis.fill(grids)


def _normalise(grid: Array, names: Sequence[str], batch: Sequence[Signals]) -> None:
    """Divide every signal by its scale and make decades of rates, in place."""
    first = len(names)
    for place, name in enumerate(names):
        signal = SIGNALS[name]
        if signal.scale is not None or signal.of_host:
            divisors = [one.divisor(signal) or math.nan for one in batch]
            grid[place] /= np.array(divisors)[:, np.newaxis]
        if signal.decades:
            first = min(first, place)
    if first < len(names):
        grid[first:] = np.log10(1.0 + np.maximum(grid[first:], 0.0) / RATE_FLOOR)


_LONGEST_S: Final = max(REACH_S.values())
_OWN: Final = _Layout(of_peers=False)
_PEERS: Final = _Layout(of_peers=True)
_NO_HOST: Final = HostHistory(1.0)


def position(name: str) -> int:
    """Return the position of signal `name` among the signals of its window."""
    signal = SIGNALS[name]
    return (_PEERS if signal.of_peers else _OWN).names[_grid_of((signal.step_s, signal.averaged))].index(name)


def kind_of(name: str) -> Hashable:
    """Return what signals of one window have in common with signal `name`."""
    signal = SIGNALS[name]
    return *_grid_of((signal.step_s, signal.averaged)), signal.of_peers
