"""The report as blocks, written once as Markdown with images beside it and once as one HTML file that needs nothing."""

from __future__ import annotations

import base64
import html
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Final

_STYLE: Final = """
body { font: 15px/1.5 system-ui, sans-serif; color: #1c2126; background: #fff; max-width: 70rem; margin: 2rem auto;
  padding: 0 1rem; }
h1, h2, h3 { line-height: 1.2; } h2 { margin-top: 2.5rem; border-bottom: 1px solid #d5dbe1; padding-bottom: .3rem; }
table { border-collapse: collapse; margin: 1rem 0; display: block; overflow-x: auto; }
th, td { border: 1px solid #d5dbe1; padding: .3rem .6rem; text-align: left; vertical-align: top;
  font-variant-numeric: tabular-nums; }
th { background: #f2f4f6; } code { background: #f2f4f6; padding: 0 .2rem; }
figure { margin: 1.5rem 0; } img { max-width: 100%; height: auto; } figcaption { color: #4a545e; font-size: .9rem; }
@media (prefers-color-scheme: dark) {
  body { background: #14181c; color: #dfe5ea; } th, td, h2 { border-color: #3a434c; } th, code { background: #20262c; }
  img { background: #fff; } figcaption { color: #a9b4be; }
}
"""


@dataclass(frozen=True, slots=True)
class Heading:
    """A heading; level 1 is the title."""

    level: int
    text: str


@dataclass(frozen=True, slots=True)
class Text:
    """A paragraph; `code` and **bold** as in Markdown."""

    text: str


@dataclass(frozen=True, slots=True)
class Code:
    """Lines as they are."""

    text: str


@dataclass(frozen=True, slots=True)
class Table:
    """A table of text cells."""

    columns: Sequence[str]
    rows: Sequence[Sequence[str]]


@dataclass(frozen=True, slots=True)
class Figure:
    """A PNG by its file name, with a sentence that says what it shows."""

    name: str
    caption: str


Block = Heading | Text | Code | Table | Figure


def to_markdown(blocks: Sequence[Block], image_folder: str) -> str:
    """Return the document in Markdown; images are looked for in `image_folder` beside it."""
    parts: list[str] = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"{'#' * level} {text}")
            case Text(text):
                parts.append(text)
            case Code(text):
                parts.append("\n".join(f"    {line}" for line in text.splitlines()))
            case Table(columns, rows):
                lines = [_row(columns), "|" + "---|" * len(columns), *map(_row, rows)]
                parts.append("\n".join(lines))
            case Figure(name, caption):
                parts.append(f"![{caption}]({image_folder}/{name})")
    return "\n\n".join(parts) + "\n"


def _row(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def to_html(blocks: Sequence[Block], images: Mapping[str, bytes]) -> str:
    """Return the document as one HTML page, images and style within; nothing is loaded from anywhere."""
    title = next((block.text for block in blocks if isinstance(block, Heading)), "Report")
    parts: list[str] = []
    for block in blocks:
        match block:
            case Heading(level, text):
                parts.append(f"<h{level}>{_inline(text)}</h{level}>")
            case Text(text):
                parts.append(f"<p>{_inline(text)}</p>")
            case Code(text):
                parts.append(f"<pre><code>{html.escape(text)}</code></pre>")
            case Table(columns, rows):
                head = "".join(f'<th scope="col">{_inline(cell)}</th>' for cell in columns)
                body = "".join("<tr>" + "".join(f"<td>{_inline(c)}</td>" for c in row) + "</tr>\n" for row in rows)
                parts.append(f"<table>\n<thead><tr>{head}</tr></thead>\n<tbody>\n{body}</tbody>\n</table>")
            case Figure(name, caption):
                data = base64.b64encode(images[name]).decode("ascii")
                alt = html.escape(caption, quote=True)
                parts.append(
                    f'<figure><img src="data:image/png;base64,{data}" alt="{alt}">'
                    f"<figcaption>{_inline(caption)}</figcaption></figure>"
                )
    body = "\n".join(parts)
    return (
        '<!DOCTYPE html>\n<html lang="en">\n<head>\n<meta charset="utf-8">\n'
        '<meta name="viewport" content="width=device-width, initial-scale=1">\n'
        f"<title>{html.escape(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{body}\n</body>\n</html>\n"
    )


def _inline(text: str) -> str:
    escaped = html.escape(text, quote=False)
    escaped = re.sub(r"`([^`]+)`", r"<code>\1</code>", escaped)
    escaped = re.sub(r"\*\*([^*]+)\*\*", r"<strong>\1</strong>", escaped)
    # A link to a file beside the Markdown would lead nowhere from a page that travels alone: its text stays.
    return re.sub(r"\[([^\]]+)\]\([^)]+\)", r"\1", escaped)
