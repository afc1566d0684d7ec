"""Simulated nodes: workloads, boards and sensors, for training the model, for tests and for the demonstration.

Three layers, each replaceable alone: workloads (`training`, `inference`, `other`: a job is a state machine shared by
its GPUs), the board and its sensors (`physics`, `sensors`), and the recorder (`run`, `recorder`).
"""

from __future__ import annotations

from classifier.simulator.boards import BOARDS, Board
from classifier.simulator.catalogue import available_kinds, random_scenario
from classifier.simulator.recorder import simulate, write_simulated, write_ticks
from classifier.simulator.run import SimulatedGpu, SimulatedRun, simulate_arrays
from classifier.simulator.scenario import Scenario
from classifier.simulator.styles import STYLES, RecorderStyle, with_random_recorder

__all__ = [
    "BOARDS",
    "STYLES",
    "Board",
    "RecorderStyle",
    "Scenario",
    "SimulatedGpu",
    "SimulatedRun",
    "available_kinds",
    "random_scenario",
    "simulate",
    "simulate_arrays",
    "with_random_recorder",
    "write_simulated",
    "write_ticks",
]
