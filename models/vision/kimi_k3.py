"""The vision tower of Kimi K3 and its projector: MoonViT as in Kimi K2.5 (`kimi_k25.py`) with RMS norms, without
biases, with an attention of its own width, learned positions resampled linearly, and a norm after the projector.

The norms of the blocks have no epsilon in the checkpoint: torch's default, the epsilon of the number format.

Legend: P patches by row, N tokens of an image, D width, O out width.
Source: Kimi K3's report, arXiv 2607.24653.
"""

from __future__ import annotations

from functools import lru_cache, partial

import torch
from torch import Tensor
from torch.nn.functional import gelu, rms_norm

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid
from moe_engine.models.vision.kimi_k25 import GELU_TANH, turned_angles
from moe_engine.models.vision.parts import PatchTransformer, load_product
from moe_engine.models.weights import WeightSource


class KimiK3Tower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends)
        v, merged, projector = vision, vision.merged_width, f"{PREFIX}mm_projector"
        self._side = int(v.num_positions**0.5)
        self._places = reader.tensor(f"{PREFIX}patch_embed.pos_emb.weight", (self._side, self._side, v.width))
        self._blocks = [_Block(v, reader, backends, f"{PREFIX}encoder.blocks.{i}") for i in range(v.num_layers)]
        self._last_norm = reader.tensor(f"{PREFIX}encoder.final_layernorm.weight", (v.width,))
        self._merge_in = load_product(backends, reader, [f"{projector}.proj.0"], merged, merged, bias=False)
        self._merge_out = load_product(backends, reader, [f"{projector}.proj.2"], v.out_width, merged, bias=False)
        self._out_norm = reader.tensor(f"{projector}.post_norm.weight", (v.out_width,))

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(turned_angles(grid, v.head_dim, v.theta).to(device), interleaved=True)
        order = torch.arange(len(pixels), device=device)
        hidden = self.patches(pixels) + self._learned(grid)  # [P, D]
        hidden = self.through_ungated(self._blocks, hidden, order, table, (len(pixels),), GELU_TANH)
        patches = _normed(hidden, self._last_norm).view(grid[1] // v.merge, v.merge, grid[2] // v.merge, v.merge, -1)
        tokens = patches.transpose(1, 2).reshape(-1, v.merged_width)
        return _normed(self._merge_out(gelu(self._merge_in(tokens))), self._out_norm, v.projector_eps)

    def _learned(self, grid: Grid) -> Tensor:
        """The learned positions, resampled to the rows and columns of the image: [P, D]."""
        rows, columns = (linear(size, self._side).to(self._places.device) for size in grid[1:])
        found = torch.einsum("ra,cb,abd->rcd", rows, columns, self._places.float())
        return found.flatten(0, 1).to(self._places.dtype)


class _Block:
    """Weights of a block."""

    def __init__(self, v: VisionConfig, reader: WeightSource, backends: Backends, prefix: str) -> None:
        inner = v.num_heads * v.head_dim
        self.norm1 = partial(_normed, weight=reader.tensor(f"{prefix}.norm0.weight", (v.width,)))
        self.norm2 = partial(_normed, weight=reader.tensor(f"{prefix}.norm1.weight", (v.width,)))
        self.qkv = load_product(backends, reader, [f"{prefix}.wqkv"], 3 * inner, v.width, bias=False)
        self.proj = load_product(backends, reader, [f"{prefix}.wo"], v.width, inner, bias=False)
        self.up = load_product(backends, reader, [f"{prefix}.mlp.fc0"], v.intermediate, v.width, bias=False)
        self.down = load_product(backends, reader, [f"{prefix}.mlp.fc1"], v.width, v.intermediate, bias=False)


def _normed(x: Tensor, weight: Tensor, eps: float | None = None) -> Tensor:
    return rms_norm(x, weight.shape, weight, eps)


@lru_cache(64)
def linear(size: int, side: int) -> Tensor:
    """Weights [size, side] float32 of linear resampling from `side` to `size` places at the centers of their cells;
    places beyond the table repeat its edge."""
    at = ((torch.arange(size) + 0.5) * side / size - 0.5).clamp(0, side - 1)
    distance = (at[:, None] - torch.arange(side)).abs()
    return (1 - distance).clamp(min=0)
