"""What each command does. Heavy imports stand inside, so that `--help` and errors come at once."""

from __future__ import annotations

import argparse
import logging
import signal
import sys
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Final

from agent.clock import SystemClock, stopwatch
from agent.config import load_config
from agent.console import Pace, fractions_to, log_to_stderr, progress, stop_event
from agent.driver_state import DriverState, read_driver_state
from agent.errors import FaultError, UsageError
from agent.pid_file import running_agent, signal_agent

if TYPE_CHECKING:
    from agent.config import Config
    from classifier.results import Decision

log = logging.getLogger("warpwatch")

#: How long `driver release` waits until the agent has let go.
RELEASE_WAIT_S: Final = 30.0


def run(arguments: argparse.Namespace) -> int:
    """Serve until SIGTERM or SIGINT; with --once or --print-config print and end."""
    from agent.run_command import run as run_agent

    return run_agent(arguments)


def driver(arguments: argparse.Namespace) -> int:
    """Tell the running agent to release the NVIDIA driver, or to take it up again."""
    pid = arguments.pid or running_agent(load_config(arguments.config).agent.runtime_folder)
    before = read_driver_state(pid)
    signal_agent(pid, signal.SIGUSR1 if arguments.action == "release" else signal.SIGUSR2)
    if before is not None and before.state == "none":
        print(f"process {pid} has no NVIDIA driver to {arguments.action}: it plays a demo, or is told to read no NVML")
    elif arguments.action == "resume":
        print(f"process {pid} takes the NVIDIA driver up again")
    else:
        limit_s = _await_release(pid, before).limit_s
        print(f"process {pid} has released the NVIDIA driver, for {limit_s:.0f} s or until `warpwatch driver resume`")
    return 0


def maintenance(arguments: argparse.Namespace) -> int:
    """Start, list or end the silence of GPUs or of the node."""
    from agent.maintenance_command import run as run_maintenance

    return run_maintenance(arguments)


def _await_release(pid: int, before: DriverState | None) -> DriverState:
    """Wait until the agent says that the driver is released; raises FaultError where it does not within the time."""
    requests = 0 if before is None else before.requests
    waits: tuple[str, ...] = ()
    state = None
    pause = threading.Event()
    ends_s = stopwatch() + RELEASE_WAIT_S
    with progress(f"waiting for process {pid}", "s", RELEASE_WAIT_S) as advance:
        while stopwatch() < ends_s:
            state = read_driver_state(pid)
            if state is not None and state.requests > requests:
                if state.state == "released":
                    return state
                if state.waits_for and state.waits_for != waits:
                    waits = state.waits_for
                    print(f"not released yet: {'; '.join(waits)}", file=sys.stderr)
            pause.wait(0.1)
            advance(0.1)
    if state is None:
        raise FaultError(
            f"process {pid} was told to release the NVIDIA driver, but what it does cannot be read from here; "
            "see its log, or ask again as root"
        )
    raise FaultError(
        f"process {pid} has not released the NVIDIA driver within {RELEASE_WAIT_S:.0f} s: "
        f"{'; '.join(waits) or 'it does not say why'}; it goes on trying, and ending the agent ends its hold"
    )


def replay(arguments: argparse.Namespace) -> int:
    """Play a trace through the pipeline; print JSON lines, or the changes and a summary for a person."""
    from agent.composition import build_replay
    from agent.replay import ReplayJson, ReplayText
    from agent.replay import replay as play
    from agent.serving import build_access, build_server

    log_to_stderr("warning")
    config = load_config(arguments.config)
    trace, pipeline = build_replay(config, arguments.trace, log.warning, bundle=arguments.model)
    server = snapshot = None
    if arguments.listen:
        access = build_access(config)
        server = build_server(config, lambda: snapshot, is_live=False, listen=arguments.listen, access=access)
        server.start()
        log.warning("serving the replay on %s", server.url)
    stop = stop_event()
    out = ReplayJson(sys.stdout) if arguments.json else ReplayText(sys.stdout)
    pace = None if arguments.fast or arguments.json else Pace(arguments.speed, stop)
    with progress(arguments.trace.name, "s of the trace") as advance:
        done_s = 0.0
        for step in play(trace, pipeline, trace.header.interval_s):
            if stop.is_set() or (pace and not pace.wait_until(step.t)):
                break
            out.step(step)
            if server:
                snapshot = pipeline.snapshot(step.now)
            advance(step.t - done_s)
            done_s = step.t
    if stop.is_set() and not server:
        raise KeyboardInterrupt
    out.summary(pipeline.workload_seconds)
    if not pipeline.history.gpus:
        log.warning("%s holds no sample of a GPU", arguments.trace)
    if server:
        if not stop.is_set():
            log.warning("the trace has ended; %s goes on serving its last state until Ctrl-C", server.url)
            stop.wait()
        server.stop()
    return 0


def record(arguments: argparse.Namespace) -> int:
    """Write what the samplers bring into a trace until the time is up or the process is told to stop."""
    from agent.daemon import build_samplers
    from agent.record import Recorder, recording_header
    from agent.records import PERIODS_S, GpuSample
    from agent.schedule import Schedule
    from agent.trace import TraceWriter

    config = load_config(arguments.config)
    log_to_stderr(config.agent.log_level)
    clock = SystemClock()
    samplers = build_samplers(config, clock)
    stop = stop_event()
    header = recording_header(arguments.label, PERIODS_S[GpuSample], [sampler.name for sampler in samplers.all])
    with TraceWriter(arguments.out, header) as writer, progress("recording", "s", arguments.duration) as advance:
        recorder = Recorder(writer, identify=arguments.identify)
        schedule = Schedule(samplers.all, clock, samplers.observed(recorder.deliver))
        samplers.start()
        schedule.start()
        elapsed_s = 0.0
        while not (stop.is_set() or recorder.failure) and (
            arguments.duration is None or elapsed_s < arguments.duration
        ):
            step_s = 1.0 if arguments.duration is None else min(1.0, arguments.duration - elapsed_s)
            stop.wait(step_s)
            elapsed_s += step_s
            advance(step_s)
        schedule.stop(2.0)
        samplers.close()
        if recorder.failure:
            raise FaultError(f"{recorder.failure}; the recording ends after {recorder.ticks} ticks")
    log.info("recorded %d ticks in %s", recorder.ticks, arguments.out)
    if not recorder.gpu_ticks:
        log.warning("no GPU answered: %s holds the network and the disks alone", arguments.out)
    return 0


def convert(arguments: argparse.Namespace) -> int:
    """Turn a foreign log into a trace."""
    from agent.convert import convert as convert_file

    log_to_stderr("warning")
    with progress(arguments.input.name, "%", 100.0) as advance:
        convert_file(arguments.input, arguments.out, log.warning, fractions_to(advance))
    return 0


def simulate(arguments: argparse.Namespace) -> int:
    """Write a simulated trace."""
    from classifier.simulator import Scenario, available_kinds, write_simulated

    if arguments.kind not in available_kinds():
        raise UsageError(f"unknown kind {arguments.kind!r}; choose one of {', '.join(available_kinds())}")
    if not 1 <= arguments.gpus <= 16:
        raise UsageError(f"--gpus is {arguments.gpus}; a node has 1 to 16")
    scenario = Scenario(
        kind=arguments.kind,
        board=arguments.board,
        gpu_count=arguments.gpus,
        duration_s=arguments.seconds,
        interval_s=arguments.interval,
    )
    write_simulated(arguments.out, scenario, arguments.seed)
    return 0


def label(arguments: argparse.Namespace) -> int:
    """Mark spans of a trace, or print the ones that are marked."""
    from agent.label import label as mark
    from agent.label import parse_span

    log_to_stderr("warning")
    spans = [parse_span(text) for text in arguments.span]
    if not (spans or arguments.list or arguments.clear):
        raise UsageError("nothing to do: name a span with --span START:END=WORD, or print those marked with --list")
    if arguments.out and not (spans or arguments.clear):
        raise UsageError(f"{arguments.out} would be a plain copy; --out goes with --span or --clear")
    with progress(arguments.trace.name, "%", 100.0) as advance:
        marked = mark(
            arguments.trace,
            spans,
            gpus=arguments.gpu,
            clear=arguments.clear,
            out=arguments.out,
            warn=log.warning,
            progress=fractions_to(advance),
        )
    if arguments.list:
        print(marked.format((arguments.out or arguments.trace).name))
    return 0


def train(arguments: argparse.Namespace) -> int:
    """Train a model bundle on simulated and own traces, or recalibrate one on own traces."""
    from classifier import model
    from classifier.own_traces import OwnTracesConfig, own_dataset
    from classifier.recalibration import recalibrate
    from classifier.training import TrainingConfig
    from classifier.training import train as train_model
    from classifier.training_data import DatasetConfig

    log_to_stderr("info")
    if not arguments.out.absolute().parent.is_dir():
        raise UsageError(f"cannot create {arguments.out}: its folder does not exist")
    if not arguments.traces and (arguments.recalibrate or arguments.scenarios == 0):
        raise UsageError("there is nothing to learn from: name folders of own labelled traces with --traces")
    if arguments.recalibrate and arguments.scenarios is not None:
        raise UsageError("--scenarios goes with training: --recalibrate keeps the trees of a bundle")
    if arguments.model and not arguments.recalibrate:
        raise UsageError("--model goes with --recalibrate: training starts from nothing")
    own = None
    if arguments.traces:
        taken = OwnTracesConfig(masked=0) if arguments.recalibrate else OwnTracesConfig()
        own = own_dataset(arguments.traces, arguments.seed, config=taken, warn=log.warning, progress=log.info)
    if arguments.recalibrate and own is not None:
        bundle = arguments.model or model.BUNDLED
        print(recalibrate(own, arguments.out, bundle=bundle, progress=log.info).format())
        return 0
    data = DatasetConfig() if arguments.scenarios is None else DatasetConfig(scenarios=arguments.scenarios)
    report = train_model(TrainingConfig(seed=arguments.seed, data=data), arguments.out, log.info, own=own)
    print(report.format())
    return 0


def evaluate(arguments: argparse.Namespace) -> int:
    """Score the labels on labelled recordings, or write the report about the model."""
    import json

    from agent.composition import choose_model, replayed_decisions
    from classifier.evaluation import evaluate as score

    log_to_stderr("warning")
    config = load_config(arguments.config)
    if arguments.report is not None:
        return _report(arguments, config)
    if arguments.traces is None:
        raise UsageError("evaluate needs a FOLDER with INDEX.csv, or --report DIR for the report about the model")
    if arguments.quick or arguments.seed is not None:
        raise UsageError("--quick and --seed go with --report DIR")
    version = choose_model(config, arguments.model).version
    with progress("recordings", "files") as advance:

        def replayed(path: Path) -> Iterator[tuple[float, tuple[Decision, ...]]]:
            yield from replayed_decisions(config, path, log.warning, bundle=arguments.model)
            advance(1)

        report = score(arguments.traces, replayed, model=version, warn=log.warning)
    if not report.sources:
        raise FaultError(f"none of the recordings that {arguments.traces / 'INDEX.csv'} names could be read")
    sys.stdout.write(json.dumps(report.as_dict(), indent=2) + "\n" if arguments.json else report.format())
    return 0


def model(arguments: argparse.Namespace) -> int:
    """Install a model bundle for this node, go back to the one before, or say which are there."""
    from agent.model_store import ModelStore

    config = load_config(arguments.config)
    store = ModelStore(config.agent.state_directory)
    if (arguments.action == "install") != (arguments.bundle is not None):
        raise UsageError("model install takes a FOLDER with a bundle; rollback and list take none")
    if arguments.action == "list":
        for held in store.held(config.model.bundle):
            print(held.line())
        return 0
    held = store.install(arguments.bundle) if arguments.action == "install" else store.rollback()
    print(held.line())
    print("have the agent use it: systemctl reload warpwatch", file=sys.stderr)
    return 0


def _report(arguments: argparse.Namespace, config: Config) -> int:
    from datetime import UTC, datetime

    from agent.model_report import report

    if arguments.json:
        raise UsageError("--json prints the scores of a FOLDER; it does not go with --report")
    today = datetime.fromtimestamp(SystemClock().now().wall_s, UTC).date().isoformat()
    written = report(
        config,
        arguments.report,
        traces=arguments.traces,
        bundle=arguments.model or config.model.bundle,
        quick=arguments.quick,
        seed=arguments.seed,
        date=today,
        progress=lambda total: progress("measuring", "steps", total),
        warn=log.warning,
    )
    print("\n".join(map(str, written)))
    return 0


def check_config(arguments: argparse.Namespace) -> int:
    """Check a configuration file."""
    from agent.serving import build_access

    build_access(load_config(arguments.config))
    print(f"{arguments.config} is valid")
    return 0


def test_alert(arguments: argparse.Namespace) -> int:
    """Have the running agent send a marked alert for a time."""
    from agent.alert_trial_command import run as run_test_alert

    return run_test_alert(arguments)


def check_rules(arguments: argparse.Namespace) -> int:
    """Say which rules of Prometheus can never fire with a configuration."""
    from agent.rules_command import run as run_check_rules

    return run_check_rules(arguments)
