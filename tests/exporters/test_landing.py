"""The landing page: what it says for each kind of node, and that nothing in it can be more than text."""

from __future__ import annotations

import dataclasses
import re
from html.parser import HTMLParser

import pytest

from agent.records import (
    DiskSample,
    FilesystemSample,
    GpuInfo,
    GpuKey,
    GpuOwners,
    Holder,
    InfinibandPort,
    InfinibandSample,
    NetworkLink,
    NetworkSample,
    NvswitchSxids,
)
from agent.samplers import SamplerStatus
from classifier.results import Assessment, Decision
from exporters.landing import node_state, render_landing
from exporters.landing_text import duration, moment, of_limit
from exporters.markup import Html, join, tag
from exporters.snapshot import GpuView, ModelInfo, NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot, key_of, mig_snapshot

HOSTILE = '<script>alert(\'1\')</script>" onload="x" &amp; \udcff\x00\x1b end'


class Reader(HTMLParser):
    """Collects tags, attribute names and text, and checks that elements are closed in order."""

    def __init__(self) -> None:
        super().__init__()
        self.tags: set[str] = set()
        self.attributes: set[str] = set()
        self.open: list[str] = []
        self.text = ""

    def handle_starttag(self, tag, attrs):
        self.tags.add(tag)
        self.attributes |= {name for name, _ in attrs}
        if tag not in {"meta", "link"}:
            self.open.append(tag)

    def handle_endtag(self, tag):
        assert self.open.pop() == tag

    def handle_data(self, data):
        if self.open and self.open[-1] != "style":
            self.text += data + " "


def read(snapshot: NodeSnapshot | None, *, owner_user: bool = False) -> Reader:
    reader = Reader()
    reader.feed(render_landing(snapshot, owner_user=owner_user).decode())
    reader.close()
    assert reader.open == []
    reader.text = re.sub(r"\s+", " ", reader.text)
    return reader


def test_a_full_node_shows_its_gpus_findings_and_samplers():
    text = read(full_snapshot()).text
    for part in (
        "■ Sampling 8 GPUs; 3 findings need a look.",
        "as of 2026-01-01 00:00:00 UTC",
        "600 / 700 W",  # 600.5 W of GPU 0, rounded half to even
        "60.0 / 140 GiB",
        "97 %",
        "61 °C",
        "training 85 %",
        "5 min",
        "■ critical stalled_collective (suspect)",
        "stalled_collective · GPU 0 · for 60 s, since 2025-12-31 23:59:00 UTC",
        "Busy at 100 % but at 240 W against 610 W",
        "Next step: restart the application.",
        "power_watts 240, busy_power_watts 610",
        "missed_checkpoint · job slurm:42",
        "none of 13 watched",
        "net_dev ✓ ok 0 s ago 2.0 ms timeout × 1",
        "warpwatch 0.1.0",
    ):
        assert part in text
    assert text.index("critical") < text.index("warning")


def test_a_played_trace_is_announced():
    assert "imulated" not in read(full_snapshot()).text
    played = dataclasses.replace(full_snapshot(), replay=True, demo_notice="DEMO: from the recorded trace a.jsonl.gz")
    assert "DEMO: from the recorded trace a.jsonl.gz" in read(played).text
    assert "imulated" not in read(played).text  # the notice knows best
    assert "Replay. The GPUs on this page come from a trace" in read(dataclasses.replace(played, demo_notice=None)).text


def test_an_agent_that_starts_says_so():
    assert "Starting: no samples yet." in read(None).text


def calm(**changes) -> NodeSnapshot:
    well = Assessment(anomaly="throttled", scope="gpu", severity=0, key=key_of(1))
    return dataclasses.replace(full_snapshot(gpus=2), assessments=(well,), **changes)


def test_the_state_names_what_is_wrong():
    gone = SamplerStatus(name="diskstats", success=False, last_success_wall_s=5.0)
    never = SamplerStatus(name="infiniband", success=False)
    note = Assessment(anomaly="throttled", scope="gpu", severity=1, key=key_of(0))
    lost = tuple(dataclasses.replace(view, state="lost" if view.key.gpu else None) for view in calm().gpus)
    for snapshot, expected in (
        (calm(), ("good", "Sampling 2 GPUs; nothing is wrong.")),
        (calm(samplers=(never,)), ("good", "Sampling 2 GPUs; nothing is wrong.")),
        (calm(samplers=(gone, never)), ("warning", "Sampling 2 GPUs; no records any more from diskstats.")),
        (dataclasses.replace(calm(), assessments=(note,)), ("info", "Sampling 2 GPUs; nothing urgent.")),
        (dataclasses.replace(calm(), assessments=()), ("info", "Sampling 2 GPUs; nothing can be judged yet.")),
        (calm(gpus_expected=3), ("critical", "1 of 3 GPUs is missing.")),
        (dataclasses.replace(calm(), gpus=lost), ("critical", "GPU 0: no fresh samples; GPU 1: lost.")),
        (calm(ready=False, samplers=(never,)), ("critical", "Not ready: no fresh samples from any source.")),
    ):
        assert node_state(snapshot) == expected


def test_a_node_without_a_driver_is_told_from_a_healthy_one():
    snapshot = NodeSnapshot(built=NOW, replay=False, ready=True, gpus_visible=0)
    level, sentence = node_state(snapshot)
    assert (level, sentence.split(":")[0]) == ("warning", "No GPU is visible")
    assert "Nothing can be judged yet" in read(snapshot).text


def test_a_gpu_without_data_has_dashes_and_not_zeros():
    text = read(NodeSnapshot(built=NOW, replay=False, gpus=(GpuView(key=GpuKey(0), state=None),), ready=True)).text
    assert "■ no data never sampled – – – – – – – none can be seen here" in text


def test_unknown_comes_with_its_reason():
    view = full_snapshot(gpus=1).gpus[0]
    decision = dataclasses.replace(view.decision, workload="unknown", probabilities=None, reason="gap")
    text = read(dataclasses.replace(full_snapshot(), gpus=(dataclasses.replace(view, decision=decision),))).text
    assert "unknown a gap in the telemetry" in text


def hostile_snapshot() -> NodeSnapshot:
    key = GpuKey(0, HOSTILE)
    at = {"monotonic_s": 0.0, "wall_s": 0.0}
    return NodeSnapshot(
        built=NOW,
        replay=True,
        gpus=(
            GpuView(
                key=key,
                state=HOSTILE,
                info=GpuInfo(**at, key=key, model_name=HOSTILE, pci_bus_id=HOSTILE, driver_version=HOSTILE),
                owners=GpuOwners(**at, key=key, holders=(Holder(*[HOSTILE] * 7, processes=0),)),
                decision=Decision(
                    key=key,
                    monotonic_s=0.0,
                    wall_s=0.0,
                    workload=HOSTILE,
                    probabilities={HOSTILE: 1.0},
                    telemetry_probabilities=None,
                    window_s=1.0,
                    reason=HOSTILE,
                    since_monotonic_s=0.0,
                    since_wall_s=1e300,
                    mismatch=True,
                    declared_class=HOSTILE,
                ),
            ),
            GpuView(
                key=GpuKey(1),
                state="ok",
                owners=GpuOwners(**at, key=GpuKey(1), holders=(Holder(HOSTILE), Holder("x" * 10_000))),
            ),
        ),
        networks=(NetworkSample(**at, device=HOSTILE, receive_bytes_total=1, transmit_bytes_total=10**30),),
        network_links=(NetworkLink(**at, device=HOSTILE, speed_bytes_per_second=1.0, is_up=True),),
        infiniband=(InfinibandSample(**at, device=HOSTILE, port=1),),
        infiniband_ports=(
            InfinibandPort(**at, device=HOSTILE, port=1, state=HOSTILE, link_layer=HOSTILE, near_gpus=(HOSTILE,)),
        ),
        disks=(DiskSample(**at, device=HOSTILE, read_bytes_total=1, written_bytes_total=1, transport=HOSTILE),),
        filesystems=(FilesystemSample(**at, mountpoint=HOSTILE, fstype=HOSTILE),),
        sxids=(NvswitchSxids(**at, device=HOSTILE, totals={1: 1}),),
        assessments=(
            Assessment(
                anomaly=HOSTILE,
                scope="job",
                severity=3,
                job_key=HOSTILE,
                since_wall_s=float("-1e12"),
                evidence={HOSTILE: HOSTILE},
                action=HOSTILE,
                summary=HOSTILE,
            ),
        ),
        samplers=(SamplerStatus(name=HOSTILE, success=False, last_success_wall_s=1.0, errors={HOSTILE: 1}),),
        model=ModelInfo(version=HOSTILE, sha256=HOSTILE),
        version=HOSTILE,
        ready=True,
        demo_notice=HOSTILE,
    )


def test_what_decided_is_the_title_of_the_workload():
    node = full_snapshot()
    told = ("steps every 0.4 s in power (5 min)", "tensor cores active 58 % of SM time (60 s)")
    views = list(node.gpus)
    assert views[0].decision is not None
    views[0] = dataclasses.replace(views[0], decision=dataclasses.replace(views[0].decision, explanation=told))
    page = render_landing(dataclasses.replace(node, gpus=tuple(views))).decode()
    assert f'title="{told[0]}; {told[1]}; training ' in page
    unknown = dataclasses.replace(views[0].decision, workload="unknown", reason="out_of_domain", probabilities=None)
    views[0] = dataclasses.replace(views[0], decision=dataclasses.replace(unknown, explanation=told[:1]))
    assert f'title="{told[0]}">unknown<' in render_landing(dataclasses.replace(node, gpus=tuple(views))).decode()


def test_nothing_from_outside_becomes_markup():
    plain, hostile = read(full_snapshot()), read(hostile_snapshot(), owner_user=True)
    assert hostile.tags <= plain.tags | {"strong"}
    assert hostile.attributes <= plain.attributes
    # 12 of the rest, and three of holders, one of the declared class, six of the host, two more of a port and a disk.
    assert hostile.text.count("<script>alert('1')</script>") >= 24
    assert len(render_landing(hostile_snapshot(), owner_user=True)) < 40_000
    assert "\x1b" not in hostile.text


def test_the_page_needs_nothing_from_elsewhere():
    page = render_landing(full_snapshot()).decode()
    assert not re.search(r"https?://|//[a-z]|<script|url\(|@import", page)


def test_markup_escapes_what_it_did_not_build():
    assert tag("p", "<b>", tag("b", "&"), title='"') == '<p title="&quot;">&lt;b&gt;<b>&amp;</b></p>'
    assert join(Html("<br>"), "<br>") == "<br>&lt;br&gt;"


@pytest.mark.parametrize(
    ("seconds", "expected"),
    [
        (-5, "0 s"),
        (119.9, "119 s"),
        (120, "2 min"),
        (3599, "59 min"),
        (3600, "1 h"),
        (12000, "3 h 20 min"),
        (187200, "2 d 4 h"),
        (172800, "2 d"),
    ],
)
def test_durations_have_two_units(seconds, expected):
    assert duration(seconds) == expected


def test_odd_numbers_are_no_reason_to_fail():
    assert moment(float("nan")) == moment(1e300) == "–"
    assert of_limit(None, None, "W") == "–"
    assert of_limit(None, 700.0, "W") == "– / 700 W"
    assert of_limit(5.4, None, "W") == "5 W"


def test_what_is_not_well_is_named_and_what_is_zero_is_not():
    text = read(dataclasses.replace(full_snapshot(gpus=2), sxids=())).text
    for line in (
        "driver asks: reset the GPU",
        "ECC errors: 3 uncorrected, 2 corrected, 5 uncorrected over the board's life, 40 corrected over it",
        "row remapping: 13 done, one waits for a reset",  # 6 + 7
        "NVLink errors: 9 CRC, 10 replay, 11 recovery",
        "PCIe replays: 8",
        "XID 48 × 2, 30 s ago, reset the GPU",
        "XID 13 × 1, 2 h ago, restart the application",
    ):
        assert text.count(line) == 1
    assert text.index("XID 48") < text.index("XID 13")  # the newest first
    well = read(dataclasses.replace(full_snapshot(gpus=1), sxids=())).text
    assert not [word for word in ("ECC", "remapping", "XID", "NVLink", "driver asks") if word in well]


def test_many_xids_are_cut_short():
    view = full_snapshot(gpus=1).gpus[0]
    xids = dataclasses.replace(view.xids, totals=dict.fromkeys(range(1, 11), 1), last_wall_s={})
    text = read(dataclasses.replace(full_snapshot(), gpus=(dataclasses.replace(view, xids=xids),), sxids=())).text
    assert text.count("XID ") == 4
    assert "and 6 XIDs more" in text


def test_a_finding_of_a_card_that_was_divided_since_is_not_shown():
    divided = mig_snapshot()
    old = Assessment(anomaly="low_utilization", scope="gpu", severity=3, key=key_of(0), summary="Of the whole card.")
    well = Assessment(anomaly="low_utilization", scope="gpu", severity=0, key=key_of(1))
    shown = dataclasses.replace(divided, assessments=(old, well))
    assert node_state(shown) == ("good", "Sampling 3 GPUs; nothing is wrong.")
    assert "Nothing found; 1 check looks" in read(shown).text
    assert "Of the whole card." not in read(shown).text


def test_instances_stand_below_their_card():
    text = read(mig_snapshot()).text
    assert "2 MIG instances" in text
    assert text.index("2 MIG instances") < text.index("0 / 1 MIG 1g.10gb") < text.index("0 / 2 MIG 1g.10gb")
    assert "4.0 / 20 GiB" in text
    assert "80 % SM" in text
    assert "stalled_collective · GPU 0 instance 1" in text
    assert node_state(mig_snapshot())[1].startswith("Sampling 3 GPUs;")
