"""Stand-in for DeepGEMM's MegaMoE on a simulated device, and its cost.

No measurement of it on Hopper is published. Assumed: messages and products of a call overlap completely, except the
latencies of dispatch and combine; rates and latencies are those measured for DeepEP and DeepGEMM. A lower bound.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import size
from benchmarks.step_costs.hardware import Hardware

FP8 = torch.float8_e4m3fn
TOKENS = 128
"""The buffer's capacity is a multiple of it."""


class MegaMoe:
    """Attributes are the library's functions. `libraries`: records the calls."""

    def __init__(self, libraries: Any, hardware: Hardware) -> None:
        def buffer(
            group: Any, num_experts: int, tokens: int, top_k: int, hidden: int, width: int, *options: Any
        ) -> Any:
            rows, device = -(-tokens // TOKENS) * TOKENS, "cuda"
            return SimpleNamespace(
                ranks=group.size(), x=torch.empty(rows, hidden, dtype=FP8, device=device),
                x_sf=torch.empty(rows, hidden // 128, device=device),
                topk_idx=torch.empty(rows, top_k, dtype=torch.int64, device=device),
                topk_weights=torch.empty(rows, top_k, device=device),
            )  # fmt: skip

        def pre_dispatch(x: Tensor, ids: Tensor, weights: Tensor, *targets: Tensor, num_tokens: int) -> None:
            values, scales, *choices = targets
            share = num_tokens / len(values)
            libraries.call(
                "mega_moe_pre_dispatch", Cost(size(x, ids, weights), share * size(values, scales) + size(*choices))
            )

        def run(y: Tensor, first: Any, second: Any, buffer: Any, **options: Any) -> None:
            routing, pairs = libraries._recorder.setting.routing, buffer.topk_idx.shape[1] * len(y)
            libraries.call("fp8_mega_moe", call_cost(hardware, routing, first, second, pairs, buffer.ranks))

        self.get_symm_buffer_for_sm90_mega_moe = buffer
        self.transform_weights_for_mega_moe_sm90 = lambda first, second: (first, second)
        self.mega_moe_pre_dispatch_sm90 = pre_dispatch
        self.fp8_mega_moe = run


def call_cost(hardware: Hardware, routing: Any, first: Any, second: Any, pairs: int, ranks: int) -> Cost:
    """Weights of experts with a token; rows of all ranks at these experts; `pairs` of this rank's tokens sent and their
    results in bf16 returned."""
    experts, narrow, hidden = first[0].shape[0], first[0].shape[1] // 2, first[0].shape[2]
    routing.check_slots(experts)
    rows = routing.rows
    read = routing.touched / experts * size(*first, *second) + rows * (hidden + hidden // 32 + narrow + narrow // 16)
    written = rows * (narrow + narrow // 16 + 2 * hidden)
    flops = {"fp8": 6.0 * rows * hidden * narrow}
    products = max((read + written) / hardware["product_bytes_per_s"], flops["fp8"] / hardware["product_flops"]["fp8"])
    table, away = hardware["deepep"]["low_latency"]["node"], pairs * (ranks - 1) / ranks
    out, back = away * (hidden + hidden // 32), away * 2 * hidden
    messages = out / table["dispatch_bytes_per_s"] + back / table["combine_bytes_per_s"]
    latency = table["dispatch_us"] + table["combine_us"]
    return Cost(read, written, flops, nvlink=out + back, link_us=latency + max(products, messages) * 1e6)
