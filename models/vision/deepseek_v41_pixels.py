"""The image processor of DeepSeek V4.1: an image is scaled to a least area and to a limit of tokens, and gray pixels
fill up its patches (source: `inference/image_processor.py` of the checkpoint, by transformers' processor)."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_engine.models.vision.pixel_patches import patch_rows

if TYPE_CHECKING:
    import numpy as np

MODEL = "deepseek_v41"
GRAY = (127, 127, 127)
LEAST_TOKENS = 4
"""Fewest tokens of an image: one of a row, and three delimiters."""


@dataclass(frozen=True)
class DeepseekV41Processor:
    """
    Attributes:
        patch: side of a patch in pixels. merge: patches of a token in one direction.
        least: fewest pixels of a scaled image. most: tokens of an image, with its delimiters.
        widest: wider images (width / height) are squeezed to this; None: no limit.
    """

    patch: int = 14
    merge: int = 3
    least: int = 544**2
    most: int = 1024
    widest: float | None = None
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> DeepseekV41Processor | None:
        """Args: fields: of the image processor; published folders have none. config: config.json. None: another
        model's."""
        if config.get("model_type") != MODEL:
            return None
        given = {**(config.get("vision_config") or {}), **fields}
        size = fields.get("size") or {}
        return cls(
            patch=int(given.get("patch_size", cls.patch)),
            merge=int(given.get("downsample_ratio", cls.merge)),
            least=int(size.get("shortest_edge") or given.get("min_pixels", cls.least)),
            most=int(size.get("longest_edge") or given.get("max_image_tokens", cls.most)),
            widest=given.get("max_wh_ratio"),
            mean=tuple(given.get("image_mean", cls.mean)),
            std=tuple(given.get("image_std", cls.std)),
        )

    def within(self, max_pixels: int | None) -> DeepseekV41Processor:
        """With another limit of an image's pixels."""
        if max_pixels is None:
            return self
        most = min(self.most, max(LEAST_TOKENS, max_pixels // self._cell**2))
        return replace(self, most=most, least=min(self.least, max_pixels))

    @property
    def _cell(self) -> int:
        """Side of a token in pixels."""
        return self.patch * self.merge

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return (self.most - LEAST_TOKENS + 1) * self.merge**2

    def sizes(self, width: float, height: int) -> tuple[int, int]:
        """(width, height) to which an image is scaled and padded, in pixels.

        Raises:
            ValueError: no size of its proportions has few enough tokens.
        """
        if self.widest is not None:
            width = min(width, height * self.widest)
        if width * height < self.least:
            scale = (self.least / (width * height)) ** 0.5
            width, height = int(width * scale), int(height * scale)
        whole = math.ceil(width / self.patch) * self.patch, math.ceil(height / self.patch) * self.patch
        if self._num_tokens(*whole) > self.most:
            whole = self._smaller(width, height)
        if self._num_tokens(*whole) > self.most or not all(whole):
            raise ValueError(f"{width} x {height} pixels have no size of at most {self.most} tokens")
        return whole

    def _num_tokens(self, width: int, height: int) -> int:
        columns, rows = (math.ceil(side / self._cell) for side in (width, height))
        return rows * (columns + 1) + 2

    def _smaller(self, width: float, height: int) -> tuple[int, int]:
        """The largest size of these proportions, in whole patches, whose tokens are within the limit: of w columns and
        h = w height / width rows, h (w + 1) + 2."""
        ratio = height / width
        columns = math.sqrt((self.most - 2) / ratio + 0.25) - 0.5
        rows = columns * ratio
        if columns < 1.0:
            return self._cell, (self.most - 2) // 2 * self._cell
        if rows < 1.0:
            return (self.most - 3) * self._cell, self._cell
        scale = min(math.floor(columns) * self._cell / width, math.floor(rows) * self._cell / height)
        return math.floor(width * scale / self.patch) * self.patch, math.floor(height * scale / self.patch) * self.patch

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, np.ndarray]:
        """One PIL image in RGB -> `pixel_values` [P, 3 * patch * patch] float32 by row, `image_grid_thw` [1, 3].

        Raises:
            ValueError: as `sizes`.
        """
        import numpy as np  # not in the process of the server, which imports this file for the sizes
        from PIL import ImageOps

        (image,) = images
        size = self.sizes(*image.size)
        if self.widest is not None and image.width >= self.widest * image.height:
            scaled = image.resize(size)
        else:
            scaled = ImageOps.pad(image, size, color=GRAY)
        return patch_rows(np.array(scaled, dtype=np.float32), self.patch, self.mean, self.std)
