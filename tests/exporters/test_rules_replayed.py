"""The shipped rules on series that come from traces, as several nodes: what fires, and when, and nothing else."""

from __future__ import annotations

import dataclasses
import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.exporters.replayed_series import RULES, SCRAPE_S, Play, input_series

JOB = "slurm:7"
#: Four GPUs that train until 420 s and then wait, sure to the agent from 460 s on.
STALLS = Play(trace="stalled_all_reduce_h100", parts=((0, 675),), job_key=JOB)
#: Two GPUs that train all the time.
WORKS = Play(trace="data_parallel_training_v100", parts=((0, 600), (0, 75)), job_key=JOB)
#: Four GPUs that train and wait in each checkpoint, every 216 s: the last one ends at 485 s, or at 270 s.
SAVES = Play(
    trace="rank0_checkpoint_h100",
    parts=((0, 640), (270, 440), (270, 320)),
    job_key=JOB,
    checkpoint_interval_s=216,
)
SAVED_LESS = dataclasses.replace(SAVES, parts=((0, 440), (270, 440), (270, 440), (270, 350)))
#: An hour, in which counters begin anew each quarter of it.
HOUR = ((0, 900),) * 4
QUIET = {
    "n1": Play(trace="rank0_checkpoint_h100", parts=HOUR, job_key=JOB),
    "n2": Play(trace="rank0_checkpoint_h100", parts=HOUR, job_key=JOB),
    "n3": Play(trace="llm_serving_h100", parts=HOUR, job_key="slurm:9"),
}


def fires(when: str, *alerts: str) -> dict:
    """Return the check that these alerts fire at a time, by name and what tells them apart, and no other."""
    expr = 'count by(alertname, job_key, instance, gpu) (ALERTS{alertstate="firing"})'
    return {"expr": expr, "eval_time": when, "exp_samples": [{"labels": f"{{{one}}}", "value": 1} for one in alerts]}


def has(when: str, expr: str, value: float) -> dict:
    return {"expr": expr, "eval_time": when, "exp_samples": [{"labels": "{}", "value": value}]}


def quiet(until: str) -> dict:
    """Return the check that nothing has fired up to a time."""
    return {"expr": f'count_over_time(ALERTS{{alertstate="firing"}}[{until}])', "eval_time": until, "exp_samples": []}


def stalled(instance: str, gpus: int = 4) -> list[str]:
    labels = f'alertname="WarpwatchStalledCollective",instance="{instance}",job_key="{JOB}"'
    return [f'{labels},gpu="{gpu}"' for gpu in range(gpus)]


JOB_STALLED = f'alertname="WarpwatchJobStalled",job_key="{JOB}"'
CULPRITS = "count by(instance, cause) (job_key:warpwatch_culprit:cause)"


def cases() -> list[dict]:
    nodes = {"n1": STALLS, "n2": STALLS, "n3": STALLS}
    restarts = dataclasses.replace(STALLS, restart_s=200.0)
    loses = dataclasses.replace(WORKS, gone_s=300.0, gone_gpu=1)
    return [
        {
            "name": "three nodes wait, one works: it is the culprit",
            "input_series": input_series({**nodes, "n4": WORKS}),
            "promql_expr_test": [
                quiet("450s"),
                fires("510s", JOB_STALLED, *stalled("n1"), *stalled("n2"), *stalled("n3")),
                {
                    "expr": CULPRITS,
                    "eval_time": "510s",
                    "exp_samples": [{"labels": '{instance="n4",cause="not_waiting"}', "value": 2}],
                },
            ],
        },
        {
            "name": "a node dies before the others wait for it",
            "input_series": input_series({**nodes, "n4": WORKS}, dies={"n4": 390.0}),
            "promql_expr_test": [
                {
                    "expr": CULPRITS,
                    "eval_time": "510s",
                    "exp_samples": [{"labels": '{instance="n4",cause="node_down"}', "value": 1}],
                },
                fires(
                    "660s",
                    JOB_STALLED,
                    *stalled("n1"),
                    *stalled("n2"),
                    *stalled("n3"),
                    f'alertname="WarpwatchAgentDown",instance="n4",job_key="{JOB}"',
                ),
            ],
        },
        {
            "name": "the agent of a node starts again: its counters begin anew, no rate is seen, and the stall is told",
            "input_series": input_series({"n1": STALLS, "n2": restarts}),
            "promql_expr_test": [
                quiet("450s"),
                fires("510s", JOB_STALLED, *stalled("n1"), *stalled("n2")),
            ],
        },
        {
            "name": "a GPU whose series vanish takes no other with it",
            "input_series": input_series({"n1": loses, "n2": WORKS}),
            "promql_expr_test": [
                has("290s", "count(instance_gpu:warpwatch_gpu_waiting:owned)", 4),
                has("330s", "count(instance_gpu:warpwatch_gpu_waiting:owned)", 3),
                quiet("590s"),
            ],
        },
        {
            "name": "a missed checkpoint is that of the freshest node",
            "input_series": input_series({"n1": SAVES, "n2": SAVED_LESS}),
            "promql_expr_test": [
                quiet("720s"),
                fires("840s", f'alertname="WarpwatchJobCheckpointMissed",job_key="{JOB}"'),
            ],
        },
        {
            "name": "a quiet hour",
            "input_series": input_series(QUIET),
            "promql_expr_test": [quiet("1h")],
        },
    ]


def test_what_was_seen_in_traces_fires_as_it_should(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool (package prometheus) is absent")
    made = {
        "rule_files": [str(path) for path in RULES],
        "evaluation_interval": f"{SCRAPE_S}s",
        "tests": [{"interval": f"{SCRAPE_S}s", **case} for case in cases()],
    }
    file = tmp_path / "replayed.test.yml"
    file.write_text(yaml.dump(made, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)), encoding="utf-8")
    done = subprocess.run(["promtool", "test", "rules", file], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
