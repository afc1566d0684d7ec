"""How a training job writes checkpoints: who writes, where to, and what the GPUs do meanwhile.

Styles: rank 0 writes and the others wait in the next collective (measured: rank 0 at 3-6 %, the others at 100 % and
0.22-0.24 of the limit); all ranks write their shards; or a copy to the host's memory in seconds at 5 to 25 GB/s per
GPU, then a long write beside the training (torch distributed checkpoints, MegaScale).
"""

from __future__ import annotations

from typing import Final

import numpy as np

from classifier.simulator.boards import Board
from classifier.simulator.overlays import Extra
from classifier.simulator.priors import GB, take
from classifier.simulator.scenario import Draws
from classifier.simulator.signals import Constant, HostLoad, Signal
from classifier.simulator.steps import Step

SAVE_STYLES: Final = ("rank0", "all_ranks", "async")
#: Where checkpoints and data are: local disks, an object store by sockets that no file counter sees, or a file server,
#: whose traffic on the wire `physics.host_activity` adds.
WRITTEN: Final = ("disk_written", "network_transmit", "filesystem_written")
READ: Final = ("disk_read", "network_receive", "filesystem_read")


class Saves:
    """The checkpoints of one job."""

    def __init__(self, draws: Draws, board: Board, step: Step, fault: str | None) -> None:
        alone = fault == "rank0_saves"
        style = draws.choice("save_style", SAVE_STYLES, (0.4, 0.35, 0.25))
        self.style = "rank0" if alone else style
        priors = step.priors
        if alone:
            self.every_s = draws.log_uniform("save_every_s", 60, 600)
            self.length_s = draws.log_uniform("save_s", 15, 57)  # gwtrain
        else:
            self.every_s = take(draws, priors, "save_every_s")
            self.length_s = take(draws, priors, "save_s")
        self.rate = take(draws, priors, "save_bytes_per_second")
        self.spread = draws.log_uniform("save_spread", 0.003, 0.1)
        self.target = draws.choice("save_to", WRITTEN, (0.4, 0.25, 0.35))
        # A page cache takes the write and lets the disk have it within dirty_expire, 30 s.
        self.cached = draws.chance("page_cache", 0.4) and self.target == "disk_written" and not alone
        self.to_host = min(draws.log_uniform("to_host_gb_s", 5, 25) * GB, 0.8 * board.pcie_bytes_per_second)
        self.offset = float(draws.rng.uniform(0.3, 1.0))
        self._step = step

    def next_s(self, rng: np.random.Generator, *, first: bool) -> float:
        """Return how long training goes on until the next checkpoint."""
        return self.every_s * (self.offset if first else max(0.3, float(rng.normal(1.0, self.spread))))

    def blocking_s(self, pause_s: float) -> float:
        """Return for how much of a checkpoint of `pause_s` training stands still."""
        if self.style != "async":
            return pause_s
        return float(np.clip(self.rate * pause_s / self._step.ranks / self.to_host, 0.1, 20.0))

    def signals(self, rng: np.random.Generator, pause_s: float) -> tuple[Signal, ...]:
        """Return what each rank does while training stands still."""
        ranks = self._step.ranks
        per_rank = self.rate / (1 if self.style == "rank0" else ranks)
        moved = per_rank
        if self.style == "async":
            moved = min(self.to_host, self.rate * pause_s / ranks / self.blocking_s(pause_s))
        writer = Constant(
            {
                "busy": float(rng.uniform(0.028, 0.062)),
                "sm": float(rng.uniform(0.001, 0.006)),
                "dram": min(0.5, float(rng.uniform(0.0005, 0.004)) + moved / 3e12),
                "pcie_transmit": moved,
                "pcie_receive": 1e6,
                "cpu_cores": float(rng.uniform(0.9, 1.6)),  # serialising
                "process_written": 0.0 if self.style == "async" else per_rank,
            }
        )
        if self.style != "rank0":
            return (writer,) * ranks
        waiting = {"busy": 1.0, "spin": self._step.waiting, "dram": 0.001, "pcie_receive": 6e5, "cpu_cores": 1.0}
        if not self._step.together:  # separate runs: nobody waits for anybody
            waiting = {"pcie_receive": 1e6, "cpu_cores": 0.05}
        return (writer, *(Constant(waiting),) * (ranks - 1))

    def behind(self, start_s: float, pause_s: float) -> tuple[Extra, ...]:
        """Return what goes on beside the training after an async checkpoint, per rank."""
        if self.style != "async":
            return ()
        written_s = 3 * pause_s
        rate = self.rate * pause_s / written_s / self._step.ranks
        return (Extra(start_s, start_s + written_s, {"process_written": rate, "cpu_cores": 0.5}),)

    def host(self, rng: np.random.Generator, start_s: float, pause_s: float) -> list[HostLoad]:
        """Return what the host writes."""
        written_s = pause_s * (3 if self.style == "async" else 1)
        first_s = start_s + float(rng.uniform(0, 2))
        last_s = start_s + written_s + float(rng.uniform(0, 4))
        if self.cached:
            first_s, last_s = first_s + float(rng.uniform(0, 5)), last_s + float(rng.uniform(10, 30))
        rate = self.rate * pause_s / max(1.0, last_s - first_s)
        return [HostLoad(start_s=first_s, end_s=last_s, channel=self.target, bytes_per_second=rate)]
