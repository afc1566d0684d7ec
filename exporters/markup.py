"""A few lines that build HTML in which everything is escaped unless it was built here."""

from __future__ import annotations

import html
from collections.abc import Iterable
from typing import Final

_VOID: Final = frozenset({"meta", "link"})


class Html(str):
    """Markup that is ready: `tag` and `join` take it as it is and escape any other text."""

    __slots__ = ()


def text(value: str) -> Html:
    """Return `value` escaped for element content and quoted attributes.

    Control characters that HTML forbids become U+FFFD, and so does what UTF-8 cannot hold.
    """
    clean = "".join(char if char in "\n\t" or char.isprintable() or char.isspace() else "�" for char in value)
    return Html(html.escape(clean.encode("utf-8", "replace").decode("utf-8")))


def join(*parts: str) -> Html:
    """Return the parts behind each other."""
    return Html("".join(part if isinstance(part, Html) else text(part) for part in parts))


def tag(name: str, /, *parts: str, **attributes: str | None) -> Html:
    """Return one element.

    An underscore at the end of an attribute name is dropped (`class_`), others become hyphens; None leaves it out.
    """
    written = "".join(
        f' {key.rstrip("_").replace("_", "-")}="{text(value)}"'
        for key, value in attributes.items()
        if value is not None
    )
    return Html(f"<{name}{written}>" if name in _VOID else f"<{name}{written}>{join(*parts)}</{name}>")


def table(
    headings: tuple[str, ...], rows: Iterable[tuple[str | None, list[Html]]], *, class_: str | None = None
) -> Html:
    """Return a table whose cells carry their heading, for the narrow layout; the first cell heads its row.

    A row is its class, or None, and its cells.
    """
    head = tag("thead", tag("tr", *(tag("th", heading, scope="col") for heading in headings)))
    lines = [
        tag(
            "tr",
            tag("th", tag("div", cells[0]), scope="row", data_label=headings[0]),
            *(
                tag("td", tag("div", cell), data_label=heading)
                for heading, cell in zip(headings[1:], cells[1:], strict=True)
            ),
            class_=level,
        )
        for level, cells in rows
    ]
    return tag("table", head, tag("tbody", *lines), class_=class_)
