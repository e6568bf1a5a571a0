"""The vision tower of GLM-4.1V, GLM-4.5V and GLM-4.6V: learned positions resampled to the image's grid, rotation by row
and column, attention within a frame; and the base that it shares with GLM-5.3-Flash: a product joins the patches of a
token, an MLP with a gate follows.

Legend: P patches, N tokens of an image, D width, M merge size, O out width.
Source: transformers (glm4v).
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn.functional import gelu, grid_sample

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.linear import Linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_angles, patch_places
from moe_engine.models.vision.parts import GatedBlock, LayerNorm, PatchTransformer, frame_lens, load_product
from moe_engine.models.weights import WeightSource

BLOCK = ("norm1", "norm2", ("attn.qkv",), "attn.proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
"""Names of the weights of `GatedBlock`."""


class GlmTower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank.

    Args:
        make_block: a block by the prefix of its weights.
    """

    def __init__(
        self, vision: VisionConfig, reader: WeightSource, backends: Backends, make_block: Callable[[str], GatedBlock]
    ) -> None:
        super().__init__(vision, reader, backends, patch_bias=True)
        v, merger = vision, f"{PREFIX}merger"
        self.blocks = [make_block(f"{PREFIX}blocks.{i}") for i in range(v.num_layers)]
        self.last_norm = RMSNorm(backends.ops, reader, f"{PREFIX}post_layernorm", v.width, v.norm_eps)
        stored = (v.out_width, v.width, v.merge, v.merge)
        joins = reader.tensor(f"{PREFIX}downsample.weight", stored).permute(0, 2, 3, 1).flatten(1).contiguous()
        self.downsample = Linear(backends.linear, joins, reader.tensor(f"{PREFIX}downsample.bias", (v.out_width,)))
        own, inner = v.out_width, v.projector_width
        self.project = load_product(backends, reader, [f"{merger}.proj"], own, own, bias=False)
        self.project_norm = LayerNorm(reader, f"{merger}.post_projection_norm", own, v.projector_eps)
        gated = [f"{merger}.gate_proj", f"{merger}.up_proj"]
        self.gate_up = load_product(backends, reader, gated, inner, own, bias=False)
        self.down = load_product(backends, reader, [f"{merger}.down_proj"], own, inner, bias=False)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * frames * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(patch_angles(grid, v.merge, v.head_dim, v.theta).to(device), interleaved=False)
        frames, order = frame_lens(grid), torch.arange(len(pixels), device=device)
        residual = self.embed(pixels, grid)  # [P, D]
        added = self.through(self.blocks, residual, order, table, lambda _: frames)
        hidden = self.last_norm.add(added, residual)
        tokens = self.downsample(hidden.view(-1, v.merged_width))  # [N, O]
        return self.down(self._gated(self.gate_up(gelu(self.project_norm(self.project(tokens))))))

    def embed(self, pixels: Tensor, grid: Grid) -> Tensor:
        """The residual stream before the first block [P, D]."""
        return self.patches(pixels)


class Glm4vTower(GlmTower):
    """With a norm and learned positions before the first block."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        v, biases = vision, (vision.bias, False, False)
        super().__init__(v, reader, backends, lambda prefix: GatedBlock(v, reader, backends, prefix, BLOCK, biases))
        self.first_norm = RMSNorm(backends.ops, reader, f"{PREFIX}post_conv_layernorm", v.width, v.norm_eps)
        self.places = reader.tensor(f"{PREFIX}embeddings.position_embedding.weight", (v.num_positions, v.width))

    def embed(self, pixels: Tensor, grid: Grid) -> Tensor:
        return self.first_norm(self.patches(pixels)) + self._learned(grid)

    def _learned(self, grid: Grid) -> Tensor:
        """The learned positions, resampled by cubic convolution to the middles of the patches: [P, D]."""
        side, (rows, columns) = int(self.vision.num_positions**0.5), patch_places(grid, self.vision.merge)
        middles = torch.stack(((columns + 0.5) / grid[2], (rows + 0.5) / grid[1]), 1)
        table = self.places.float().view(1, side, side, -1).permute(0, 3, 1, 2)
        at = (middles * 2 - 1).view(1, -1, 1, 2).to(table.device)  # from -1 to 1
        found = grid_sample(table, at, mode="bicubic", padding_mode="border", align_corners=False)  # [1, D, P, 1]
        return found[0, :, :, 0].T.to(self.places.dtype).repeat(grid[0], 1)
