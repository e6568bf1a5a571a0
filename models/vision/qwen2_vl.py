"""The vision tower of Qwen2-VL: every block attends within a frame; LayerNorms, an MLP without a gate.

Legend: P patches, N tokens of an image, D width, M merge size, O out width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_angles
from moe_engine.models.vision.parts import LayerNorm, PatchTransformer, TowerBlock, frame_lens, load_product
from moe_engine.models.weights import WeightSource

BLOCK = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.fc1", "mlp.fc2")
"""Names of the weights of `TowerBlock`."""


class Qwen2Tower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends)
        v = vision
        self.blocks = [TowerBlock(v, reader, backends, f"{PREFIX}blocks.{i}", BLOCK) for i in range(v.num_layers)]
        self.merge_norm = LayerNorm(reader, f"{PREFIX}merger.ln_q", v.width, v.norm_eps)
        merged = v.merged_width
        self.merge_in = load_product(backends, reader, [f"{PREFIX}merger.mlp.0"], merged, merged)
        self.merge_out = load_product(backends, reader, [f"{PREFIX}merger.mlp.2"], v.out_width, merged)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * frames * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(patch_angles(grid, v.merge, v.head_dim, v.theta).to(device), interleaved=False)
        places, frames = torch.arange(len(pixels), device=device), frame_lens(grid)
        hidden = self.patches(pixels)  # [P, D]
        hidden = self.through_ungated(self.blocks, hidden, places, table, frames, _quick_gelu)
        return self.merge_out(gelu(self.merge_in(self.merge_norm(hidden).view(-1, v.merged_width))))


def _quick_gelu(x: Tensor) -> Tensor:
    return x * torch.sigmoid(1.702 * x)
