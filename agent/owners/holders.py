"""Who holds a GPU or MIG instance, from everything that is known about it."""

from __future__ import annotations

from typing import NamedTuple


class PodOwner(NamedTuple):
    """A pod that the kubelet gave a GPU or MIG instance to, as its pod-resources service lists it."""

    namespace: str
    pod: str
    container: str
    pod_uid: str = ""  # "" where the kubelet does not tell
