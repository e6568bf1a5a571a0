"""An emulator of FlashInfer's trtllm-gen fused experts in block FP8, on the CPU, with the checks of the library.

Sources: flashinfer/fused_moe/core.py (`trtllm_fp8_block_scale_routed_moe`, `convert_to_block_layout`),
flashinfer/utils.py (row order of the shuffle), csrc/trtllm_fused_moe_kernel_launcher.cu (`Fp8BlockScaleLauncher`).
Written without the adapter's code.
"""

from __future__ import annotations

from enum import IntEnum
from types import SimpleNamespace
from typing import Any

import torch
from torch import Tensor

from tests.kernels.vendors.contract import check_shape, must
from tests.kernels.vendors.library_calls import launched

SHUFFLED = 16
"""Rows of a block of the shuffle."""


class RoutingMethodType(IntEnum):
    Renormalize = 1
    DeepSeekV3 = 2


class WeightLayout(IntEnum):
    MajorK = 0
    MajorMn = 1
    BlockMajorK = 2


class TrtllmMoeEmulator:
    """`module` is the stand-in; `calls`: tokens of each call."""

    def __init__(self) -> None:
        self.calls: list[int] = []
        fused = SimpleNamespace(
            trtllm_fp8_block_scale_routed_moe=launched(self._run), convert_to_block_layout=_to_blocks,
            RoutingMethodType=RoutingMethodType, WeightLayout=WeightLayout,
        )  # fmt: skip
        self.module: Any = SimpleNamespace(shuffle_matrix_a=_shuffle, fused_moe=fused)

    def _run(
        self, topk_ids, routing_bias, hidden_states, hidden_states_scale, gemm1_weights, gemm1_weights_scale,
        gemm2_weights, gemm2_weights_scale, num_experts, top_k, n_group, topk_group, intermediate_size,
        local_expert_offset, local_num_experts, routed_scaling_factor, routing_method_type=0,
        use_shuffled_weight=False, weight_layout=0, do_finalize=True, enable_pdl=None, gemm1_lora_delta=None,
        output=None, tune_max_num_tokens=8192,
    ):  # fmt: skip
        ids, weights = topk_ids
        tokens, hidden = hidden_states.shape
        must(hidden_states.dtype == torch.float8_e4m3fn, "hidden_states must be fp8")
        self._check_routing(ids, weights, tokens, num_experts, top_k, local_expert_offset, local_num_experts)
        must(routing_method_type == RoutingMethodType.Renormalize and not n_group and not topk_group, "groups")
        must(routing_bias is None and gemm1_lora_delta is None and do_finalize, "not emulated")
        must(intermediate_size % 128 == 0, "intermediate_size must be a multiple of 128")
        must(hidden_states_scale.dtype == torch.float32, "hidden_states_scale must be float")
        check_shape(hidden_states_scale, (hidden // 128, tokens), "hidden_states_scale")
        must(use_shuffled_weight and weight_layout == WeightLayout.BlockMajorK, "the layout of these tests")
        shapes = (2 * intermediate_size, hidden), (hidden, intermediate_size)
        matrices = []
        for data, scales, (n, k) in zip(
            (gemm1_weights, gemm2_weights), (gemm1_weights_scale, gemm2_weights_scale), shapes
        ):
            must(data.dtype == torch.float8_e4m3fn and scales.dtype == torch.float32, "weights in fp8, scales in float")
            check_shape(data, (local_num_experts, k // 128, n, 128), "weights")
            check_shape(scales, (local_num_experts, n // 128, k // 128), "scales")
            matrices.append(_matrices(data, scales))
        for x in (hidden_states, hidden_states_scale, ids, weights, gemm1_weights, gemm2_weights, output):
            must(x.is_contiguous(), "pointers are read as contiguous")
        check_shape(output, (tokens, hidden), "output")
        must(output.dtype == torch.bfloat16, "output must be bfloat16")
        self.calls.append(tokens)
        x = hidden_states.double() * hidden_states_scale.double().T.repeat_interleave(128, 1)
        output.copy_(_experts(x, ids - local_expert_offset, weights, *matrices))
        return output

    def _check_routing(
        self, ids: Tensor, weights: Tensor, tokens: int, experts: int, top_k: int, first: int, local: int
    ) -> None:
        must(ids.dtype == torch.int32 and weights.dtype in (torch.float32, torch.bfloat16), "dtypes of choices")
        check_shape(ids, (tokens, top_k), "topk_ids")
        check_shape(weights, (tokens, top_k), "topk_weights")
        must(1 <= top_k <= 32, "top_k<=32 && top_k>0")
        must(experts % 4 == 0, "num_experts must be divisible by 4")
        must(experts > top_k, "num_experts must be greater than top_k")
        must(local > 0 and first >= 0 and first + local <= experts, "local experts beyond num_experts")
        must(bool(((ids >= 0) & (ids < experts)).all()), "an id beyond num_experts indexes other memory")
        for chosen in ids.tolist():
            held = [e for e in chosen if first <= e < first + local]
            must(len(held) == len(set(held)), f"a token chooses an expert twice: {chosen}")


def _shuffle(matrix: Tensor, epilogue_tile_m: int) -> Tensor:
    must(matrix.dim() == 2 and epilogue_tile_m % 128 != 0, "blocks of 16 rows, of a matrix")
    out = torch.empty_like(matrix)
    out[_places(len(matrix))] = matrix
    return out


def _places(rows: int) -> Tensor:
    """New place of each row: in each block 0, 8, 1, 9, ... (`srcToDstBlk16RowMap`)."""
    must(rows % SHUFFLED == 0, f"{rows} rows are no multiple of {SHUFFLED}")
    row = torch.arange(rows)
    inside = row % SHUFFLED
    return row - inside + torch.where(inside % 2 == 0, inside // 2, 8 + inside // 2)


def _to_blocks(matrix: Tensor, block: int) -> Tensor:
    columns = matrix.shape[1]
    must(columns % block == 0, "K must be divisible by blockK")
    return torch.stack([matrix[:, start : start + block] for start in range(0, columns, block)])


def _matrices(data: Tensor, scales: Tensor) -> Tensor:
    """float64 [E, N, K] of stored weights [E, K / 128, N, 128]."""
    rows = data.shape[2]
    wide = torch.cat(list(data.double().unbind(1)), dim=-1)[:, _places(rows)]
    return wide * scales.double().repeat_interleave(128, 1).repeat_interleave(128, 2)


def _experts(x: Tensor, ids: Tensor, weights: Tensor, first: Tensor, second: Tensor) -> Tensor:
    """The up half is above the gate half; the activation is quantized by blocks of 128 of a row."""
    out = torch.zeros_like(x)
    for token, chosen in enumerate(ids.tolist()):
        for slot, expert in enumerate(chosen):
            if not 0 <= expert < len(first):
                continue
            up, gate = (first[expert] @ x[token]).chunk(2)
            inner = (gate * torch.sigmoid(gate) * up).view(-1, 128)
            scale = inner.abs().amax(1, keepdim=True).clamp_min(1e-10) / 448
            quantized = (inner / scale).float().to(torch.float8_e4m3fn).double() * scale
            out[token] += float(weights[token, slot]) * (second[expert] @ quantized.flatten())
    return out
