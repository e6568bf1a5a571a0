"""Gemma 3's image processor: transformers', whose pixels become patches."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import ConfigError

TYPE = "Gemma3ImageProcessor"
_OWN = ("image_processor_type", "auto_map", "processor_class", "image_seq_length")


@dataclass(frozen=True)
class Gemma3Processor:
    """Images are scaled to `size` x `size` pixels. `settings`: arguments of transformers' processor; `patch`: side of
    a patch."""

    settings: Mapping[str, Any]
    size: int
    patch: int

    @classmethod
    def of(cls, fields: Mapping[str, Any], config: Mapping[str, Any]) -> Gemma3Processor | None:
        """Args: fields: of the image processor. config: config.json, whose images the tower takes. None: another
        model's, or a text model alone.

        Raises:
            ConfigError: crops beside an image, or images of another size than the tower's.
        """
        vision = config.get("vision_config")
        if config.get("model_type") != "gemma3" or not vision:
            return None
        if fields.get("do_pan_and_scan"):
            raise ConfigError("preprocessor_config.json: do_pan_and_scan is not supported; set it to false")
        size, own = fields.get("size") or {}, int(vision.get("image_size", 224))
        if any(int(size.get(side, own)) != own for side in ("height", "width")):
            raise ConfigError(f"preprocessor_config.json: size {dict(size)} is not vision_config.image_size {own}")
        settings = {name: value for name, value in fields.items() if name not in _OWN}
        settings["size"] = {"height": own, "width": own}
        return cls(settings, own, int(vision.get("patch_size", 16)))

    def within(self, max_pixels: int | None) -> Gemma3Processor:
        """The same: images have one size."""
        return self

    @property
    def max_patches(self) -> int:
        """Patches of an image."""
        return (self.size // self.patch) ** 2

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> dict[str, Any]:
        """One PIL image in RGB -> `pixel_values` [P, 3 * patch * patch] float32 by row, `image_grid_thw` [1, 3]."""
        import numpy as np
        from transformers.models.gemma3.image_processing_pil_gemma3 import Gemma3ImageProcessorPil

        (pixels,) = Gemma3ImageProcessorPil(**self.settings)(images=images, return_tensors="np")["pixel_values"]
        side = self.size // self.patch
        parts = pixels.reshape(3, side, self.patch, side, self.patch).transpose(1, 3, 0, 2, 4)
        grid = np.array([[1, side, side]])
        return {"pixel_values": parts.reshape(side**2, -1).astype(np.float32), "image_grid_thw": grid}
