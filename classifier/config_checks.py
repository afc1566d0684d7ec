"""Checks of configuration values that a key's unit cannot express, in one wording."""

from __future__ import annotations


def require(holds: bool, key: str, value: float, must: str) -> None:
    """Raise ValueError where `holds` is false; `must` says what `key` has to be.

    A comparison with NaN is false, so that NaN is refused as well.
    """
    if not holds:
        raise ValueError(f"{key} is {value}; it must be {must}")
