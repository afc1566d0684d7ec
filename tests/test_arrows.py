"""The direction of imports, as docs/architecture.md draws it."""

from __future__ import annotations

import ast
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]

#: The modules that put the parts together and may see all of them.
COMPOSITION = {
    "agent/pipeline.py",
    "agent/replay.py",
    "agent/composition.py",
    "agent/reload.py",
    "agent/rules_command.py",
    "agent/config.py",
    "agent/daemon.py",
    "agent/learned_state.py",
    "agent/cli.py",
    "agent/commands.py",
    "agent/model_report.py",
    "agent/model_store.py",
    "agent/serving.py",
}
#: What a module under the folder may import of this project; the longest matching folder counts.
ALLOWED = {
    "agent/samplers": (
        "agent.clock",
        "agent.errors",
        "agent.gpu_roster",
        "agent.owners",
        "agent.programs",
        "agent.records",
        "agent.samplers",
        "agent.threads",
        "agent.trace",
        "agent.vocabulary",
        "agent.xids",
    ),
    "agent": ("agent",),
    "classifier": (
        "agent.clock",
        "agent.errors",
        "agent.history",
        "agent.records",
        "agent.trace",
        "agent.vocabulary",
        "agent.xids",
        "classifier",
    ),
    "exporters": (
        "agent.admin_file",
        "agent.clock",
        "agent.errors",
        "agent.records",
        "agent.samplers",
        "agent.threads",
        "agent.vocabulary",
        "classifier.results",
        "exporters",
    ),
}
#: Third-party modules by the files or folders that alone may import them.
CONFINED = {
    "pynvml": (
        "agent/samplers/nvml_binding.py",
        "agent/samplers/nvml_fast_binding.py",
        "agent/samplers/nvml_gpm_binding.py",
    ),
    "prometheus_client": ("exporters/",),
    "sklearn": ("classifier/training",),
    "matplotlib": ("classifier/report/plots.py",),
    "workloadtruth": ("classifier/report/baselines.py",),
    "time": ("agent/clock.py",),
    "subprocess": (),
    "pickle": (),
    "joblib": (),
}

FILES = sorted(
    path.relative_to(ROOT).as_posix()
    for package in ("agent", "classifier", "exporters")
    for path in (ROOT / package).rglob("*.py")
)


def imports(path: str) -> set[str]:
    found = set()
    for node in ast.walk(ast.parse((ROOT / path).read_text(encoding="utf-8"))):
        if isinstance(node, ast.Import):
            found.update(alias.name for alias in node.names)
        elif isinstance(node, ast.ImportFrom) and node.module:
            found.add(node.module)
    return found


@pytest.mark.parametrize("path", FILES)
def test_a_module_imports_only_what_its_folder_may(path):
    folder = max((name for name in ALLOWED if path.startswith(name + "/")), key=len)
    allowed = ALLOWED[folder]
    ours = {name for name in imports(path) if name.split(".")[0] in ("agent", "classifier", "exporters")}
    if path not in COMPOSITION:
        wrong = {
            name
            for name in ours
            if name != "agent" and not any(name == ok or name.startswith(ok + ".") for ok in allowed)
        }
        assert not wrong, f"{path} may not import {sorted(wrong)}"


@pytest.mark.parametrize("path", FILES)
def test_a_confined_module_is_imported_in_its_place_only(path):
    for name, places in CONFINED.items():
        used = any(imported == name or imported.startswith(name + ".") for imported in imports(path))
        assert not used or any(path.startswith(place) for place in places), f"{path} may not import {name}"
