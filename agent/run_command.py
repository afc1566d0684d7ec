"""`warpwatch run`: the agent from its start to its end, and what signals tell it meanwhile."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.clock import SystemClock, stopwatch
from agent.config import load_config, print_config
from agent.console import log_to_stderr, set_log_level, stop_event
from agent.errors import FaultError, UsageError
from agent.pid_file import pid_file
from agent.supervisor import Supervisor

if TYPE_CHECKING:
    from agent.daemon import Daemon

log = logging.getLogger("warpwatch")

#: Seconds between two looks whether the agent is told something.
_LOOK_S: Final = 0.5


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; with --once or --print-config print and end."""
    if arguments.print_config:
        options = {} if arguments.listen is None else {"export.listen": arguments.listen}
        sys.stdout.write(print_config(arguments.config, options))
        return 0
    config = load_config(arguments.config)
    log_to_stderr(config.agent.log_level)
    again = _Again()
    if sys.stdin is None or not sys.stdin.isatty():  # a terminal that is closed ends its agent
        signal.signal(signal.SIGHUP, again.ask)
    from agent.daemon import Daemon, bundled_demo, run_once

    demo = None if arguments.demo is None else bundled_demo() if arguments.demo == Path() else arguments.demo
    if arguments.once:
        sys.stdout.flush()
        sys.stdout.buffer.write(run_once(config, SystemClock(), demo))
        return 0
    stop = stop_event()
    faults: list[str] = []

    def fail(reason: str) -> None:
        faults.append(reason)
        stop.set()

    daemon = Daemon(config, SystemClock(), listen=arguments.listen, demo=demo, on_fault=fail)
    signal.signal(signal.SIGUSR1, lambda *_: daemon.release_driver())
    signal.signal(signal.SIGUSR2, lambda *_: daemon.resume_driver())
    if daemon.demo_notice:
        log.warning(daemon.demo_notice)
    daemon.start()
    supervisor = Supervisor()
    _serve(daemon, supervisor, arguments.config, stop, again)
    log.info("stopping")
    supervisor.stopping(faults[0] if faults else "told to")
    daemon.stop()
    if faults:
        raise FaultError(f"the NVIDIA driver can only be read by a new process ({faults[0]}); start warpwatch again")
    return 0


class _Again:
    """Whether SIGHUP asked for the configuration to be read again.

    No Event: a signal that comes while the handler of one before holds its lock would wait for itself for ever.
    """

    is_asked = False

    def ask(self, *_: object) -> None:
        """Note a signal; a handler of signal.signal."""
        self.is_asked = True


def _serve(daemon: Daemon, supervisor: Supervisor, path: Path | None, stop: threading.Event, again: _Again) -> None:
    """Tell the service manager how it goes until `stop` is set, and read the configuration again where it is asked."""
    serving = f"serving {daemon.url}metrics"
    log.info("open %s in a browser; Prometheus scrapes %smetrics", daemon.url, daemon.url)
    supervisor.ready(serving)
    told_s = stopwatch()
    with pid_file(daemon.runtime_folder):
        while not stop.wait(_LOOK_S):
            if again.is_asked:
                again.is_asked = False
                supervisor.reloading()
                _reload(daemon, path)
                supervisor.ready(serving)
            if supervisor.sign_period_s is not None and stopwatch() - told_s >= supervisor.sign_period_s - _LOOK_S:
                told_s = stopwatch()
                if daemon.is_working():
                    supervisor.alive()


def _reload(daemon: Daemon, path: Path | None) -> None:
    """Read the configuration again and put it in force; a bad one is said and changes nothing."""
    try:
        config = load_config(path)
        daemon.reload(config)
        set_log_level(config.agent.log_level)
    except (UsageError, FaultError) as error:
        daemon.refuse_reload()
        log.error("%s; the configuration of before goes on to hold", error)  # noqa: TRY400 - the sentence says it all
