"""Rows of the metric table that say who holds a GPU, and the holders as they are exported."""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping
from typing import Final, NamedTuple

from agent.records import GpuKey, GpuOwners, Holder
from exporters.metric_def import WORK_LABELS, MetricDef, Series, work_labels, work_views
from exporters.snapshot import NodeSnapshot

#: Who holds a GPU. `owner_user` is added by configuration only: a user name is personal data.
OWNER_LABELS: Final = ("job_key", "job_id", "scheduler", "owner_namespace", "owner_pod", "owner_container")
USER_LABEL: Final = "owner_user"
#: Series of shares that one GPU may have; the smallest holders beyond that are one of them.
MAX_SHARES: Final = 8
#: The `job_key` of that one.
OTHERS: Final = "other"
#: By how much shares may miss their sum of 1 as a matter of rounding.
_ROUNDING: Final = 1e-9


class Owner(NamedTuple):
    """One holder by what tells it apart, in the order of the labels."""

    job_key: str = ""
    job_id: str = ""
    scheduler: str = ""
    namespace: str = ""
    pod: str = ""
    container: str = ""
    user: str = ""

    def label_values(self, *, owner_user: bool) -> tuple[str, ...]:
        """Return the values of OWNER_LABELS, and of USER_LABEL where it is wanted."""
        return tuple(self) if owner_user else tuple(self)[:-1]


def owners_of(snapshot: NodeSnapshot) -> dict[GpuKey, frozenset[Owner] | None]:
    """Return who holds each card and each MIG instance, by index; None where it cannot be seen.

    Of a divided card about which nothing was said, it is whoever holds its instances, seen only where all of them are.
    """
    found: dict[GpuKey, frozenset[Owner] | None] = {}
    instances: dict[GpuKey, list[frozenset[Owner] | None]] = {}
    for view in snapshot.gpus:
        shares = shares_of(view.owners)
        found[view.key] = owners = None if shares is None else frozenset(shares)
        of_card = instances.setdefault(view.key._replace(gpu_i_id=None), [])
        if view.key.gpu_i_id is not None:
            of_card.append(owners)
    for card, held in instances.items():
        if found.get(card) is None:
            seen = [owners for owners in held if owners is not None]
            found[card] = frozenset().union(*seen) if held and len(seen) == len(held) else None
    return dict(sorted(found.items(), key=lambda item: item[0].order))


def shares_of(owners: GpuOwners | None) -> dict[Owner, float] | None:
    """Return the share of each holder, the largest first; they sum to 1. None where it cannot be seen who they are.

    Equal holders are one. Shares that make no sense are taken in proportion, or as equal where none does.
    """
    if owners is None:
        return None
    shares: dict[Owner, float] = {}
    for holder in owners.holders:
        owner = _owner(holder)
        shares[owner] = shares.get(owner, 0.0) + _positive(holder.share_ratio)
    total = sum(shares.values())
    if not total:
        shares = dict.fromkeys(shares, 1 / len(shares)) if shares else {}
    elif abs(total - 1) > _ROUNDING:
        shares = {owner: share / total for owner, share in shares.items()}
    return dict(sorted(shares.items(), key=lambda item: (-item[1], item[0])))


def holder_count(owners: GpuOwners) -> int:
    """Return how many hold a GPU, also where the record has one holder for several."""
    return max(len(shares_of(owners) or ()), int(owners.holder_count or 0))


def owner_counts(snapshot: NodeSnapshot, owners: Mapping[GpuKey, frozenset[Owner] | None]) -> dict[GpuKey, int]:
    """Return how many hold each GPU of `owners`, as `owners_of` returned them; those that cannot be seen are left out.

    Of a divided card about which nothing was said it is the least that can be: some may hold several instances.
    """
    counts = {key: len(found) for key, found in owners.items() if found is not None}
    own = {view.key: holder_count(view.owners) for view in snapshot.gpus if view.owners is not None}
    for key, count in own.items():
        card = key._replace(gpu_i_id=None)
        counts[key] = count
        if card in counts and card not in own:
            counts[card] = max(counts[card], count)
    return counts


def share_series(owners: GpuOwners | None) -> int:
    """Return how many series of shares one GPU or instance has."""
    return min(len(shares_of(owners) or ()), MAX_SHARES)


def owner_metrics(*, owner_user: bool = False) -> tuple[MetricDef, ...]:
    """Return the rows of the owner series, with or without the label for the user."""
    labels = (*OWNER_LABELS, USER_LABEL) if owner_user else OWNER_LABELS

    def info(snapshot: NodeSnapshot) -> Series:
        found = owners_of(snapshot)
        counts = owner_counts(snapshot, found)
        for key, owners in found.items():
            count = counts.get(key)
            (only,) = owners if owners is not None and len(owners) == count == 1 else (Owner(),)
            yield (*work_labels(key), "" if count is None else str(count), *only.label_values(owner_user=owner_user)), 1

    def shares(snapshot: NodeSnapshot) -> Series:
        for view in work_views(snapshot):
            found = _bounded(shares_of(view.owners) or {})
            for values, share in _by_labels(found.items(), owner_user=owner_user):
                yield (*work_labels(view.key), *values), share

    return (
        MetricDef(
            name="gpu_owner_info",
            kind="gauge",
            unit="",
            help="Who holds the GPU; always 1 and exactly one series per GPU. `owners` is the number of holders, empty "
            "where it cannot be seen. The labels after it are empty where nobody or more than one holds it. A divided "
            "card is held by whoever holds its instances.",
            labels=(*WORK_LABELS, "owners", *labels),
            values=info,
        ),
        MetricDef(
            name="gpu_owner_share_ratio",
            kind="gauge",
            unit="ratio",
            help="Share of the GPU or instance that each holder has; the shares sum to 1. Absent where nobody holds it "
            f"or it cannot be seen who does. At most {MAX_SHARES} series; the smallest holders beyond that are one, "
            f"with the job_key `{OTHERS}`.",
            labels=(*WORK_LABELS, *labels),
            values=shares,
        ),
    )


def _owner(holder: Holder) -> Owner:
    return Owner(
        job_key=holder.job_key,
        job_id=holder.job_id,
        scheduler=holder.scheduler,
        namespace=holder.namespace,
        pod=holder.pod,
        container=holder.container,
        user=holder.user,
    )


def _positive(share: float) -> float:
    return share if math.isfinite(share) and share > 0 else 0.0


def _bounded(shares: dict[Owner, float]) -> dict[Owner, float]:
    if len(shares) <= MAX_SHARES:
        return shares
    ordered = list(shares.items())
    bounded = dict(ordered[: MAX_SHARES - 1])
    rest = sum(share for _, share in ordered[MAX_SHARES - 1 :])
    bounded[Owner(OTHERS)] = bounded.get(Owner(OTHERS), 0.0) + rest
    return bounded


def _by_labels(shares: Iterable[tuple[Owner, float]], *, owner_user: bool) -> list[tuple[tuple[str, ...], float]]:
    """Return the shares by label values, in their order: two holders may differ in the user alone."""
    found: dict[tuple[str, ...], float] = {}
    for owner, share in shares:
        values = owner.label_values(owner_user=owner_user)
        found[values] = found.get(values, 0.0) + share
    return sorted(found.items())
