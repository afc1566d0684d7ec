"""The command line: `warpwatch COMMAND`. Exit status 0 done, 1 a fault, 2 wrong use or unreadable input."""

from __future__ import annotations

import argparse
import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Final

from agent import __version__
from agent.cli_alert_trial import add_test_alert
from agent.cli_maintenance import add_maintenance
from agent.cli_rules import add_check_rules
from agent.errors import WarpwatchError

_EPILOG: Final = """\
examples:
  warpwatch run                               sample this host and serve http://localhost:9836/metrics
  warpwatch run --once                        sample once and print the metrics
  warpwatch replay log.csv --json             label a log of nvidia-smi, one JSON object a line
  warpwatch record trace.jsonl.gz --duration 600
  warpwatch convert log.csv trace.jsonl.gz
  warpwatch label trace.jsonl.gz --span 0:600=training

exit status: 0 done, 1 a fault, 2 wrong use or unreadable input
"""


def main(argv: Sequence[str] | None = None) -> int:
    """Run the command and return its exit status; errors are one plain sentence on standard error."""
    arguments = build_parser().parse_args(argv)
    from agent import commands

    try:
        status = int(getattr(commands, arguments.command.replace("-", "_"))(arguments))
        sys.stdout.flush()
    except WarpwatchError as error:
        print(f"warpwatch: {error}", file=sys.stderr)
        return error.exit_status
    except KeyboardInterrupt:
        print("warpwatch: interrupted", file=sys.stderr)
        return 1
    except BrokenPipeError:
        # The reader of our output went away (`| head`): nobody is left to tell.
        _discard_output()
        return 1
    except OSError as error:
        where = f" {error.filename}" if error.filename else " output"
        print(f"warpwatch: cannot read or write{where}: {error.strerror}", file=sys.stderr)
        _discard_output()
        return 1
    return status


def _discard_output() -> None:
    """Send what is still buffered nowhere: Python would try to write it at exit, and complain."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def build_parser() -> argparse.ArgumentParser:
    """Return the command line, from which the manual page and the completions are made as well."""
    parser = argparse.ArgumentParser(
        prog="warpwatch",
        description="Says what every GPU of this host is doing and what goes wrong, for Prometheus.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--version", action="version", version=f"warpwatch {__version__}")
    commands = parser.add_subparsers(dest="command", required=True, metavar="COMMAND")
    _add_run(commands)
    _add_replay(commands)
    _add_record(commands)
    _add_convert(commands)
    _add_simulate(commands)
    _add_label(commands)
    _add_train(commands)
    _add_evaluate(commands)
    _add_check_config(commands)
    add_check_rules(commands)
    add_test_alert(commands)
    _add_driver(commands)
    add_maintenance(commands)
    _add_model(commands)
    return parser


_Commands = argparse._SubParsersAction  # the type has no public name


def _add(commands: _Commands[argparse.ArgumentParser], name: str, help_: str, examples: str) -> argparse.ArgumentParser:
    return commands.add_parser(
        name,
        help=help_,
        description=help_[0].upper() + help_[1:] + ".",
        epilog=f"examples:\n{examples}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )


def _add_config(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--config",
        type=Path,
        metavar="FILE",
        help="TOML configuration (default: /etc/warpwatch/warpwatch.toml where it exists)",
    )


def _add_run(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "run",
        "sample this host, label its GPUs and serve /metrics until stopped",
        "  warpwatch run\n"
        "  warpwatch run --listen 127.0.0.1:9900 --config /etc/warpwatch/warpwatch.toml\n"
        "  warpwatch run --demo            play the bundled simulated trace as GPUs; exports warpwatch_replay 1\n",
    )
    _add_config(parser)
    parser.add_argument("--listen", metavar="HOST:PORT", help="address to serve on (default: :9836, all addresses)")
    parser.add_argument("--once", action="store_true", help="sample once, print the metrics to standard output, end")
    parser.add_argument(
        "--print-config", action="store_true", help="print all keys that hold and where they come from, end"
    )
    parser.add_argument(
        "--demo",
        nargs="?",
        type=Path,
        const="",
        metavar="TRACE",
        help="play a trace as the GPUs of this host (without TRACE the bundled one); says so everywhere",
    )


def _add_replay(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "replay",
        "play a trace or a foreign log through the labels and detectors of a live node",
        "  warpwatch replay trace.jsonl.gz --fast\n"
        "  nvidia-smi --query-gpu=index,timestamp,utilization.gpu,memory.used,power.draw --format=csv -l 1 > log.csv\n"
        "  warpwatch replay log.csv --json | jq 'select(.type == \"finding\")'\n"
        "  warpwatch replay trace.jsonl.gz --speed 10 --listen :9836\n",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace, or a log that `convert` reads")
    _add_config(parser)
    speed = parser.add_mutually_exclusive_group()
    speed.add_argument("--speed", type=_positive, default=1.0, metavar="N", help="times real time (default: 1)")
    speed.add_argument("--fast", action="store_true", help="as fast as this machine can")
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="model bundle (default: the shipped one)")
    parser.add_argument("--json", action="store_true", help="print one JSON object a line; implies --fast")
    parser.add_argument("--listen", metavar="HOST:PORT", help="serve /metrics and the landing page meanwhile")


def _add_record(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "record",
        "record what the samplers bring into a trace",
        "  warpwatch record trace.jsonl.gz --duration 600 --label training\n"
        "  warpwatch record trace.jsonl.gz                 until Ctrl-C\n",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="file to create; gzip where the name ends in .gz")
    _add_config(parser)
    parser.add_argument("--duration", type=_positive, metavar="S", help="seconds to record (default: until stopped)")
    parser.add_argument(
        "--label",
        choices=("training", "inference", "idle", "other"),
        metavar="L",
        help="what the GPUs are doing throughout, where you know: training, inference, idle or other",
    )
    parser.add_argument("--identify", action="store_true", help="keep the real UUIDs and PCI addresses")


def _add_convert(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "convert",
        "turn a foreign log into a trace: nvidia-smi CSV, dmon and pmon text, generic CSV",
        "  warpwatch convert log.csv trace.jsonl.gz\n",
    )
    parser.add_argument("input", type=Path, metavar="IN", help="the log, plain or gzip; its format is found by content")
    parser.add_argument("out", type=Path, metavar="OUT", help="trace to create; gzip where the name ends in .gz")


def _add_simulate(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "simulate",
        "write a simulated trace of one kind of work; its header says that it is simulated",
        "  warpwatch simulate stalled_all_reduce stall.jsonl.gz --gpus 8 --seconds 1200 --seed 7\n",
    )
    parser.add_argument("kind", metavar="KIND", help="kind of work; an unknown one lists them")
    parser.add_argument("out", type=Path, metavar="OUT", help="trace to create; gzip where the name ends in .gz")
    parser.add_argument("--gpus", type=int, default=8, metavar="N", help="GPUs of the node, 1 to 16 (default: 8)")
    parser.add_argument(
        "--board", default="H100", metavar="NAME", help="GPU model; an unknown one lists them (default: H100)"
    )
    parser.add_argument("--seconds", type=_positive, default=900.0, metavar="S", help="length (default: 900)")
    parser.add_argument("--interval", type=_positive, default=1.0, metavar="S", help="sample interval (default: 1)")
    parser.add_argument(
        "--seed", type=_natural, default=1, metavar="N", help="equal seeds give equal files (default: 1)"
    )


def _add_label(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "label",
        "mark in a trace what its GPUs were really doing, for `train --traces`",
        "  warpwatch label trace.jsonl.gz --list\n"
        "  warpwatch label trace.jsonl.gz --span 0:600=training --span 700:=idle\n"
        "  warpwatch label trace.jsonl.gz --span 10m:1h=inference --gpu 0 --gpu 1 -o labelled.jsonl.gz\n"
        "  warpwatch label trace.jsonl.gz --clear --span :=training      mark the whole trace anew\n"
        "\n"
        "Times are seconds from the first sample on, as `warpwatch replay` prints them; 10m is ten minutes.\n"
        "Without START a span is from the beginning, without END to the end. Leave unmarked what is none of the four\n"
        "(loading, warm-up) and what you do not know: it is not trained on. A recording of one thing throughout needs\n"
        "no span where it was made with `record --label`. The file is replaced only when the new one is complete.\n",
    )
    parser.add_argument("trace", type=Path, metavar="TRACE", help="a trace of `record` or `convert`, plain or gzip")
    parser.add_argument(
        "--span",
        action="append",
        default=[],
        metavar="START:END=WORD",
        help="mark this stretch as training, inference, idle or other; may be given more than once",
    )
    parser.add_argument(
        "--gpu",
        action="append",
        default=[],
        type=_natural,
        metavar="N",
        help="the spans hold for this GPU alone; may be given more than once (default: all GPUs)",
    )
    parser.add_argument("--list", action="store_true", help="print what is marked, after the changes if there are any")
    parser.add_argument("--clear", action="store_true", help="first remove every span that was marked before")
    parser.add_argument("-o", "--out", type=Path, metavar="OUT", help="trace to write (default: TRACE itself)")


def _add_train(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "train",
        "train the model on simulated and own labelled traces and write a bundle (needs warpwatch[train])",
        "  warpwatch train bundle/                                simulated traces alone, as the shipped bundle\n"
        "  warpwatch train bundle/ --traces recordings/           and own traces, marked by `warpwatch label`\n"
        "  warpwatch train bundle/ --traces recordings/ --recalibrate\n"
        "  warpwatch replay trace.jsonl.gz --fast --model bundle/\n"
        "\n"
        "Windows of one trace stay together: whole traces are fitted, calibrated or tested on. A folder inside FOLDER\n"
        "is one source (a machine, a project), and so is a trace beside them. To recalibrate takes two traces each of\n"
        "two of training, inference and other; it changes how sure the model has to be, and not what it looks at.\n"
        "`[model] bundle` in the configuration has the agent use a bundle. Equal traces, options and versions of the\n"
        "libraries give equal bundles.\n",
    )
    parser.add_argument("out", type=Path, metavar="OUT", help="folder to create for the bundle")
    parser.add_argument(
        "--traces", nargs="+", type=Path, default=[], metavar="FOLDER", help="folders with own labelled traces"
    )
    parser.add_argument(
        "--recalibrate",
        action="store_true",
        help="keep the trees of a bundle, and fit only its temperature and threshold on the own traces",
    )
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="bundle to recalibrate (default: the shipped one)")
    parser.add_argument(
        "--scenarios",
        type=_natural,
        metavar="N",
        help="simulated scenarios to train on; 0 trains on own traces alone (default: 5000)",
    )
    parser.add_argument(
        "--seed", type=_natural, default=1, metavar="N", help="equal seeds give equal models (default: 1)"
    )


def _add_evaluate(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "evaluate",
        "score the labels on labelled recordings, or write the whole report about the model",
        "  warpwatch evaluate traces/\n"
        "  warpwatch evaluate traces/ --json\n"
        "  warpwatch evaluate --report docs traces/   model.md, model.html, plots; needs warpwatch[train]\n",
    )
    parser.add_argument(
        "traces", type=Path, nargs="?", metavar="FOLDER", help="folder with INDEX.csv and the traces it names"
    )
    _add_config(parser)
    parser.add_argument("--model", type=Path, metavar="FOLDER", help="model bundle (default: the shipped one)")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    parser.add_argument(
        "--report",
        type=Path,
        metavar="DIR",
        help="train on simulated traces with whole families and sources held out, and write tables and plots to DIR",
    )
    parser.add_argument("--quick", action="store_true", help="with --report: a little of everything, to try it")
    parser.add_argument("--seed", type=_natural, metavar="N", help="with --report: equal seeds give equal figures")


def _add_check_config(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "check-config",
        "check a configuration file and name the first mistake",
        "  warpwatch check-config /etc/warpwatch/warpwatch.toml\n",
    )
    parser.add_argument("config", type=Path, metavar="FILE", help="the TOML file")


def _add_driver(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "driver",
        "have the running agent release the NVIDIA driver, or take it up again",
        "  warpwatch driver release     the agent lets go with its next tick, within three seconds\n"
        "  nvidia-smi --gpu-reset -i 3\n"
        "  warpwatch driver resume\n"
        "  systemctl kill -s SIGUSR1 warpwatch     the same as release, where no process id file is written\n",
    )
    parser.add_argument("action", choices=("release", "resume"), help="release ends by itself after 10 min")
    _add_config(parser)
    parser.add_argument("--pid", type=int, metavar="PID", help="the agent (default: the one of /run/warpwatch/agent)")


def _add_model(commands: _Commands[argparse.ArgumentParser]) -> None:
    parser = _add(
        commands,
        "model",
        "install a model bundle for this node, go back to the one before, or list them",
        "  warpwatch model install bundle/     checked, copied below /var/lib/warpwatch and made the current one\n"
        "  warpwatch model rollback            the one before; the shipped one where there was none\n"
        "  warpwatch model list\n"
        "\n"
        "The agent takes the current one when it starts, and says so where it does not fit; `[model] bundle` in the\n"
        "configuration comes before it. warpwatch_model_info tells which one is in use.\n",
    )
    parser.add_argument("action", choices=("install", "rollback", "list"))
    parser.add_argument(
        "bundle", nargs="?", type=Path, metavar="FOLDER", help="bundle to install, as `train` writes it"
    )
    _add_config(parser)


def _natural(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r} is not a whole number from 0 on")
    return int(text)


def _positive(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r} is not a number above 0")
    return value
