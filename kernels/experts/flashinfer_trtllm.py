"""TensorRT-LLM's fused block-FP8 experts (trtllm-gen), through FlashInfer: local tokens on Blackwell.

One call permutes, multiplies, activates, quantizes, multiplies and sums. The choices are this engine's, so any router,
EPLB and fused shared experts work as with other rows. A choice of another rank becomes an expert that the call counts
but does not hold. Experts that are not in block FP8 run on another row.

Source: `trtllm_fp8_block_scale_routed_moe` of flashinfer/fused_moe/core.py, 0.7.2, and its checks in
csrc/trtllm_fused_moe_kernel_launcher.cu; weights: tests/moe/test_dpsk_fused_moe_fp8.py, `Shuffled_BlockMajorK`.
Legend: T tokens, K experts per token, D hidden, I expert width, E experts.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, ExpertsKernel, QuantizedExperts
from moe_engine.kernels.quantization.protocol import (
    BLOCK,
    BLOCK_FP8,
    FP8,
    Activation,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    QuantizedActivation,
    QuantizedRows,
    num_blocks,
)
from moe_engine.kernels.quantization.reference import dequantize_weight
from moe_engine.kernels.vendors import limits
from moe_engine.kernels.vendors.probe import TRTLLM_MOE

EPILOGUE_ROWS = 64
"""`epilogue_tile_m` of the library's shuffle for block FP8."""
_WITHOUT_SIGN = 0x7FFFFFFF


@dataclass(frozen=True)
class Layer:
    """Type of `ExpertWeights.data`.

    Attributes:
        first: e4m3 [E, D / 128, 2I, 128]: up above gate, rows shuffled, in blocks of K. second: [E, I / 128, D, 128].
        first_scales: float32 [E, 2I / 128, D / 128], up above gate. second_scales: [E, D / 128, I / 128].
    """

    first: Tensor
    first_scales: Tensor
    second: Tensor
    second_scales: Tensor
    power_of_two: bool

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.first, self.first_scales, self.second, self.second_scales


class TrtllmExperts:
    """`ExpertsKernel` of local tokens. No host synchronization.

    Args:
        plain: the kernel of experts that are not in block FP8; default: Triton's.
        module: the library; default: the installed one.
        quantize: (x, power_of_two) -> rows, of unquantized tokens; default: the Triton kernel.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "flashinfer_trtllm"

    def __init__(
        self,
        plain: ExpertsKernel | None = None,
        module: Any | None = None,
        quantize: Callable[[Tensor, bool], QuantizedRows] | None = None,
    ) -> None:
        self._lib = TRTLLM_MOE.load() if module is None else TRTLLM_MOE.check(module)
        self._plain = plain or _triton_experts()
        self._quantize = quantize or _triton_quantization()

    @property
    def capabilities(self) -> ExpertsCapabilities:
        blocks = QuantizedExperts(self.allocate_blocks, self.load_expert_blocks)
        return ExpertsCapabilities({BlockFP8: blocks}, takes_shared=self._plain.capabilities.takes_shared)

    def allocate(self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any) -> ExpertWeights:
        return self._plain.allocate(num_experts, hidden, width, dtype, device)

    def allocate_blocks(
        self, num_experts: int, hidden: int, width: int, device: Any, format: BlockFP8 = BLOCK_FP8
    ) -> ExpertWeights:
        """Experts of sizes that the library does not support are stored in bfloat16, for the other kernel."""
        if limits.trtllm_experts(hidden, width) is not None:
            return self.allocate(num_experts, hidden, width, torch.bfloat16, device)
        wide, narrow = num_blocks(hidden), num_blocks(width)
        layer = Layer(
            torch.empty(num_experts, wide, 2 * width, BLOCK, dtype=FP8, device=device),
            torch.empty(num_experts, 2 * narrow, wide, device=device),
            torch.empty(num_experts, narrow, hidden, BLOCK, dtype=FP8, device=device),
            torch.empty(num_experts, wide, narrow, device=device),
            format.power_of_two,
        )
        return ExpertWeights(num_experts, hidden, width, layer, sum(part.nbytes for part in layer.memory))

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        if isinstance(weights.data, Layer):
            raise ValueError("these experts were allocated in block FP8: load_expert_blocks fills them")
        self._plain.load_expert(weights, expert, gate, up, down)

    def load_expert_blocks(
        self, weights: ExpertWeights, expert: int, gate: BlockWeight, up: BlockWeight, down: BlockWeight
    ) -> None:
        layer = weights.data
        if not isinstance(layer, Layer):
            self._plain.load_expert(weights, expert, *map(dequantize_weight, (gate, up, down)))
            return
        for target, data in ((layer.first, torch.cat((up.data, gate.data))), (layer.second, down.data)):
            on_device = data.to(target.device).view(torch.uint8)
            shuffled = self._lib.shuffle_matrix_a(on_device, EPILOGUE_ROWS)
            target[expert].view(torch.uint8).copy_(self._lib.fused_moe.convert_to_block_layout(shuffled, BLOCK))
        layer.first_scales[expert].copy_(torch.cat((up.scales, gate.scales)))
        layer.second_scales[expert].copy_(down.scales)

    def expert_memory(self, weights: ExpertWeights, expert: int) -> list[Tensor]:
        if not isinstance(weights.data, Layer):
            return list(self._plain.expert_memory(weights, expert))
        return [part[expert] for part in weights.data.memory]

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        if not isinstance(weights.data, Layer):
            return self._plain.input_format(weights)
        return ActivationFormat.fp8(weights.data.power_of_two)

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        """Raises ValueError: the library permutes tokens itself, so the table refuses launches with a dispatcher."""
        raise ValueError(limits.TRTLLM_DISPATCHED)

    def run_routed(
        self, x: Activation, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        layer = weights.data
        if not isinstance(layer, Layer):
            return self._plain.run_routed(x, topk_weights, topk_ids, weights, add)
        tokens, top_k = topk_ids.shape
        out = torch.empty(tokens, weights.hidden, dtype=x.dtype, device=topk_ids.device)
        if not tokens:
            return out
        if x.dtype != torch.bfloat16 or top_k > limits.TRTLLM_TOP_K:
            raise ValueError(
                f"trtllm-gen sums at most {limits.TRTLLM_TOP_K} experts in bfloat16, not {top_k} {x.dtype}"
            )
        rows = x.rows if isinstance(x, QuantizedActivation) else self._quantize(x.contiguous(), layer.power_of_two)
        count, fused = weights.num_experts, self._lib.fused_moe
        fused.trtllm_fp8_block_scale_routed_moe(
            topk_ids=(_known(topk_ids, count), topk_weights.contiguous()), routing_bias=None, hidden_states=rows.data,
            hidden_states_scale=_columns(rows), gemm1_weights=layer.first, gemm1_weights_scale=layer.first_scales,
            gemm2_weights=layer.second, gemm2_weights_scale=layer.second_scales,
            num_experts=limits.trtllm_experts_of(count, top_k), top_k=top_k, n_group=None, topk_group=None,
            intermediate_size=weights.width, local_expert_offset=0, local_num_experts=count,
            routed_scaling_factor=None, routing_method_type=fused.RoutingMethodType.Renormalize.value,
            use_shuffled_weight=True, weight_layout=fused.WeightLayout.BlockMajorK.value, output=out,
        )  # fmt: skip
        return out if add is None else out.add_(add)


def _triton_experts() -> ExpertsKernel:
    from moe_engine.kernels.experts.triton_experts import TritonExperts

    return TritonExperts()


def _triton_quantization() -> Callable[[Tensor, bool], QuantizedRows]:
    from moe_engine.kernels.quantization.triton_rows import quantize_rows

    return quantize_rows


def _known(ids: Tensor, count: int) -> Tensor:
    """ids int32 [T, K] with `count` for choices of other ranks and of padding: an expert that is not local. Without the
    sign a negative id is larger than any expert, so that two launches suffice."""
    return ids.to(torch.int32).bitwise_and(_WITHOUT_SIGN).clamp_max_(count).contiguous()


def _columns(rows: QuantizedRows) -> Tensor:
    """Scales [D / 128, T], contiguous: a view if T is a multiple of 4."""
    return rows.scales.transpose(0, 1).contiguous()
