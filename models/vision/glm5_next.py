"""The vision tower of GLM-5.3-Flash and its projector: rotation by row and column, attention within a frame, clamped
MLPs, a product that joins the patches of a token.

Legend: P patches, N tokens of an image, D width, H heads, Dh head width, M merge size, O out width.
Source: transformers (glm5_next).
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.linear import Linear
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_angles
from moe_engine.models.vision.parts import (
    AttentionWeights,
    GatedBlock,
    LayerNorm,
    PatchTransformer,
    frame_lens,
    load_product,
)
from moe_engine.models.weights import WeightSource

BLOCK = ("norm1", "norm2", ("attn.qkv",), "attn.proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
"""Names of the weights of `GatedBlock`."""


class _Block(GatedBlock):
    """With norms of the heads of q and k."""

    def __init__(self, v: VisionConfig, reader: WeightSource, backends: Backends, prefix: str) -> None:
        super().__init__(v, reader, backends, prefix, BLOCK, (v.bias, v.bias))
        self.head_norms = [
            RMSNorm(backends.ops, reader, f"{prefix}.attn.{part}_norm", v.head_dim, v.norm_eps) for part in "qk"
        ]


class Glm5NextTower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_bias=True)
        v, merger = vision, f"{PREFIX}merger"
        self.blocks = [_Block(v, reader, backends, f"{PREFIX}blocks.{i}") for i in range(v.num_layers)]
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
        residual = self.patches(pixels)  # [P, D]
        added = self.through(self.blocks, residual, order, table, lambda _: frames)
        hidden = self.last_norm.add(added, residual)
        tokens = self.downsample(hidden.view(-1, v.merged_width))  # [N, O]
        return self.down(self._gated(self.gate_up(gelu(self.project_norm(self.project(tokens))))))

    def _heads(self, block: AttentionWeights, hidden: Tensor) -> Tensor:
        assert isinstance(block, _Block)
        qkv, heads = super()._heads(block, hidden), self.vision.num_heads
        for i, norm in enumerate(block.head_norms):
            part = qkv[:, i * heads : (i + 1) * heads]
            part.copy_(norm(part))
        return qkv
