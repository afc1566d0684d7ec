"""Puts the exporters together from table `[export]`: the same for a live node and for a replay."""

from __future__ import annotations

import socket
from collections.abc import Callable
from typing import TYPE_CHECKING

from agent.config import Config
from exporters.metric_def import MetricDef
from exporters.metrics import metric_table
from exporters.snapshot import NodeSnapshot
from exporters.textfile import Textfile
from exporters.web import WebApp, WebServer, parse_listen

if TYPE_CHECKING:
    from exporters.web_access import WebAccess


def export_table(config: Config, *, is_live: bool) -> tuple[MetricDef, ...]:
    """Return the rows of the metric table that `[export]` asks for.

    What is played from a file has none under the names of dcgm-exporter: rules that others wrote for these know nothing
    of warpwatch_replay, and would call somebody.
    """
    export = config.export
    if not export.dcgm or not is_live:
        return metric_table(export.host, owner_user=export.owner_user)
    from exporters.metrics_dcgm import dcgm_metrics

    dcgm = dcgm_metrics(socket.gethostname(), export.dcgm_hostname_label)
    return metric_table(export.host, owner_user=export.owner_user, dcgm=dcgm)


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
    is_live: bool,
    listen: str | None = None,
    access: WebAccess | None = None,
) -> WebServer:
    """Return the server of what `snapshot` returns, on `listen` or the address of the configuration."""
    app = WebApp(snapshot, table=export_table(config, is_live=is_live), owner_user=config.export.owner_user)
    return WebServer(app, *parse_listen(listen or config.export.listen), access=access)


def build_textfile(config: Config, snapshot: Callable[[], NodeSnapshot | None], *, is_live: bool) -> Textfile | None:
    """Return the writer of the file for node_exporter, None where none is wanted."""
    path = config.export.textfile
    return None if path is None else Textfile(path, snapshot, export_table(config, is_live=is_live))
