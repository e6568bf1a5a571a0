"""Parameters used by a token."""

from __future__ import annotations

from moe_engine.models.config import ModelConfig
from moe_engine.models.tensors.model import EMBEDDING, model_tensors


def num_active_parameters(config: ModelConfig) -> int:
    """K of E experts, the whole head, one row of the embedding (not counted)."""
    top_k = config.moe.top_k if config.moe is not None else 1
    return sum(
        spec.num_elements * min(spec.copies, top_k)
        for spec in model_tensors(config)
        if config.tie_word_embeddings or spec.name != EMBEDDING
    )
