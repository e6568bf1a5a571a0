"""DeepGEMM's MegaMoE on Hopper: dispatch, both products and combine of block-FP8 experts in one call of all ranks.

The call reads the tokens of every rank over NVLink (`fused` batches of `parallel/dispatch/mega_moe.py`), so exchange
and products overlap. On Blackwell the library multiplies FP4 weights only, which block FP8 is not.

Source: deep_gemm/__init__.py of sgl-deep-gemm 0.2.5 (fp8_mega_moe, transform_weights_for_mega_moe_sm90).
Legend: T tokens, D hidden, I expert width, E experts of this rank.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.batch import ExpertBatch, ExpertWeights
from moe_engine.kernels.experts.protocol import ExpertsCapabilities, QuantizedExperts
from moe_engine.kernels.quantization.protocol import (
    BLOCK_FP8,
    FP8,
    UNQUANTIZED,
    ActivationFormat,
    BlockFP8,
    BlockWeight,
    num_blocks,
)
from moe_engine.kernels.vendors.probe import MEGA_MOE

FUSED_ONLY = "MegaMoE takes the tokens of --moe-a2a-backend megamoe"


@dataclass(frozen=True)
class Layer:
    """Type of `ExpertWeights.data`.

    Attributes:
        first: e4m3 [E, 2I, D], 8 rows of gate, 8 of up, and so on. second: e4m3 [E, D, I].
        first_scales: float32 [E, 2I / 128, D / 128], gate's first. second_scales: [E, D / 128, I / 128].
    """

    first: Tensor
    first_scales: Tensor
    second: Tensor
    second_scales: Tensor

    @property
    def memory(self) -> tuple[Tensor, Tensor, Tensor, Tensor]:
        return self.first, self.first_scales, self.second, self.second_scales


class MegaMoe:
    """`ExpertsKernel` of fused batches. No host synchronization.

    Args:
        module: the library; default: the installed one.

    Raises:
        ImportError: the library is missing or lacks a required function.
    """

    name = "mega_moe"

    def __init__(self, module: Any | None = None) -> None:
        self._lib = MEGA_MOE.load() if module is None else MEGA_MOE.check(module)

    @property
    def capabilities(self) -> ExpertsCapabilities:
        return ExpertsCapabilities({BlockFP8: QuantizedExperts(self.allocate_blocks, self.load_expert_blocks)})

    def allocate(self, num_experts: int, hidden: int, width: int, dtype: Any, device: Any) -> ExpertWeights:
        """Raises ValueError: there is no kernel for them."""
        raise ValueError(
            f"MegaMoE on Hopper multiplies block-FP8 experts, and these are stored as {dtype}: use another "
            "--moe-a2a-backend"
        )

    def allocate_blocks(
        self, num_experts: int, hidden: int, width: int, device: Any, format: BlockFP8 = BLOCK_FP8
    ) -> ExpertWeights:
        wide, narrow = num_blocks(hidden), num_blocks(width)
        layer = Layer(
            torch.empty(num_experts, 2 * width, hidden, dtype=FP8, device=device),
            torch.empty(num_experts, 2 * narrow, wide, device=device),
            torch.empty(num_experts, hidden, width, dtype=FP8, device=device),
            torch.empty(num_experts, wide, narrow, device=device),
        )
        return ExpertWeights(num_experts, hidden, width, layer, sum(part.nbytes for part in layer.memory))

    def load_expert(self, weights: ExpertWeights, expert: int, gate: Tensor, up: Tensor, down: Tensor) -> None:
        raise ValueError("these experts were allocated in block FP8: load_expert_blocks fills them")

    def load_expert_blocks(
        self, weights: ExpertWeights, expert: int, gate: BlockWeight, up: BlockWeight, down: BlockWeight
    ) -> None:
        layer: Layer = weights.data
        device = layer.first.device
        first = torch.cat((gate.data, up.data))[None].to(device), torch.cat((gate.scales, up.scales))[None].to(device)
        second = down.data[None].to(device), down.scales[None].to(device)
        for targets, source in zip(
            ((layer.first, layer.first_scales), (layer.second, layer.second_scales)),
            self._lib.transform_weights_for_mega_moe_sm90(first, second),
        ):
            for target, part in zip(targets, source):
                target[expert].copy_(part[0])

    def expert_memory(self, weights: ExpertWeights, expert: int) -> list[Tensor]:
        return [part[expert] for part in weights.data.memory]

    def input_format(self, weights: ExpertWeights) -> ActivationFormat:
        """Unquantized: the launch that fills the buffer quantizes."""
        return UNQUANTIZED

    def run(self, batch: ExpertBatch, weights: ExpertWeights) -> Tensor:
        """The sums over all experts [T, D] of this rank's tokens. Collective, also for a rank without tokens.

        Raises:
            ValueError: a batch of another dispatcher.
        """
        if batch.fused is None:
            raise ValueError(FUSED_ONLY)
        layer: Layer = weights.data
        out = torch.empty_like(batch.x)
        self._lib.fp8_mega_moe(
            out, (layer.first, layer.first_scales), (layer.second, layer.second_scales), batch.fused.buffer,
            cumulative_local_expert_recv_stats=batch.counts, num_tokens_bound=batch.fused.bound,
        )  # fmt: skip
        return out

    def run_routed(
        self, x: Any, topk_weights: Tensor, topk_ids: Tensor, weights: ExpertWeights, add: Tensor | None = None
    ) -> Tensor:
        """Raises ValueError: local tokens have no buffer."""
        raise ValueError(FUSED_ONLY)
