"""The lines of the landing page that say what is in maintenance, so that nobody wonders why nobody is told."""

from __future__ import annotations

from exporters.landing_text import duration, gpu_name, moment, shortened
from exporters.markup import Html, join, tag
from exporters.snapshot import MaintenanceView, NodeSnapshot


def maintenance_lines(snapshot: NodeSnapshot) -> Html:
    """Return one line for each maintenance that holds now, and for each test alert."""
    return join(*(_line(snapshot, one) for one in snapshot.maintenance), *map(_test_line, snapshot.test_alerts))


def _line(snapshot: NodeSnapshot, one: MaintenanceView) -> Html:
    names = "The node" if one.keys is None else ", ".join(gpu_name(key) for key in one.keys)
    what = names or "A GPU that is not here"
    is_plural = one.keys is not None and len(one.keys) > 1
    whose = "alerts" if not one.anomalies else f"alerts of {', '.join(one.anomalies)}"
    left = duration(one.until_wall_s - snapshot.built.wall_s)
    return tag(
        "p",
        tag("strong", f"{what} {'are' if is_plural else 'is'} in maintenance"),
        f" until {moment(one.until_wall_s)}, {left} from now: {whose} are silent.",
        f" {shortened(one.reason, 200)}" if one.reason else "",
        class_="banner",
        role="note",
    )


def _test_line(pair: tuple[str, str]) -> Html:
    anomaly, severity = pair
    return tag(
        "p",
        tag("strong", "A test alert lasts"),
        f": {anomaly}, {severity}. Nothing is wrong.",
        class_="banner",
        role="note",
    )
