"""`make chaos MINUTES=5`: episodes of chaos until the time is over; a failing seed is printed with its command."""

from __future__ import annotations

import argparse
import secrets
import sys
import tempfile
import time
from pathlib import Path

import pytest

from tests.chaos.node import chaos_node
from tests.end_to_end.fault_node import GPUS
from tests.nvml_emulator.emulator import build


def main() -> None:
    """Play and print what was met; exit with 1 and the seed where something did not hold."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("minutes", nargs="?", type=float, default=5.0, help="how long (default: %(default)g)")
    parser.add_argument("--seed", type=int, default=None, help="of an earlier run, to repeat it")
    arguments = parser.parse_args()
    seed = secrets.randbelow(2**31) if arguments.seed is None else arguments.seed
    build()
    _say(f"seed {seed}")
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        until = time.monotonic() + arguments.minutes * 60
        try:
            with chaos_node(folder, seed) as node:
                while not node.episodes or time.monotonic() < until:
                    node.episode()
                node.findings_are_right()
                _say(f"{node.episodes} episodes on {GPUS} GPUs, {len(node.met)} kinds of faults")
                _say(f"longest recovery: {node.longest_recovery[0]:.1f} s after {node.longest_recovery[1]}")
                _say(f"slowest page: {node.slowest_page_s * 1e3:.0f} ms of {node.pages} pages")
        except (AssertionError, pytest.fail.Exception) as error:
            log = folder / "agent.log"
            _say("\n".join([str(error), *getattr(error, "__notes__", ()), log.read_text(errors="replace")[-2000:]]))
            sys.exit(f"failed; to repeat it: make chaos MINUTES={arguments.minutes:g} SEED={seed}")


def _say(text: str) -> None:
    sys.stdout.write(text + "\n")
    sys.stdout.flush()


if __name__ == "__main__":
    main()
