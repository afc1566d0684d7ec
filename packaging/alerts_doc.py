"""Write docs/alerts.md from the rule files and the runbooks: `python packaging/alerts_doc.py > docs/alerts.md`."""

from __future__ import annotations

import re
import sys
from pathlib import Path
from typing import Any, Final

import yaml

from agent.vocabulary import ACTIONS

ROOT: Final = Path(__file__).resolve().parents[1]
_STEPS: Final = 3
_INTRODUCTION: Final = """\
# Alerts

This page is written from `exporters/rules/` and the runbooks by `python packaging/alerts_doc.py > docs/alerts.md`; a
test fails when they differ. How the rules, their owner labels and the example for Alertmanager fit together stands in
[exporter.md](exporter.md) and [cluster_jobs.md](cluster_jobs.md).

- Only `critical` pages. `action` is the next step in one word.
- No alert fires on an instance that plays a file (`warpwatch_replay 1`), on samples older than a minute, or on what is
  in [maintenance](maintenance.md).
- What is said of a GPU carries the owner where there is exactly one: `job_key`, `job_id`, `owner_pod`; of a GPU that
  does not answer, the text names who held it, since the labels would change when its job dies.
- The agent confirms its findings by itself ([detectors.md](detectors.md)), so that most alerts have no `for`.
- `unknown_workload` has no alert: it is information, and where little can be read it is so most of the time.

| alert | severity | action | for | group |
|---|---|---|---|---|
"""


def rows() -> list[tuple[str, dict[str, Any]]]:
    """Return every alerting rule with its group, in the order of the files."""
    found = []
    for path in sorted((ROOT / "exporters/rules").glob("*.rules.yml"), key=lambda path: (path.stem.count("."), path)):
        for group in yaml.safe_load(path.read_text(encoding="utf-8"))["groups"]:
            found += [(group["name"], rule) for rule in group["rules"] if "alert" in rule]
    return found


def page() -> str:
    """Return docs/alerts.md."""
    alerts = rows()
    lines = [_INTRODUCTION.rstrip("\n")]
    for group, rule in alerts:
        labels = rule["labels"]
        action = ", ".join(word for word in ACTIONS if re.search(rf"\b{word}\b", labels["action"]))
        name = rule["alert"]
        lines.append(
            f"| [{name}](#{name.lower()}) | {labels['severity']} | {action} | {rule.get('for', '-')} | {group} |"
        )
    names = dict.fromkeys(rule["alert"] for _, rule in alerts)
    lines += [_section(name, [rule for _, rule in alerts if rule["alert"] == name]) for name in names]
    return "\n".join(lines) + "\n"


def _section(name: str, rules: list[dict[str, Any]]) -> str:
    book = rules[0]["annotations"]["runbook_url"].rpartition("/")[2]
    text = (ROOT / "docs/runbooks" / book).read_text(encoding="utf-8")
    meaning = re.sub(r"(?<=\.) [^.]*:$", "", text.split("\n\n")[1])
    parts = [f"\n## {name}\n\n{_linked(meaning)}\n"]
    for rule in rules:
        for_text = f", for {rule['for']}" if "for" in rule else ""
        query = "\n".join("    " + line for line in rule["expr"].strip().splitlines())
        parts.append(f"{rule['labels']['severity']}{for_text}:\n\n{query}\n")
    steps = "\n".join(f"{number}. {_linked(step)}" for number, step in enumerate(_steps(text), 1))
    return "\n".join(parts) + f"\nFirst steps ([runbook](runbooks/{book})):\n\n{steps}"


def _linked(text: str) -> str:
    """Return text of a runbook with its links as they are from docs/."""
    return re.sub(r"\]\((?!\.\./|https?:|#)", "](runbooks/", text).replace("](../", "](")


def _steps(text: str) -> list[str]:
    """Return the first steps of a runbook: those that confirm, then those that mend."""
    found: list[str] = []
    for heading in ("Confirm", "Do"):
        part = re.search(rf"\n## {heading}\n\n(.*?)(?=\n## |\Z)", text, re.DOTALL)
        if part is None:
            raise SystemExit(f"a runbook has no section {heading}: {text.splitlines()[0]}")
        listed = re.findall(r"^(?:\d+\.|-) (.*?)(?=\n(?:\d+\.|-) |\n\n|\Z)", part[1], re.DOTALL | re.MULTILINE)
        found += listed or [part[1].strip().split("\n\n")[0]]
    return [re.sub(r"\s+", " ", step).strip() for step in found[:_STEPS]]


if __name__ == "__main__":
    sys.stdout.write(page())
