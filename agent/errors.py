"""Errors that end a command with one plain sentence on standard error."""

from __future__ import annotations


class WarpwatchError(Exception):
    """Base of the errors that are shown to a person; `str(error)` is one sentence with the next step."""

    exit_status = 1


class FaultError(WarpwatchError):
    """Something that should work did not: a port in use, a full disk. Exit status 1."""


class UsageError(WarpwatchError):
    """Wrong use or unreadable input: an unknown key, a file that is no trace. Exit status 2."""

    exit_status = 2
