"""The report about the model: docs/model.md, its plots and one HTML page, made by `write_report`.

`experiment` measures (simulated families and real sources held out, baselines, speed), `figures` reads figures from
that, `bars` holds them against what the model must reach, `sections` and `plots` show them, `document` writes.
"""

from __future__ import annotations

from pathlib import Path
from typing import Final

from agent.errors import FaultError
from classifier.report.document import Figure, to_html, to_markdown
from classifier.report.experiment import QUICK, ReportConfig, Results, run, steps_of
from classifier.report.plots import plots
from classifier.report.sections import sections

__all__ = ["QUICK", "ReportConfig", "Results", "run", "steps_of", "write_report"]

MARKDOWN_NAME: Final = "model.md"
HTML_NAME: Final = "model.html"
IMAGES_NAME: Final = "model"


def write_report(results: Results, folder: Path, *, date: str, command: str) -> tuple[Path, Path]:
    """Write model.md, model.html and the folder of plots and return the first two; raises FaultError as files do."""
    images = plots(results)
    captions = {name: caption for name, (_, caption) in images.items()}
    blocks = [
        Figure(block.name, captions[block.name]) if isinstance(block, Figure) else block
        for block in sections(results, date, command)
        if not isinstance(block, Figure) or block.name in images
    ]
    try:
        (folder / IMAGES_NAME).mkdir(parents=True, exist_ok=True)
        for name, (png, _) in images.items():
            (folder / IMAGES_NAME / name).write_bytes(png)
        markdown, page = folder / MARKDOWN_NAME, folder / HTML_NAME
        markdown.write_text(to_markdown(blocks, IMAGES_NAME), encoding="utf-8")
        page.write_text(to_html(blocks, {name: png for name, (png, _) in images.items()}), encoding="utf-8")
    except OSError as error:
        raise FaultError(f"cannot write the report to {folder}: {error.strerror}") from error
    return markdown, page
