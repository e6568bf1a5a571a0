"""GLM-5.3-Flash's image processor: transformers', whose bounds are numbers of tokens of two frames."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

TYPE = "Glm5NextImageProcessor"
_OWN = ("image_processor_type", "auto_map", "processor_class")


@dataclass(frozen=True)
class GlmProcessor:
    """Images are scaled to at most `most` tokens, and to at least `least`. `settings`: the other arguments of
    transformers' processor; `cell`: side of a token in pixels."""

    settings: Mapping[str, Any]
    cell: int
    merge: int
    least: int
    most: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> GlmProcessor | None:
        """By preprocessor_config.json; None: another processor."""
        if str(fields.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil") != TYPE:
            return None
        settings = {name: value for name, value in fields.items() if name not in _OWN}
        patch, merge = int(settings.get("patch_size", 14)), int(settings.get("merge_size", 2))
        cell = patch * merge * int(settings.get("patch_expand_factor", 1))
        least, most = settings.pop("min_image_tokens", 16), settings.pop("max_image_tokens", 8000)
        return cls(settings, cell, merge, int(least), int(most))

    def within(self, max_pixels: int | None) -> GlmProcessor:
        """With another limit of an image's pixels."""
        if max_pixels is None:
            return self
        most = max(1, min(self.most, max_pixels // self.cell**2))
        return replace(self, most=most, least=min(self.least, most))

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return self.most * self.merge**2

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> Any:
        """One PIL image in RGB -> `pixel_values` [P, patch width] float32, by token, and `image_grid_thw` [1, 3]."""
        from transformers.models.glm5_next.image_processing_pil_glm5_next import Glm5NextImageProcessorPil

        bounds = {"min_image_tokens": self.least, "max_image_tokens": self.most}
        return Glm5NextImageProcessorPil(**self.settings, **bounds)(images=images, return_tensors=return_tensors)
