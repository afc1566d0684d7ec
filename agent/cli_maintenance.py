"""The command line of `warpwatch maintenance`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

_EXAMPLES: Final = """\
examples:
  warpwatch maintenance start --gpu 3 --for 2h --reason "reseating the board, ticket 4711"
  warpwatch maintenance start --gpu GPU-5d4c3b2a-1111-2222-3333-444444444444 --for 90m
  warpwatch maintenance start --node --for 1d                       driver upgrade, reboot
  warpwatch maintenance start --node --for 8h --anomaly low_utilization
  warpwatch maintenance list
  warpwatch maintenance end --gpu 3        or: end --node, end --all, end 1f2e3d4c

Nobody is told about a GPU in maintenance: warpwatch_gpu_maintenance is 1, and the shipped rules are silent at that.
Findings are made and shown as ever. It ends by itself, and outlives a restart and a boot. A GPU is named better by its
UUID, since an index may change with a boot. To pull a GPU out, put the node in maintenance: a missing GPU is the
node's alert.
"""


def add_maintenance(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # it has no public name
    """Add the command and what it can do."""
    parser = commands.add_parser(
        "maintenance",
        help="silence the alerts of GPUs or of the node for a time",
        description="Silence the alerts of GPUs or of the node for a time.",
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("action", choices=("start", "list", "end"), help="what to do")
    parser.add_argument("id", nargs="*", metavar="ID", help="with end: as `list` prints them")
    what = parser.add_mutually_exclusive_group()
    what.add_argument(
        "--gpu",
        action="append",
        default=[],
        metavar="GPU",
        help="a card by its GPU-... UUID or its index; may be given more than once",
    )
    what.add_argument("--node", action="store_true", help="the whole node")
    what.add_argument("--all", action="store_true", help="with end: whatever holds now")
    parser.add_argument("--for", dest="duration", metavar="TIME", help="with start: how long, as in 90s, 30m, 2h, 1d")
    parser.add_argument(
        "--reason", default="", metavar="TEXT", help="with start: shown on the landing page and by list"
    )
    parser.add_argument(
        "--anomaly",
        action="append",
        default=[],
        metavar="NAME",
        help="with start: only this anomaly; may be given more than once (default: all, and missing or lost GPUs)",
    )
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML configuration (default: /etc/warpwatch/warpwatch.toml where it exists)",
    )
