"""Biases of the routed experts in this rank's slots.

Legend: D hidden, I expert width of this rank, E experts of the model, S slots of this rank.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch

from moe_engine.kernels.experts.batch import ExpertBiases
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.tensors.model import DOWN_BIAS, GATE_UP_BIAS
from moe_engine.models.weights import WeightSource


def empty_biases(moe: MoEConfig, num_slots: int, width: int, hidden: int, device: torch.device) -> ExpertBiases:
    """Uninitialized biases of S slots, for `fill_biases`."""
    both, down = torch.zeros(num_slots, 2 * width, device=device), torch.zeros(num_slots, hidden, device=device)
    return ExpertBiases(both, down, moe.alpha, moe.limit)


def fill_biases(
    bias: ExpertBiases,
    reader: WeightSource,
    block: str,
    moe: MoEConfig,
    slots: Mapping[int, Sequence[int]],
    cut: slice | None,
) -> None:
    """Reads the biases of experts into their slots, by expert.

    Args:
        block: name of the MoE block.
        cut: this rank's part of the width. Ranks whose part is not the first leave the second bias 0: their results are
            summed.
    """
    wide, hidden = torch.float32, bias.down.shape[1]
    both = reader.tensor(f"{block}.{GATE_UP_BIAS}", (moe.num_experts, 2 * moe.width), dtype=wide)  # [E, 2 * width]
    down = reader.tensor(f"{block}.{DOWN_BIAS}", (moe.num_experts, hidden), dtype=wide)  # [E, D]
    pairs = [(expert, slot) for expert, of_expert in slots.items() for slot in of_expert]
    experts, targets = torch.tensor(pairs, dtype=torch.int64, device=both.device).unbind(1)
    gate_up = both.index_select(0, experts).unflatten(1, (-1, 2))[:, cut or slice(None)]  # [S, I, 2]
    bias.gate_up.index_copy_(0, targets, gate_up.transpose(1, 2).flatten(1))
    if cut is None or not cut.start:
        bias.down.index_copy_(0, targets, down.index_select(0, experts))
