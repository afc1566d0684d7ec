"""What `warpwatch maintenance` does: writes, lists and removes the files that the agent reads."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from datetime import UTC, datetime

from agent.clock import Clock, SystemClock
from agent.config import load_config
from agent.errors import FaultError, UsageError
from agent.maintenance import READ_PERIOD_S, Maintenance, MaintenanceFiles, parse_duration, parse_gpus


def run(arguments: argparse.Namespace, clock: Clock | None = None) -> int:
    """Do what the arguments say; raises UsageError and FaultError with one sentence."""
    _check(arguments)
    files = MaintenanceFiles(load_config(arguments.config).agent.state_directory)
    clock = clock or SystemClock()
    action = {"start": _start, "list": _list, "end": _end}[arguments.action]
    sys.stdout.write(action(arguments, files, clock))
    return 0


def _check(arguments: argparse.Namespace) -> None:
    """Refuse options that mean nothing beside the action."""
    of_start = {"--for": arguments.duration, "--reason": arguments.reason, "--anomaly": arguments.anomaly}
    of_end = {"an ID": arguments.id, "--all": arguments.all}
    of_both = {"--gpu": arguments.gpu, "--node": arguments.node}
    allowed = {"start": of_start | of_both, "list": {}, "end": of_end | of_both}[arguments.action]
    for name, value in (of_start | of_end | of_both).items():
        if value and name not in allowed:
            raise UsageError(f"{name} does not go with `maintenance {arguments.action}`; see --help for examples")
    if arguments.action == "start" and not (arguments.gpu or arguments.node):
        raise UsageError("name what is in maintenance: --gpu GPU, which may be given more than once, or --node")
    if arguments.action == "start" and not arguments.duration:
        raise UsageError("say how long with --for, as in --for 2h: a silence that nobody ends would last")
    if arguments.action == "end" and sum(map(bool, (*of_end.values(), *of_both.values()))) != 1:
        raise UsageError("say what ends: one of ID, --gpu, --node, --all")


def _start(arguments: argparse.Namespace, files: MaintenanceFiles, clock: Clock) -> str:
    begun = files.start(
        clock.now(),
        parse_duration(arguments.duration),
        gpus=parse_gpus(arguments.gpu),
        anomalies=arguments.anomaly,
        reason=arguments.reason,
    )
    return (
        f"{_subject(begun)} {'are' if len(begun.gpus) > 1 else 'is'} in maintenance until {_moment(begun)} "
        f"(id {begun.id}); a running agent knows within {READ_PERIOD_S:.0f} s\n"
    )


def _list(_: argparse.Namespace, files: MaintenanceFiles, clock: Clock) -> str:
    held = files.read(clock.now())
    if not held:
        return "nothing is in maintenance\n"
    return "".join(
        "  ".join(filter(None, (one.id, f"until {_moment(one)}", _subject(one), ", ".join(one.anomalies), one.reason)))
        + "\n"
        for one in held
    )


def _end(arguments: argparse.Namespace, files: MaintenanceFiles, clock: Clock) -> str:
    held = files.read(clock.now())
    chosen = _chosen(arguments, held)
    if not chosen:
        raise FaultError("nothing of that is in maintenance; `warpwatch maintenance list` shows what is")
    files.end([one.id for one in chosen])
    left = {one.id for one in files.read(clock.now())}
    for one in chosen:
        if one.id in left:
            raise FaultError(f"maintenance {one.id} lies in a file of another name in {files.folder}; remove that file")
    return "".join(f"the maintenance of {_subject(one)} (id {one.id}) has ended\n" for one in chosen)


def _chosen(arguments: argparse.Namespace, held: Sequence[Maintenance]) -> list[Maintenance]:
    if arguments.all:
        return list(held)
    if arguments.node:
        return [one for one in held if one.is_of_node]
    if arguments.gpu:
        gpus = set(parse_gpus(arguments.gpu))
        # One that was begun for several GPUs ends for all of them, or not by naming some.
        return [one for one in held if one.gpus and set(one.gpus) <= gpus]
    unknown = set(arguments.id) - {one.id for one in held}
    if unknown:
        raise FaultError(f"there is no maintenance {min(unknown)}; `warpwatch maintenance list` shows what there is")
    return [one for one in held if one.id in arguments.id]


def _subject(one: Maintenance) -> str:
    if one.is_of_node:
        return "the node"
    names = [gpu if gpu.isdecimal() else gpu.replace("gpu-", "GPU-", 1) for gpu in one.gpus]
    return f"GPU {', '.join(names)}" if len(names) == 1 else f"GPUs {', '.join(names)}"


def _moment(one: Maintenance) -> str:
    return datetime.fromtimestamp(one.expires_wall_s, UTC).strftime("%Y-%m-%d %H:%M:%SZ")
