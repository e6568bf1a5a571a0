"""Tokens of the text among an image's tokens: after its rows in Mistral's models, at its tiles in Llama 4 and Command A
Vision.

Legend: N tokens of an image with those of the text, R rows and C columns of the tower's tokens, D hidden; B tiles of S
tokens.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.models.checkpoint.cut import Cut
from moe_engine.models.config import ModelConfig
from moe_engine.models.layers.embedding import EMBEDDING
from moe_engine.models.vision.grid import Grid
from moe_engine.models.weights import WeightSource


class RowEnds:
    """Embeddings of `VisionConfig.row_ends` or `tile_marks`, whole on every rank."""

    def __init__(self, config: ModelConfig, reader: WeightSource) -> None:
        assert config.vision is not None
        self._vision, table = config.vision, (config.vocab_size, config.hidden_size)
        cuts = [Cut(slice(token, token + 1)) for token in self._vision.row_ends or self._vision.tile_marks or ()]
        self.weight = torch.cat([reader.tensor(EMBEDDING, table, cut) for cut in cuts])  # [1 to 3, D]

    def insert(self, rows: Tensor, grid: Grid) -> Tensor:
        """The tower's rows [R * C, D] -> [N, D]: one token after each row, another after the last."""
        vision = self._vision
        if vision.tile:
            return self._at_tiles(rows.view(-1, (vision.tile // vision.merge) ** 2, rows.shape[1]), grid)
        tokens = rows.view(grid[1] // vision.merge, grid[2] // vision.merge, -1)
        out = torch.cat((tokens, self.weight[0].expand(len(tokens), 1, -1)), 1)
        out[-1, -1] = self.weight[1]
        return out.flatten(0, 1)

    def _at_tiles(self, tiles: Tensor, grid: Grid) -> Tensor:
        """Rows of all tiles [B, S, D] -> [N, D]: marks after tiles and rows of tiles, one before the last tile; or one
        after each tile."""
        if len(self.weight) == 1:
            return torch.cat((tiles, self.weight.expand(len(tiles), 1, -1)), 1).flatten(0, 1)
        between, behind, last = self.weight.unsqueeze(1)  # [1, D] each
        columns, parts = grid[2] // self._vision.tile, []
        for i, tile in enumerate(tiles[:-1]):
            parts += [tile, between if (i + 1) % columns else behind]
        return torch.cat((*parts, last, tiles[-1]))
