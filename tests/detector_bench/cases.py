"""What a case is: a node, what is true of it, and how it is told from the findings."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np

from tests.detector_bench.node import Filesystem, Node
from tests.detector_bench.sensors import PROFILES, Profile

#: After the end of a fault a finding may still begin for this long: windows look back.
GRACE_S = 180.0


@dataclass(frozen=True)
class Expected:
    """A fault that has to be found: by `anomaly`, from `start_s` on, within `allowed_s`.

    `gpus` are those it may be said of (None: any, or the node or a job); `also` are other right words for it.
    """

    anomaly: str
    start_s: float
    end_s: float
    allowed_s: float
    severity: int = 2
    gpus: tuple[int, ...] | None = None
    also: tuple[str, ...] = ()
    tag: str = ""


@dataclass(frozen=True)
class Accepted:
    """A word that may be said between two times, up to a severity, and need not be."""

    anomaly: str
    start_s: float
    end_s: float
    severity: int = 3


@dataclass
class Truth:
    """All that is true of one case."""

    expected: list[Expected] = field(default_factory=list)
    accepted: list[Accepted] = field(default_factory=list)

    def expect(self, anomaly: str, start_s: float, end_s: float, allowed_s: float, **more) -> None:
        self.expected.append(Expected(anomaly, start_s, end_s, allowed_s, **more))

    def accept(self, anomaly: str, start_s: float = 0.0, end_s: float = 1e9, severity: int = 3) -> None:
        self.accepted.append(Accepted(anomaly, start_s, end_s, severity))


#: Which words the faults of a kind have, by the beginning of its name.
_WORDS = {
    "stall_": ("stalled_collective", "collective_wait"),
    "splice_": ("stalled_collective", "collective_wait"),
    "day_": ("missed_checkpoint",),
    "hang_": ("no_progress",),
    "held_idle": ("low_utilization",),
    "allocated_": ("low_utilization",),
    "starved_": ("input_starved",),
    "straggler_": ("straggler",),
    "fail_slow_": ("fail_slow",),
    "throttle_": ("throttled",),
    "leak_": ("memory_leak",),
    "link_": ("link_errors",),
    "ecc_": ("ecc_remap",),
    "lost_": ("gpu_lost",),
    "storage_": ("storage_stall",),
    "unlabelled": ("unknown_workload",),
}
Build = Callable[["Draw"], tuple[Node, Truth]]


@dataclass(frozen=True)
class Kind:
    """One kind of case: `group` is healthy, stall, splice, fault or jobday."""

    name: str
    group: str
    build: Build
    about: str
    #: Channels without which the fault cannot be seen: where they are missing nothing is expected.
    needs: tuple[str, ...] = ()
    profiles: tuple[str, ...] = tuple(PROFILES)
    hours: float = 1.0
    boards: tuple[str, ...] = ("H100", "H100", "A100", "H200", "V100", "L40S")
    gpus: tuple[int, ...] = (8, 8, 8, 4)
    held_out: bool = False

    @property
    def faults(self) -> tuple[str, ...]:
        """The words that its faults have, by the beginning of its name; none for healthy work."""
        return next((words for start, words in _WORDS.items() if self.name.startswith(start)), ())


@dataclass
class Draw:
    """The random draws of one case."""

    rng: np.random.Generator
    kind: Kind
    profile: Profile
    seconds: int

    def node(self, *, gpus: int | None = None, ports: int | None = None, board: str | None = None) -> Node:
        """Return an empty node."""
        name = board or str(self.rng.choice(self.kind.boards))
        count = int(self.rng.choice(self.kind.gpus)) if gpus is None else gpus
        if ports is None:
            ports = int(self.rng.choice([0, count])) if name in ("H100", "H200", "A100") else 0
        mount = Filesystem() if self.rng.random() < 0.6 else None
        return Node(rng=self.rng, board_name=name, gpus=count, seconds=self.seconds, ports=ports, filesystem=mount)

    def between(self, low: float, high: float) -> float:
        return float(np.exp(self.rng.uniform(np.log(low), np.log(high))))

    def pick(self, *options):
        return options[int(self.rng.integers(len(options)))]


KINDS: dict[str, Kind] = {}


def kind(group: str, about: str, **more) -> Callable[[Build], Build]:
    """Register the decorated function as a kind of its name."""

    def register(build: Build) -> Build:
        KINDS[build.__name__] = Kind(name=build.__name__, group=group, build=build, about=about, **more)
        return build

    return register
