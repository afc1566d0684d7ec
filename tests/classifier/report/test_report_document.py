"""The command end to end with a little of everything: files, tables, plots, and a page that needs nothing else."""

from __future__ import annotations

import re
from html.parser import HTMLParser

import numpy as np
import pytest

from agent.cli import main
from classifier.report.bars import at_least, at_most, steady_counts
from classifier.report.document import Code, Figure, Heading, Table, Text, to_html, to_markdown
from classifier.report.metrics import Estimate
from classifier.report.recorded import Unit, idle_against_busy, over_sources
from classifier.simulator import Scenario, write_simulated

pytest.importorskip("matplotlib")

VOID = {"meta", "img", "br", "link"}
LOGS = (
    ("training/alpha__one", "training", "data_parallel_training", "agent", 700),
    ("training/beta__one", "training", "small_model_training", "nvidia_smi", 350),
    ("inference/gamma__one", "inference", "llm_serving", "agent", 700),
    ("inference/delta__one", "inference", "vision_inference", "nvidia_smi", ""),
    ("idle/alpha__two", "idle", "loaded_idle", "agent", 700),
)


class Balance(HTMLParser):
    """Collects tags, and what does not close."""

    def __init__(self):
        super().__init__(convert_charrefs=True)
        self.open, self.seen, self.attributes, self.wrong = [], [], [], []

    def handle_starttag(self, tag, attrs):
        self.seen.append(tag)
        self.attributes += attrs
        if tag not in VOID:
            self.open.append(tag)

    def handle_endtag(self, tag):
        if not self.open or self.open.pop() != tag:
            self.wrong.append(tag)


def parsed(page):
    balance = Balance()
    balance.feed(page)
    balance.close()
    return balance


@pytest.fixture(scope="module")
def folder(tmp_path_factory):
    """Recordings of five made-up sources; simulated, as nothing real may be here."""
    where = tmp_path_factory.mktemp("recordings")
    rows = ["file,label,source_repo,tdp_w"]
    for number, (name, label, kind, recorder, watts) in enumerate(LOGS):
        path = where / f"{name}.jsonl.gz"
        path.parent.mkdir(exist_ok=True)
        scenario = Scenario(kind=kind, gpu_count=1, duration_s=330.0, recorder=recorder, begin_s=900.0)
        write_simulated(path, scenario, number)
        rows.append(f"{name}.jsonl.gz,{label},github.com/somebody/{path.name.partition('__')[0]},{watts}")
    (where / "INDEX.csv").write_text("\n".join(rows) + "\n", encoding="utf-8")
    return where


@pytest.fixture(scope="module")
def written(folder, tmp_path_factory):
    out = tmp_path_factory.mktemp("report")
    assert main(["evaluate", "--report", str(out), str(folder), "--quick"]) == 0
    return out


def test_every_section_and_table_is_there(written):
    text = (written / "model.md").read_text(encoding="utf-8")
    for heading in (
        "# How right the model is", "## Bars", "## Simulated families held out", "### 60 s of evidence",
        "### 300 s of evidence", "### By family, profile N, 60 s", "## Decisions over time",
        "## Families the model does not know", "## Never called training",
        "## With a declaration of 95 % reliability", "## Real sources", "### Idle against busy, 60 s",
        "### By source, 60 s", "### Steady phases of recordings with profiling columns", "### Decisions as replayed",
        "## How it was measured", "### Baselines", "### Families held out together",
    ):  # fmt: skip
        assert f"\n{heading}\n" in f"\n{text}", heading
    for table in re.findall(r"(?:^\|.*\n)+", text, flags=re.MULTILINE):
        rows = table.strip().split("\n")
        assert len(rows) > 2, f"no row in {rows[0]}"
        assert len({len(re.split(r"(?<!\\)\|", row)) for row in rows}) == 1, rows[0]
    assert "nan" not in text
    assert "the figures mean nothing" in text
    for method in (
        "warpwatch", "linear model", "random forest", "utilisation threshold", "three rules",
        "KempnerPulse categories", "workloadtruth-cli", "each source left out", "shipped model",
    ):  # fmt: skip
        assert f"| {method}" in text, method
    assert text.count("met") >= 1


def test_no_path_of_this_machine_is_in_it(written, folder):
    for name in ("model.md", "model.html"):
        text = (written / name).read_text(encoding="utf-8")
        assert str(folder) not in text
        assert str(written) not in text


def test_the_page_is_whole_and_loads_nothing(written):
    page = (written / "model.html").read_text(encoding="utf-8")
    balance = parsed(page)
    assert balance.wrong == []
    assert balance.open == []
    assert page.startswith("<!DOCTYPE html>")
    assert balance.seen.count("html") == balance.seen.count("body") == balance.seen.count("h1") == 1
    assert not {"script", "link", "iframe"} & set(balance.seen)
    assert balance.seen.count("img") == len(list((written / "model").iterdir()))
    sources = [value for name, value in balance.attributes if name in ("src", "href")]
    assert sources
    assert all(value.startswith("data:image/png;base64,") for value in sources)
    assert not re.search(r"url\(|@import", page)
    assert all(value for name, value in balance.attributes if name == "alt")


def test_plots_are_small_png_of_a_legible_size(written):
    text = (written / "model.md").read_text(encoding="utf-8")
    plots = sorted((written / "model").iterdir())
    assert [path.name for path in plots] == [
        "accuracy.png", "delay.png", "families.png", "reliability.png", "risk.png", "sources.png",
    ]  # fmt: skip
    for path in plots:
        data = path.read_bytes()
        assert data[:8] == b"\x89PNG\r\n\x1a\n"
        assert data[-8:-4] == b"IEND"
        assert len(data) < 150_000
        width, height = (int.from_bytes(data[start : start + 4], "big") for start in (16, 20))
        assert 350 <= width <= 1000
        assert 250 <= height <= 1200
        assert f"](model/{path.name})" in text


def test_a_report_needs_no_recordings_and_evaluate_needs_a_folder(tmp_path, capsys):
    assert main(["evaluate"]) == 2
    assert "--report DIR" in capsys.readouterr().err
    assert main(["evaluate", str(tmp_path), "--quick"]) == 2
    assert main(["evaluate", "--report", str(tmp_path), "--json"]) == 2
    assert main(["evaluate", "--report", str(tmp_path / "out"), str(tmp_path)]) == 2
    assert "INDEX.csv" in capsys.readouterr().err


def test_blocks_in_both_forms():
    blocks = [
        Heading(1, "A & B"),
        Text("see `x < y` and **this** in [that.md](that.md)"),
        Code("a\nb"),
        Table(("one", "two"), [("1|2", "<b>")]),
        Figure("a.png", 'say "a"'),
    ]
    assert to_markdown(blocks, "pics") == (
        "# A & B\n\nsee `x < y` and **this** in [that.md](that.md)\n\n    a\n    b\n\n"
        '| one | two |\n|---|---|\n| 1\\|2 | <b> |\n\n![say "a"](pics/a.png)\n'
    )
    page = to_html(blocks, {"a.png": b"\x89PNG"})
    assert "<title>A &amp; B</title>" in page
    assert "<p>see <code>x &lt; y</code> and <strong>this</strong> in that.md</p>" in page
    assert "<td>1|2</td><td>&lt;b&gt;</td>" in page
    assert 'src="data:image/png;base64,iVBORw==" alt="say &quot;a&quot;"' in page
    assert parsed(page).wrong == []


def test_bars():
    assert at_least("x", 0.9, Estimate(0.85), "").verdict == "missed by 0.05"
    assert at_least("x", 0.9, Estimate(0.9), "").verdict == "met"
    assert at_most("x", 0.05, Estimate(0.04), "").verdict == "met"
    assert at_most("x", 0.05, Estimate(0.08), "").verdict == "missed by 0.03"
    assert at_most("x", 0.05, Estimate(None), "").verdict == at_least("x", 0.05, None, "").verdict == "not measured"
    assert steady_counts([]) == (0, 0)


def unit(source, label, right, said_idle=0.0):
    return Unit(
        source=source, label=label, windows=10, coverage=1.0, recall=right, said_idle=said_idle, classed=1.0,
        right_of_classed=right, forced=right, shares=(right, 1 - right),
    )  # fmt: skip


def test_sources_weigh_the_same_within_a_class_and_classes_weigh_the_same():
    units = [unit("a", "training", 1.0), unit("b", "training", 0.0), unit("c", "training", 0.5)]
    units.append(unit("a", "inference", 1.0))
    # Training (1 + 0 + 0.5) / 3 = 0.5, inference 1.
    found = over_sources(units, lambda u: u.recall)
    assert found.value == pytest.approx(0.75)
    assert 0.5 <= found.low < 0.75 < found.high <= 1.0
    assert over_sources(units[:3], lambda u: u.recall) == Estimate(None)


def test_idle_against_busy_by_source():
    units = [unit("a", "idle", 1.0, 0.9), unit("b", "idle", 1.0, 0.7), unit("c", "training", 1.0, 0.1)]
    # Idle said of idle 0.8, not of busy 0.9.
    assert idle_against_busy(units).value == pytest.approx(0.85)
    assert np.isfinite(idle_against_busy(units).low)
