"""What the landing page says of who holds a GPU."""

from __future__ import annotations

from typing import Final

from exporters.landing_text import NOTHING, percent, shortened
from exporters.markup import Html, join, tag, text
from exporters.metrics_owners import OTHERS, Owner, holder_count, shares_of
from exporters.snapshot import GpuView

#: Holders of one GPU that are shown, the largest first.
_SHOWN: Final = 3


def owner_cell(view: GpuView, *, owner_user: bool) -> Html:
    """Return who holds a GPU or instance; `owner_user` names the user too."""
    return tag("div", _holders(view, owner_user=owner_user), class_="owner")


def _holders(view: GpuView, *, owner_user: bool) -> Html:
    shares = shares_of(view.owners)
    if shares is None or view.owners is None:
        return text(NOTHING)
    if not shares:
        return tag("span", "nobody", class_="soft")
    if len(shares) == 1:
        is_unused = all(holder.processes == 0 for holder in view.owners.holders)
        note = tag("div", "no process on it", class_="soft small") if is_unused else Html()
        return join(_one(next(iter(shares)), owner_user=owner_user), note)
    named = [(owner, share) for owner, share in shares.items() if owner != Owner(OTHERS)][:_SHOWN]
    lines = [
        tag("div", _name(owner), " ", tag("span", percent(share), class_="soft number"), title=_title(owner))
        for owner, share in named
    ]
    more = holder_count(view.owners) - len(named)
    if more:
        lines.append(tag("div", f"and {more} more", class_="soft small"))
    return join(*lines)


def _one(owner: Owner, *, owner_user: bool) -> Html:
    where = "/".join(part for part in (owner.namespace, owner.pod) if part) or owner.container
    below = [shortened(part) for part in (where, f"user {owner.user}" if owner_user and owner.user else "") if part]
    return join(
        tag("div", _name(owner), title=_title(owner)),
        *(tag("div", part, class_="soft small") for part in below),
    )


def _name(owner: Owner) -> str:
    return shortened(owner.job_key or owner.job_id or owner.pod or owner.container) or "not known who"


def _title(owner: Owner) -> str | None:
    return shortened(owner.job_key, 256) or None
