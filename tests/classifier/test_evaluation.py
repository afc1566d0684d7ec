"""Evaluation: decisions are counted per source, outside loading and warm-up, with the baselines beside them."""

from __future__ import annotations

import json
from pathlib import Path

import numpy as np
import pytest

from agent.cli import main
from agent.composition import replayed_decisions
from agent.config import Config
from agent.errors import UsageError
from agent.pipeline import Pipeline
from agent.records import GpuKey, GpuLimits, GpuSample, Tick
from agent.replay import replay
from classifier.detectors.baseline import PowerBaselines
from classifier.evaluation import evaluate, read_index
from classifier.evaluation_report import EvaluationReport, SourceScore
from classifier.features import FEATURE_NAMES
from classifier.labeller import Labeller
from classifier.labeller_config import LabellerConfig
from classifier.model import Prediction
from tests.classifier.fake_models import Unexplained

REAL = Path(__file__).parents[3] / "shared" / "traces"
POWER = FEATURE_NAMES.index("power__p50__60")


class FakeModel(Unexplained):
    """Says training where power is known and above half the limit, else inference."""

    version = "fake"
    threshold = 0.7
    deciding_features = ()

    def predict(self, rows):
        probabilities = np.full((len(rows), 4), 0.002)
        for row, values in zip(probabilities, rows, strict=True):
            row[0 if values[POWER] > 0.5 else 1] = 0.994
        return Prediction(probabilities=probabilities, out_of_domain_ratio=np.full(len(rows), 0.1))


def played(utilization, watts, seconds, interval_s=1, model=None):
    """Replay one GPU with a limit of 400 W."""
    pipeline = Pipeline(
        labeller=Labeller(model, LabellerConfig()),
        detectors=(),
        baselines=PowerBaselines(),
        sample_interval_s=interval_s,
        facts_hold=True,
    )
    ticks = []
    for t in range(0, seconds, interval_s):
        stamp = {"monotonic_s": float(t), "wall_s": float(t), "key": GpuKey(0)}
        sample = GpuSample(**stamp, utilization_ratio=utilization, power_watts=watts, sm_active_ratio=utilization)
        ticks.append(Tick(monotonic_s=t, wall_s=t, records=(sample, GpuLimits(**stamp, power_limit_watts=400.0))))
    for step in replay(ticks, pipeline, interval_s):
        yield step.t, step.judgement.decisions


TRACES = {
    "a__one.csv": (0.9, 300.0, 101),
    "b__two.csv": (0.9, 100.0, 101),
    "c__three.csv": (0.0, 50.0, 101),
    "a__four.csv": (0.9, 100.0, 101),
}


def replayed(path, model=None):
    if path.name not in TRACES:
        raise UsageError(f"cannot read {path}")
    return played(*TRACES[path.name], model=model)


def with_fake_model(path):
    return replayed(path, FakeModel())


@pytest.fixture
def folder(tmp_path):
    (tmp_path / "INDEX.csv").write_text(
        "file,label,source_repo\n"
        "training/a__one.csv,training,example.org/a\n"
        "training/a__four.csv,training,example.org/a\n"
        "inference/b__two.csv,inference,example.org/b\n"
        "idle/c__three.csv,idle,example.org/c\n"
        "idle/c__gone.csv,idle,example.org/c\n"
    )
    (tmp_path / "PHASES.csv").write_text(
        "file,phase,t_start_s,t_end_s\ntraining/a__four.csv,loading,0,49\ntraining/a__four.csv,steady,50,100\n"
    )
    return tmp_path


def test_decisions_are_counted_per_source_and_phases_are_cropped(folder):
    warnings = []
    report = evaluate(folder, with_fake_model, model="fake", warn=warnings.append)
    by_source = {(one.label, one.source): one for one in report.sources}
    training = by_source["training", "a"]
    # One: 21 decisions at 0, 5, ..., 100 s, of which 3 come before 15 s of evidence. Four: those from 50 s on, 11.
    assert training.recordings == 2
    assert dict(training.decisions) == {"unknown": 3, "training": 18, "inference": 11}
    assert dict(training.reasons) == {"too_few_samples": 3}
    assert training.recall == 18 / 32
    assert training.recall_decided == 18 / 29
    assert training.coverage == 29 / 32
    assert training.forced_share("training") == 18 / 29
    assert by_source["idle", "c"].decisions == {"unknown": 3, "idle": 18}
    assert by_source["inference", "b"].recall_decided == 1.0
    assert any("c__gone.csv" in message for message in warnings)


def test_report_shows_recall_coverage_baselines_and_repositories(folder):
    report = evaluate(folder, with_fake_model, model="fake")
    # Sources: a is 18/29 right, b wholly: mean over sources 0.81; one of two is the commoner.
    assert report.forced_by_source == pytest.approx((18 / 29 + 1) / 2)
    assert report.majority_baseline == 0.5
    low, high = report.shuffled_range
    assert low <= report.forced_by_source <= high
    # 74 decisions: 32 training, 21 inference, 21 idle; the 11 wrong ones are all a's.
    assert report.wrong_share == report.confused_share == 11 / 74
    text = report.format()
    assert "0.810" in text
    assert "labels shuffled" in text
    values = json.loads(json.dumps(report.as_dict(), allow_nan=False))
    assert values["sources"][0]["repository"] == "example.org/a"
    assert values["micro"]["training"]["recall"] == round(18 / 32, 4)
    assert values["macro"]["idle"]["said idle"] == round(18 / 21, 4)
    assert values["model"] == "fake"


def source(label, forced):
    return SourceScore(
        source="x", label=label, repository="", recordings=1, decisions={"unknown": 9}, reasons={}, forced=forced
    )


def test_always_the_commoner_is_compared_on_the_same_sources():
    """Of three inference sources two have no probabilities: one training, one inference are left to be forced."""
    silent = source("inference", {})
    report = EvaluationReport(
        sources=(source("training", {"training": 3}), source("inference", {"training": 1}), silent, silent), model=None
    )
    assert report.forced_by_source == 0.5
    assert report.majority_baseline == 0.5


def test_without_a_model_idle_is_still_seen_and_nothing_else_is_claimed(folder):
    report = evaluate(folder, replayed, model=None)
    assert {word for one in report.sources if one.label != "idle" for word in one.decisions} == {"unknown"}
    assert report.micro("idle").right == 18
    assert report.forced_by_source is None
    assert report.format()


def test_slow_logs_give_one_decision_for_each_sample(folder):
    report = evaluate(folder, lambda _path: played(0.0, 50.0, 201, interval_s=20), model=None)
    assert report.micro("idle").total == 2 * 11  # two recordings of 0, 20, ..., 200 s


def test_folder_without_index_or_with_another_table_is_refused(tmp_path):
    with pytest.raises(UsageError, match=r"INDEX\.csv"):
        evaluate(tmp_path, replayed, model=None)
    (tmp_path / "INDEX.csv").write_text("name\nx\n")
    with pytest.raises(UsageError, match="no column file"):
        read_index(tmp_path)
    (tmp_path / "INDEX.csv").write_text("file,label,source_repo\na__b.csv,gaming,r\n")
    with pytest.raises(UsageError, match="gaming"):
        read_index(tmp_path)
    (tmp_path / "INDEX.csv").write_text("file,label,source_repo\n")
    with pytest.raises(UsageError, match="lists no recording"):
        read_index(tmp_path)


def test_empty_report_has_no_figures():
    report = EvaluationReport(sources=(), model=None)
    assert report.shuffled_range is None
    assert report.wrong_share is None
    assert report.format()


def test_a_source_without_decisions_divides_by_nothing():
    score = SourceScore(source="s", label="training", repository="r", recordings=0, decisions={}, reasons={}, forced={})
    assert (score.coverage, score.recall, score.recall_decided) == (None, None, None)


@pytest.mark.skipif(not REAL.is_dir(), reason="the real recordings are not here (../shared/traces)")
def test_idle_recordings_of_public_sources_are_idle():
    """Idle is the claim that holds on real recordings: replay the three of them."""
    recordings = [one for one in read_index(REAL) if one.label == "idle"]
    assert len(recordings) == 3
    for recording in recordings:
        steps = replayed_decisions(Config(), recording.path, lambda _: None)
        said = [one.workload for t, decisions in steps if recording.keeps(t) for one in decisions]
        assert said.count("idle") / len(said) > 0.85
        assert set(said) <= {"idle", "unknown"}


def test_recordings_of_which_none_can_be_read_are_a_fault(tmp_path, capsys):
    (tmp_path / "INDEX.csv").write_text("file,label,source_repo\nnone.csv,training,a/b\n", encoding="utf-8")
    assert main(["evaluate", str(tmp_path)]) == 1
    said = capsys.readouterr()
    assert said.out == ""
    assert "none of the recordings that" in said.err
