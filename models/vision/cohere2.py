"""The vision tower of Command A Vision (SigLIP) and its projector: patches of a token are joined.

Legend: P patches of all tiles, N tokens of all tiles, O out width.
Source: transformers (cohere2_vision).
"""

from __future__ import annotations

from torch import Tensor
from torch.nn.functional import silu

from moe_engine.kernels.backends import Backends
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid
from moe_engine.models.vision.parts import load_product
from moe_engine.models.vision.siglip import SiglipTower
from moe_engine.models.weights import WeightSource


class Cohere2Tower(SiglipTower):
    """Pixels of the tiles of an image -> embeddings of their tokens."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends)
        v, out = vision, f"{PREFIX}projector"
        self.project_in = load_product(backends, reader, [f"{out}.linear_1"], 2 * v.projector_width, v.merged_width)
        self.project_out = load_product(backends, reader, [f"{out}.linear_2"], v.out_width, v.projector_width)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype, tile by tile -> [N, O]."""
        v, side = self.vision, self.vision.tile // self.vision.merge
        states = self.states(pixels).view(-1, side, v.merge, side, v.merge, v.width)
        up, gate = self.project_in(states.transpose(2, 3).reshape(-1, v.merged_width)).chunk(2, 1)  # the gate is second
        return self.project_out(silu(gate) * up)
