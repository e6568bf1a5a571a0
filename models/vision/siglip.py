"""SigLIP: learned positions, attention among the patches of a picture (a tile or an image) without rotation.

Legend: P patches of all pictures, B pictures, R patches of a picture, D width.
Source: transformers (siglip).
"""

from __future__ import annotations

from functools import partial

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.minimax_m3 import BLOCK
from moe_engine.models.vision.parts import LayerNorm, PatchTransformer, TowerBlock
from moe_engine.models.weights import WeightSource


class SiglipTower(PatchTransformer):
    """Base of towers; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_name="embeddings.patch_embedding", patch_bias=True)
        v = vision
        self.learned = reader.tensor(f"{PREFIX}embeddings.position_embedding.weight", (v.num_positions, v.width))
        names = [f"{PREFIX}encoder.layers.{i}" for i in range(v.num_layers)]
        self.blocks = [TowerBlock(v, reader, backends, name, BLOCK) for name in names]
        self.last_norm = LayerNorm(reader, f"{PREFIX}post_layernorm", v.width, v.norm_eps)

    def states(self, pixels: Tensor) -> Tensor:
        """pixels [P, channels * height * width of a patch], picture by picture -> normed states [P, D]."""
        each = self.vision.num_positions
        count = len(pixels) // each
        hidden = (self.patches(pixels).view(count, each, -1) + self.learned).flatten(0, 1)
        places, act = torch.arange(len(hidden), device=hidden.device), partial(gelu, approximate="tanh")
        return self.last_norm(self.through_ungated(self.blocks, hidden, places, None, (each,) * count, act))
