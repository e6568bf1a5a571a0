"""The vision tower of Gemma 3 (SigLIP) and its projector: the patches of a token are averaged.

Legend: P patches, N tokens of an image, D width, O out width.
Source: transformers (gemma3).
"""

from __future__ import annotations

from torch import Tensor

from moe_engine.kernels.backends import Backends
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.linear import Linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid
from moe_engine.models.vision.siglip import SiglipTower
from moe_engine.models.weights import WeightSource


class Gemma3Tower(SiglipTower):
    """Pixels of an image -> embeddings of its tokens."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends)
        v, out = vision, f"{PREFIX}projector"
        self.norm = RMSNorm(backends.ops, reader, f"{out}.mm_soft_emb_norm", v.width, v.norm_eps, plus=1.0)
        stored = reader.tensor(f"{out}.mm_input_projection_weight", (v.width, v.out_width))
        self.project = Linear(backends.linear, stored.T.contiguous(), None)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype, by row -> [N, O]."""
        v, rows = self.vision, self.vision.side // self.vision.merge
        pooled = self.states(pixels).view(rows, v.merge, rows, v.merge, v.width).mean((1, 3))
        return self.project(self.norm(pooled.flatten(0, 1)))
