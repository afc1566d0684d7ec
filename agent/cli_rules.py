"""The command line of `warpwatch check-rules`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

_EPILOG: Final = """\
examples:
  warpwatch check-rules exporters/rules/*.rules.yml
  warpwatch check-rules /etc/prometheus/rules/gpu.yml --config /etc/warpwatch/warpwatch.toml

A rule is named where it reads a series that is not exported (a sampler or a detector that is off, a level of [export]
host, a name with a typing error), a word that a label never holds, or what no rule of these files records. Metrics of
other programs are taken to exist. The exit status is 1 where a rule is named. Needs warpwatch[rules].
"""


def add_check_rules(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # it has no public name
    """Add the command."""
    parser = commands.add_parser(
        "check-rules",
        help="say which rules of Prometheus can never fire with a configuration",
        description="Say which rules of Prometheus can never fire, or record anything, with a configuration.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", type=Path, nargs="+", metavar="FILE", help="files of rules, checked together")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML configuration (default: /etc/warpwatch/warpwatch.toml where it exists)",
    )
    parser.add_argument("--json", action="store_true", help="print one JSON object a line for each such rule")
