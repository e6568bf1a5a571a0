"""The vision tower of Kimi K3 with torch's own functions, in the number format of its weights.

Legend: P patches by row, N tokens of an image, O width of the text model.
"""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import torch
from safetensors.torch import load_file
from torch import Tensor
from torch.nn import functional as F

from tests.models.kimi_k3 import UNREAD, K3Reference
from tests.models.vision_checkpoints import GreedyOracle, Pixels

TOWER, PROJECTOR = "vision_tower.", "mm_projector."


class TowerReference:
    """v: `vision_config`; tensors under the published names."""

    def __init__(self, v: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._v, self._tensors = v, tensors

    def embed(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """pixels [P, 3 * patch * patch] -> [N, O]."""
        v, (_, rows, columns) = self._v, grid
        kernel = self._tensors[UNREAD]
        x = F.conv2d(pixels.to(kernel.dtype).unflatten(1, kernel.shape[1:]), kernel).flatten(1)
        places = self._weight(f"{TOWER}patch_embed.pos_emb").permute(2, 0, 1)[None]
        x = x + F.interpolate(places, size=(rows, columns), mode="bilinear")[0].flatten(1).T
        turns = self._turns(rows, columns)
        for i in range(v["vt_num_hidden_layers"]):
            block = f"{TOWER}encoder.blocks.{i}"
            qkv = F.linear(self._norm(f"{block}.norm0", x), self._weight(f"{block}.wqkv"))
            q, k, w = qkv.unflatten(1, (3, v["vt_num_attention_heads"], -1)).permute(1, 2, 0, 3)  # [H, P, Dh] each
            mixed = F.scaled_dot_product_attention(turned(q, turns), turned(k, turns), w)
            x = x + F.linear(mixed.transpose(0, 1).flatten(1), self._weight(f"{block}.wo"))
            inner = F.linear(self._norm(f"{block}.norm1", x), self._weight(f"{block}.mlp.fc0"))
            x = x + F.linear(F.gelu(inner, approximate="tanh"), self._weight(f"{block}.mlp.fc1"))
        x = self._norm(f"{TOWER}encoder.final_layernorm", x)
        tokens = x.view(rows // 2, 2, columns // 2, 2, -1).transpose(1, 2).flatten(0, 1).flatten(1)
        inner = F.gelu(F.linear(tokens, self._weight(f"{PROJECTOR}proj.0")))
        out = F.linear(inner, self._weight(f"{PROJECTOR}proj.2"))
        return self._norm(f"{PROJECTOR}post_norm", out, v["projector_ln_eps"])

    def _weight(self, name: str) -> Tensor:
        return self._tensors[f"{name}.weight"]

    def _norm(self, name: str, x: Tensor, eps: float | None = None) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._weight(name), eps)

    def _turns(self, rows: int, columns: int) -> Tensor:
        """Complex factors of the pairs of a head: by column and by row in turns. [P, Dh / 2]."""
        width = self._v["qkv_hidden_size"] // self._v["vt_num_attention_heads"]
        speeds = 10000.0 ** (-torch.arange(0, width, 4)[: width // 4].double() / width)
        row, column = torch.meshgrid(torch.arange(rows), torch.arange(columns), indexing="ij")
        angles = torch.stack((column.flatten()[:, None] * speeds, row.flatten()[:, None] * speeds), 2).flatten(1)
        return torch.polar(torch.ones_like(angles), angles)


class K3Oracle(GreedyOracle):
    """A checkpoint with a tower: its formulas and those of the language model."""

    def __init__(self, path: Path) -> None:
        self.path, self.text = path, K3Reference(path)
        tensors = {name: t.double() for name, t in load_file(path / "model.safetensors").items()}
        self._tower = TowerReference(json.loads((path / "config.json").read_text())["vision_config"], tensors)

    def embed(self, image: Pixels) -> Tensor:
        return self._tower.embed(image.values, image.grid)

    def image_inputs(self, ids: list[int], images: list[Pixels]) -> dict[str, Any]:
        return {"images": torch.cat([self.embed(image) for image in images])}

    def logits(self, ids: list[int], images: list[Pixels]) -> Tensor:
        return self.text.logits(ids, **self.image_inputs(ids, images) if images else {}).float()


def turned(x: Tensor, turns: Tensor) -> Tensor:
    pairs = torch.view_as_complex(x.double().unflatten(-1, (-1, 2)))
    return torch.view_as_real(pairs * turns).flatten(-2).to(x.dtype)
