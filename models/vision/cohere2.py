"""The vision tower of Command A Vision (SigLIP) and its projector: learned positions, attention within a tile, patches
joined by token at the end.

Legend: P patches of all tiles, R patches of a tile, B tiles, N tokens of all tiles, D width, M merge size, O out width.
Source: transformers (cohere2_vision, siglip).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, silu

from moe_engine.kernels.backends import Backends
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid
from moe_engine.models.vision.minimax_m3 import BLOCK
from moe_engine.models.vision.parts import LayerNorm, PatchTransformer, TowerBlock, load_product
from moe_engine.models.weights import WeightSource


class Cohere2Tower(PatchTransformer):
    """Pixels of the tiles of an image -> embeddings of their tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_name="embeddings.patch_embedding", patch_bias=True)
        v, out = vision, f"{PREFIX}projector"
        self.learned = reader.tensor(f"{PREFIX}embeddings.position_embedding.weight", (v.num_positions, v.width))
        names = [f"{PREFIX}encoder.layers.{i}" for i in range(v.num_layers)]
        self.blocks = [TowerBlock(v, reader, backends, name, BLOCK) for name in names]
        self.last_norm = LayerNorm(reader, f"{PREFIX}post_layernorm", v.width, v.norm_eps)
        self.project_in = load_product(backends, reader, [f"{out}.linear_1"], 2 * v.projector_width, v.merged_width)
        self.project_out = load_product(backends, reader, [f"{out}.linear_2"], v.out_width, v.projector_width)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype, tile by tile -> [N, O]."""
        v, patches, side = self.vision, self.vision.tile**2, self.vision.tile // self.vision.merge
        tiles = len(pixels) // patches
        hidden = (self.patches(pixels).view(tiles, patches, -1) + self.learned).flatten(0, 1)  # [P, D]
        places = torch.arange(len(hidden), device=hidden.device)
        act = partial(gelu, approximate="tanh")
        hidden = self.through_ungated(self.blocks, hidden, places, None, (patches,) * tiles, act)
        normed = self.last_norm(hidden).view(tiles, side, v.merge, side, v.merge, -1)
        up, gate = self.project_in(normed.transpose(2, 3).reshape(-1, v.merged_width)).chunk(2, 1)  # the gate is second
        return self.project_out(silu(gate) * up)
