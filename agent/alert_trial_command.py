"""What `warpwatch test-alert` does: writes the file by which the running agent sends a marked alert."""

from __future__ import annotations

import argparse
import sys

from agent.alert_trial import begin_trial, check_trial
from agent.clock import Clock, SystemClock
from agent.config import load_config
from agent.maintenance import READ_PERIOD_S, parse_duration
from agent.pid_file import check_agent, running_agent


def run(arguments: argparse.Namespace, clock: Clock | None = None) -> int:
    """Do what the arguments say; raises UsageError and FaultError with one sentence."""
    config = load_config(arguments.config)
    seconds = parse_duration(arguments.duration)
    check_trial(arguments.anomaly, seconds)
    check_agent(arguments.pid or running_agent(config.agent.runtime_folder))
    now = (clock or SystemClock()).now()
    trial = begin_trial(config.agent.state_directory, now, arguments.anomaly, arguments.severity, seconds)
    sys.stdout.write(
        f"WarpwatchTestAlert of {trial.anomaly}, {trial.severity}, lasts for {seconds:.0f} s; the agent exports it "
        f"within {READ_PERIOD_S:.0f} s, and it fires with the next evaluation of the rules\n"
    )
    return 0
