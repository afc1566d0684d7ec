"""The owner series: one info for each card and instance whatever is known, and shares that sum to 1."""

from __future__ import annotations

import dataclasses
import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from agent.records import GpuKey, GpuOwners, Holder
from exporters.exposition import series_of
from exporters.metrics import METRICS, metric_table
from exporters.metrics_owners import MAX_SHARES, shares_of
from exporters.snapshot import GpuView, NodeSnapshot
from tests.exporters.snapshots import NOW, key_of

ROWS = {row.name: row for row in METRICS}
WITH_USER = {row.name: row for row in metric_table(owner_user=True)}
JOB = Holder("slurm:7", job_id="7", scheduler="slurm", user="mmuster", share_ratio=0.5)
POD = Holder(
    "kubernetes:ml/web",
    job_id="web",
    scheduler="kubernetes",
    namespace="ml",
    pod="web-0",
    container="server",
    share_ratio=0.5,
)
NOBODY = ("",) * 6
OF_JOB = ("slurm:7", "7", "slurm", "", "", "")
OF_POD = ("kubernetes:ml/web", "web", "kubernetes", "ml", "web-0", "server")


def view(key: GpuKey, *holders: Holder, seen: bool = True) -> GpuView:
    owners = GpuOwners(monotonic_s=0.0, wall_s=0.0, key=key, holders=holders)
    return GpuView(key=key, state="ok", owners=owners if seen else None)


def of(name: str, *views: GpuView, rows=ROWS) -> dict[tuple[str, ...], float]:
    """Return the series of a family by its labels after gpu and uuid."""
    snapshot = NodeSnapshot(built=NOW, replay=False, gpus=views)
    return {(labels[0], *labels[2:]): value for labels, value in series_of(rows[name], snapshot).items()}


def test_the_labels_are_those_of_the_contract():
    owner = ("job_key", "job_id", "scheduler", "owner_namespace", "owner_pod", "owner_container")
    assert ROWS["gpu_owner_info"].labels == ("gpu", "uuid", "GPU_I_ID", "owners", *owner)
    assert ROWS["gpu_owner_share_ratio"].labels == ("gpu", "uuid", "GPU_I_ID", *owner)
    assert WITH_USER["gpu_owner_info"].labels == (*ROWS["gpu_owner_info"].labels, "owner_user")
    assert WITH_USER["gpu_owner_share_ratio"].labels == (*ROWS["gpu_owner_share_ratio"].labels, "owner_user")
    assert [row.name for row in metric_table(owner_user=True)] == [row.name for row in METRICS]


def test_one_info_series_whether_one_two_nobody_or_nobody_known_holds_a_gpu():
    views = (view(key_of(0), JOB), view(key_of(1), JOB, POD), view(key_of(2)), view(key_of(3), seen=False))
    assert list(of("gpu_owner_info", *views)) == [
        ("0", "", "1", *OF_JOB),
        ("1", "", "2", *NOBODY),
        ("2", "", "0", *NOBODY),
        ("3", "", "", *NOBODY),
    ]


def test_each_holder_has_its_share_and_nobody_has_none():
    views = (
        view(key_of(0), JOB._replace(share_ratio=1.0)),
        view(key_of(1), JOB._replace(share_ratio=0.75), POD._replace(share_ratio=0.25)),
        view(key_of(2)),
        view(key_of(3), seen=False),
    )
    assert of("gpu_owner_share_ratio", *views) == {
        ("0", "", *OF_JOB): 1.0,
        ("1", "", *OF_JOB): 0.75,
        ("1", "", *OF_POD): 0.25,
    }


def test_somebody_who_cannot_be_named_is_an_owner_nevertheless():
    views = (view(key_of(0), Holder("")),)
    assert of("gpu_owner_info", *views) == {("0", "", "1", *NOBODY): 1}
    assert of("gpu_owner_share_ratio", *views) == {("0", "", *NOBODY): 1}


def test_the_user_stands_on_the_series_only_where_it_is_asked_for():
    views = (view(key_of(0), JOB), view(key_of(1)))
    assert list(of("gpu_owner_info", *views, rows=WITH_USER)) == [
        ("0", "", "1", *OF_JOB, "mmuster"),
        ("1", "", "0", *NOBODY, ""),
    ]
    assert list(of("gpu_owner_share_ratio", *views, rows=WITH_USER)) == [("0", "", *OF_JOB, "mmuster")]


def test_equal_holders_are_one_and_holders_that_differ_in_the_user_alone_share_a_series():
    twice = (view(key_of(0), JOB, JOB),)
    assert of("gpu_owner_info", *twice) == {("0", "", "1", *OF_JOB): 1}
    assert of("gpu_owner_share_ratio", *twice) == {("0", "", *OF_JOB): 1.0}
    users = (view(key_of(0), JOB, JOB._replace(user="other")),)
    assert of("gpu_owner_info", *users) == {("0", "", "2", *NOBODY): 1}
    assert of("gpu_owner_share_ratio", *users) == {("0", "", *OF_JOB): 1.0}
    assert of("gpu_owner_share_ratio", *users, rows=WITH_USER) == {
        ("0", "", *OF_JOB, "mmuster"): 0.5,
        ("0", "", *OF_JOB, "other"): 0.5,
    }


def test_a_divided_card_is_held_by_whoever_holds_its_instances():
    card = key_of(0)
    first, second = card._replace(gpu_i_id=1), card._replace(gpu_i_id=2)
    whole = JOB._replace(share_ratio=1.0)
    for held, expected in (
        ((view(first, whole), view(second, whole)), ("1", *OF_JOB)),
        ((view(first, whole), view(second, POD)), ("2", *NOBODY)),
        ((view(first, whole), view(second)), ("1", *OF_JOB)),
        ((view(first), view(second)), ("0", *NOBODY)),
        ((view(first, whole), view(second, seen=False)), ("", *NOBODY)),
    ):
        views = (view(card, seen=False), *held)
        infos = of("gpu_owner_info", *views)
        assert [labels[:2] for labels in infos] == [("0", ""), ("0", "1"), ("0", "2")]
        assert next(iter(infos)) == ("0", "", *expected)
    # What was said of the card itself counts, and shares are where the work runs.
    views = (view(card, POD), view(first, whole), view(second))
    assert next(iter(of("gpu_owner_info", *views))) == ("0", "", "1", *OF_POD)
    assert of("gpu_owner_share_ratio", *views) == {("0", "1", *OF_JOB): 1.0}


def test_an_instance_without_its_card_still_has_a_series_of_the_card():
    assert list(of("gpu_owner_info", view(key_of(0)._replace(gpu_i_id=4), JOB))) == [
        ("0", "", "1", *OF_JOB),
        ("0", "4", "1", *OF_JOB),
    ]


def test_the_smallest_of_many_holders_are_one():
    holders = tuple(Holder(f"slurm:{n}", share_ratio=n / 66) for n in range(1, 12))  # 1 + ... + 11 is 66
    shares = of("gpu_owner_share_ratio", view(key_of(0), *holders))
    assert len(shares) == MAX_SHARES
    # The seven largest are 11 to 5; 1 + 2 + 3 + 4 is the rest.
    assert {labels[2] for labels in shares} == {"other", *(f"slurm:{n}" for n in range(5, 12))}
    assert shares["0", "", "other", "", "", "", "", ""] == pytest.approx(10 / 66)
    assert of("gpu_owner_info", view(key_of(0), *holders)) == {("0", "", "11", *NOBODY): 1}


def test_the_number_of_holders_is_told_also_where_the_sampler_has_one_for_several():
    """Twelve hold it: seven by name, and five by the one that stands for all others."""
    holders = (*(Holder(f"slurm:{n}", share_ratio=1 / 12) for n in range(7)), Holder("other", share_ratio=5 / 12))
    card, alone = key_of(0), key_of(1)
    first, second = card._replace(gpu_i_id=1), card._replace(gpu_i_id=2)
    owners = GpuOwners(monotonic_s=0.0, wall_s=0.0, key=alone, holders=holders, holder_count=12)
    crowded = dataclasses.replace(view(first), owners=dataclasses.replace(owners, key=first))
    views = (view(card, seen=False), crowded, view(second, JOB), GpuView(key=alone, state="ok", owners=owners))
    assert list(of("gpu_owner_info", *views)) == [
        ("0", "", "12", *NOBODY),
        ("0", "1", "12", *NOBODY),
        ("0", "2", "1", *OF_JOB),
        ("1", "", "12", *NOBODY),
    ]
    # What was said of the card itself counts.
    assert list(of("gpu_owner_info", view(card, POD), crowded)) == [("0", "", "1", *OF_POD), ("0", "1", "12", *NOBODY)]


def test_shares_that_make_no_sense_are_put_right():
    owners = GpuOwners(monotonic_s=0.0, wall_s=0.0, key=key_of(0))

    def shares(*ratios: float) -> list[float]:
        holders = tuple(Holder(f"slurm:{n}", share_ratio=ratio) for n, ratio in enumerate(ratios))
        return list((shares_of(dataclasses.replace(owners, holders=holders)) or {}).values())

    assert shares(1.0, 1.0) == [0.5, 0.5]
    assert shares(3.0, math.nan, 1.0) == [0.75, 0.25, 0.0]
    assert shares(-1.0, 0.0) == [0.5, 0.5]
    assert shares() == []


texts = st.text(st.characters(codec=None, exclude_categories=()), max_size=5)


@given(
    st.lists(
        st.builds(Holder, texts, job_id=texts, pod=texts, user=texts, share_ratio=st.floats(-0.5, 1.0)), max_size=12
    ),
    st.booleans(),
)
def test_whatever_the_holders_the_series_are_unique_bounded_and_whole(holders, owner_user):
    snapshot = NodeSnapshot(built=NOW, replay=False, gpus=(view(key_of(0), *holders),))
    rows = WITH_USER if owner_user else ROWS
    raw = list(rows["gpu_owner_share_ratio"].values(snapshot))
    assert len(series_of(rows["gpu_owner_info"], snapshot)) == 1
    assert len({labels for labels, _ in raw}) == len(raw) <= MAX_SHARES
    if holders:
        assert sum(share for _, share in raw) == pytest.approx(1.0)
