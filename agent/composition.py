"""Puts the judgement together from the configuration: the same for a live node and for a replay."""

from __future__ import annotations

import logging

log = logging.getLogger("warpwatch")
