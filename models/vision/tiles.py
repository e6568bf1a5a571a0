"""The common part of image processors of our own that cut images into tiles: several tiles have one of the whole image
after them.

Legend: B tiles, P patches of all tiles.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any, Self

if TYPE_CHECKING:
    import numpy as np


@dataclass(frozen=True)
class TileProcessor:
    """
    Attributes:
        patch, tile: sides in pixels. most: tiles of a canvas. resample: Pillow's number of the filter.
    """

    patch: int
    tile: int
    most: int
    resample: int = 2
    scale: float = 1 / 255
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)

    @classmethod
    def values_of(cls, given: Mapping[str, Any]) -> dict[str, Any]:
        """Filter and normalization by preprocessor_config.json."""
        return {
            "resample": int(given.get("resample", cls.resample)),
            "scale": float(given.get("rescale_factor", cls.scale)),
            "mean": tuple(given.get("image_mean", cls.mean)),
            "std": tuple(given.get("image_std", cls.std)),
        }

    def within(self, max_pixels: int | None) -> Self:
        """With another limit of a canvas's pixels."""
        return self if max_pixels is None else replace(self, most=max(1, min(self.most, max_pixels // self.tile**2)))

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return (self.most + (self.most > 1)) * self._side**2

    @property
    def _side(self) -> int:
        """Patches of a tile in one direction."""
        return self.tile // self.patch

    def tiles(self, canvas: np.ndarray, image: Any) -> np.ndarray:
        """canvas [height, width, 3] of whole tiles, the PIL image on it -> [B, tile, tile, 3], row by row."""
        import numpy as np  # not in the process of the server, which imports the processors for the limits

        (height, width, _), tile = canvas.shape, self.tile
        tiles = canvas.reshape(height // tile, tile, width // tile, tile, 3).swapaxes(1, 2).reshape(-1, tile, tile, 3)
        if len(tiles) == 1:
            return tiles
        return np.concatenate((tiles, np.asarray(image.resize((tile, tile), self._filter))[None]))

    def patches(self, tiles: np.ndarray) -> np.ndarray:
        """[B, tile, tile, 3] -> [P, 3, patch * patch], tile by tile and in a tile by row."""
        side, patch = self._side, self.patch
        parts = tiles.reshape(len(tiles), side, patch, side, patch, 3).transpose(0, 1, 3, 5, 2, 4)
        return parts.reshape(len(tiles) * side**2, 3, patch**2)

    def grid(self, rows: int, columns: int) -> np.ndarray:
        """`image_grid_thw` [1, 3] of a canvas of so many tiles: its patches."""
        import numpy as np

        return np.array([[1, rows * self._side, columns * self._side]])

    @property
    def _filter(self) -> Any:
        from PIL import Image

        return Image.Resampling(self.resample)
