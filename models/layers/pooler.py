"""The pooler of a pooled model, which replaces the LM head: score head and normalization, in float32.

Legend: S requests, D hidden, L labels or dimensions.
"""

from __future__ import annotations

import torch
import torch.nn.functional as F
from torch import Tensor

from moe_engine.models.config import ModelConfig
from moe_engine.models.pooling import ScoreLayer, score_layers
from moe_engine.models.weights import WeightSource
from moe_engine.parallel.step_sizes import StepSizes


class Pooler:
    """Pooled states [S, D] -> vectors [S, L] float32. Every rank has the whole score head: no collective."""

    def __init__(self, config: ModelConfig, reader: WeightSource) -> None:
        assert config.pooling is not None
        self._normalizes = config.pooling.normalizes
        self._layers = [_load(layer, reader) for layer in score_layers(config)]

    def __call__(self, states: Tensor, sizes: StepSizes | None = None) -> Tensor:
        x = states.float()
        for i, (weight, bias) in enumerate(self._layers):
            x = F.linear(F.relu(x) if i else x, weight, bias)
        return F.normalize(x, dim=-1) if self._normalizes else x


def _load(layer: ScoreLayer, reader: WeightSource) -> tuple[Tensor, Tensor | None]:
    weight = reader.tensor(f"{layer.name}.weight", (layer.rows, layer.columns), dtype=torch.float32)
    bias = reader.tensor(f"{layer.name}.bias", (layer.rows,), dtype=torch.float32) if layer.bias else None
    return weight, bias
