"""The emulator's README names all that there is."""

from __future__ import annotations

import re

from tests.nvml_emulator.emulator import HERE

README = (HERE / "README.md").read_text(encoding="utf-8")


def test_every_symbol_is_listed() -> None:
    table = (HERE / "symbols.h").read_text(encoding="utf-8").partition("#define SYMBOLS")[2]
    symbols = {name for name in re.findall(r"\bnvml[A-Z]\w+", table) if not name.endswith("_t")}
    listed = README.partition("nvmlErrorString and these:")[2].partition("A symbol that is not there")[0]
    assert set(re.findall(r"\bnvml\w+", listed)) == symbols


def test_every_value_and_its_kind_is_listed() -> None:
    values = re.findall(r'X\(\w+, "(\w+)", (\w+)\)', (HERE / "values.h").read_text(encoding="utf-8"))
    assert len(values) > 50
    rows = [row.split(" | ") for row in README.splitlines() if row.startswith("| `")]
    kinds = {name: row[1] for row in rows if len(row) == 3 for name in re.findall(r"`(\w+)", row[0])}
    assert {name: kinds.get(name) for name, _ in values} == {name: kind.lower() for name, kind in values}


def test_every_statement_of_the_control_file_is_listed() -> None:
    source = (HERE / "control.c").read_text(encoding="utf-8")
    verbs = set(re.findall(r'\{"(\w+)", [A-Z]+, \d\}', source)) | set(re.findall(r'sscanf\(line, "(\w+) ', source))
    assert {"fail", "latency", "mig", "reload", "event"} <= verbs
    assert {verb for verb in verbs if f"| `{verb} " not in README} == set()
