"""The page: both formats, what parsers and promtool say to it, and that it is built once."""

from __future__ import annotations

import dataclasses
import gzip
import shutil
import subprocess

import pytest
from hypothesis import given
from hypothesis import strategies as st
from prometheus_client import CollectorRegistry
from prometheus_client.exposition import generate_latest as generate_text
from prometheus_client.metrics_core import Metric
from prometheus_client.openmetrics.exposition import generate_latest as generate_openmetrics
from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text
from prometheus_client.registry import Collector

from agent.records import GpuInfo, GpuKey, GpuOwners, Holder, NetworkSample, NvswitchSxids
from agent.samplers import SamplerStatus
from exporters.exposition import Family, families_of, render
from exporters.metrics import METRICS, metric_table
from exporters.prometheus import OPENMETRICS, TEXT, PrometheusPage, accepts_gzip, negotiate
from exporters.snapshot import NodeSnapshot
from tests.exporters.snapshots import NOW, full_host, full_port, full_snapshot, full_view, key_of

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
    "carriage\rreturn, \x85 and \u2028",
    "\0 nul and \ufeff",
    'a="b"} 1 # {trace_id="x"} 1',
    "x" * 256,
]
#: Alike in their first 256 characters: only the digest tells them apart.
LONG = ["x" * 10_000, "x" * 10_001, "x" * 9_999 + '"', '"' * 10_000, "\\" * 10_000, "\udcff" * 10_000, "ü" * 10_000]


def page_of(snapshot: NodeSnapshot, content_type: str = TEXT, *, own_process: bool = True, table=METRICS) -> str:
    page = PrometheusPage(lambda: snapshot, table=table, own_process=own_process).render(content_type)
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
    """Return a node on which everything that has a name from outside has a hostile one."""
    at = {"monotonic_s": 0.0, "wall_s": 0.0}
    names = [*HOSTILE, *LONG]
    host = full_host()
    changed = dataclasses.replace
    keys = [GpuKey(n, name) for n, name in enumerate(names)]
    return NodeSnapshot(
        built=NOW,
        replay=False,
        gpus=tuple(
            changed(
                full_view(key),
                info=GpuInfo(**at, key=key, model_name=name, pci_bus_id=name, device=name, driver_version=name),
                owners=GpuOwners(
                    **at, key=key, holders=(Holder(name, name, name, name, name, name, name), Holder(name + "2"))
                ),
            )
            for key, name in zip(keys, names, strict=True)
        ),
        networks=tuple(
            NetworkSample(**at, device=name, receive_bytes_total=n, transmit_bytes_total=n)
            for n, name in enumerate(names)
        ),
        network_links=tuple(changed(host["network_links"][0], device=name) for name in names),
        infiniband=tuple(changed(host["infiniband"][0], device=name) for name in names),
        infiniband_ports=tuple(
            changed(full_port(0), device=name, link_layer=name, state=name, near_gpus=(name,), hw_counters={name: 1})
            for name in names
        ),
        disks=tuple(changed(host["disks"][0], device=name) for name in names),
        filesystems=tuple(changed(host["filesystems"][0], mountpoint=name, fstype=name) for name in names),
        sxids=tuple(NvswitchSxids(**at, device=name, totals={1: 1}) for name in names),
        samplers=tuple(SamplerStatus(name=name, success=True, errors={name: 1}) for name in names),
        xid_actions={48: "look"},
        version=HOSTILE[0],
    )


def test_what_is_emitted_is_the_table_and_the_process():
    found = {name for name, _ in samples(parse_text(page_of(full_snapshot())))}
    # No card of the full node is divided, and nothing is in maintenance.
    absent = {
        "gpu_mig_info",
        "test_alert",
        *(f"{of}_maintenance" for of in ("gpu", "node", "gpu_anomaly", "node_anomaly")),
    }
    assert found == {row.full_name for row in METRICS if row.name not in absent} | PROCESS


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
    one = page_of(full_snapshot(), own_process=False, table=metric_table("full"))
    turned = dataclasses.replace(
        full_snapshot(),
        gpus=full_snapshot().gpus[::-1],
        assessments=full_snapshot().assessments[::-1],
        networks=full_snapshot().networks[::-1],
        infiniband=full_snapshot().infiniband[::-1],
        network_links=full_snapshot().network_links[::-1],
        infiniband_ports=full_snapshot().infiniband_ports[::-1],
        filesystems=full_snapshot().filesystems[::-1],
        sxids=full_snapshot().sxids[::-1],
        disks=full_snapshot().disks[::-1],
        samplers=full_snapshot().samplers[::-1],
    )
    assert page_of(turned, own_process=False, table=metric_table("full")) == one


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
@pytest.mark.parametrize("build", [full_snapshot, hostile_snapshot])
def test_promtool_has_nothing_to_say(build):
    result = subprocess.run(
        ["promtool", "check", "metrics"], input=page_of(build()), capture_output=True, text=True, check=False
    )
    assert (result.returncode, result.stdout, result.stderr) == (0, "", "")


@pytest.mark.skipif(shutil.which("promtool") is None, reason="promtool is not installed")
def test_promtool_dislikes_only_the_spelling_that_is_the_kernels():
    page = page_of(full_snapshot(), table=metric_table("full", owner_user=True))
    result = subprocess.run(["promtool", "check", "metrics"], input=page, capture_output=True, text=True, check=False)
    # node_exporter writes it so, and dashboards read it so.
    found = [line for line in (result.stdout + result.stderr).splitlines() if line]
    assert [line for line in found if not line.startswith("warpwatch_memory_MemAvailable_bytes ")] == []


def test_the_parsers_read_the_full_level_alike():
    table = metric_table("full", owner_user=True)
    text = samples(parse_text(page_of(full_snapshot(), own_process=False, table=table)))
    assert text == samples(parse_openmetrics(page_of(full_snapshot(), OPENMETRICS, own_process=False, table=table)))


def test_hostile_labels_come_back_as_they_were():
    everything = metric_table("full", owner_user=True)
    for families in (
        parse_text(page_of(hostile_snapshot(), table=everything)),
        parse_openmetrics(page_of(hostile_snapshot(), OPENMETRICS, table=everything)),
    ):
        found = samples(families)
        devices = {
            dict(labels)["device"]: value
            for (name, labels), value in found.items()
            if name == "warpwatch_network_receive_bytes_total"
        }
        # Whatever is long is cut to another label than all others, and keeps its own value.
        assert sorted(devices.values()) == list(range(len(HOSTILE) + len(LONG)))
        expected = {name: float(n) for n, name in enumerate(HOSTILE)}
        expected["\\udcff\\udcfe"] = expected.pop("\udcff\udcfe")
        assert expected.items() <= devices.items()
        assert max(len(value) for _, labels in found for _, value in labels) == 256
        # One owner series for each GPU and two shares, whatever they are called.
        names = [name for name, _ in found]
        assert names.count("warpwatch_gpu_owner_info") == len(HOSTILE) + len(LONG)
        assert names.count("warpwatch_gpu_owner_share_ratio") == 2 * (len(HOSTILE) + len(LONG))


@given(st.lists(st.text(st.characters(codec=None, exclude_categories=())), max_size=8, unique=True))
def test_any_names_give_a_page_that_both_parsers_read_alike(names):
    # A name that is no Unicode and one that looks like its escapes are one label; nothing else is.
    written = {name.encode("utf-8", "backslashreplace") for name in names}
    snapshot = NodeSnapshot(
        built=NOW,
        replay=False,
        networks=tuple(
            NetworkSample(monotonic_s=0.0, wall_s=0.0, device=name, receive_bytes_total=1, transmit_bytes_total=1)
            for name in names
        ),
    )
    text = samples(parse_text(page_of(snapshot, own_process=False)))
    assert text == samples(parse_openmetrics(page_of(snapshot, OPENMETRICS, own_process=False)))
    found = {dict(labels)["device"].encode() for name, labels in text if name.endswith("receive_bytes_total")}
    assert found == written


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
