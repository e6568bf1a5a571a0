"""The vision tower of MiniMax-M3: a norm before the blocks and none after them, rotation by frame, row and column,
attention within an image; a projector for each patch, and one that joins the patches of a token.

Legend: P patches by token, N tokens of an image, D width, M merge size, O out width, R rotated channels of a head.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_places
from moe_engine.models.vision.parts import LayerNorm, PatchTransformer, TowerBlock, load_product
from moe_engine.models.weights import WeightSource

BLOCK = (
    "layer_norm1", "layer_norm2", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"), "self_attn.out_proj",
    "mlp.fc1", "mlp.fc2",
)  # fmt: skip
"""Names of the weights of `TowerBlock`."""


class MiniMaxM3Tower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_name="embeddings.patch_embedding")
        v, blocks = vision, f"{PREFIX}encoder.layers"
        self.first_norm = LayerNorm(reader, f"{PREFIX}pre_layrnorm", v.width, v.norm_eps)
        self.blocks = [TowerBlock(v, reader, backends, f"{blocks}.{i}", BLOCK) for i in range(v.num_layers)]
        middle, out, joined = v.projector_width, v.out_width, v.out_width * v.merge**2
        self.project_in = load_product(backends, reader, [f"{PREFIX}projector.linear_1"], middle, v.width)
        self.project_out = load_product(backends, reader, [f"{PREFIX}projector.linear_2"], out, middle)
        self.merge_in = load_product(backends, reader, [f"{PREFIX}merge_mlp.linear_1"], middle, joined)
        self.merge_out = load_product(backends, reader, [f"{PREFIX}merge_mlp.linear_2"], out, middle)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * frames * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(three_axis_angles(grid, v.merge, v.head_dim, v.theta).to(device), interleaved=False)
        order = torch.arange(len(pixels), device=device)
        hidden = self.first_norm(self.patches(pixels))  # [P, D]
        hidden = self.through_ungated(self.blocks, hidden, order, table, (len(pixels),), gelu)
        tokens = self.project_out(gelu(self.project_in(hidden))).view(-1, v.out_width * v.merge**2)
        return self.merge_out(gelu(self.merge_in(tokens)))


def three_axis_angles(grid: Grid, merge: int, width: int, theta: float) -> Tensor:
    """Rotary table of the patches of an image, [P, R] float32: cosines of frame, row and column, then their sines. Each
    axis has a third of the head's `width` channels, rounded down to pairs; the other channels are not rotated."""
    third = width // 3 // 2 * 2
    inverse = 1.0 / theta ** (torch.arange(0, third, 2, dtype=torch.float32) / third)  # [R/6]
    rows, columns = patch_places(grid, merge).repeat(1, grid[0])
    frames = torch.arange(grid[0]).repeat_interleave(grid[1] * grid[2])
    places = torch.stack((frames, rows, columns), 1)  # [P, 3]
    angles = (places.unsqueeze(2) * inverse).flatten(1)  # [P, R/2]
    return torch.cat((angles.cos(), angles.sin()), 1)
