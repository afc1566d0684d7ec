"""Reads the machine: samplers, schedule, history, traces, configuration and the command line."""

from __future__ import annotations

from importlib.metadata import PackageNotFoundError, version

try:
    __version__ = version("warpwatch")
except PackageNotFoundError:  # run from a source tree that is not installed
    __version__ = "0+source"
