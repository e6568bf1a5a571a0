"""The vision tower of Qwen2.5-VL: attention within windows, in some layers within a frame.

Legend: P patches, N tokens of an image, D width, M merge size, O out width.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_angles, window_order
from moe_engine.models.vision.parts import GatedBlock, PatchTransformer, frame_lens, load_product
from moe_engine.models.weights import WeightSource

BLOCK = ("norm1", "norm2", ("attn.qkv",), "attn.proj", ("mlp.gate_proj", "mlp.up_proj"), "mlp.down_proj")
"""Names of the weights of `GatedBlock`."""


class Qwen25Tower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends)
        v = vision
        names = [f"{PREFIX}blocks.{i}" for i in range(v.num_layers)]
        self.blocks = [GatedBlock(v, reader, backends, name, BLOCK, (True, True, True)) for name in names]
        self.merge_norm = RMSNorm(backends.ops, reader, f"{PREFIX}merger.ln_q", v.width, v.norm_eps)
        merged = v.merged_width
        self.merge_in = load_product(backends, reader, [f"{PREFIX}merger.mlp.0"], merged, merged)
        self.merge_out = load_product(backends, reader, [f"{PREFIX}merger.mlp.2"], v.out_width, merged)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * frames * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        windows = window_order(grid, v.merge, v.window // v.merge // v.patch_size)
        order, back = windows.order.to(device), windows.back.to(device)

        def by_window(x: Tensor) -> Tensor:  # [P, any]
            return x.view(len(order), v.merge**2, -1)[order].flatten(0, 1)

        angles = patch_angles(grid, v.merge, v.head_dim, v.theta).to(device)
        table, places = RotaryTable(by_window(angles), interleaved=False), torch.arange(len(pixels), device=device)
        frames = frame_lens(grid)
        residual = by_window(self.patches(pixels))  # [P, D]
        added = self.through(
            self.blocks, residual, places, table, lambda i: frames if i in v.full_layers else windows.lens
        )
        hidden = self.merge_norm.add(added, residual)
        merged = gelu(self.merge_in(hidden.view(len(order), -1)))  # [N, D * M * M]
        return self.merge_out(merged)[back]
