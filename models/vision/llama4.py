"""The vision tower of Llama 4 and its projector: learned positions, a class token in addition to the patches of a tile,
rotation by column and row, attention within a tile, patches joined by token at the end.

Legend: P patches of all tiles, R patches of a tile, B tiles, N tokens of all tiles, D width, M merge size, O out width,
Dh head width.
Source: transformers (llama4).
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
    "input_layernorm", "post_attention_layernorm", ("self_attn.q_proj", "self_attn.k_proj", "self_attn.v_proj"),
    "self_attn.o_proj", "mlp.fc1", "mlp.fc2",
)  # fmt: skip
"""Names of the weights of `TowerBlock`."""


class Llama4Tower(PatchTransformer):
    """Pixels of the tiles of an image -> embeddings of their tokens; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_name="patch_embedding.linear")
        v, inner, adapter = vision, vision.projector_width, f"{PREFIX}vision_adapter.mlp"
        last = reader.tensor(f"{PREFIX}class_embedding", (v.width,))
        self.learned = reader.tensor(f"{PREFIX}positional_embedding_vlm", (v.num_positions, v.width))
        self.last = last + self.learned[-1]  # the class token with its position
        self.first_norm = LayerNorm(reader, f"{PREFIX}layernorm_pre", v.width, v.norm_eps)
        names = [f"{PREFIX}model.layers.{i}" for i in range(v.num_layers)]
        self.blocks = [TowerBlock(v, reader, backends, name, BLOCK) for name in names]
        self.last_norm = LayerNorm(reader, f"{PREFIX}layernorm_post", v.width, v.norm_eps)
        self.merge_in = load_product(backends, reader, [f"{adapter}.fc1"], inner, v.merged_width, bias=False)
        self.merge_out = load_product(backends, reader, [f"{adapter}.fc2"], inner, inner, bias=False)
        self.project = load_product(backends, reader, [f"{PREFIX}projector.linear_1"], v.out_width, inner, bias=False)

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * height * width of a patch], in the activation dtype, tile by tile -> [N, O]."""
        v, device = self.vision, pixels.device
        side, tokens = v.tile // v.merge, v.tile**2 + 1
        tiles = len(pixels) // v.tile**2
        table = RotaryTable(tile_angles(v.tile, v.head_dim, v.theta).to(device), interleaved=True)
        patches = self.patches(pixels).view(tiles, v.tile**2, -1) + self.learned[:-1]  # [B, R, D]
        hidden = self.first_norm(torch.cat((patches, self.last.expand(tiles, 1, -1)), 1).flatten(0, 1))
        places = torch.arange(tokens, device=device).repeat(tiles)
        hidden = self.through_ungated(self.blocks, hidden, places, table, (tokens,) * tiles, gelu)
        normed = self.last_norm(hidden.view(tiles, tokens, -1)[:, :-1])
        joined = normed.reshape(tiles, side, v.merge, side, v.merge, -1).transpose(2, 3).reshape(-1, v.merged_width)
        return self.project(gelu(self.merge_out(gelu(self.merge_in(joined)))))


def tile_angles(side: int, width: int, theta: float) -> Tensor:
    """Rotary table of the patches of a tile by row and of its class token, [R + 1, Dh] float32: cosines of column and
    row, which begin with 1, then their sines. The class token is not rotated."""
    pairs = torch.arange(0, width // 2, 2, dtype=torch.float32)
    inverse = 1.0 / theta ** (pairs / (width // 2))  # [Dh/4]
    columns_first = patch_places((1, side, side), 1).flip(0).T.unsqueeze(2) + 1  # [R, 2, 1]
    angles = torch.cat(((columns_first * inverse).flatten(1), torch.zeros(1, width // 2)))
    return torch.cat((angles.cos(), angles.sin()), 1)
