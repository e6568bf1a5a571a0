"""Command A Vision's image processor: transformers' needs torchvision. An image is scaled to a canvas of whole tiles;
several tiles have one of the whole image after them.

Legend: P patches of all tiles.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.models.vision.tiles import TileProcessor

if TYPE_CHECKING:
    import numpy as np

MODEL = "cohere2_vision"


@dataclass(frozen=True)
class Cohere2Processor(TileProcessor):
    """Images are scaled to at most `most` tiles of `tile` pixels, without keeping their proportions."""

    patch: int = 16
    tile: int = 512
    most: int = 12
    resample: int = 3
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
            **cls.values_of(given),
        )

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

        (image,) = images
        rows, columns = self.canvas(*image.size)
        canvas = np.asarray(image.resize((columns * self.tile, rows * self.tile), self._filter))
        mean, std = (np.array(own, dtype=np.float32) for own in (self.mean, self.std))
        pixels = (self.tiles(canvas, image) * np.float32(self.scale) - mean) / std
        values = self.patches(pixels)
        return {"pixel_values": values.reshape(len(values), -1), "image_grid_thw": self.grid(rows, columns)}
