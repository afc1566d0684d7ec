"""Scenarios that repeat recorded conditions: what a recording fixes as parameters, and what it measured.

The recordings are public DCGM data of 8x H100 SXM5, 80 GB, limit 700 W, at 10 Hz (repository
atharvanihalani/gpu-telemetry-exploration), steady phases, means per GPU. Power is no parameter of training: it has to
come out of the activity. Activity levels are parameters because they are what a configuration decides.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Final

from classifier.simulator.scenario import Scenario

#: Nothing but steps: no checkpoint and no evaluation in sight, a power gain of 1.
_STEADY: Final[Mapping[str, float | str]] = {
    "save_every_s": 36000.0,
    "evaluates": 0.0,
    "power_gain": 1.0,
    "drift": 0.01,
}
_SERVED: Final[Mapping[str, float | str]] = {
    "tensor_parallel": 1.0,
    "day_depth": 0.0,
    "gusts": 0.05,
    "quiet_share": -0.3,
    "quantised": 0.0,
}


@dataclass(frozen=True, slots=True, kw_only=True)
class Preset:
    """A recorded condition; `measured` holds means by channel of `agent.history`."""

    about: str
    kind: str
    parameters: Mapping[str, float | str]
    measured: Mapping[str, float]
    gpu_count: int = 8
    infiniband: bool = False

    def scenario(self, *, duration_s: float = 400.0, begin_s: float = 3600.0, interval_s: float = 1.0) -> Scenario:
        """Return the scenario of this condition, long past its start."""
        return Scenario(
            kind=self.kind,
            board="H100",
            gpu_count=self.gpu_count,
            duration_s=duration_s,
            begin_s=begin_s,
            interval_s=interval_s,
            infiniband=self.infiniband,
            parameters=self.parameters,
        )


PRESETS: Final[dict[str, Preset]] = {
    "none": Preset(
        about="empty",
        kind="idle",
        parameters={},
        measured={"power_watts": 71.0, "utilization_ratio": 0.0, "sm_active_ratio": 0.0},
    ),
    "B1": Preset(
        about="8 billion parameters loaded, nobody asks",
        kind="loaded_idle",
        parameters={"health_checks": 0.0, "memory": 0.203, "polls": 0.0},
        measured={"power_watts": 120.0, "utilization_ratio": 0.0, "sm_active_ratio": 0.0},
    ),
    "E2_serving": Preset(
        about="light streaming generation, one server per GPU (128-146 W, utilisation 0.06-0.13, SM 0.023-0.053)",
        kind="llm_serving",
        gpu_count=4,
        parameters={
            **_SERVED,
            "resident": 0.085,
            "concurrency": 4.0,
            "prefill_s": 0.01,
            "prefill_sm": 0.5,
            "prefill_tensor": 0.45,
            "decode_s": 10.0,
            "power_gain": 0.7,
            "decode_sm": 0.4,
            "decode_tensor": 0.14,
            "decode_dram": 0.43,
            "batch_half": 4.0,
            "memory": 0.32,
            "pcie_gb_s": 0.31,
            "decode_pcie_share": 1.0,
        },
        measured={
            "power_watts": 137.0,
            "utilization_ratio": 0.095,
            "memory_utilization_ratio": 0.045,
            "sm_active_ratio": 0.038,
            "tensor_active_ratio": 0.006,
            "dram_active_ratio": 0.036,
            "pcie_receive_bytes_per_second": 0.03e9,
            "nvlink_transmit_bytes_per_second": 0.0,
        },
    ),
    "I4": Preset(
        about="speculative decoding, eight independent processes, a cadence of 0.4 s",
        kind="speculative_decoding",
        parameters={
            **_SERVED,
            "resident": 0.62,
            "concurrency": 12.0,
            "prefill_s": 0.01,
            "prefill_sm": 0.5,
            "prefill_tensor": 0.45,
            "decode_s": 10.0,
            "batch_half": 12.0,
            "decode_sm": 0.36,
            "decode_tensor": 0.17,
            "decode_dram": 0.248,
            "cadence_s": 0.4,
            "swing": 0.6,
            "power_gain": 0.56,
            "memory": 0.227,
            "pcie_gb_s": 0.45,
            "decode_pcie_share": 1.0,
        },
        measured={
            "power_watts": 207.0,
            "utilization_ratio": 0.69,
            "memory_utilization_ratio": 0.19,
            "sm_active_ratio": 0.238,
            "tensor_active_ratio": 0.037,
            "dram_active_ratio": 0.148,
            "pcie_receive_bytes_per_second": 0.293e9,
            "nvlink_transmit_bytes_per_second": 0.0,
        },
    ),
    "T2": Preset(
        about="data parallel, 136 million parameters; steps below 0.2 s",
        kind="small_model_training",
        parameters={
            **_STEADY,
            "drift": 0.04,  # its power varied by 20 W from second to second, alike on all GPUs
            "flavour": "small_ddp",
            "precision": "bf16",
            "sm": 0.638,
            "tensor": 0.194,
            "dram": 0.323,
            "nvlink_gb_s": 8.9,
            "busy": 0.85,
            "step_s": 0.15,
            "accumulation": 1.0,
            "exposed": 0.03,
            "memory": 0.147,
            "pcie_gb_s": 0.074,
            "multi_node": 0.0,
        },
        measured={
            "power_watts": 547.0,
            "utilization_ratio": 0.85,
            "memory_utilization_ratio": 0.42,
            "sm_active_ratio": 0.638,
            "tensor_active_ratio": 0.194,
            "dram_active_ratio": 0.323,
            "nvlink_transmit_bytes_per_second": 8.9e9,
            "pcie_receive_bytes_per_second": 0.074e9,
        },
    ),
    "T3": Preset(
        about="data parallel, 3.37 billion parameters, 16 micro-batches; steps of 5.8 s",
        kind="data_parallel_training",
        parameters={
            **_STEADY,
            "flavour": "ddp",
            "precision": "bf16",
            "sm": 0.877,
            "tensor": 0.583,
            "dram": 0.369,
            "nvlink_gb_s": 1.5,
            "busy": 1.0,
            "step_s": 5.8,
            "accumulation": 16.0,
            "exposed": 0.01,
            "memory": 0.867,
            "pcie_gb_s": 0.028,
            "multi_node": 0.0,
        },
        measured={
            "power_watts": 689.0,
            "utilization_ratio": 1.0,
            "memory_utilization_ratio": 0.48,
            "sm_active_ratio": 0.877,
            "tensor_active_ratio": 0.583,
            "dram_active_ratio": 0.369,
            "nvlink_transmit_bytes_per_second": 1.5e9,
            "pcie_receive_bytes_per_second": 0.028e9,
        },
    ),
    "E2_training": Preset(
        about="data parallel, 3.37 billion parameters, 4 GPUs; steps of 0.4 s",
        kind="data_parallel_training",
        gpu_count=4,
        parameters={
            **_STEADY,
            "flavour": "ddp",
            "precision": "bf16",
            "sm": 0.885,
            "tensor": 0.57,
            "dram": 0.49,
            "nvlink_gb_s": 35.0,
            "busy": 1.0,
            "step_s": 0.4,
            "accumulation": 1.0,
            "exposed": 0.04,
            "memory": 0.83,
            "pcie_gb_s": 0.07,
            "multi_node": 0.0,
        },
        measured={
            "power_watts": 686.0,
            "utilization_ratio": 1.0,
            "sm_active_ratio": 0.885,
            "tensor_active_ratio": 0.57,
            "dram_active_ratio": 0.49,
            "nvlink_transmit_bytes_per_second": 35e9,
            "pcie_receive_bytes_per_second": 0.07e9,
        },
    ),
    "T6": Preset(
        about="sharded, optimizer on the CPU; bursts of 348 W each 3.5 s, 121 W in between",
        kind="offload_training",
        parameters={
            **_STEADY,
            "flavour": "offload",
            "precision": "bf16",
            "sm": 0.09,
            "tensor": 0.057,
            "dram": 0.039,
            "nvlink_gb_s": 5.0,
            "busy": 0.137,
            "step_s": 3.5,
            "exposed": 0.03,
            "memory": 0.4,
            "offload_gb_s": 12.2,
            "transfer": 0.113,
            "pcie_gb_s": 0.03,
            "multi_node": 0.0,
        },
        measured={
            "power_watts": 186.0,
            "utilization_ratio": 0.137,
            "memory_utilization_ratio": 0.05,
            "sm_active_ratio": 0.09,
            "tensor_active_ratio": 0.057,
            "dram_active_ratio": 0.039,
            "nvlink_transmit_bytes_per_second": 5.0e9,
            "pcie_receive_bytes_per_second": 1.42e9,
        },
    ),
    "T13": Preset(
        about="tensor parallel 8, pipeline parallel 2 over InfiniBand, first node; steps of 0.4 s; two GPUs hand on",
        kind="tensor_pipeline_training",
        infiniband=True,
        parameters={
            **_STEADY,
            "drift": 0.03,  # its power varied by 13 to 15 W from second to second, alike on all GPUs
            "flavour": "pipeline",
            "precision": "bf16",
            "pipeline_stages": 2.0,
            "stages_within_node": 0.0,
            "bubble": 0.06,
            "blocks": "24",
            "sm": 0.45,
            "tensor": 0.107,
            "dram": 0.32,
            "nvlink_gb_s": 50.0,
            "busy": 0.99,
            "step_s": 0.394,
            "accumulation": 2.0,
            "exposed": 0.05,
            "memory": 0.39,
            "pcie_gb_s": 0.03,
            "peer_gb_s": 2.3,
            "multi_node": 1.0,
            "fabric_bytes_per_second": 0.52e9,
        },
        measured={
            "power_watts": 418.0,
            "utilization_ratio": 0.99,
            "memory_utilization_ratio": 0.41,
            "sm_active_ratio": 0.45,
            "tensor_active_ratio": 0.107,
            "dram_active_ratio": 0.32,
            "nvlink_transmit_bytes_per_second": 50e9,
            "infiniband_transmit_bytes_per_second": 0.52e9,
        },
    ),
    "T11": Preset(
        about="tensor parallel 8, data parallel 2",
        kind="tensor_pipeline_training",
        infiniband=True,
        parameters={
            **_STEADY,
            "flavour": "tensor",
            "precision": "bf16",
            "sm": 0.53,
            "tensor": 0.15,
            "nvlink_gb_s": 56.6,
            "step_s": 1.2,
            "multi_node": 1.0,
            "fabric_bytes_per_second": 56e9,
        },
        measured={
            "power_watts": 508.0,
            "sm_active_ratio": 0.53,
            "tensor_active_ratio": 0.15,
            "nvlink_transmit_bytes_per_second": 56.6e9,
            "infiniband_transmit_bytes_per_second": 56e9,
        },
    ),
    "T14": Preset(
        about="tensor, expert and data parallel (mixture of experts); tensor over SM activity 0.369",
        kind="expert_training",
        infiniband=True,
        parameters={
            **_STEADY,
            "flavour": "experts",
            "precision": "bf16",
            "sm": 0.53,
            "tensor": 0.196,
            "nvlink_gb_s": 32.0,
            "step_s": 0.3,
            "multi_node": 1.0,
            "fabric_bytes_per_second": 79e9,
        },
        measured={"power_watts": 480.0, "nvlink_transmit_bytes_per_second": 32e9},
    ),
    "T15": Preset(
        about="sharded over 16 GPUs (ZeRO-3); tensor over SM activity 0.657",
        kind="sharded_training",
        infiniband=True,
        parameters={
            **_STEADY,
            "flavour": "fsdp",
            "precision": "bf16",
            "sm": 0.41,
            "tensor": 0.269,
            "nvlink_gb_s": 23.0,
            "step_s": 0.8,
            "multi_node": 1.0,
            "fabric_bytes_per_second": 49e9,
        },
        measured={"power_watts": 417.0, "nvlink_transmit_bytes_per_second": 23e9},
    ),
}
