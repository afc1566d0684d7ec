"""The command line of `warpwatch test-alert`."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Final

from agent.vocabulary import ANOMALIES, SEVERITIES

_EPILOG: Final = """\
examples:
  warpwatch test-alert stalled_collective                        pages whoever a stall would page, for five minutes
  warpwatch test-alert straggler --severity warning --for 10m

The alert is called WarpwatchTestAlert and says that nothing is wrong. It goes the way of an alert of its severity: the
agent's page, Prometheus' scrape and rules, Alertmanager's routes, the receiver. It ends by itself. No finding, label or
baseline knows of it. An instance that plays a file sends none.
"""


def add_test_alert(commands: argparse._SubParsersAction[argparse.ArgumentParser]) -> None:  # it has no public name
    """Add the command."""
    parser = commands.add_parser(
        "test-alert",
        help="send a marked alert through the whole way to the pager",
        description="Send a marked alert through the whole way to the pager.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("anomaly", metavar="ANOMALY", help="what it stands for: " + ", ".join(ANOMALIES))
    parser.add_argument("--severity", choices=SEVERITIES[1:], default="critical", help="(default: critical)")
    parser.add_argument(
        "--for", dest="duration", default="5m", metavar="DURATION", help="how long, as in 90s or 5m (default: 5m)"
    )
    parser.add_argument("--pid", type=int, metavar="PID", help="process of an agent that runs without the service")
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML configuration (default: /etc/warpwatch/warpwatch.toml where it exists)",
    )
