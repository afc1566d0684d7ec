"""Own labelled traces: into windows, into a bundle by training or recalibration, and back into labels by replay."""

from __future__ import annotations

import json
from collections import Counter

import numpy as np
import pytest
from threadpoolctl import threadpool_limits

from agent.cli import main
from agent.errors import UsageError
from agent.records import GpuKey, GpuSample, Tick
from agent.trace import Phase, TraceHeader, TraceWriter
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES
from classifier.model import ARRAYS_NAME, BUNDLED, load
from classifier.own_traces import OwnTracesConfig, find_traces, join, own_dataset
from classifier.training import split
from classifier.training_data import Dataset

UTIL = FEATURE_NAMES.index("util__p50__60")
PLAIN = OwnTracesConfig(masked=0)


def write(path, seconds=100, gpus=1, phases=(), label=None, util=0.5, first_s=5000.0):
    """Write a trace of GPU 0 at `util` (of t), GPU 1 at twice that, and so on."""
    path.parent.mkdir(parents=True, exist_ok=True)
    moved = tuple(Phase(start_s=first_s + a, end_s=first_s + b, workload=word, gpu=gpu) for a, b, word, gpu in phases)
    header = TraceHeader(provenance="recorded", interval_s=1.0, label=label, ground_truth=moved)
    with TraceWriter(path, header) as writer:
        for t in range(seconds + 1):
            at = {"monotonic_s": first_s + t, "wall_s": float(t)}
            records = tuple(
                GpuSample(**at, key=GpuKey(gpu), utilization_ratio=util * (gpu + 1), memory_utilization_ratio=util / 2)
                for gpu in range(gpus)
            )
            writer.write(Tick(**at, records=records))
    return path


def test_windows_begin_15_s_into_a_span_and_follow_every_30_s_by_gpu(tmp_path):
    write(tmp_path / "a.jsonl", gpus=2, phases=[(0, 60, "training", None), (60, 100, "inference", 1)], util=0.4)
    own = own_dataset([tmp_path], 1, config=PLAIN)
    # Both GPUs at 15 and 45 s; GPU 1 again at 75 s, which is 15 s into its second span and 30 s after its last window.
    assert [CLASSES[label] for label in own.data.labels] == ["training"] * 4 + ["inference"]
    assert own.data.rows[:, UTIL].tolist() == [0.4, 0.8, 0.4, 0.8, 0.8]
    assert own.by_class() == {"training": 4, "inference": 1, "idle": 0, "other": 0}
    assert set(own.data.kinds) == {"own/a"}
    assert own.describe() == "1 own trace of 1 source (1 recorded)"


def test_a_label_of_the_whole_recording_counts_where_no_span_is_marked(tmp_path):
    write(tmp_path / "whole.jsonl", label="other")
    write(tmp_path / "spans.jsonl", label="other", phases=[(0, 50, "training", None)])
    own = own_dataset([tmp_path], 1, config=PLAIN)
    by_kind = Counter(zip(own.data.kinds, own.data.labels, strict=True))
    # 15, 45 and 75 s of the one; 15 and 45 s of the other, which is no `other` after 50 s.
    assert by_kind == {("own/whole", CLASSES.index("other")): 3, ("own/spans", CLASSES.index("training")): 2}


def test_what_the_idle_rule_answers_is_kept_for_idle_gpus_alone(tmp_path):
    write(tmp_path / "pause.jsonl", phases=[(0, 50, "inference", None)], util=0.0)
    write(tmp_path / "empty.jsonl", phases=[(0, 50, "idle", None)], util=0.0)
    warnings = []
    own = own_dataset([tmp_path], 1, config=PLAIN, warn=warnings.append)
    assert own.by_class() == {"training": 0, "inference": 0, "idle": 2, "other": 0}
    assert len(warnings) == 1
    assert "pause.jsonl gives no window" in warnings[0]


def test_a_long_trace_is_thinned_evenly(tmp_path):
    write(tmp_path / "long.jsonl", seconds=3000, gpus=2, label="training", util=0.4)
    own = own_dataset([tmp_path], 1, config=OwnTracesConfig(windows=50, masked=0))
    # 100 windows of each GPU are halved twice.
    assert own.data.rows[:, UTIL].tolist().count(0.4) == own.data.rows[:, UTIL].tolist().count(0.8) == 25


def test_traces_are_groups_folders_are_sources_and_no_split_parts_a_trace(tmp_path):
    for name in ("node1/a", "node1/b", "node1/sub/c", "node2/a", "alone"):
        write(tmp_path / f"{name}.jsonl", label="training")
    (tmp_path / "node1/notes.txt").write_text("no trace")
    found = find_traces([tmp_path, tmp_path / "alone.jsonl"])
    assert [source for _, source in found] == ["alone", "node1", "node1", "node1", "node2"]
    own = own_dataset([tmp_path], 1)
    assert own.sources == ("alone", "node1", "node2")
    assert np.unique(own.data.groups).size == own.traces == 5
    parts = [set(own.data.groups[part]) for part in split(own.data, 1)]
    assert sum(map(len, parts)) == 5


def test_rows_with_a_poorer_profile_hold_less_and_equal_seeds_give_equal_rows(tmp_path):
    write(tmp_path / "a.jsonl", label="training")
    first, second, other = (own_dataset([tmp_path], seed) for seed in (1, 1, 2))
    assert first.data.digest() == second.data.digest()
    assert len(other.data.labels) == len(first.data.labels) == 6  # 15, 45 and 75 s, each twice
    known = np.isfinite(first.data.rows)
    assert not (known[1::2] & ~known[::2]).any()


def test_joined_data_keeps_groups_apart():
    def data(groups):
        size = len(groups)
        return Dataset(
            rows=np.zeros((size, len(FEATURE_NAMES))),
            labels=np.zeros(size, dtype=np.int64),
            groups=np.array(groups, dtype=np.int64),
            kinds=np.array(["x"] * size),
        )

    assert join(data([0, 4]), data([0, 1])).groups.tolist() == [0, 4, 5, 6]
    assert join(data([]), data([0, 1])).groups.tolist() == [0, 1]


def test_what_is_missing_is_named(tmp_path):
    with pytest.raises(UsageError, match="there is no such folder or trace"):
        find_traces([tmp_path / "absent"])
    with pytest.raises(UsageError, match="no trace in"):
        find_traces([tmp_path])
    write(tmp_path / "a.jsonl")
    with pytest.raises(UsageError, match="warpwatch label TRACE"):
        own_dataset([tmp_path], 1)


#: Kinds of simulated traces for the round trip, and what they are marked as.
ROUND_TRIP = {
    "data_parallel_training": "training",
    "llm_serving": "inference",
    "hpc": "other",
    "idle": "idle",
}


@pytest.fixture(scope="module")
def recordings(tmp_path_factory):
    """Return a folder with five traces of each class, simulated by the command and marked by the command."""
    folder = tmp_path_factory.mktemp("recordings")
    for kind, word in ROUND_TRIP.items():
        for seed in range(1, 6):
            path = folder / f"node{seed}" / f"{kind}.jsonl.gz"
            path.parent.mkdir(exist_ok=True)
            sizes = ["--gpus", "2", "--seconds", "120", "--seed", str(seed)]
            assert main(["simulate", kind, str(path), *sizes]) == 0
            assert main(["label", str(path), "--clear", "--span", f":={word}"]) == 0
    return folder


def labels_of(capsys, trace, bundle) -> Counter[str]:
    capsys.readouterr()
    assert main(["replay", str(trace), "--json", "--model", str(bundle)]) == 0
    events = map(json.loads, capsys.readouterr().out.splitlines())
    return Counter(event["workload"] for event in events if event["type"] == "decision")


def test_label_train_replay_round_trip_twice_the_same(recordings, tmp_path, capsys):
    for name in ("first", "second"):
        arguments = ["train", str(tmp_path / name), "--traces", str(recordings), "--scenarios", "0"]
        with threadpool_limits(1):  # for so little data threads cost more than they bring
            assert main(arguments) == 0
    assert "bundle written" in capsys.readouterr().out
    first, second = load(tmp_path / "first"), load(tmp_path / "second")
    assert first.sha256 == second.sha256
    assert first.metadata["trained_on"] == "20 own traces of 5 sources (20 simulated)"
    assert first.metadata["training"]["own_traces"]["windows"].keys() == set(CLASSES)
    assert "Trained on 20 own traces of 5 sources" in (tmp_path / "first" / "card.md").read_text()
    said = labels_of(capsys, recordings / "node1/data_parallel_training.jsonl.gz", tmp_path / "first")
    assert set(said) <= {"training", "unknown"}
    assert said["training"] > 0


def test_own_traces_alone_need_every_class(recordings, tmp_path, capsys):
    only = str(recordings / "node1/hpc.jsonl.gz")
    assert main(["train", str(tmp_path / "out"), "--traces", only, "--scenarios", "0"]) == 2
    assert "holds no window of training, inference, idle" in capsys.readouterr().err


def test_recalibration_keeps_the_trees_and_says_so(recordings, tmp_path, capsys):
    for name in ("first", "second"):
        assert main(["train", str(tmp_path / name), "--traces", str(recordings), "--recalibrate"]) == 0
    assert "trees as they were" in capsys.readouterr().out
    shipped, first = load(), load(tmp_path / "first")
    assert first.sha256 == load(tmp_path / "second").sha256 != shipped.sha256
    assert (tmp_path / "first" / ARRAYS_NAME).read_bytes() == (BUNDLED / ARRAYS_NAME).read_bytes()
    assert first.hierarchy.temperatures != shipped.hierarchy.temperatures
    said = first.metadata["recalibrated"]
    assert said["from_sha256"] == shipped.sha256
    assert said["temperatures_before"] == list(shipped.hierarchy.temperatures)
    assert said["thresholds_before"] == shipped.thresholds
    assert said["own_traces"]["traces"] == 20
    assert "## Recalibrated" in (tmp_path / "first" / "card.md").read_text()
    assert labels_of(capsys, recordings / "node1/idle.jsonl.gz", tmp_path / "first")["idle"] > 0


def test_a_bundle_is_used_by_the_configuration(recordings, tmp_path, capsys):
    (tmp_path / "warpwatch.toml").write_text(f'[model]\nbundle = "{tmp_path / "absent"}"\n')
    trace = recordings / "node1/idle.jsonl.gz"
    assert main(["replay", str(trace), "--json", "--config", str(tmp_path / "warpwatch.toml")]) == 2
    assert "absent" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["--recalibrate"], "name folders of own labelled traces with --traces"),
        (["--scenarios", "0"], "name folders of own labelled traces with --traces"),
        (["--traces", "RECORDINGS", "--recalibrate", "--scenarios", "9"], "--recalibrate keeps the trees"),
        (["--traces", "RECORDINGS", "--model", "x"], "--model goes with --recalibrate"),
        (["--traces", "RECORDINGS/node1", "--recalibrate"], "training in 1, inference in 1, other in 1; label more"),
        (["--traces", "nowhere"], "there is no such folder"),
    ],
)
def test_wrong_use_of_train_is_one_sentence(recordings, tmp_path, capsys, arguments, said):
    named = [argument.replace("RECORDINGS", str(recordings)) for argument in arguments]
    assert main(["train", str(tmp_path / "out"), *named]) == 2
    error = [line for line in capsys.readouterr().err.splitlines() if line.startswith("warpwatch: ")][-1]
    assert said in error
    assert not (tmp_path / "out").exists()
