"""Pixtral's image processor: an image is scaled down to a longest side, and its sides are scaled up to whole tokens
(source: arXiv 2410.07073). transformers' gives whole images, not patches, and gets the token's size from its caller."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_engine.models.vision.pixel_patches import patch_rows

if TYPE_CHECKING:
    import numpy as np

TYPES = ("PixtralImageProcessor", "PixtralImageProcessorFast", "PixtralImageProcessorPil")


@dataclass(frozen=True)
class PixtralProcessor:
    """
    Attributes:
        patch: side of a patch in pixels. merge: patches of a token in one direction. longest: most pixels of a side.
    """

    patch: int
    merge: int
    longest: int = 1024
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> PixtralProcessor | None:
        """Args: fields: of the image processor. config: config.json, whose sizes the tower has. None: another one's."""
        if fields.get("image_processor_type") not in TYPES:
            return None
        vision, size = config.get("vision_config") or {}, fields.get("size") or {}
        return cls(
            patch=int(vision.get("patch_size", 16)),
            merge=int(config.get("spatial_merge_size", 1 if config.get("model_type") == "llava" else 2)),
            longest=int(size.get("longest_edge") or max(size.get("height", 1024), size.get("width", 1024))),
            mean=tuple(fields.get("image_mean") or cls.mean),
            std=tuple(fields.get("image_std") or cls.std),
        )

    @classmethod
    def native(cls, config: Mapping[str, Any]) -> PixtralProcessor | None:
        """The processor for Mistral's own files, which have only the tower's settings; None: the model has no tower."""
        if (vision := config.get("vision_config")) is None:
            return None
        return cls(vision["patch_size"], config["spatial_merge_size"], vision["image_size"])

    def within(self, max_pixels: int | None) -> PixtralProcessor:
        """With a longest side that keeps this limit of an image's pixels."""
        if max_pixels is None:
            return self
        token = self.patch * self.merge
        return replace(self, longest=max(token, math.isqrt(max_pixels) // token * token))

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return (-(-self.longest // (self.patch * self.merge)) * self.merge) ** 2

    def sizes(self, width: int, height: int) -> tuple[int, int]:
        """(width, height) to which an image is scaled."""
        ratio, token = max(width / self.longest, height / self.longest), self.patch * self.merge
        if ratio > 1:
            width, height = (max(1, math.floor(length / ratio)) for length in (width, height))
        return -(-width // token) * token, -(-height // token) * token

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, np.ndarray]:
        """One PIL image in RGB -> `pixel_values` [P, 3 * patch * patch] float32 by row, `image_grid_thw` [1, 3]."""
        import numpy as np  # not in the process of the server, which imports this file for the sizes
        from PIL import Image

        (image,) = images
        size = self.sizes(*image.size)
        pixels = np.array(image.resize(size, Image.Resampling.BICUBIC), dtype=np.float32)
        return patch_rows(pixels, self.patch, self.mean, self.std)
