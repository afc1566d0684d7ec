"""`make fuzz MINUTES=10`: every property of tests/fuzz with many examples, with new seeds until time is over.

The first finding ends it; pytest prints the example and the line that repeats it: it becomes an `@example` or a test.
"""

from __future__ import annotations

import argparse
import os
import secrets
import subprocess
import sys
import time
from pathlib import Path


def main() -> None:
    """Run rounds until the minutes are over; exit with pytest's status where one fails."""
    parser = argparse.ArgumentParser(description=__doc__.partition("\n")[0])
    parser.add_argument("minutes", nargs="?", type=float, default=10.0, help="how long (default: %(default)g)")
    parser.add_argument("--examples", type=int, default=400, help="examples of a property in a round")
    arguments = parser.parse_args()
    environment = os.environ | {"WARPWATCH_FUZZ_EXAMPLES": str(arguments.examples)}
    command = [sys.executable, "-m", "pytest", "-q", "--no-header", str(Path(__file__).parent)]
    until = time.monotonic() + arguments.minutes * 60
    rounds = 0
    while not rounds or time.monotonic() < until:
        rounds += 1
        seed = secrets.randbelow(2**32)
        sys.stdout.write(f"round {rounds}, seed {seed}, {arguments.examples} examples a property\n")
        sys.stdout.flush()
        done = subprocess.run([*command, f"--hypothesis-seed={seed}"], env=environment, check=False)
        if done.returncode:
            sys.exit(done.returncode)


if __name__ == "__main__":
    main()
