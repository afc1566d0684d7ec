"""The landing page: what a person on call wants at first sight, rendered from one snapshot, without a script."""

from __future__ import annotations

import base64
import hashlib
from collections import Counter
from importlib.resources import files
from typing import Final

from agent.records import GpuKey
from agent.samplers import SamplerStatus
from agent.vocabulary import SEVERITIES
from classifier.results import Assessment
from exporters.landing_health import health_lines
from exporters.landing_host import host_section
from exporters.landing_maintenance import maintenance_lines
from exporters.landing_owners import owner_cell
from exporters.landing_text import (
    NOTHING,
    SIGNS,
    action_text,
    duration,
    evidence_text,
    gibibytes,
    gpu_name,
    moment,
    of_limit,
    percent,
    reason_text,
    subject_name,
)
from exporters.markup import Html, join, table, tag, text
from exporters.metric_def import standing
from exporters.snapshot import GpuView, NodeSnapshot, stopped_samplers

REFRESH_S: Final = 10
_AFTER_GPUS: Final = GpuKey(1 << 30)

_STYLE: Final = files("exporters").joinpath("landing.css").read_text(encoding="utf-8")
#: Source of the one style sheet for the Content-Security-Policy header: nothing else is applied.
STYLE_SOURCE: Final = f"'sha256-{base64.b64encode(hashlib.sha256(_STYLE.encode()).digest()).decode()}'"


def render_landing(snapshot: NodeSnapshot | None, *, owner_user: bool = False) -> bytes:
    """Return the page of `snapshot`, or of an agent that has no samples yet; `owner_user` names users on it."""
    if snapshot is None:
        body = join(tag("header", tag("h1", "warpwatch")), _state("warning", "Starting: no samples yet."), _links())
        return _document("warpwatch: starting", body)
    level, sentence = node_state(snapshot)
    facts = tag("p", _facts(snapshot), class_="facts")
    body = join(
        tag(
            "header",
            tag("h1", "warpwatch"),
            tag("span", f"as of {moment(snapshot.built.wall_s)}", class_="soft number"),
        ),
        _banner(snapshot),
        _state(level, sentence),
        maintenance_lines(snapshot),
        facts,
        tag(
            "main",
            _gpus(snapshot, owner_user=owner_user),
            _findings(snapshot),
            host_section(snapshot),
            _samplers(snapshot),
        ),
        _links(snapshot.version),
    )
    return _document(f"warpwatch: {sentence}", body)


def node_state(snapshot: NodeSnapshot) -> tuple[str, str]:
    """Return how the node is, as good, info, warning or critical, and in one sentence."""
    if not snapshot.ready and not any(status.success for status in snapshot.samplers):
        return "critical", "Not ready: no fresh samples from any source."
    expected, visible = snapshot.gpus_expected, snapshot.gpus_visible
    if expected and visible is not None and visible < expected:
        missing = expected - visible
        return "critical", f"{missing} of {expected} GPUs {'is' if missing == 1 else 'are'} missing."
    broken = [view for view in snapshot.gpus if view.key.gpu_i_id is None and view.state != "ok"]
    if broken:
        broken.sort(key=lambda view: view.key.order)
        return "critical", "; ".join(f"{gpu_name(view.key)}: {_state_words(view)}" for view in broken) + "."
    if not snapshot.gpus:
        return "warning", "No GPU is visible: sampling the host; GPUs are picked up when a driver offers them."
    count = len({view.key.gpu for view in snapshot.gpus})
    return _judged(snapshot, f"Sampling {count} {'GPU' if count == 1 else 'GPUs'}")


def _state_words(view: GpuView) -> str:
    return "no fresh samples" if view.state is None else view.state.replace("_", " ")


def _judged(snapshot: NodeSnapshot, sampling: str) -> tuple[str, str]:
    """Return the state of a node whose GPUs all answer."""
    assessments = standing(snapshot)
    severities = [item.severity for item in assessments if item.severity]
    urgent = sum(severity >= 2 for severity in severities)
    if urgent:
        worst = SEVERITIES[max(severities)]
        return worst, f"{sampling}; {urgent} {'finding needs' if urgent == 1 else 'findings need'} a look."
    stopped = stopped_samplers(snapshot)
    if stopped:
        return "warning", f"{sampling}; no records any more from {', '.join(stopped)}."
    if not assessments:
        return "info", f"{sampling}; nothing can be judged yet."
    return ("info", f"{sampling}; nothing urgent.") if severities else ("good", f"{sampling}; nothing is wrong.")


def _document(title: str, body: Html) -> bytes:
    head = tag(
        "head",
        tag("meta", charset="utf-8"),
        tag("meta", name="viewport", content="width=device-width, initial-scale=1"),
        tag("meta", http_equiv="refresh", content=str(REFRESH_S)),
        tag("link", rel="icon", href="data:,"),
        tag("title", title),
        Html(f"<style>{_STYLE}</style>"),
    )
    page = join(Html("<!doctype html>\n"), tag("html", head, tag("body", body), lang="en"), Html("\n"))
    return page.encode("utf-8")


def _banner(snapshot: NodeSnapshot) -> Html:
    if snapshot.demo_notice is not None:
        # Its own words: the trace may be simulated, recorded or imported.
        return tag("p", tag("strong", snapshot.demo_notice), class_="banner", role="note")
    if snapshot.replay:
        played = "The GPUs on this page come from a trace, not from this machine."
        return tag("p", tag("strong", "Replay. "), played, class_="banner", role="note")
    return Html()


def _state(level: str, sentence: str) -> Html:
    return tag("p", f"{SIGNS[level]} {sentence}", class_=f"state {level}", role="status")


def _facts(snapshot: NodeSnapshot) -> str:
    drivers = sorted({view.info.driver_version for view in snapshot.gpus if view.info and view.info.driver_version})
    facts = [
        f"{_counted(snapshot.gpus_visible, 'GPU')} visible" if snapshot.gpus_visible is not None else "",
        f"{snapshot.gpus_expected} expected" if snapshot.gpus_expected is not None else "",
        f"driver {', '.join(drivers)}" if drivers else "",
        f"model {snapshot.model.version}" if snapshot.model else "no model is loaded",
        _counted(len(snapshot.networks), "network interface"),
        _counted(len(snapshot.infiniband), "InfiniBand port") if snapshot.infiniband else "",
        _counted(len(snapshot.disks), "disk"),
        _counted(len(snapshot.filesystems), "network file system") if snapshot.filesystems else "",
        "" if snapshot.config_reload_successful else "the last reading of the configuration failed",
    ]
    return " · ".join(fact for fact in facts if fact)


def _gpus(snapshot: NodeSnapshot, *, owner_user: bool) -> Html:
    if not snapshot.gpus:
        return Html()
    headings = ("GPU", "Model", "State", "Held by", "Workload", "Since", "Power", "Util", "Memory", "Temp", "Anomalies")
    instances = Counter(view.key.gpu for view in snapshot.gpus if view.key.gpu_i_id is not None)
    rows = [
        _gpu_row(snapshot, view, 0 if view.key.gpu_i_id is not None else instances[view.key.gpu], owner_user=owner_user)
        for view in sorted(snapshot.gpus, key=lambda view: view.key.order)
    ]
    return join(tag("h2", "GPUs"), table(headings, rows))


def _gpu_row(
    snapshot: NodeSnapshot, view: GpuView, instances: int, *, owner_user: bool
) -> tuple[str | None, list[Html]]:
    """Return one card, or one MIG instance; a card that is divided says so in the place of a workload."""
    watched = [] if instances else [item for item in snapshot.assessments if item.key == view.key]
    worst = max((item.severity for item in watched), default=0)
    sample, slow = view.sample, view.slow
    power = of_limit(
        sample.power_watts if sample else None, view.limits.power_limit_watts if view.limits else None, "W"
    )
    memory = of_limit(
        gibibytes(sample.memory_used_bytes) if sample else None,
        gibibytes(sample.memory_total_bytes) if sample else None,
        "GiB",
        1,
    )
    celsius = slow.temperature_celsius if slow else None
    cells = [
        _gpu_cell(view),
        tag("span", _model(view), class_=None if view.key.gpu_i_id is None else "number"),
        _gpu_state(snapshot, view),
        owner_cell(view, owner_user=owner_user),
        tag("span", _counted(instances, "MIG instance"), class_="soft") if instances else _workload(view),
        _since(snapshot, view),
        tag("span", power, class_="number"),
        _utilization(view),
        tag("span", memory, class_="number"),
        tag("span", NOTHING if celsius is None else f"{celsius:.0f} °C", class_="number"),
        join(Html() if instances else _gpu_anomalies(watched), *health_lines(snapshot, view)) or text(NOTHING),
    ]
    return (SEVERITIES[worst] if worst else None), cells


def _gpu_cell(view: GpuView) -> Html:
    if view.key.gpu_i_id is None:
        return tag("span", str(view.key.gpu), title=view.key.uuid)
    uuid = view.mig.mig_uuid if view.mig else None
    return tag("span", f"{view.key.gpu} / {view.key.gpu_i_id}", title=uuid, class_="number instance")


def _model(view: GpuView) -> str:
    if view.key.gpu_i_id is not None:
        return f"MIG {view.mig.profile}" if view.mig and view.mig.profile else "MIG instance"
    return (view.info.model_name if view.info else None) or NOTHING


def _utilization(view: GpuView) -> Html:
    """Return the utilisation, or the share of active multiprocessors where only that is offered, as in an instance."""
    sample = view.sample
    if sample is not None and sample.utilization_ratio is None and sample.sm_active_ratio is not None:
        return tag("span", f"{percent(sample.sm_active_ratio)} SM", class_="number", title="multiprocessors active")
    return tag("span", percent(sample.utilization_ratio if sample else None), class_="number")


def _counted(count: int, word: str) -> str:
    return f"{count} {word}" if count == 1 else f"{count} {word}s"


def _gpu_state(snapshot: NodeSnapshot, view: GpuView) -> Html:
    if view.state == "ok":
        return _badge("good", "ok")
    if view.state is not None:
        return _badge("critical", view.state)
    last = "never sampled"
    if view.sample_wall_s is not None:
        last = f"for {duration(snapshot.built.wall_s - view.sample_wall_s)}"
    return join(_badge("critical", "no data"), tag("div", last, class_="soft small"))


def _workload(view: GpuView) -> Html:
    decision = view.decision
    if decision is None:
        return text(NOTHING)
    probability = decision.probabilities.get(decision.workload) if decision.probabilities else None
    declared = Html()
    if decision.mismatch and decision.declared_class:
        declared = tag("div", f"declared {decision.declared_class}", class_="soft small")
    if probability is None:
        reason = reason_text(decision.reason)
        why = "; ".join(decision.explanation)
        word = tag("span", decision.workload, title=why) if why else decision.workload
        return join(word, tag("div", reason, class_="soft small") if reason else "", declared)
    shares = ", ".join(f"{word} {percent(share)}" for word, share in (decision.probabilities or {}).items())
    bar = tag(
        "svg",
        tag("rect", width="100", height="10", class_="rest"),
        tag("rect", width=f"{100 * min(max(probability, 0.0), 1.0):.1f}", height="10", class_="part"),
        class_="bar",
        viewBox="0 0 100 10",
        preserveAspectRatio="none",
        aria_hidden="true",
    )
    return join(
        tag(
            "span",
            f"{decision.workload} ",
            tag("span", percent(probability), class_="soft number"),
            bar,
            title="; ".join((*decision.explanation, shares)),
        ),
        declared,
    )


def _since(snapshot: NodeSnapshot, view: GpuView) -> Html:
    if view.decision is None:
        return text(NOTHING)
    held = duration(snapshot.built.wall_s - view.decision.since_wall_s)
    return tag("span", held, class_="number", title=moment(view.decision.since_wall_s))


def _gpu_anomalies(watched: list[Assessment]) -> Html:
    bad = sorted((item for item in watched if item.severity), key=lambda item: -item.severity)
    if not bad:
        return tag("span", f"none of {len(watched)} watched" if watched else "none can be seen here", class_="soft")
    return join(
        *(tag("div", _severity(item), f" {item.anomaly}", " (suspect)" if item.suspect else "") for item in bad)
    )


def _badge(level: str, word: str) -> Html:
    return tag("span", f"{SIGNS[level]} {word}", class_=f"badge {level}")


def _severity(item: Assessment) -> Html:
    word = SEVERITIES[item.severity]
    return _badge(word, word)


def _findings(snapshot: NodeSnapshot) -> Html:
    assessments = standing(snapshot)
    found = sorted(
        (item for item in assessments if item.severity),
        key=lambda item: (-item.severity, (item.key or _AFTER_GPUS).order, item.anomaly),
    )
    if found:
        content = tag("ul", *(_finding(snapshot, item) for item in found), class_="findings")
    elif assessments:
        checks = "1 check looks" if len(assessments) == 1 else f"{len(assessments)} checks look"
        content = tag("p", f"Nothing found; {checks} at fresh data.", class_="soft")
    else:
        content = tag("p", "Nothing can be judged yet: no check has the data it needs.", class_="soft")
    return join(tag("h2", "Findings"), content)


def _finding(snapshot: NodeSnapshot, item: Assessment) -> Html:
    since = ""
    if item.since_wall_s is not None:
        since = f" · for {duration(snapshot.built.wall_s - item.since_wall_s)}, since {moment(item.since_wall_s)}"
    step = action_text(item.action)
    numbers = evidence_text(item)
    return tag(
        "li",
        tag("div", _severity(item), " ", tag("strong", item.anomaly), f" · {subject_name(item)}{since}"),
        tag("p", item.summary) if item.summary else "",
        tag("p", tag("strong", "Next step: "), f"{step}.") if step else "",
        tag("p", numbers, class_="soft small") if numbers else "",
        class_=SEVERITIES[item.severity],
    )


def _samplers(snapshot: NodeSnapshot) -> Html:
    if not snapshot.samplers:
        return Html()
    headings = ("Sampler", "State", "Last success", "Duration", "Errors")
    rows = [_sampler_row(snapshot, status) for status in sorted(snapshot.samplers, key=lambda status: status.name)]
    return join(tag("h2", "Samplers"), table(headings, rows))


def _sampler_row(snapshot: NodeSnapshot, status: SamplerStatus) -> tuple[str | None, list[Html]]:
    last = "never"
    if status.last_success_wall_s is not None:
        last = f"{duration(snapshot.built.wall_s - status.last_success_wall_s)} ago"
    errors = ", ".join(f"{reason} × {count}" for reason, count in sorted(status.errors.items()) if count)
    took = NOTHING if status.duration_s is None else f"{1000 * status.duration_s:.1f} ms"
    cells = [
        text(status.name),
        _badge("good", "ok") if status.success else _badge("warning", "no records"),
        tag("span", last, class_="number"),
        tag("span", took, class_="number"),
        text(errors or "none"),
    ]
    return (None if status.success else "warning"), cells


def _links(version: str = "") -> Html:
    links = (("/metrics", "Metrics"), ("/-/healthy", "Healthy"), ("/-/ready", "Ready"))
    name = tag("span", f"warpwatch {version}", class_="soft") if version else ""
    return tag("nav", *(tag("a", word, href=path) for path, word in links), name)
