"""Families are held out whole, windows see no more than their profile, and decisions come of the live path."""

from __future__ import annotations

import dataclasses

import numpy as np
import pytest

from agent.history import GpuHistory, HostHistory
from agent.records import GpuKey, GpuLimits, GpuSample, GpuSlowSample, NetworkSample, Tick
from agent.vocabulary import CLASSES
from classifier.features import FEATURE_NAMES
from classifier.model import Prediction
from classifier.profiles import PROFILE_NAMES
from classifier.report.answers import answer
from classifier.report.baselines import baselines
from classifier.report.metrics import ABSTAINED
from classifier.report.playback import Track, called, play, through
from classifier.report.simulated import (
    VARIANTS,
    class_of_families,
    deal,
    held_out_answers,
    simulated_run,
    simulated_windows,
    subset,
    unknown_families,
)
from classifier.report.windows import SPANS_S, WindowsBuilder, add_run, joined, label_over, moments_of
from classifier.simulator import available_kinds
from classifier.training_data import Dataset


class Constant:
    """Says one class of every row, with one probability."""

    threshold = 0.8

    def __init__(self, word, probability=0.985, ratio=0.5):
        self._row = np.full(4, (1 - probability) / 3)
        self._row[CLASSES.index(word)] = probability
        self._ratio = ratio
        self.asked = []

    def thresholds_of(self, rows):
        return np.full(len(rows), self.threshold)

    def predict(self, rows):
        self.asked.append(rows)
        return Prediction(
            probabilities=np.tile(self._row, (len(rows), 1)), out_of_domain_ratio=np.full(len(rows), self._ratio)
        )


@pytest.fixture(scope="module")
def windows():
    return simulated_windows(
        ("data_parallel_training", "idle", "llm_serving"), baselines(),
        scenarios=2, duration_s=(360.0, 400.0), seed=3, advance=lambda _: None,
    )[0]  # fmt: skip


CLASSES_OF = {
    "a": "training", "b": "training", "c": "training", "d": "inference", "e": "inference", "f": "other", "g": "idle",
    "stalled_all_reduce": "training", "data_parallel_training": "training",
}  # fmt: skip


def test_every_family_of_a_class_of_two_is_held_out_once_and_no_fold_takes_a_class_whole():
    folds = deal(CLASSES_OF, 3, seed=1)
    held_out = [family for fold in folds for family in fold]
    assert sorted(held_out) == sorted(set(CLASSES_OF) - {"f", "g"})  # f and g are alone in their class
    for fold in folds:
        for name in ("training", "inference"):
            mine = {family for family, workload in CLASSES_OF.items() if workload == name}
            assert mine - set(fold)
    assert folds == deal(CLASSES_OF, 3, seed=1)


@pytest.mark.parametrize("seed", range(5))
def test_a_variant_is_held_out_with_the_family_it_is_of(seed):
    for fold in deal(CLASSES_OF, 4, seed=seed):
        assert ("stalled_all_reduce" in fold) == ("data_parallel_training" in fold)


def test_variants_are_families_of_the_simulator():
    assert set(VARIANTS) | set(VARIANTS.values()) <= set(available_kinds())


def test_unknown_families_leave_one_of_other_to_train_on():
    classes = {"mining": "other", "hpc": "other", "burn_in": "other", "idle": "idle"}
    assert unknown_families(classes) == ("hpc", "mining")
    assert unknown_families({"mining": "other", "hpc": "other"}) == ("hpc",)


def test_the_class_of_a_family_is_its_commonest():
    labels, families = np.array([0, 0, 2, 1]), np.array(["a", "a", "a", "b"])
    assert class_of_families(labels, families) == {"a": "training", "b": "inference"}


def test_a_subset_keeps_columns_together():
    data = Dataset(
        **{
            one.name: np.arange(4) if one.name != "rows" else np.arange(8.0).reshape(4, 2)
            for one in dataclasses.fields(Dataset)
        }
    )
    kept = subset(data, np.array([True, False, False, True]))
    assert kept.rows.tolist() == [[0, 1], [6, 7]]
    assert kept.labels.tolist() == kept.groups.tolist() == [0, 3]


def test_windows_have_the_truth_of_their_run(windows):
    assert windows.size > 0
    for family, label in (("idle", "idle"), ("llm_serving", "inference")):
        assert set(windows.labels[windows.families == family]) <= {CLASSES.index(label), CLASSES.index("idle")}
    assert set(windows.spans_s) == set(SPANS_S)
    assert windows.answers.shape == (windows.size, len(PROFILE_NAMES), len(baselines()))
    again = joined([windows.where(windows.families == one) for one in np.unique(windows.families)])
    assert again.size == windows.size


def test_windows_are_the_same_for_one_seed(windows):
    again, _ = simulated_windows(
        ("data_parallel_training", "idle", "llm_serving"), baselines(),
        scenarios=2, duration_s=(360.0, 400.0), seed=3, advance=lambda _: None,
    )  # fmt: skip
    for name in ("rows", "labels", "groups", "idle", "answers"):
        np.testing.assert_array_equal(getattr(windows, name), getattr(again, name))


def test_rules_that_need_power_abstain_under_profile_u(windows):
    three = [baseline.name for baseline in baselines()].index("three rules")
    assert (windows.answers[:, PROFILE_NAMES.index("U"), three] == ABSTAINED).all()
    assert (windows.answers[:, PROFILE_NAMES.index("P"), three] != ABSTAINED).all()


def test_a_window_that_waits_is_left_out_and_an_idle_one_kept():
    host, gpu = HostHistory(1e6), GpuHistory(GpuKey(0), 1e6)
    for second in range(61):
        gpu.put("utilization_ratio", float(second), 0.0)
    builder = WindowsBuilder(baselines())
    where = {"group": 0, "family": "x", "gpu_count": 1, "skip_waiting": True}
    assert not builder.add(gpu, host, 60.0, 60.0, label="inference", **where)
    assert builder.add(gpu, host, 60.0, 60.0, label="idle", **where)
    built = builder.build()
    assert built.size == 1
    assert built.still.all()
    assert built.idle.all()


def test_no_window_spans_two_truths():
    run = simulated_run(np.random.default_rng(1), "data_parallel_training", (300.0, 300.0))
    change = next((phase.end_s for phase in run.phases if phase.end_s < 290), None)
    gpu = run.gpus[0].key.gpu
    if change is not None and label_over(run, gpu, change + 1, change + 5) != label_over(run, gpu, 0, change - 1):
        assert label_over(run, gpu, change - 5, change + 5) is None
    builder = WindowsBuilder(baselines())
    add_run(builder, run, np.random.default_rng(2), group=0, gpus=1, moments=4)
    assert builder.build().size <= 8


def test_moments_lie_within_and_do_not_crowd():
    assert list(moments_of(0.0, 59.0, 60.0, 5)) == []
    assert list(moments_of(0.0, 60.0, 60.0, 5)) == [60.0]
    assert list(moments_of(10.0, 130.0, 60.0, 3)) == [70.0, 100.0, 130.0]
    assert len(list(moments_of(0.0, 89.0, 60.0, 50))) == 2


def test_a_model_sees_only_the_profile(windows):
    model = Constant("training")
    answer(model, windows, "U")
    power = [position for position, name in enumerate(FEATURE_NAMES) if name.startswith(("power", "sm__", "nvlink"))]
    assert np.isnan(model.asked[0][:, power]).all()
    answer(model, windows, "N")
    assert np.isfinite(model.asked[1][:, power]).any()


def test_the_idle_rule_comes_before_the_model(windows):
    answers = answer(Constant("training"), windows, "N")
    idle = windows.idle[:, PROFILE_NAMES.index("N")]
    assert idle.any()
    assert (answers.said[idle] == CLASSES.index("idle")).all()
    assert (answers.said[~idle] != CLASSES.index("idle")).all()


def test_nothing_is_said_below_the_threshold_far_away_or_of_idle(windows):
    busy = windows.where(~windows.idle[:, -1])
    assert (answer(Constant("training", 0.7), busy, "N").said == ABSTAINED).all()
    assert (answer(Constant("training", ratio=1.5), busy, "N").said == ABSTAINED).all()
    assert (answer(Constant("training", ratio=np.nan), busy, "N").said == ABSTAINED).all()
    assert (answer(Constant("idle"), busy, "N").said == ABSTAINED).all()
    assert (answer(Constant("training", 0.7), busy, "N").forced == CLASSES.index("training")).all()


def test_of_kernels_that_only_wait_nothing_is_said_whatever_the_model_says(windows):
    busy = windows.where(~windows.idle[:, -1])
    waiting = dataclasses.replace(busy, waiting=np.ones_like(busy.waiting))
    assert (answer(Constant("training"), busy, "N").said == CLASSES.index("training")).any()
    assert (answer(Constant("training"), waiting, "N").said == ABSTAINED).all()
    assert (answer(Constant("training"), waiting, "N").forced == CLASSES.index("training")).all()


def test_nvidia_smi_columns_need_five_minutes(windows):
    busy = windows.where(~windows.idle.any(axis=1))
    said = answer(Constant("training"), busy, "P").said
    assert (said[busy.spans_s == 60.0] == ABSTAINED).all()
    assert (said[busy.spans_s == 300.0] == CLASSES.index("training")).all()


def test_a_window_is_answered_by_the_model_that_never_saw_its_family(windows):
    models = [(("idle",), Constant("other")), (("llm_serving",), Constant("training"))]
    busy = ~windows.idle[:, -1]
    forced = held_out_answers(models, windows, "N").forced
    assert (forced[busy & (windows.families == "llm_serving")] == CLASSES.index("training")).all()
    assert (forced[busy & (windows.families == "data_parallel_training")] == CLASSES.index("other")).all()


STAMP = {"monotonic_s": 1.0, "wall_s": 1.0, "key": GpuKey(0)}


def test_a_profile_takes_the_rest_out_of_the_records():
    tick = Tick(
        monotonic_s=1.0,
        wall_s=1.0,
        records=(
            GpuSample(**STAMP, utilization_ratio=0.5, power_watts=200.0, sm_active_ratio=0.4,
                      nvlink_receive_bytes_total=5),
            GpuSlowSample(**STAMP, temperature_celsius=50.0, energy_joules_total=9.0, processes=()),
            GpuLimits(**STAMP, power_limit_watts=400.0),
            NetworkSample(monotonic_s=1.0, wall_s=1.0, device="eth0", receive_bytes_total=1, transmit_bytes_total=2),
        ),
    )  # fmt: skip
    seen = {profile: {type(r): r for r in next(through(profile, [tick])).records} for profile in PROFILE_NAMES}
    assert seen["U"][GpuSample].utilization_ratio == 0.5
    assert seen["U"][GpuSample].power_watts is None
    assert GpuLimits not in seen["U"]
    assert seen["P"][GpuSample].power_watts == 200.0
    assert seen["P"][GpuSample].sm_active_ratio is None
    assert seen["P"][GpuSlowSample].temperature_celsius == 50.0
    assert seen["G"][GpuSample].nvlink_receive_bytes_total == 5
    assert seen["G"][GpuSlowSample].processes is None
    assert NetworkSample not in seen["G"]
    assert list(seen["N"].values()) == list(tick.records)


def test_a_run_is_played_with_its_truth_and_a_gap_is_unknown():
    run = simulated_run(np.random.default_rng(4), "idle", (200.0, 200.0), gpus=1)
    (track,) = play(None, run, "N", group=0, gap=(90.0, 150.0))
    said = dict(zip(track.times, track.words, strict=True))
    assert said[60.0] == said[85.0] == "idle"
    assert {said[time_s] for time_s in (100.0, 120.0, 145.0)} == {"unknown"}
    assert said[195.0] == "idle"
    assert set(track.truths) <= {"idle", None}
    assert called([track], "training") == (0, len(track.words))
    assert called([track], "idle", "idle")[0] == track.words.count("idle")


def test_flips_and_delays_of_a_track():
    track = Track(
        group=0, gpu=0, family="x",
        times=(0.0, 5.0, 10.0, 15.0, 20.0, 25.0),
        words=("unknown", "idle", "idle", "unknown", "training", "unknown"),
        truths=("idle", "idle", "idle", "training", "training", "training"),
        starts=((0.0, "idle"), (12.0, "training")),
    )  # fmt: skip
    assert track.hours == pytest.approx(30 / 3600)
    assert track.flips == 1  # training to unknown; what changes with the truth is no flip
    assert track.delays == [8.0]  # the start of idle does not count
