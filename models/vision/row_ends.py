"""Tokens of the text between the rows of an image's tokens, as in Mistral's models.

Legend: N tokens of an image with its row ends, R rows and C columns of the tower's tokens, D hidden.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.models.config import ModelConfig
from moe_engine.models.cut import Cut
from moe_engine.models.layers.embedding import EMBEDDING
from moe_engine.models.vision.grid import Grid
from moe_engine.models.weights import WeightSource


class RowEnds:
    """Embeddings of `VisionConfig.row_ends`, whole on every rank."""

    def __init__(self, config: ModelConfig, reader: WeightSource) -> None:
        assert config.vision is not None and config.vision.row_ends is not None
        table, self._merge = (config.vocab_size, config.hidden_size), config.vision.merge
        cuts = [Cut(slice(token, token + 1)) for token in config.vision.row_ends]
        self.weight = torch.cat([reader.tensor(EMBEDDING, table, cut) for cut in cuts])  # [2, D]

    def insert(self, rows: Tensor, grid: Grid) -> Tensor:
        """The tower's rows [R * C, D] -> [N, D]: one token behind each row, another behind the last."""
        tokens = rows.view(grid[1] // self._merge, grid[2] // self._merge, -1)
        out = torch.cat((tokens, self.weight[0].expand(len(tokens), 1, -1)), 1)
        out[-1, -1] = self.weight[1]
        return out.flatten(0, 1)
