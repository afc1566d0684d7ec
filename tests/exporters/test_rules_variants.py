"""Every alert of the shipped rules: with 0, 1 and 2 owners, on MIG, in Kubernetes, and silent."""

from __future__ import annotations

import shutil
import subprocess
from pathlib import Path

import pytest
import yaml

from tests.exporters.rule_variants import STEP_S, VARIANTS, alerts, alone, bases, variants


def test_every_alert_has_a_case_that_variants_are_made_of() -> None:
    assert bases()[1] == []


def test_every_variant_of_every_alert_is_told_as_it_should(tmp_path: Path) -> None:
    if shutil.which("promtool") is None:
        pytest.skip("promtool (package prometheus) is absent")
    cases = list(variants())
    assert len(cases) == len(VARIANTS) * len(alerts())
    files = []
    for name in dict.fromkeys(name for name, _ in cases):
        rules = _written(tmp_path / f"{name}.rules.yml", alone(name))
        tests = [case for of, case in cases if of == name]
        made = {"rule_files": [str(rules)], "evaluation_interval": f"{STEP_S}s", "tests": tests}
        files.append(_written(tmp_path / f"{name}.test.yml", made))
    done = subprocess.run(["promtool", "test", "rules", *files], capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stdout + done.stderr


def _written(path: Path, content: object) -> Path:
    path.write_text(yaml.dump(content, Dumper=getattr(yaml, "CSafeDumper", yaml.SafeDumper)), encoding="utf-8")
    return path
