"""Llama 4's image processor, which transformers has for torchvision only: an image is scaled into a canvas of tiles of
its proportions, black beyond its edges; an image of several tiles has a tile of the whole image after them."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.models.vision.tiles import TileProcessor

if TYPE_CHECKING:
    import numpy as np

MODEL = "llama4"


@dataclass(frozen=True)
class Llama4Processor(TileProcessor):
    """
    Attributes:
        enlarges: small images too fill the largest canvas.
    """

    tile: int = 336
    most: int = 16
    enlarges: bool = False

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> Llama4Processor | None:
        """Args: fields: of the image processor. config: config.json, whose tiles the tower has. None: another model's.

        Raises:
            ConfigError: tiles of another size than the tower's.
        """
        if config.get("model_type") != MODEL:
            return None
        given = {name: value for name, value in fields.items() if value is not None}
        vision, size = config.get("vision_config") or {}, given.get("size", {})
        tile, own = int(size.get("height", cls.tile)), int(vision.get("image_size", 448))
        if tile != own or int(size.get("width", tile)) != own:
            raise ConfigError(f"preprocessor_config.json: size {dict(size)} is not vision_config.image_size {own}")
        return cls(
            patch=int(vision.get("patch_size", 14)),
            tile=tile,
            most=int(given.get("max_patches", cls.most)),
            enlarges=bool(given.get("resize_to_max_canvas")),
            **cls.values_of(given),
        )

    def canvases(self) -> list[tuple[int, int]]:
        """(rows, columns) of tiles, those of equal proportions one after the other: ties take the first."""
        by_ratio: dict[float, list[tuple[int, int]]] = {}
        for count in range(self.most, 0, -1):
            for rows in range(1, count + 1):
                if count % rows == 0:
                    by_ratio.setdefault(rows**2 / count, []).append((rows, count // rows))
        return [canvas for same in by_ratio.values() for canvas in same]

    def sizes(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(rows, columns) of tiles of an image, and its scaled (width, height). Factors are rounded to float32 where
        transformers' are tensors."""
        import numpy as np  # not in the process of the server, which imports this file for the limit

        canvases = self.canvases()
        sides = np.array(canvases, dtype=np.float32) * self.tile / np.array((height, width), dtype=np.float32)
        factors = sides.min(1)
        larger = factors[factors >= 1]
        best = factors.max() if not len(larger) else larger.max() if self.enlarges else larger.min()
        canvas = min((canvases[i] for i in np.flatnonzero(factors == best)), key=math.prod)
        limits: list[Any] = [np.float32(count * self.tile) for count in canvas]
        if not self.enlarges:  # a small image grows to one tile at most
            known = [max(length, self.tile) for length in (height, width)]
            limits = [most if most < length else length for most, length in zip(limits, known)]
        across, down = limits[1] / width, limits[0] / height
        if across < down:
            scaled = int(limits[1]), min(math.floor(height * across), int(limits[0]))
        else:
            scaled = min(math.floor(width * down), int(limits[1])), int(limits[0])
        return canvas, (max(1, scaled[0]), max(1, scaled[1]))

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, np.ndarray]:
        """One PIL image in RGB -> `pixel_values` [P, 3 * patch * patch] float32, tile by tile and in a tile by row,
        `image_grid_thw` [1, 3]: the patches of the canvas."""
        import numpy as np

        (image,) = images
        (rows, columns), size = self.sizes(*image.size)
        canvas = np.zeros((rows * self.tile, columns * self.tile, 3), dtype=np.uint8)
        canvas[: size[1], : size[0]] = np.asarray(image.resize(size, self._filter))
        patches = self.patches(self.tiles(canvas, image))
        values = np.stack([self._values(*each)[patches[:, i]] for i, each in enumerate(zip(self.mean, self.std))], 1)
        return {"pixel_values": values.reshape(len(patches), -1), "image_grid_thw": self.grid(rows, columns)}

    def _values(self, mean: float, std: float) -> np.ndarray:
        """The normalized value of each number of a pixel, rounded to bfloat16 in each step: [256] float32."""
        import numpy as np

        values = _rounded(np.arange(256, dtype=np.float32) * np.float32(self.scale))
        less, factor = _rounded(np.array((mean, std), dtype=np.float32))
        return _rounded(_rounded(values - less) / factor)


def _rounded(values: np.ndarray) -> np.ndarray:
    """float32 -> the nearest bfloat16 (ties to even), as float32."""
    import numpy as np

    bits = np.ascontiguousarray(values, dtype=np.float32).view(np.uint32)
    rounded = (bits + 0x7FFF + ((bits >> 16) & 1)) & np.uint32(0xFFFF0000)
    return rounded.astype(np.uint32).view(np.float32)
