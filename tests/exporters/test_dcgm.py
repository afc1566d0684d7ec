"""Series under the names of dcgm-exporter: names, types, units and labels as its dashboards and rules ask for them."""

from __future__ import annotations

import dataclasses
import re

from prometheus_client.openmetrics.parser import text_string_to_metric_families as parse_openmetrics
from prometheus_client.parser import text_string_to_metric_families as parse_text

from agent.config import Config, ExportConfig
from agent.records import GpuKey, GpuMigInfo, GpuOwners, GpuXids, Holder
from agent.serving import export_table
from agent.vocabulary import CLOCK_EVENT_REASONS
from exporters.exposition import families_of, render, series_of
from exporters.metrics import METRICS
from exporters.metrics_dcgm import dcgm_metrics
from exporters.snapshot import GpuView, NodeSnapshot
from tests.exporters.snapshots import NOW, full_snapshot, full_view, key_of

ROWS = {row.full_name: row for row in dcgm_metrics("node-1")}

#: What Grafana dashboard 12239 (NVIDIA's own) queries, and its two variables.
DASHBOARD = {
    "DCGM_FI_DEV_GPU_TEMP": "gauge",
    "DCGM_FI_DEV_POWER_USAGE": "gauge",
    "DCGM_FI_DEV_SM_CLOCK": "gauge",
    "DCGM_FI_PROF_GR_ENGINE_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_TENSOR_ACTIVE": "gauge",
    "DCGM_FI_DEV_FB_USED": "gauge",
    "DCGM_FI_DEV_FB_FREE": "gauge",
}
#: The families that dcgm-exporter has on in its two shipped lists, as they are typed there.
SHIPPED = {
    **DASHBOARD,
    "DCGM_FI_DEV_MEM_CLOCK": "gauge",
    "DCGM_FI_DEV_MEMORY_TEMP": "gauge",
    "DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION": "counter",
    "DCGM_FI_DEV_PCIE_REPLAY_COUNTER": "counter",
    "DCGM_FI_DEV_GPU_UTIL": "gauge",
    "DCGM_FI_DEV_MEM_COPY_UTIL": "gauge",
    "DCGM_FI_DEV_XID_ERRORS": "gauge",
    "DCGM_FI_DEV_UNCORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_CORRECTABLE_REMAPPED_ROWS": "counter",
    "DCGM_FI_DEV_ROW_REMAP_FAILURE": "gauge",
    "DCGM_FI_PROF_DRAM_ACTIVE": "gauge",
    "DCGM_FI_PROF_PCIE_TX_BYTES": "gauge",
    "DCGM_FI_PROF_PCIE_RX_BYTES": "gauge",
}
#: Of these lists, what is not measured here, or has no one meaning there: a rate that is typed as a counter.
NOT_HERE = {
    "DCGM_FI_DEV_ENC_UTIL",
    "DCGM_FI_DEV_DEC_UTIL",
    "DCGM_FI_DEV_FB_RESERVED",
    "DCGM_FI_DEV_VGPU_LICENSE_STATUS",
    "DCGM_FI_DEV_NVLINK_BANDWIDTH_TOTAL",
    "DCGM_FI_DEV_PCIE_TX_THROUGHPUT",
    "DCGM_FI_DEV_PCIE_RX_THROUGHPUT",
    "DCGM_FI_DEV_RETIRED_SBE",
    "DCGM_FI_DEV_RETIRED_DBE",
}
#: What others' rules and dashboards ask for beside these.
COMMON = {
    "DCGM_FI_DEV_FB_TOTAL": "gauge",
    "DCGM_FI_DEV_ECC_SBE_VOL_TOTAL": "counter",
    "DCGM_FI_DEV_ECC_DBE_VOL_TOTAL": "counter",
    "DCGM_FI_DEV_ECC_SBE_AGG_TOTAL": "counter",
    "DCGM_FI_DEV_ECC_DBE_AGG_TOTAL": "counter",
    "DCGM_FI_DEV_ROW_REMAP_PENDING": "gauge",
    "DCGM_FI_DEV_NVLINK_CRC_FLIT_ERROR_COUNT_TOTAL": "counter",
    "DCGM_FI_DEV_NVLINK_REPLAY_ERROR_COUNT_TOTAL": "counter",
    "DCGM_FI_DEV_NVLINK_RECOVERY_ERROR_COUNT_TOTAL": "counter",
    "DCGM_FI_DEV_CLOCKS_EVENT_REASONS": "gauge",
    "DCGM_FI_DEV_CLOCK_THROTTLE_REASONS": "gauge",
    "DCGM_FI_DEV_ENFORCED_POWER_LIMIT": "gauge",
    "DCGM_FI_PROF_SM_ACTIVE": "gauge",
    "DCGM_FI_PROF_SM_OCCUPANCY": "gauge",
    "DCGM_FI_PROF_PIPE_FP64_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_FP32_ACTIVE": "gauge",
    "DCGM_FI_PROF_PIPE_FP16_ACTIVE": "gauge",
    "DCGM_FI_PROF_NVLINK_TX_BYTES": "gauge",
    "DCGM_FI_PROF_NVLINK_RX_BYTES": "gauge",
}


def node(*views: GpuView) -> NodeSnapshot:
    return NodeSnapshot(built=NOW, replay=False, gpus=views)


def whole_view() -> GpuView:
    """Return a GPU of which everything is measured, with values whose conversion is worked out in the tests."""
    view = full_view(key_of(0))
    assert view.sample is not None
    assert view.slow is not None
    sample = dataclasses.replace(
        view.sample,
        utilization_ratio=0.5,
        memory_used_bytes=3 << 30,
        memory_total_bytes=80 << 30,
        sm_clock_hertz=1.98e9,
        clock_event_reasons=("sw_power_cap", "hw_thermal"),
        tensor_hmma_active_ratio=0.25,
        tensor_imma_active_ratio=0.0,
        tensor_dfma_active_ratio=0.0,
        fp64_active_ratio=0.0,
        fp32_active_ratio=0.125,
        fp16_active_ratio=0.0,
        pcie_receive_bytes_per_second=1e6,
        pcie_transmit_bytes_per_second=2e6,
        nvlink_receive_bytes_per_second=3e6,
        nvlink_transmit_bytes_per_second=4e6,
    )
    seconds = dict.fromkeys(CLOCK_EVENT_REASONS, 1.5)
    slow = dataclasses.replace(view.slow, energy_joules_total=12.5, clock_event_seconds_total=seconds)
    assert view.limits is not None
    limits = dataclasses.replace(
        view.limits, pcie_generation=1, pcie_generation_max=5, pcie_width=16, pcie_width_max=16
    )
    return dataclasses.replace(view, sample=sample, slow=slow, limits=limits)


def value(name: str, view: GpuView) -> float | None:
    series = series_of(ROWS[name], node(view))
    return next(iter(series.values()), None)


def page(snapshot: NodeSnapshot, *, openmetrics: bool = False) -> str:
    return render(families_of(ROWS.values(), snapshot), openmetrics=openmetrics).decode()


def test_names_and_types_are_those_of_dashboards_and_rules():
    wanted = {**SHIPPED, **COMMON}
    assert {name: ROWS[name].kind for name in wanted} == wanted
    assert not NOT_HERE & set(ROWS)


def test_all_of_them_are_there_where_everything_is_measured():
    found = {family.name for family in parse_text(page(node(whole_view())))}
    assert found == set(ROWS)


def test_what_is_not_measured_is_absent():
    assert page(node(GpuView(key=key_of(0), state="ok"))) == "\n"
    view = whole_view()
    assert view.sample is not None
    bare = dataclasses.replace(view, sample=dataclasses.replace(view.sample, tensor_active_ratio=None, power_watts=0.0))
    assert value("DCGM_FI_PROF_PIPE_TENSOR_ACTIVE", bare) is None
    assert value("DCGM_FI_DEV_POWER_USAGE", bare) == 0


def test_units_are_dcgms():
    view = whole_view()
    assert value("DCGM_FI_DEV_GPU_UTIL", view) == 50  # percent
    assert value("DCGM_FI_PROF_GR_ENGINE_ACTIVE", view) == 0.5  # a ratio
    assert value("DCGM_FI_DEV_SM_CLOCK", view) == 1980  # MHz
    assert value("DCGM_FI_DEV_FB_USED", view) == 3 * 1024  # MiB
    assert value("DCGM_FI_DEV_FB_FREE", view) == 77 * 1024
    assert value("DCGM_FI_DEV_FB_TOTAL", view) == 80 * 1024
    assert value("DCGM_FI_DEV_TOTAL_ENERGY_CONSUMPTION", view) == 12500  # mJ
    assert value("DCGM_FI_DEV_CLOCKS_EVENT_REASON_SW_POWER_CAP_NS", view) == 1.5e9  # ns
    assert value("DCGM_FI_DEV_CLOCKS_EVENT_REASONS", view) == 0x44  # 0x4 power cap, 0x40 thermal by the board
    assert value("DCGM_FI_PROF_PCIE_TX_BYTES", view) == 2e6


def test_the_newest_xid_and_none():
    view = whole_view()
    times = {13: NOW.wall_s - 60, 79: NOW.wall_s - 10, 94: NOW.wall_s - 90}
    seen = GpuXids(monotonic_s=1.0, wall_s=1.0, key=view.key, totals=dict.fromkeys(times, 1), last_wall_s=times)
    assert value("DCGM_FI_DEV_XID_ERRORS", dataclasses.replace(view, xids=seen)) == 79
    none = GpuXids(monotonic_s=1.0, wall_s=1.0, key=view.key, totals={79: 0})
    assert value("DCGM_FI_DEV_XID_ERRORS", dataclasses.replace(view, xids=none)) == 0
    assert value("DCGM_FI_DEV_XID_ERRORS", dataclasses.replace(view, xids=None)) is None


def test_labels_are_dcgms_and_empty_ones_are_left_out():
    view = dataclasses.replace(whole_view(), owners=None)
    info = view.info
    assert info is not None
    line = next(line for line in page(node(view)).splitlines() if line.startswith("DCGM_FI_DEV_GPU_TEMP{"))
    assert line == (
        f'DCGM_FI_DEV_GPU_TEMP{{gpu="0",UUID="{view.key.uuid}",pci_bus_id="{info.pci_bus_id}",device="{info.device}",'
        f'modelName="{info.model_name}",Hostname="node-1",DCGM_FI_DRIVER_VERSION="{info.driver_version}"}} '
        f"{view.slow and view.slow.temperature_celsius:g}"
    )
    newer = dcgm_metrics("node-1", "hostname")
    assert b',hostname="node-1",' in render(families_of(newer, node(view)), openmetrics=False)


def owners(view: GpuView, *holders: Holder) -> GpuView:
    return dataclasses.replace(view, owners=GpuOwners(monotonic_s=1.0, wall_s=1.0, key=view.key, holders=holders))


def test_who_holds_the_gpu_alone_is_named_as_dcgm_does():
    pod = Holder(job_key="k", scheduler="kubernetes", namespace="ml", pod="train-0", container="main")
    assert ',container="main",namespace="ml",pod="train-0"}' in page(node(owners(whole_view(), pod)))
    job = Holder(job_key="slurm:42", job_id="42", scheduler="slurm")
    assert ',hpc_job="42"}' in page(node(owners(whole_view(), job)))
    assert not re.search("hpc_job|pod=", page(node(owners(whole_view(), pod, job))))


def test_a_divided_card_has_its_board_once_and_its_work_on_the_instances():
    card = whole_view()
    key = card.key._replace(gpu_i_id=7)
    mig = GpuMigInfo(monotonic_s=1.0, wall_s=1.0, key=key, profile="1g.10gb", mig_uuid="MIG-1")
    instance = GpuView(key=key, state="ok", sample=card.sample, mig=mig)
    text = page(node(dataclasses.replace(card, owners=None), instance))
    assert len(re.findall("^DCGM_FI_DEV_POWER_USAGE{", text, re.MULTILINE)) == 1
    (line,) = re.findall("^DCGM_FI_DEV_FB_USED{.*", text, re.MULTILINE)
    assert f'UUID="{card.key.uuid}"' in line
    assert 'modelName="' in line
    assert ',GPU_I_PROFILE="1g.10gb",GPU_I_ID="7",Hostname="node-1"' in line


def test_the_same_samples_in_both_formats():
    snapshot = full_snapshot()

    def samples(families) -> dict:
        # prometheus_client's reader of text adds _total to the name of every counter.
        found = [sample for family in families for sample in family.samples]
        return {(one.name.removesuffix("_total"), tuple(one.labels.items())): one.value for one in found}

    assert samples(parse_text(page(snapshot))) == samples(parse_openmetrics(page(snapshot, openmetrics=True)))


def test_they_are_off_unless_asked_for_and_never_of_a_replay():
    wanted = Config(export=ExportConfig(dcgm=True))
    assert [row.full_name for row in export_table(Config(), is_live=True)] == [row.full_name for row in METRICS]
    assert set(ROWS) < {row.full_name for row in export_table(wanted, is_live=True)}
    assert not set(ROWS) & {row.full_name for row in export_table(wanted, is_live=False)}


def test_they_cost_a_bounded_number_of_series():
    assert len(ROWS) <= 60
    rows = ROWS.values()
    key = GpuKey(0, "GPU-x")
    assert all(len(series_of(row, node(full_view(key)))) <= 1 for row in rows)
