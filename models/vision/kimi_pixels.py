"""The image processor of Kimi K2.5, which transformers has for torchvision only, and of Kimi K3: an image keeps its
size up to a number of patches, and is padded to whole tokens (source: NaViT, arXiv 2307.06304; the checkpoint's
`media_proc_cfg`). Kimi K3 puts transparent pixels on a background."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from moe_engine.errors import ConfigError
from moe_engine.models.vision.pixel_patches import patch_rows

if TYPE_CHECKING:
    import numpy as np

TYPE = "Kimi_K25ImageProcessor"


PLAIN = {"white": 255, "black": 0, "gray": 128}
"""Backgrounds of one gray value."""
CHESSBOARD = {"square_size": 16, "white_value": 255, "gray_value": 200, "square_on_top_left": True}
"""Defaults of the other background's fields."""


@dataclass(frozen=True)
class Background:
    """Behind transparent pixels: squares of two gray values; `before`: an image gets it before it is resized."""

    square: int
    white: int
    gray: int
    white_first: bool
    before: bool

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Background | None:
        """None: `media_proc_cfg` has none. Raises ConfigError: an unknown pattern."""
        own = fields.get("transparent_bg_config")
        if not isinstance(own, Mapping):
            return None
        pattern, before = own.get("pattern", "black"), fields.get("transparent_bg_fill_stage") != "after_resize"
        if pattern in PLAIN:
            return cls(1, PLAIN[pattern], PLAIN[pattern], True, before)
        if pattern != "chessboard":
            raise ConfigError(f"transparent_bg_config.pattern {pattern!r} is not supported; supported: chessboard")
        given = {name: own.get(f"chessboard_{name}", value) for name, value in CHESSBOARD.items()}
        square, white, gray = (int(given[name]) for name in ("square_size", "white_value", "gray_value"))
        return cls(square, white, gray, bool(given["square_on_top_left"]), before)

    def behind(self, image: Any) -> Any:
        """A PIL image in RGBA -> one in RGB."""
        import numpy as np
        from PIL import Image

        values = np.asarray(image)
        rows, columns = (np.arange(size) // self.square for size in values.shape[:2])
        is_gray = (rows[:, None] + columns) % 2 == self.white_first
        board = np.where(is_gray, self.gray, self.white).astype(np.float32)[..., None]
        alpha = values[..., 3:].astype(np.float32) / 255
        return Image.fromarray((alpha * values[..., :3] + (1 - alpha) * board).astype(np.uint8))


@dataclass(frozen=True)
class KimiProcessor:
    """The fields of preprocessor_config.json, in the publisher's or transformers' spelling; lengths in patches."""

    patch: int = 14
    merge: int = 2
    most: int = 16384
    """Patches of an image."""
    side: int = 512
    """Patches of a row or column."""
    mean: tuple[float, ...] = (0.5, 0.5, 0.5)
    std: tuple[float, ...] = (0.5, 0.5, 0.5)
    background: Background | None = None
    """None: images are read without transparency."""

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> KimiProcessor | None:
        """None: the file is another processor's."""
        own = fields.get("media_proc_cfg")
        if not isinstance(own, Mapping) and fields.get("image_processor_type") != TYPE:
            return None
        given = own if isinstance(own, Mapping) else fields
        size = given.get("size") or {}
        return cls(
            patch=int(given.get("patch_size", 14)),
            merge=int(given.get("merge_kernel_size", given.get("merge_size", 2))),
            most=int(given.get("in_patch_limit", given.get("max_patches", 16384))),
            side=int(given.get("patch_limit_on_one_side", size.get("max_height", 512))),
            mean=tuple(given.get("image_mean", cls.mean)),
            std=tuple(given.get("image_std", cls.std)),
            background=Background.of(given),
        )

    def within(self, max_pixels: int | None) -> KimiProcessor:
        """With another limit of an image's pixels."""
        return self if max_pixels is None else replace(self, most=max(1, max_pixels // self.patch**2))

    @property
    def reads_alpha(self) -> bool:
        """Whether transparent images are to be in RGBA."""
        return self.background is not None

    @property
    def max_patches(self) -> int:
        """Patches of the largest image, with its padding."""
        return self.most + 2 * self.merge * self.side + self.merge**2

    def sizes(self, width: int, height: int) -> tuple[tuple[int, int], tuple[int, int]]:
        """(width, height) to which an image is resized, and to which it is padded, in pixels."""
        columns, rows = max(1, width // self.patch), max(1, height // self.patch)
        limit = self.side * self.patch
        scale = min(1.0, math.sqrt(self.most / (columns * rows)), limit / width, limit / height)
        resized = [min(max(1, int(length * scale)), limit) for length in (width, height)]
        token = self.patch * self.merge
        padded = [-(-length // token) * token for length in resized]
        return (resized[0], resized[1]), (padded[0], padded[1])

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, np.ndarray]:
        """One PIL image in RGB, or RGBA with a background -> `pixel_values` [P, 3 * patch * patch] float32 by row,
        `image_grid_thw` [1, 3]."""
        import numpy as np  # not in the process of the server, which imports this file for the sizes
        from PIL import Image

        (image,) = images
        resized, padded = self.sizes(*image.size)
        behind = self.background if image.mode == "RGBA" else None
        if behind is not None and behind.before:
            image = behind.behind(image)
        if resized != image.size:
            image = image.resize(resized, Image.Resampling.BICUBIC)
        if behind is not None and not behind.before:
            image = behind.behind(image)
        pixels = np.zeros((padded[1], padded[0], 3), dtype=np.float32)
        pixels[: resized[1], : resized[0]] = np.asarray(image)
        return patch_rows(pixels, self.patch, self.mean, self.std)
