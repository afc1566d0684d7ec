"""Puts the exporters together from table `[export]`: the same for a live node and for a replay."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from agent.config import Config
from exporters.metric_def import MetricDef
from exporters.metrics import metric_table
from exporters.snapshot import NodeSnapshot
from exporters.web import WebApp, WebServer, parse_listen

if TYPE_CHECKING:
    from exporters.web_access import WebAccess


def export_table(config: Config) -> tuple[MetricDef, ...]:
    """Return the rows of the metric table that `[export]` asks for."""
    return metric_table(config.export.host, owner_user=config.export.owner_user)


def build_access(config: Config) -> WebAccess | None:
    """Return the web configuration of `[export]`, None where there is none; raises UsageError for a bad one."""
    if config.export.web_config is None:
        return None
    # What it needs is only loaded where it is used.
    from exporters.web_access import WebAccess

    return WebAccess(config.export.web_config)


def build_server(
    config: Config,
    snapshot: Callable[[], NodeSnapshot | None],
    *,
    listen: str | None = None,
    access: WebAccess | None = None,
) -> WebServer:
    """Return the server of what `snapshot` returns, on `listen` or the address of the configuration."""
    app = WebApp(snapshot, table=export_table(config), owner_user=config.export.owner_user)
    return WebServer(app, *parse_listen(listen or config.export.listen), access=access)
