"""`warpwatch check-rules`: rules that can never fire with a configuration, since no series feeds them."""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Final

from agent.config import Config, ExportConfig, load_config
from agent.serving import export_table
from agent.vocabulary import ANOMALIES, CLOCK_EVENT_REASONS, GPU_STATES, WORKLOADS
from classifier.detectors.baseline import PowerBaselines
from classifier.detectors.registry import build_detectors
from exporters.metric_def import MetricDef
from exporters.rule_check import Feeds, Rule, Silent, read_rules, silent_rules

#: Beginnings of families that a sampler feeds alone, by its key under `[samplers]`.
_OF_SAMPLERS: Final = {
    "nvml": ("gpu_", "gpus_", "training_step_"),
    "xid": ("gpu_xid_", "nvswitch_sxid_"),
    "network": ("network_",),
    "infiniband": ("infiniband_",),
    "disk": ("disk_",),
    "filesystems": ("filesystem_", "nvidia_fs_"),
    "pressure": ("pressure_", "procs_"),
    "owners": ("gpu_owner_",),
}
#: Words of labels, by family and label, whatever is configured.
_WORDS: Final = {
    ("gpu_state", "state"): GPU_STATES,
    ("gpu_workload", "workload"): WORKLOADS,
    ("gpu_workload_seconds_total", "workload"): WORKLOADS,
    ("gpu_workload_energy_joules_total", "workload"): WORKLOADS,
    ("gpu_clock_event_seconds_total", "reason"): CLOCK_EVENT_REASONS,
    ("gpu_clock_event_active", "reason"): CLOCK_EVENT_REASONS,
}


def run(arguments: argparse.Namespace) -> int:
    """Check the files and print what can never fire."""
    config = load_config(arguments.config)
    rules = [rule for path in arguments.file for rule in read_rules(path)]
    found = silent_rules(rules, feeds_of(config))
    for one in found:
        sys.stdout.write((json.dumps(_as_dict(one)) if arguments.json else _line(one)) + "\n")
    if not arguments.json:
        count = f"{len(found)} of {len(rules)} rules can never fire" if found else f"all {len(rules)} rules can fire"
        sys.stdout.write(f"{count} with this configuration\n")
    return int(bool(found))


def feeds_of(config: Config) -> Feeds:
    """Return the series that an agent with this configuration exports, and why others are missing."""
    rows = export_table(config, is_live=True)
    off = _switched_off(config)
    words: dict[str, Mapping[str, frozenset[str]]] = {}
    missing: dict[str, str] = {}
    for row in rows:
        if row.name in off:
            missing[row.full_name] = off[row.name]
        else:
            words[row.full_name] = _words_of(row, config)
    everything = replace(config, export=ExportConfig(host="full", owner_user=True, dcgm=True))
    for row in export_table(everything, is_live=True):
        if row.full_name not in words:
            key = "[export] dcgm" if row.host is None else "[export] host"
            missing.setdefault(row.full_name, f"{key} leaves it out")
    return Feeds(words=words, missing=missing)


def _switched_off(config: Config) -> Mapping[str, str]:
    """Return why families are not there, by their names without the prefix."""
    names = {row.name for row in export_table(replace(config, export=ExportConfig(host="full")), is_live=True)}
    off: dict[str, str] = {}
    for sampler, beginnings in _OF_SAMPLERS.items():
        if not getattr(config.samplers, sampler):
            off |= {name: f"[samplers] {sampler} is off" for name in names if name.startswith(beginnings)}
    return off


def _words_of(row: MetricDef, config: Config) -> Mapping[str, frozenset[str]]:
    return {label: frozenset(words) for label in row.labels if (words := _words(row, label, config)) is not None}


def _words(row: MetricDef, label: str, config: Config) -> tuple[str, ...] | None:
    if label == "anomaly":
        judged = tuple(_anomalies(config))
        # A maintenance may be confined to any of them.
        return ANOMALIES if row.name.endswith("_maintenance") else judged
    return _WORDS.get((row.name, label))


def _anomalies(config: Config) -> Iterator[str]:
    for detector in build_detectors(config.detectors, PowerBaselines(config.detectors.baseline)):
        yield from detector.anomalies


def _line(silent: Silent) -> str:
    rule = silent.rule
    return f"{rule.file}: {_kind(rule)} {rule.name} ({rule.group}): {silent.why}"


def _as_dict(silent: Silent) -> Mapping[str, str]:
    rule = silent.rule
    return {"file": str(rule.file), "group": rule.group, "kind": _kind(rule), "name": rule.name, "why": silent.why}


def _kind(rule: Rule) -> str:
    return "alert" if rule.is_alert else "record"
