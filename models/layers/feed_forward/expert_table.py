"""Experts by token id, in layers whose router chooses none (DeepSeek V4's first layers).

Legend: V vocabulary, E experts, K experts per token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.errors import CheckpointError
from moe_engine.models.config_sections.moe import MoEConfig
from moe_engine.models.weights import WeightSource


def read_expert_table(reader: WeightSource, name: str, vocab_size: int, moe: MoEConfig) -> Tensor:
    """The table [V, K] int32. Raises CheckpointError: it names experts that the layer does not have."""
    table = reader.tensor(name, (vocab_size, moe.top_k), dtype=torch.int32)
    if not reader.made_up:
        least, most = (int(edge) for edge in table.aminmax())
        if least < 0 or most >= moe.num_experts:
            raise CheckpointError(f"{name} names experts {least} to {most}, the layer has 0 to {moe.num_experts - 1}")
    return table
