"""The wheel: what it holds, and that it runs where nothing else of this project is."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture(scope="module")
def wheel(tmp_path_factory):
    folder = tmp_path_factory.mktemp("wheel")
    subprocess.run(
        [sys.executable, "-m", "pip", "wheel", "--quiet", "--no-deps", "--wheel-dir", str(folder), str(ROOT)],
        check=True,
    )
    (built,) = folder.glob("warpwatch-*.whl")
    return built


def test_it_holds_the_three_packages_the_bundle_and_the_demo_and_nothing_else(wheel):
    names = zipfile.ZipFile(wheel).namelist()
    tops = {name.split("/")[0] for name in names}
    assert {top for top in tops if not top.endswith(".dist-info")} == {"agent", "classifier", "exporters"}
    assert {"classifier/bundle/model.json", "classifier/bundle/arrays.npz"} <= set(names)
    assert any(name.startswith("agent/demo/simulated_") for name in names)
    assert any(name.startswith("exporters/rules/") for name in names)
    assert not any("test" in name.lower() and name.endswith(".py") for name in names)
    assert not any(name.endswith(".pyc") for name in names)


def test_it_installs_into_an_empty_environment_and_replays_without_scikit_learn(wheel, tmp_path):
    subprocess.run([sys.executable, "-m", "venv", str(tmp_path / "env")], check=True)
    python = tmp_path / "env" / "bin" / "python"
    subprocess.run([str(python), "-m", "pip", "install", "--quiet", str(wheel)], check=True)
    missing = subprocess.run([str(python), "-c", "import sklearn"], check=False, capture_output=True, text=True)
    assert "No module named 'sklearn'" in missing.stderr
    command = [str(python.with_name("warpwatch"))]
    # Far from the source tree, so that nothing of it can be imported by chance.
    demo = subprocess.run(
        [str(python), "-c", "from agent.daemon import bundled_demo; print(bundled_demo())"],
        check=True,
        capture_output=True,
        text=True,
        cwd=tmp_path,
    ).stdout.strip()
    assert demo.startswith(str(tmp_path))
    done = subprocess.run(
        [*command, "replay", demo, "--json"], check=True, capture_output=True, text=True, cwd=tmp_path
    )
    events = [json.loads(line) for line in done.stdout.splitlines()]
    assert [event["type"] for event in events[-8:]] == ["summary"] * 8
    train = subprocess.run([*command, "train", "out"], check=False, capture_output=True, text=True, cwd=tmp_path)
    assert train.returncode != 0
    assert "warpwatch[train]" in train.stderr
    assert "Traceback" not in train.stderr
