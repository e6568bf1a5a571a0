"""The vision tower of Mistral's models (Pixtral, arXiv 2410.07073) and its projector: rotation by row and column,
attention within an image; since Mistral Small 3.1 patches are joined by token at the end.

Legend: P patches by row, N tokens of an image, D width, M merge size, O out width, Dh head width.
"""

from __future__ import annotations

from typing import ClassVar

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_places
from moe_engine.models.vision.parts import GatedBlock, GatedNames, PatchTransformer, load_product
from moe_engine.models.weights import WeightSource

BLOCK = (
    "attention_norm", "ffn_norm", ("attention.q_proj", "attention.k_proj", "attention.v_proj"), "attention.o_proj",
    ("feed_forward.gate_proj", "feed_forward.up_proj"), "feed_forward.down_proj",
)  # fmt: skip
"""Names of the weights of `GatedBlock`."""
NATIVE_BLOCK = (
    "attention_norm", "ffn_norm", ("attention.wq", "attention.wk", "attention.wv"), "attention.wo",
    ("feed_forward.w1", "feed_forward.w3"), "feed_forward.w2",
)  # fmt: skip
"""The same under Mistral's own names."""


class UnmergedTower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens, one for each patch (Pixtral 12B); the whole tower on one rank."""

    block: ClassVar[GatedNames] = BLOCK
    interleaved: ClassVar[bool] = False
    """Rotary pairs are (2j, 2j+1), else (j, j+Dh/2)."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_name="patch_conv")
        v, out = vision, f"{PREFIX}projector"
        self.first_norm = RMSNorm(backends.ops, reader, f"{PREFIX}ln_pre", v.width, v.norm_eps)
        names = [f"{PREFIX}transformer.layers.{i}" for i in range(v.num_layers)]
        self.blocks = [GatedBlock(v, reader, backends, name, self.block, (False, False, False)) for name in names]
        bias = v.projector_bias
        self.project_in = load_product(backends, reader, [f"{out}.linear_1"], v.out_width, v.width, bias=bias)
        self.project_out = load_product(backends, reader, [f"{out}.linear_2"], v.out_width, v.out_width, bias=bias)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(axial_angles(grid, v.head_dim, v.theta).to(device), self.interleaved)
        order = torch.arange(len(pixels), device=device)
        residual = self.first_norm(self.patches(pixels))  # [P, D]
        hidden = self.through(self.blocks, residual, order, table, lambda _: (len(pixels),))
        return self.project_out(gelu(self.project_in(self._tokens(hidden, residual, grid))))

    def _tokens(self, hidden: Tensor, residual: Tensor, grid: Grid) -> Tensor:
        """What the last block adds to the residual [P, D] -> the projector's input [N, D]."""
        return residual + hidden


class PixtralTower(UnmergedTower):
    """The same with patches joined by token."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends)
        v, out = vision, f"{PREFIX}projector"
        self.token_norm = RMSNorm(backends.ops, reader, f"{out}.norm", v.width, v.projector_eps)
        merge = [f"{out}.patch_merger.merging_layer"]
        self.merge = load_product(backends, reader, merge, v.width, v.merged_width, bias=False)

    def _tokens(self, hidden: Tensor, residual: Tensor, grid: Grid) -> Tensor:
        v, normed = self.vision, self.token_norm.add(hidden, residual)
        tokens = normed.view(grid[1] // v.merge, v.merge, grid[2] // v.merge, v.merge, v.width)
        return self.merge(tokens.permute(0, 2, 4, 1, 3).reshape(-1, v.merged_width))


class NativePixtralTower(PixtralTower):
    """The same with Mistral's own names and order of rotated channels."""

    block = NATIVE_BLOCK
    interleaved = True


def axial_angles(grid: Grid, width: int, theta: float) -> Tensor:
    """Rotary table of the patches of an image, [P, Dh] float32: cosines of row and column, then their sines. The row
    has the first, third, ... frequency, the column the others."""
    inverse = 1.0 / theta ** (torch.arange(0, width, 2, dtype=torch.float32) / width)  # [Dh/2]
    rows, columns = patch_places(grid, 1).unsqueeze(2)  # [P, 1] each
    angles = torch.cat((rows * inverse[::2], columns * inverse[1::2]), 1)
    return torch.cat((angles.cos(), angles.sin()), 1)
