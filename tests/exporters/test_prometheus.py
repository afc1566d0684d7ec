"""The page: both formats, what parsers and promtool say to it, and that it is built once."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
import subprocess

import pytest
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from agent.records import NetworkSample
from exporters.exposition import Family, families_of, render
from exporters.metrics import METRICS
from exporters.prometheus import OPENMETRICS, TEXT, PrometheusPage, accepts_gzip, negotiate
from exporters.snapshot import NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot, full_view, key_of

PROCESS = {
    "process_virtual_memory_bytes",
    "process_resident_memory_bytes",
    "process_start_time_seconds",
    "process_cpu_seconds_total",
    "process_open_fds",
    "process_max_fds",
}
#: Accept headers as Prometheus 2.42 and 3 send them.
PROMETHEUS_2 = (
    "application/openmetrics-text;version=1.0.0;q=0.8,application/openmetrics-text;version=0.0.1;q=0.75,"
    "text/plain;version=0.0.4;q=0.5,*/*;q=0.1"
)
PROMETHEUS_3 = (
    "application/openmetrics-text;version=1.0.0;escaping=allow-utf-8;q=0.6,"
    "application/openmetrics-text;version=0.0.1;q=0.5,text/plain;version=1.0.0;escaping=allow-utf-8;q=0.4,"
    "text/plain;version=0.0.4;q=0.3,*/*;q=0.2"
)
HOSTILE = [
    'quote " and }',
    "backslash \\ and \\n",
    "new\nline",
    "<script>alert(1)</script>",
    "tab\tand\x01control",
    "Grüße 😀",
    "\udcff\udcfe",  # bytes that were no UTF-8
    "# EOF",
    "x" * 5000,
]


def page_of(snapshot: NodeSnapshot, content_type: str = TEXT, *, own_process: bool = True) -> str:
    page = PrometheusPage(lambda: snapshot, own_process=own_process).render(content_type)
    assert page is not None
    return page.decode()


def samples(families) -> dict[tuple[str, tuple[tuple[str, str], ...]], float]:
    """Return all samples by name and labels; fails on a series that comes twice."""
    found = {}
    for family in families:
        for sample in family.samples:
            identity = (sample.name, tuple(sorted(sample.labels.items())))
            assert identity not in found
            found[identity] = sample.value
    return found


def hostile_snapshot() -> NodeSnapshot:
    return NodeSnapshot(
        built=NOW,
        replay=False,
        networks=tuple(
            NetworkSample(monotonic_s=0.0, wall_s=0.0, device=name, receive_bytes_total=n, transmit_bytes_total=n)
            for n, name in enumerate(HOSTILE)
        ),
    )


def test_what_is_emitted_is_the_table_and_the_process():
    found = {name for name, _ in samples(parse_text(page_of(full_snapshot())))}
    # No card of the full node is divided.
    assert found == {row.full_name for row in METRICS} - {"warpwatch_gpu_mig_info"} | PROCESS


def test_both_formats_hold_the_same_samples():
    snapshot = full_snapshot()
    text = samples(parse_text(page_of(snapshot, own_process=False)))
    openmetrics = samples(parse_openmetrics(page_of(snapshot, OPENMETRICS, own_process=False)))
    assert len(text) > 800
    assert text == openmetrics
    assert not [name for name, _ in openmetrics if name.endswith("_created")]


def test_some_lines_as_they_are_written():
    page = page_of(full_snapshot()).splitlines()
    uuid = "GPU-00000000-0000-0000-0000-000000000002"
    for line in (
        f'warpwatch_gpu_power_watts{{gpu="2",uuid="{uuid}"}} 602.5',  # 600.5 + index
        f'warpwatch_gpu_workload{{gpu="2",uuid="{uuid}",workload="training"}} 1',
        f'warpwatch_gpu_energy_joules_total{{gpu="2",uuid="{uuid}"}} 123456.789',
        f'warpwatch_gpu_nvlink_receive_bytes_total{{gpu="2",uuid="{uuid}"}} 7000000000000002.0',
        'warpwatch_infiniband_receive_bytes_total{device="ib0",port="1"} 4096',
        'warpwatch_job_anomaly_severity{anomaly="missed_checkpoint",job_key="slurm:42"} 2',
        'warpwatch_build_info{version="0.1.0"} 1',
        "warpwatch_replay 0",
        "# TYPE warpwatch_gpu_energy_joules_total counter",
    ):
        assert line in page


def test_the_library_renders_the_same_samples():
    class Table(Collector):
        def collect(self):
            for family in families_of(METRICS, full_snapshot(gpus=2)):
                metric = Metric(family.name.removesuffix("_total"), family.help, family.kind, family.unit)
                for values, number in family.series.items():
                    labels = dict(zip(family.labels, values, strict=True))
                    if not labels.get("GPU_I_ID"):
                        labels.pop("GPU_I_ID", None)
                    metric.add_sample(family.name, labels, number)
                yield metric

    registry = CollectorRegistry(auto_describe=False)
    registry.register(Table())
    for content_type, parse, generate in (
        (TEXT, parse_text, generate_text),
        (OPENMETRICS, parse_openmetrics, generate_openmetrics),
    ):
        ours = list(parse(page_of(full_snapshot(gpus=2), content_type, own_process=False)))
        assert ours == list(parse(generate(registry).decode()))


def test_a_mig_instance_has_its_label():
    view = full_view(key_of(0)._replace(gpu_i_id=3))
    page = page_of(NodeSnapshot(built=NOW, replay=False, gpus=(view,)), own_process=False)
    labels = f'gpu="0",uuid="{key_of(0).uuid}",GPU_I_ID="3"'
    assert f"warpwatch_gpu_utilization_ratio{{{labels}}} 0.97" in page.splitlines()


@pytest.mark.parametrize(
    ("number", "expected"),
    [
        (0.0, "0"),
        (-0.0, "0"),
        (-3.0, "-3"),
        (0.1, "0.1"),
        (1e15, "1000000000000000.0"),
        (2.0**60, "1.152921504606847e+18"),
        (1_767_225_600.123, "1767225600.123"),
    ],
)
def test_numbers_are_short_and_read_back_the_same(number, expected):
    family = Family(name="x", kind="gauge", unit="", help="h", labels=(), series={(): number})
    page = render([family], openmetrics=False).decode()
    assert page == f"# HELP x h\n# TYPE x gauge\nx {expected}\n"
    assert float(expected) == number


def test_equal_snapshots_give_equal_bytes():
    one = page_of(full_snapshot(), own_process=False)
    turned = dataclasses.replace(
        full_snapshot(),
        gpus=full_snapshot().gpus[::-1],
        assessments=full_snapshot().assessments[::-1],
        networks=full_snapshot().networks[::-1],
        infiniband=full_snapshot().infiniband[::-1],
        disks=full_snapshot().disks[::-1],
        samplers=full_snapshot().samplers[::-1],
    )
    assert page_of(turned, own_process=False) == one


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("build", [full_snapshot, hostile_snapshot])
def test_promtool_has_nothing_to_say(build):
    result = subprocess.run(
        ["promtool", "check", "metrics"], input=page_of(build()), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


def test_hostile_labels_come_back_as_they_were():
    for families in (
        parse_text(page_of(hostile_snapshot())),
        parse_openmetrics(page_of(hostile_snapshot(), OPENMETRICS)),
    ):
        devices = {
            dict(labels)["device"]: value
            for (name, labels), value in samples(families).items()
            if name == "warpwatch_network_receive_bytes_total"
        }
        expected = {name: float(n) for n, name in enumerate(HOSTILE)}
        expected["\\udcff\\udcfe"] = expected.pop("\udcff\udcfe")
        assert devices == expected


def test_a_page_is_built_once_per_snapshot_format_and_coding():
    current = full_snapshot(gpus=1)
    page = PrometheusPage(lambda: current)
    text, zipped = page.render(TEXT), page.render(TEXT, gzipped=True)
    openmetrics = page.render(OPENMETRICS)
    assert page.render(TEXT) is text
    assert page.render(TEXT, gzipped=True) is zipped
    assert page.render(OPENMETRICS) is openmetrics
    assert gzip.decompress(zipped) == text
    current = dataclasses.replace(current)  # equal, but another moment
    assert page.render(TEXT) is not text


def test_there_is_no_page_before_the_first_snapshot():
    assert PrometheusPage(lambda: None).render() is None


@pytest.mark.parametrize(
    ("accept", "expected"),
    [
        (None, TEXT),
        ("", TEXT),
        ("*/*", TEXT),
        ("text/html,application/xhtml+xml,*/*;q=0.8", TEXT),
        ("application/openmetrics-text", OPENMETRICS),
        ("application/openmetrics-text;version=1.0.0;q=0", TEXT),
        ("application/openmetrics-text;version=9.9", TEXT),
        ("application/openmetrics-text;q=0.1,text/plain;q=0.5", TEXT),
        ("application/openmetrics-text;q=nonsense", OPENMETRICS),
        (PROMETHEUS_2, OPENMETRICS),
        (PROMETHEUS_3, OPENMETRICS),
    ],
)
def test_the_format_is_chosen_by_accept(accept, expected):
    assert negotiate(accept) == expected


@pytest.mark.parametrize(
    ("header", "expected"),
    [(None, False), ("gzip", True), ("deflate, gzip;q=0.5", True), ("gzip;q=0", False), ("*", True), ("br", False)],
)
def test_gzip_is_chosen_by_accept_encoding(header, expected):
    assert accepts_gzip(header) is expected
