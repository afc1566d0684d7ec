"""How each style of serving behaves: ranges with their sources (`priors` explains the short names).

A request has a prefill (compute-bound, near the power limit) and then decodes together with the others (memory-bound,
low power): Splitwise, POLCA. Prefill and decode levels are those of the phase itself, not means over time.
"""

from __future__ import annotations

from typing import Final

from classifier.simulator.priors import Priors, even, log

_ONLINE: Final[Priors] = {
    "prefill_s": log(0.03, 1.0, "prefill spikes of 0.05-2 s; prior"),
    "decode_s": log(0.5, 25, "prior: 20-1000 tokens at 20-100 a second"),
    "concurrency": log(0.1, 60, "batch of 1-32, more with paged caches; prior"),
    "batch_half": log(4, 64, "concurrency at which decode reaches half of its extra SM activity; prior"),
    # A small model on a slow host leaves gaps between kernels.
    "resident": log(0.06, 1.0, "H100 E2: utilisation 0.06-0.13 under constant load; H100 I4 0.69"),
    "decode_sm": even(0.2, 0.6, "H100 I4 0.24, E2 0.02-0.05 with gaps"),
    "decode_dram": even(0.25, 0.85, "memory-bound: 0.25-0.7 of the time average; prior"),
    "decode_tensor": even(0.05, 0.55, "share of SM; H100 I4 0.16, E2 0.16"),
    "prefill_sm": even(0.45, 0.92, "prior, Splitwise: 0.9-0.95 of compute"),
    "prefill_tensor": even(0.45, 0.8, "share of SM; 0.3-0.7 of all; prior"),
    "prefill_dram": even(0.2, 0.5, "prior"),
    "nvlink_gb_s": even(2, 45, "2-40 with tensor parallelism; prior"),
    "nvlink_skew": even(0.96, 1.04, "tensor parallel traffic is symmetric"),
    "pcie_gb_s": log(0.02, 0.6, "H100 E2 0.02-0.04, I4 0.293"),
    "power_gain": even(0.55, 1.1, "H100 I4: 0.6 of what the training fit gives; H200 decode 137-300 of 700 W"),
    "memory": even(0.15, 0.93, "0.85-0.92 where a cache is preallocated; H100 E2 0.2-0.44, I4 0.23"),
    "day_depth": even(0.0, 0.82, "up to ten times between trough and peak of the day"),
    "gusts": even(0.05, 1.0, "spread of the logarithm of the rate over 20 s; prior"),
    "quiet_share": even(-0.3, 0.4, "share of 20 s without requests; below 0 none; prior"),
    "fabric_gb_s": log(1e-6, 1e-5, "nothing"),
    "cores": log(0.8, 3, "engine loop and HTTP server; prior"),
    "host_gb_s": log(1.5, 14, "weights that stay in the host's memory come in for every token; prior"),
    "host_cores": log(3, 20, "layers that the host computes; prior"),
}

SERVING_STYLES: Final[dict[str, Priors]] = {
    "online": _ONLINE,
    # Layers split over GPUs: an all-reduce of kilobytes twice a layer and token.
    "tensor_parallel": {
        **_ONLINE,
        "concurrency": log(1, 250, "prior"),
        "quiet_share": even(-0.6, 0.3, "prior"),
        "resident": log(0.3, 1.0, "CUDA graphs keep kernels resident; prior"),
        "decode_sm": even(0.25, 0.65, "spinning in small all-reduces adds; prior"),
        "nvlink_gb_s": log(2, 80, "2-40, as much as training in prefill-heavy loads; prior"),
        "memory": even(0.15, 0.95, "preallocated cache, as much as the operator says"),
    },
    "prefill_pool": {
        **_ONLINE,
        "prefill_s": log(0.05, 2.5, "prior"),
        "decode_s": log(0.01, 0.05, "the first token only"),
        "concurrency": log(0.003, 0.08, "requests at the token stage; the pool is 0.4-1 busy at prefill"),
        "resident": even(0.9, 1.0, "prior"),
        "prefill_sm": even(0.5, 0.92, "0.5-0.9; prior"),
        "prefill_tensor": even(0.5, 0.82, "share of SM; 0.3-0.7 of all; prior"),
        "nvlink_gb_s": log(8, 80, "10-80; prior"),
        "nvlink_skew": even(1.1, 2.2, "pushes its caches out"),
        "power_gain": even(0.85, 1.12, "0.6-1.0 of the limit; POLCA: at or above it"),
        "memory": even(0.4, 0.95, "prior"),
        "fabric_gb_s": log(0.5, 25, "caches to the decode pool: transmit far above receive; prior"),
        "load": even(0.3, 0.97, "share of the time with a prefill under way; prior"),
    },
    "decode_pool": {
        **_ONLINE,
        "prefill_s": log(0.005, 0.02, "caches come in; hardly any prefill"),
        "decode_s": log(4, 40, "prior"),
        "concurrency": log(20, 250, "large batches, very smooth; prior"),
        "resident": even(0.85, 1.0, "utilisation 0.8-1; prior"),
        "decode_sm": even(0.15, 0.4, "0.2-0.5 at depth; prior"),
        "decode_dram": even(0.5, 0.88, "0.5-0.85; prior"),
        "decode_tensor": even(0.08, 0.4, "share of SM; 0.02-0.15 of all; prior"),
        "nvlink_gb_s": log(4, 45, "5-40; prior"),
        "nvlink_skew": even(0.5, 0.95, "receives caches"),
        "power_gain": even(0.55, 0.9, "H200 decode: 0.2-0.43 of the limit"),
        "memory": even(0.6, 0.96, "prior"),
        "gusts": even(0.03, 0.4, "prior"),
        "quiet_share": even(-0.5, 0.02, "prior"),
        "fabric_gb_s": log(0.5, 25, "receive far above transmit; prior"),
    },
    # A small model proposes, the large one verifies: short bursts, a cadence that looks like steps.
    "speculative": {
        **_ONLINE,
        "concurrency": log(0.8, 16, "H100 I4: one request after another"),
        "decode_s": log(1, 25, "prior"),
        "prefill_s": log(0.03, 0.3, "prior"),
        "resident": log(0.45, 0.95, "H100 I4: utilisation 0.69 (0.63-0.74)"),
        "decode_sm": even(0.3, 0.55, "H100 I4 0.238 on average"),
        "decode_dram": even(0.18, 0.5, "H100 I4 0.148 on average"),
        "decode_tensor": even(0.1, 0.45, "share of SM; H100 I4 0.16"),
        "pcie_gb_s": log(0.1, 0.8, "H100 I4 0.293"),
        "cadence_s": log(0.15, 1.2, "H100 I4: 0.4 s, r 0.61 in SM activity"),
        "swing": even(0.2, 0.9, "depth of the cadence; prior"),
        "quiet_share": even(-0.5, 0.1, "prior"),
    },
    # A file of prompts through an engine with continuous batching: as full as its cache allows.
    "batch_generation": {
        **_ONLINE,
        "prefill_s": log(0.02, 0.6, "prior"),
        "decode_s": log(2, 40, "prior: 100-1000 tokens at 25-50 a second"),
        "concurrency": log(32, 400, "all that the cache holds, 256 by default in vLLM; prior"),
        "resident": log(0.5, 1.0, "utilisation 0.95-1 of offline batches, less for small models; prior"),
        "decode_sm": even(0.25, 0.6, "0.4-0.8 of offline batches with the depth; prior"),
        "decode_dram": even(0.35, 0.88, "0.4-0.8; prior"),
        "decode_tensor": even(0.08, 0.6, "share of SM; 0.1-0.5 of all; prior"),
        "memory": even(0.5, 0.96, "a cache that takes 0.9 by default; prior"),
        "day_depth": even(0.0, 0.01, "no day in a file"),
        "gusts": even(0.02, 0.3, "lengths of prompts that come in runs; prior"),
        "quiet_share": even(-0.5, 0.0, "the queue is never empty"),
        "power_gain": even(0.6, 1.12, "0.45-0.95 of the limit; prior"),
        "cores": log(0.9, 6, "an engine loop and tokenizers; prior"),
    },
}

BATCH: Final[Priors] = {
    "batch_s": log(0.1, 30, "prior"),
    "batch_spread": log(0.01, 0.5, "prior"),
    "busy": even(0.6, 1.0, "0.95-1 with continuous batching; prior"),
    "sm": even(0.25, 0.88, "0.4-0.8; prior"),
    "tensor": even(0.12, 0.66, "share of SM; 0.1-0.5 of all; prior"),
    "dram": even(0.2, 0.8, "0.4-0.8; prior"),
    "nvlink_gb_s": even(2, 60, "10-60 with tensor parallelism; prior"),
    "pcie_gb_s": log(0.02, 3, "prior"),
    "memory": even(0.1, 0.95, "prior"),
    "last_memory": even(0.9, 1.1, "caches that grow with the longest input; prior"),
    "power_gain": even(0.65, 1.12, "0.45-0.95 of the limit; prior"),
    "cores": log(0.9, 6, "a driver and tokenizers; prior"),
}

IMAGES: Final[Priors] = {
    "load": even(0.15, 1.3, "utilisation 0.2-0.95, by arrivals; above 1 a backlog that never ends; prior"),
    "batch_s": log(0.004, 0.15, "one batch of images or texts; prior"),
    "batch_size": log(1, 64, "dynamic batching; prior"),
    "sm": even(0.3, 0.92, "0.2-0.7 on average; prior"),
    "tensor": even(0.1, 0.65, "share of SM; 0.1-0.4 of all; prior"),
    "dram": even(0.25, 0.75, "0.2-0.6 on average; prior"),
    "pcie_gb_s": log(0.05, 8, "images in: 0.2-6 on average; prior"),
    "memory": log(0.02, 0.85, "2-20 GB, more where a framework takes all in advance; prior"),
    "bytes_per_item": log(2e3, 1.5e6, "texts and images; prior"),
    "gusts": even(0.05, 1.1, "prior"),
    "day_depth": even(0.0, 0.82, "as serving"),
    "quiet_share": even(-0.5, 0.3, "prior"),
    "power_gain": even(0.7, 1.12, "0.3-0.8 of the limit; prior"),
    "cores": log(0.5, 12, "decoding images on the host; prior"),
}

ITEM_STYLES: Final[dict[str, Priors]] = {
    "images": IMAGES,
    # Texts of a corpus become vectors: an encoder, batch after batch from files, the queue never empty.
    "embedding": {
        **IMAGES,
        "load": even(0.75, 1.4, "a backlog; prior"),
        "batch_s": log(0.01, 0.6, "prior"),
        "sm": even(0.5, 0.94, "0.4-0.8 of offline batches; prior"),
        "tensor": even(0.25, 0.72, "share of SM; matrices of a prefill; prior"),
        "dram": even(0.25, 0.65, "prior"),
        "pcie_gb_s": log(0.003, 0.2, "tokens are small; prior"),
        "bytes_per_item": log(3e2, 2e4, "texts; prior"),
        "gusts": even(0.02, 0.3, "prior"),
        "quiet_share": even(-0.5, 0.02, "prior"),
        "memory": log(0.02, 0.7, "prior"),
        "cores": log(0.9, 8, "tokenizers; prior"),
    },
    # Speech to text over files: an encoder for each half minute of sound, then a decoder that is bound by memory.
    "speech": {
        **IMAGES,
        "load": even(0.5, 1.3, "a backlog, or calls as they come; prior"),
        "batch_s": log(0.2, 6, "an encoder and some hundred tokens; prior"),
        "batch_size": log(1, 32, "prior"),
        "sm": even(0.15, 0.7, "prior"),
        "tensor": even(0.05, 0.45, "share of SM; prior"),
        "dram": even(0.2, 0.7, "prior"),
        "pcie_gb_s": log(0.005, 0.3, "spectra; prior"),
        "bytes_per_item": log(2e5, 3e6, "half a minute of sound; prior"),
        "gusts": even(0.02, 0.6, "prior"),
        "quiet_share": even(-0.5, 0.15, "prior"),
        "memory": log(0.03, 0.8, "prior"),
        "cores": log(0.9, 10, "decoding and resampling; prior"),
    },
}

DIFFUSION: Final[Priors] = {
    "load": even(0.1, 1.05, "share of the time with a picture in work; above 1 a queue that never empties; prior"),
    "picture_s": log(2, 60, "square waves of 2-60 s; prior"),
    "denoising_s": log(0.04, 1.0, "one denoising step; prior"),
    "sm": even(0.7, 0.95, "0.7-0.95; prior"),
    "tensor": even(0.4, 0.65, "share of SM; 0.3-0.6 of all; prior"),
    "dram": even(0.28, 0.52, "0.3-0.5; prior"),
    "power_gain": even(0.9, 1.15, "0.85-1.0 of the limit in bursts; prior"),
    "memory": even(0.08, 0.8, "prior"),
    "picture_bytes": log(3e5, 3e8, "pictures and clips; prior"),
    "cores": log(0.9, 2, "one process; prior"),
    "host_gb_s": log(2, 14, "models that are swapped in for their part of a picture; prior"),
}
