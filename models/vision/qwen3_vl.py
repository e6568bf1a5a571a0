"""The vision tower of Qwen3-VL: learned positions resampled to the image's grid, attention within a frame, and states
of some layers that are added to the first layers of the text model (deepstack, arXiv 2406.04334).

Legend: P patches, N tokens of an image, D width, M merge size, O out width, K deepstack layers.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn.functional import gelu

from moe_engine.kernels.backends import Backends
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.models.tensors.vision import PREFIX
from moe_engine.models.vision.grid import Grid, patch_angles, patch_places
from moe_engine.models.vision.parts import LayerNorm, PatchTransformer, TowerBlock, frame_lens, load_product
from moe_engine.models.weights import WeightSource

BLOCK = ("norm1", "norm2", "attn.qkv", "attn.proj", "mlp.linear_fc1", "mlp.linear_fc2")
"""Names of the weights of `TowerBlock`."""


class _Merger:
    """States of patches [P, D] -> rows of tokens [N, O]. `joins_first`: the norm is over the patches of a token."""

    def __init__(
        self, v: VisionConfig, reader: WeightSource, backends: Backends, prefix: str, joins_first: bool
    ) -> None:
        self._norm_width, self._width = v.merged_width if joins_first else v.width, v.merged_width
        self.norm = LayerNorm(reader, f"{prefix}.norm", self._norm_width, v.norm_eps)
        self.fc1 = load_product(backends, reader, [f"{prefix}.linear_fc1"], v.merged_width, v.merged_width)
        self.fc2 = load_product(backends, reader, [f"{prefix}.linear_fc2"], v.out_width, v.merged_width)

    def __call__(self, hidden: Tensor) -> Tensor:
        joined = self.norm(hidden.view(-1, self._norm_width)).view(-1, self._width)
        return self.fc2(gelu(self.fc1(joined)))


class Qwen3Tower(PatchTransformer):
    """Pixels of an image -> its tokens' embeddings, and the rows for deepstack layers; the whole tower on one rank."""

    def __init__(self, vision: VisionConfig, reader: WeightSource, backends: Backends) -> None:
        super().__init__(vision, reader, backends, patch_bias=True)
        v = vision
        self.places = reader.tensor(f"{PREFIX}pos_embed.weight", (v.num_positions, v.width))
        self.blocks = [TowerBlock(v, reader, backends, f"{PREFIX}blocks.{i}", BLOCK) for i in range(v.num_layers)]
        self.merger = _Merger(v, reader, backends, f"{PREFIX}merger", joins_first=False)
        count = len(v.deepstack_layers)
        self.deepstack = [
            _Merger(v, reader, backends, f"{PREFIX}deepstack_merger_list.{i}", joins_first=True) for i in range(count)
        ]

    def forward(self, pixels: Tensor, grid: Grid) -> Tensor:
        """pixels [P, channels * frames * height * width of a patch], in the activation dtype -> [N, (1 + K) O]."""
        v, device = self.vision, pixels.device
        table = RotaryTable(patch_angles(grid, v.merge, v.head_dim, v.theta).to(device), interleaved=False)
        order = torch.arange(len(pixels), device=device)
        frames = frame_lens(grid)
        hidden = self.patches(pixels) + self._learned(grid)  # [P, D]
        rows: list[Tensor] = []
        for i, block in enumerate(self.blocks):
            hidden = hidden + self.attend(block, block.norm1(hidden), order, table, frames)
            hidden = hidden + block.down(gelu(block.up(block.norm2(hidden)), approximate="tanh"))
            if i in v.deepstack_layers:
                rows.append(self.deepstack[v.deepstack_layers.index(i)](hidden))
        return torch.cat((self.merger(hidden), *rows), 1)

    def _learned(self, grid: Grid) -> Tensor:
        """The learned positions, resampled linearly to the rows and columns of a frame: [P, D]."""
        indices, weights = resampled(grid, self.vision.merge, int(self.vision.num_positions**0.5))
        device = self.places.device
        found = self.places[indices.to(device)] * weights.to(device).unsqueeze(2)
        return found.sum(1).to(self.places.dtype).repeat(grid[0], 1)


def resampled(grid: Grid, merge: int, side: int) -> tuple[Tensor, Tensor]:
    """Rows of a square table [side * side, D] and their weights for each patch of a frame, both [P, 4]: linear between
    neighbors, with the first and last patch at the edges."""
    places = patch_places(grid, merge)
    taps, shares = [], []
    for place, size in zip(places, grid[1:]):
        at = place.float() * (side - 1) / max(size - 1, 1)
        low = at.floor()
        taps.append(torch.stack((low.long(), (low.long() + 1).clamp(max=side - 1)), 1))  # [P, 2]
        shares.append(torch.stack((1 - (at - low), at - low), 1))
    indices = taps[0].unsqueeze(2) * side + taps[1].unsqueeze(1)
    return indices.flatten(1), (shares[0].unsqueeze(2) * shares[1].unsqueeze(1)).flatten(1)
