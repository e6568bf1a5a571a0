"""The vision tower of GLM-5.3-Flash: that of GLM-4.1V without learned positions, with norms of the heads of q and k and
clamped MLPs.

Legend: P patches, H heads, Dh head width.
Source: transformers (glm5_next).
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.vision.glm4v import BLOCK, GlmTower
from moe_engine.models.vision.parts import AttentionWeights, GatedBlock
from moe_engine.models.weights import WeightSource


class _Block(GatedBlock):
    """With norms of the heads of q and k."""

    def __init__(self, v: VisionConfig, reader: WeightSource, backends: Backends, prefix: str) -> None:
        super().__init__(v, reader, backends, prefix, BLOCK, (v.bias, v.bias, v.bias))
        self.head_norms = [
            RMSNorm(backends.ops, reader, f"{prefix}.attn.{part}_norm", v.head_dim, v.norm_eps) for part in "qk"
        ]


class Glm5NextTower(GlmTower):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, lambda prefix: _Block(vision, reader, backends, prefix))

    def _heads(self, block: AttentionWeights, hidden: Tensor) -> Tensor:
        assert isinstance(block, _Block)
        qkv, heads = super()._heads(block, hidden), self.vision.num_heads
        for i, norm in enumerate(block.head_norms):
            part = qkv[:, i * heads : (i + 1) * heads]
            part.copy_(norm(part))
        return qkv
