"""The vision tower of Kimi K2.5 (MoonViT, arXiv 2504.07491) and its projector: learned positions resampled to the
image's grid, rotation by column and row in turns, attention within an image, patches joined by token at the end.

Legend: P patches by row, N tokens of an image, D width, M merge size, O out width, Dh head width.
"""

from __future__ import annotations

from functools import lru_cache, partial

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

CUBIC = -0.75
"""Parameter of the cubic kernel (Keys, 1981)."""


GELU_TANH = partial(gelu, approximate="tanh")
BLOCK = ("norm0", "norm1", "wqkv", "wo", "mlp.fc0", "mlp.fc1")
"""Names of the weights of `TowerBlock`."""


class KimiTower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_bias=True)
        v = vision
        side = int(v.num_positions**0.5)
        self.places = reader.tensor(f"{PREFIX}patch_embed.pos_emb.weight", (side, side, v.width)).flatten(0, 1)
        self.blocks = [
            TowerBlock(v, reader, backends, f"{PREFIX}encoder.blocks.{i}", BLOCK) for i in range(v.num_layers)
        ]
        self.last_norm = LayerNorm(reader, f"{PREFIX}encoder.final_layernorm", v.width, v.norm_eps)
        self.token_norm = LayerNorm(reader, f"{PREFIX}mm_projector.pre_norm", v.width, v.norm_eps)
        merged = v.merged_width
        self.merge_in = load_product(backends, reader, [f"{PREFIX}mm_projector.proj.0"], merged, merged)
        self.merge_out = load_product(backends, reader, [f"{PREFIX}mm_projector.proj.2"], v.out_width, merged)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(turned_angles(grid, v.head_dim, v.theta).to(device), interleaved=True)
        order = torch.arange(len(pixels), device=device)
        hidden = self.patches(pixels) + self._learned(grid)  # [P, D]
        hidden = self.through_ungated(self.blocks, hidden, order, table, (len(pixels),), GELU_TANH)
        normed = self.token_norm(self.last_norm(hidden))
        tokens = normed.view(grid[1] // v.merge, v.merge, grid[2] // v.merge, v.merge, v.width).transpose(1, 2)
        return self.merge_out(gelu(self.merge_in(tokens.reshape(-1, v.merged_width))))

    def _learned(self, grid: Grid) -> Tensor:
        """The learned positions, resampled to the rows and columns of the image: [P, D]."""
        rows, columns = (cubic(size, int(self.vision.num_positions**0.5)).to(self.places.device) for size in grid[1:])
        table = self.places.float().view(rows.shape[1], columns.shape[1], -1)
        found = torch.einsum("ra,cb,abd->rcd", rows, columns, table)
        return found.flatten(0, 1).to(self.places.dtype)


def turned_angles(grid: Grid, width: int, theta: float) -> Tensor:
    """Rotary table of the patches of an image, [P, Dh] float32: cosines of the pairs, then sines. Pairs take turns
    between the column and the row, each two with one frequency."""
    inverse = 1.0 / theta ** (torch.arange(0, width // 2, 2, dtype=torch.float32) / (width // 2))  # [Dh/4]
    angles = patch_places(grid, 1).flip(0).unsqueeze(2) * inverse  # [2, P, Dh/4]
    turned = angles.permute(1, 2, 0).flatten(1)  # [P, Dh/2]
    return torch.cat((turned.cos(), turned.sin()), 1)


@lru_cache(64)
def cubic(size: int, side: int) -> Tensor:
    """Weights [size, side] float32 of cubic resampling from `side` to `size` places at the centers of their cells;
    places beyond the table repeat its edge."""
    at = (torch.arange(size) + 0.5) * side / size - 0.5
    low = at.floor()
    weights = torch.zeros(size, side)
    for offset in range(-1, 3):
        distance = (at - low - offset).abs()
        near = ((CUBIC + 2) * distance - (CUBIC + 3)) * distance**2 + 1
        far = ((CUBIC * distance - 5 * CUBIC) * distance + 8 * CUBIC) * distance - 4 * CUBIC
        share = torch.where(distance <= 1, near, far)
        weights.scatter_add_(1, (low.long() + offset).clamp(0, side - 1)[:, None], share[:, None])
    return weights
