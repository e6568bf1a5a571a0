"""The vision tower of DeepSeek V4.1: random tensors under the published names, and its formulas in float64.

transformers has no tower of this model. The formulas are those of timm's `deepseek_vit` and of NeMo Automodel.

Legend: P patches by row, N tokens of an image with its delimiters, D width, H heads, O width of the text model.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional as F

from tests.models.vision_checkpoints import Pixels

IMAGE, PATCH = 271, 2
"""The placeholder of an image, and the side of a patch in pixels."""
VISION: dict[str, Any] = {
    "model_type": "deepseek_v41_vision", "hidden_size": 24, "intermediate_size": 20, "num_hidden_layers": 3,
    "num_attention_heads": 2, "patch_size": PATCH, "downsample_ratio": 3, "rope_theta": 100.0, "min_pixels": 144,
    "max_image_tokens": 40,
}  # fmt: skip
"""`vision_config`; some pairs of channels turn fast."""


class DelimitedPixels(Pixels):
    """An image with a token after each row of tokens of `side` x `side` patches, one before it and one after it."""

    side = 3

    @property
    def num_tokens(self) -> int:
        return -(-self.grid[1] // self.side) * (-(-self.grid[2] // self.side) + 1) + 2


def picture(rows: int, columns: int) -> DelimitedPixels:
    """Of rows x columns patches."""
    return DelimitedPixels((1, rows, columns), torch.randn(rows * columns, 3 * PATCH**2))


def put_tower(v: dict[str, Any], out: int, put: Callable[..., None]) -> None:
    """put: (name, *shape, scale, shift) adds a random tensor."""
    width, inner = v["hidden_size"], v["intermediate_size"]

    def linear(name: str, rows: int, columns: int, bias: bool = True) -> None:
        put(f"{name}.weight", rows, columns, scale=0.25)
        if bias:
            put(f"{name}.bias", rows, scale=0.3)

    linear("vision.patch_embed.proj", width, 3 * v["patch_size"] ** 2)
    for i in range(v["num_hidden_layers"]):
        block = f"vision.blocks.{i}"
        put(f"{block}.norm1.weight", width, scale=0.2, shift=1.0)
        put(f"{block}.norm2.weight", width, scale=0.2, shift=1.0)
        linear(f"{block}.attn.wqkv", 3 * width, width)
        linear(f"{block}.attn.wo", width, width)
        linear(f"{block}.mlp.w1", 2 * inner, width, bias=False)
        linear(f"{block}.mlp.w2", width, inner, bias=False)
    put("vision.norm.weight", width, scale=0.2, shift=1.0)
    linear("aligner.w1", out, width * v["downsample_ratio"] ** 2)
    linear("aligner.w2", out, out)
    for name in ("image_start", "image_end", "image_newline"):
        put(name, out)


class TowerReference:
    """v: `vision_config`; tensors under the published names."""

    def __init__(self, v: dict[str, Any], tensors: dict[str, Tensor]) -> None:
        self._v, self._tensors = v, tensors

    def embed(self, pixels: Tensor, grid: tuple[int, int, int]) -> Tensor:
        """pixels [P, 3 * patch * patch] -> [N, O]."""
        v, (_, rows, columns) = self._v, grid
        x = self._linear("vision.patch_embed.proj", pixels.double())
        for i in range(v["num_hidden_layers"]):
            block = f"vision.blocks.{i}"
            qkv = self._linear(f"{block}.attn.wqkv", self._norm(f"{block}.norm1", x))
            q, k, w = qkv.view(len(x), 3, v["num_attention_heads"], -1).permute(1, 2, 0, 3)  # [H, P, Dh] each
            scores = self._turned(q, columns) @ self._turned(k, columns).mT / q.shape[2] ** 0.5
            x = x + self._linear(f"{block}.attn.wo", (scores.softmax(2) @ w).transpose(0, 1).flatten(1))
            gate, up = self._linear(f"{block}.mlp.w1", self._norm(f"{block}.norm2", x)).chunk(2, 1)
            x = x + self._linear(f"{block}.mlp.w2", gate * gate.sigmoid() * up)
        side = v["downsample_ratio"]
        image = self._norm("vision.norm", x).T.view(1, -1, rows, columns)
        cells = F.unfold(F.pad(image, (0, -columns % side, 0, -rows % side)), side, stride=side)[0].T
        tokens = self._linear("aligner.w2", F.gelu(self._linear("aligner.w1", cells)))
        out = [self._tensors["image_start"]]
        for row in tokens.view(-(-rows // side), -1, tokens.shape[1]):
            out += [*row, self._tensors["image_newline"]]
        return torch.stack([*out, self._tensors["image_end"]])

    def _linear(self, name: str, x: Tensor) -> Tensor:
        return F.linear(x, self._tensors[f"{name}.weight"], self._tensors.get(f"{name}.bias"))

    def _norm(self, name: str, x: Tensor) -> Tensor:
        return F.rms_norm(x, x.shape[-1:], self._tensors[f"{name}.weight"], 1e-6)

    def _turned(self, x: Tensor, columns: int) -> Tensor:
        """x [H, P, Dh]: channel i turns with i + Dh / 2, the first half of the pairs by row, the others by column."""
        half = x.shape[2] // 2
        quarter, patch = half // 2, torch.arange(x.shape[1])
        speeds = self._v["rope_theta"] ** (-torch.arange(quarter).double() / quarter)
        places = torch.stack((patch // columns, patch % columns), 1)  # [P, 2]
        angles = (places[:, :, None] * speeds).flatten(1)
        pairs = torch.complex(x[..., :half], x[..., half:]) * torch.polar(torch.ones_like(angles), angles)
        return torch.cat((pairs.real, pairs.imag), 2)
