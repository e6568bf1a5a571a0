"""The vision tower of DeepSeek V4.1 and its projector: rotation by row and column, attention within an image, patches
joined by token at the end. Embeddings delimit an image and its rows of tokens.

Legend: P patches by row, N tokens of an image with its delimiters, R rows and C columns of tokens, D width, M merge
size, O out width.
Source: `inference/vision.py` of the checkpoint, by timm's `deepseek_vit` and NeMo Automodel.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu, pad

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.layers.norm import RMSNorm
from moe_engine.models.tensors.vision import DELIMITERS, PREFIX
from moe_engine.models.vision.grid import Grid, patch_angles
from moe_engine.models.vision.parts import GatedBlock, PatchTransformer, load_product
from moe_engine.models.weights import WeightSource

BLOCK = ("norm1", "norm2", ("attn.wqkv",), "attn.wo", ("mlp.w1",), "mlp.w2")
"""Names of the weights of `GatedBlock`."""


class DeepseekV41Tower(PatchTransformer):
    """Pixels of an image -> embeddings of its tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_bias=True)
        v = vision
        names = [f"{PREFIX}blocks.{i}" for i in range(v.num_layers)]
        self.blocks = [GatedBlock(v, reader, backends, name, BLOCK, (True, True, False)) for name in names]
        self.last_norm = RMSNorm(backends.ops, reader, f"{PREFIX}norm", v.width, v.norm_eps)
        self.merge_in = load_product(backends, reader, [f"{PREFIX}aligner.w1"], v.out_width, v.merged_width)
        self.merge_out = load_product(backends, reader, [f"{PREFIX}aligner.w2"], v.out_width, v.out_width)
        self.delimiters = [reader.tensor(f"{PREFIX}{name}", (v.out_width,)) for name in DELIMITERS]

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype -> [N, O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(patch_angles(grid, 1, v.head_dim, v.theta).to(device), interleaved=False)
        order = torch.arange(len(pixels), device=device)
        residual = self.patches(pixels)  # [P, D]
        added = self.through(self.blocks, residual, order, table, lambda _: (len(pixels),))
        joined = self._joined(self.last_norm.add(added, residual), grid)  # [R, C, D * M * M]
        tokens = self.merge_out(gelu(self.merge_in(joined.flatten(0, 1)))).view(*joined.shape[:2], -1)
        start, newline, end = self.delimiters
        rows = torch.cat((tokens, newline.expand(len(tokens), 1, -1)), 1).flatten(0, 1)
        return torch.cat((start.unsqueeze(0), rows, end.unsqueeze(0)))

    def _joined(self, hidden: Tensor, grid: Grid) -> Tensor:
        """The M x M patches of each token, channel by channel; places beyond the image are 0."""
        _, rows, columns = grid
        merge = self.vision.merge
        whole = pad(hidden.view(rows, columns, -1), (0, 0, 0, -columns % merge, 0, -rows % merge))
        cells = whole.view(whole.shape[0] // merge, merge, whole.shape[1] // merge, merge, -1)
        return cells.permute(0, 2, 4, 1, 3).flatten(2)
