"""Stand-ins for FlashInfer's trtllm-gen kernels on a simulated Blackwell device, and the cost of their calls.

Launches as of FlashInfer 0.7.2: an MLA decode is one kernel, which also merges the splits of a context; fused experts
are routing, gather with first product, activation, second product and weighted sum. The attention kernel and the sum
over splits start as dependent launches; whether its binaries announce the next one is unknown and not counted.
Legend: T tokens, H heads, K experts per token, D hidden, I expert width, E experts.
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Routing, size

FP8 = torch.float8_e4m3fn
TILE = 8
"""Rows of the smallest tile of its expert products, which have the weights as their first operand."""


class RoutingMethodType(IntEnum):
    Renormalize = 1


class WeightLayout(IntEnum):
    BlockMajorK = 2


class FlashInfer:
    """Attributes are the library's names that the engine's adapters look for. `libraries`: records the calls."""

    def __init__(self, libraries: Any) -> None:
        self._libraries = libraries
        self.mla = SimpleNamespace(
            BatchMLAPagedAttentionWrapper=_Wrapper, MLAPlanMetadata=SimpleNamespace,
            trtllm_batch_decode_with_kv_cache_mla=self._decode,
        )  # fmt: skip
        self.fused_moe = SimpleNamespace(
            convert_to_block_layout=lambda matrix, block: matrix.unflatten(1, (-1, block)).transpose(0, 1),
            trtllm_fp8_block_scale_routed_moe=self._experts, WeightLayout=WeightLayout,
            RoutingMethodType=RoutingMethodType,
        )  # fmt: skip

    @staticmethod
    def shuffle_matrix_a(matrix: Tensor, epilogue_tile_m: int) -> Tensor:
        return matrix

    def module(self) -> Any:
        names = ("mla", "fused_moe", "shuffle_matrix_a")
        wrappers = {f"BatchPrefillWith{name}KVCacheWrapper": _Wrapper for name in ("Ragged", "Paged")}
        return SimpleNamespace(**{name: getattr(self, name) for name in names}, **wrappers)

    def _decode(
        self, query: Tensor, kv_cache: Tensor, workspace_buffer: Tensor, qk_nope_head_dim: int, kv_lora_rank: int,
        qk_rope_head_dim: int, block_tables: Tensor, seq_lens: Tensor, max_seq_len: int, bmm1_scale: float,
        bmm2_scale: float, backend: str, cum_seq_lens_q: Tensor | None = None, max_q_len: int | None = None,
    ) -> Tensor:  # fmt: skip
        heads, width = query.shape[-2:]
        rows = query.numel() // width
        out = torch.empty(*query.shape[:-1], kv_lora_rank, dtype=torch.bfloat16, device=query.device)
        requests = len(seq_lens)
        context = self._libraries._recorder.setting.context + rows // heads // requests - 1
        flops = {"fp8" if query.dtype == FP8 else "bf16": 2.0 * rows * context * (width + kv_lora_rank)}
        records = requests * context * width * kv_cache.element_size()
        self._libraries.call("trtllm_mla", Cost(size(query, block_tables) + records, size(out), flops), True)
        return out

    def _experts(
        self, topk_ids: tuple[Tensor, Tensor], routing_bias: None, hidden_states: Tensor, hidden_states_scale: Tensor,
        gemm1_weights: Tensor, gemm1_weights_scale: Tensor, gemm2_weights: Tensor, gemm2_weights_scale: Tensor,
        output: Tensor, **options: Any,
    ) -> Tensor:  # fmt: skip
        parts = (gemm1_weights, gemm1_weights_scale), (gemm2_weights, gemm2_weights_scale)
        routing = self._libraries._recorder.setting.routing
        for name, cost in experts_costs(routing, hidden_states, topk_ids[0], parts, output):
            self._libraries.call(name, cost)
        return output


class _Wrapper:
    """Wrapper of steps with prompts, which run in the warm-up and are not counted."""

    def __init__(self, *args: Any, **options: Any) -> None: ...

    def plan(self, *args: Any, **options: Any) -> None: ...

    def reset_workspace_buffer(self, *args: Any, **options: Any) -> None: ...

    def run(
        self, q: Tensor, k: Tensor, v: Tensor, *, return_lse: bool = False, ckv_scale: Any = None, **options: Any
    ) -> Any:
        """Attention over keys and values [S, H, *]."""
        out = q.new_empty(*q.shape[:2], v.shape[-1])
        return (out, torch.empty(*q.shape[:2], device=q.device)) if return_lse else out


def experts_costs(routing: Routing, x: Tensor, ids: Tensor, parts: Any, out: Tensor) -> list[tuple[str, Cost]]:
    """The kernels of a call. x [T, D] e4m3; parts: weights [E, K / 128, N, 128] and scales, of both products."""
    (first, first_scales), (second, second_scales) = parts
    experts, hidden = len(first), x.shape[1]
    routing.check_slots(experts)
    wide, rows = first.shape[2], routing.rows
    computed, share = max(rows, routing.touched * TILE), routing.touched / experts
    inner, outer = rows * wide * 2, rows * hidden * 2
    quantized = rows * wide // 2 * (1 + 4 / 128)
    return [
        ("trtllm_routing", Cost(size(ids), 3 * size(ids))),
        ("trtllm_gate_up", Cost(share * size(first, first_scales) + size(x) * (1 + 4 / 128), inner,
                                {"fp8": 2.0 * computed * wide * hidden})),
        ("trtllm_activation", Cost(inner, quantized)),
        ("trtllm_down", Cost(share * size(second, second_scales) + quantized, outer,
                             {"fp8": computed * wide * hidden})),
        ("trtllm_finalize", Cost(outer + 2 * size(ids), size(out))),
    ]  # fmt: skip
