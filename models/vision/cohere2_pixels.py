"""Command A Vision's image processor: transformers' needs torchvision. An image is scaled to a canvas of whole tiles;
several tiles have one of the whole image after them.

Legend: P patches of all tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError

if TYPE_CHECKING:
    import numpy as np

MODEL = "cohere2_vision"


@dataclass(frozen=True)
class Cohere2Processor:
    """Images are scaled to at most `most` tiles of `tile` pixels, without keeping their proportions. `patch`: side of a
    patch; `resample`: Pillow's filter."""

    patch: int = 16
    tile: int = 512
    most: int = 12
    resample: int = 3
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.48145466, 0.4578275, 0.40821073)
    std: tuple[float, ...] = (0.26862954, 0.26130258, 0.27577711)

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> Cohere2Processor | None:
        """Args: fields: of the image processor. config: config.json, whose tiles the tower has. None: another model's,
        or a text model alone.

        Raises:
            ConfigError: tiles of another size than the tower's.
        """
        vision = config.get("vision_config")
        if config.get("model_type") != MODEL or not vision:
            return None
        given = {name: value for name, value in fields.items() if value is not None}
        size, own = given.get("size", {}), int(vision.get("image_size", cls.tile))
        if int(size.get("height", cls.tile)) != own or int(size.get("width", cls.tile)) != own:
            raise ConfigError(f"preprocessor_config.json: size {dict(size)} is not vision_config.image_size {own}")
        return cls(
            patch=int(vision.get("patch_size", cls.patch)),
            tile=own,
            most=int(given.get("max_patches", cls.most)) if given.get("crop_to_patches", True) else 1,
            resample=int(given.get("resample", cls.resample)),
            scale=float(given.get("rescale_factor", cls.scale)),
            mean=tuple(given.get("image_mean", cls.mean)),
            std=tuple(given.get("image_std", cls.std)),
        )

    def within(self, max_pixels: int | None) -> Cohere2Processor:
        """With another limit of a canvas's pixels."""
        return self if max_pixels is None else replace(self, most=max(1, min(self.most, max_pixels // self.tile**2)))

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return (self.most + (self.most > 1)) * (self.tile // self.patch) ** 2

    def canvas(self, width: int, height: int) -> tuple[int, int]:
        """(rows, columns) of tiles of an image: that which enlarges it least, or else shrinks it least; of several the
        smallest, then the narrowest."""
        sides = range(1, self.most + 1)
        shapes = [(rows, columns) for columns in sides for rows in sides if rows * columns <= self.most]
        shapes.sort(key=lambda shape: shape[0] * shape[1])
        factors = [min(columns * self.tile / width, rows * self.tile / height) for rows, columns in shapes]
        larger = [factor for factor in factors if factor >= 1]
        return shapes[factors.index(min(larger) if larger else max(factors))]

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, np.ndarray]:
        """One PIL image in RGB -> `pixel_values` [P, 3 * patch * patch] float32, tile by tile and in a tile by row,
        `image_grid_thw` [1, 3]: the patches of the canvas."""
        import numpy as np
        from PIL import Image

        (image,) = images
        rows, columns = self.canvas(*image.size)
        tile, side, filter = self.tile, self.tile // self.patch, Image.Resampling(self.resample)
        canvas = np.asarray(image.resize((columns * tile, rows * tile), filter))
        tiles = canvas.reshape(rows, tile, columns, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        if len(tiles) > 1:
            tiles = np.concatenate((tiles, np.asarray(image.resize((tile, tile), filter))[None]))
        mean, std = (np.array(own, dtype=np.float32) for own in (self.mean, self.std))
        pixels = (tiles * np.float32(self.scale) - mean) / std
        parts = pixels.reshape(len(tiles), side, self.patch, side, self.patch, 3).transpose(0, 1, 3, 5, 2, 4)
        grid = np.array([[1, rows * side, columns * side]])
        return {"pixel_values": parts.reshape(len(tiles) * side**2, -1), "image_grid_thw": grid}
