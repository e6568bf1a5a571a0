"""DeepSeek V4.1 with images as an oracle: the formulas of tower and language model in float64."""

from __future__ import annotations

import json
import math
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor

from tests.models.v41_dspark import V41DSparkReference
from tests.models.v41_tower import TowerReference
from tests.models.vision_checkpoints import GreedyOracle, Pixels


class V41Oracle(GreedyOracle):
    """Of a checkpoint with a tower; with DSpark layers, `text` has their drafts."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, V41DSparkReference(path)
        tensors = {name: t.double() for name, t in load_file(path / "model.safetensors").items()}
        self._tower = TowerReference(json.loads((path / "config.json").read_text())["vision_config"], tensors)

    def embed(self, image: Pixels) -> Tensor:
        return self._tower.embed(image.values, image.grid)

    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        return {"images": torch.cat([self.embed(image) for image in images])} if images else {}

    def logits(self, ids: list[int], images: list[Pixels]) -> Tensor:
        return self.text.logits(ids, **self.image_inputs(ids, images)).float()

    def states(self, ids: list[int], images: list[Pixels]) -> Tensor:
        return self.text.states(ids, **self.image_inputs(ids, images))

    def is_clear(self, ids: list[int], images: list[Pixels], margin: float) -> bool:
        """Whether rounding decides no selection of entries or experts."""
        self.text.margin = math.inf
        self.logits(ids, images)
        return self.text.margin > margin
