"""The waiting rule: kernels that only wait for others, of which nothing says what they wait for.

A communication kernel that waits keeps utilisation at 100 % and up to a fifth of the SMs resident, computes nothing and
moves nothing: a training job in a late collective and a tensor-parallel server between two requests show the same. No
model can tell them apart, and only what came before can.
"""

from __future__ import annotations

from typing import Final

from classifier.detectors.wait_signature import SignatureConfig
from classifier.labeller_config import LabellerConfig
from classifier.signals import LONGEST_WINDOW_S, Signals

#: The bounds are those of the stall detector; here profiling has to be measured, since power alone is no proof.
_BOUNDS: Final = SignatureConfig()
#: Signals that stay below their bound in every sample where they are measured.
_STILL: Final = {
    "tensor": _BOUNDS.tensor_active_ratio,
    "dram": _BOUNDS.dram_active_ratio,
    "fp64": _BOUNDS.tensor_active_ratio,
    "fp32": _BOUNDS.tensor_active_ratio,
    "fp16": _BOUNDS.tensor_active_ratio,
    "memutil": _BOUNDS.memory_utilization_ratio,
}
_LINKS: Final = ("nvlink_tx_rate", "nvlink_rx_rate")


def looks_waiting(signals: Signals, config: LabellerConfig) -> bool:
    """Return whether nothing but kernels that wait ran in the last `config.waiting_window_s`, longer in slow logs.

    False where utilisation, tensor or DRAM activity are not measured: then a wait cannot be told from light work.
    """
    spacing_s = signals.window("util", LONGEST_WINDOW_S).spacing_s
    window_s = max(config.waiting_window_s, config.minimum_samples * spacing_s if spacing_s > 0 else 0.0)
    util, sm = signals.window("util", window_s), signals.window("sm", window_s)
    if util.size < config.minimum_samples or util.quantile(0.0) < _BOUNDS.utilization_ratio:
        return False
    if not signals.window("tensor", window_s).size or not signals.window("dram", window_s).size:
        return False
    if sm.size and sm.quantile(1.0) >= _BOUNDS.sm_active_ratio:
        return False
    for name, bound in _STILL.items():
        window = signals.window(name, window_s)
        if window.size and window.quantile(1.0) >= bound:
            return False
    links = [signals.window(name, window_s) for name in _LINKS]
    return sum(link.quantile(1.0) for link in links if link.size) <= _BOUNDS.nvlink_bytes_per_second
