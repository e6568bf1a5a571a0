"""Image processors of GLM-5.3-Flash and GLM-4.1V: transformers', whose bounds are numbers of tokens, or pixels of all
frames of a patch."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any, ClassVar

TYPE = "Glm5NextImageProcessor"
VOLUME_TYPES = ("Glm4vImageProcessor", "Glm46VImageProcessor")
"""Processors of GLM-4.1V and GLM-4.5V, and of GLM-4.6V: they compute the same."""
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


@dataclass(frozen=True)
class Glm4vProcessor:
    """Images are scaled to at most `most` pixels, and to at least `least`, each counted in `frames` frames. `settings`:
    the other arguments of transformers' processor; `patch`: side of a patch in pixels."""

    least_by_default: ClassVar[int] = 112 * 112
    most_by_default: ClassVar[int] = 28 * 28 * 15000
    settings: Mapping[str, Any]
    patch: int
    frames: int
    least: int
    most: int

    @classmethod
    def of(cls, fields: Mapping[str, Any]) -> Glm4vProcessor | None:
        """By preprocessor_config.json; None: another processor."""
        if str(fields.get("image_processor_type")).removesuffix("Fast").removesuffix("Pil") not in VOLUME_TYPES:
            return None
        settings = {name: value for name, value in fields.items() if name not in (*_OWN, "size")}
        size = fields.get("size") or {}
        least, most = size.get("shortest_edge", cls.least_by_default), size.get("longest_edge", cls.most_by_default)
        patch, frames = settings.get("patch_size", 14), settings.get("temporal_patch_size", 2)
        return cls(settings, int(patch), int(frames), int(least), int(most))

    def within(self, max_pixels: int | None) -> Glm4vProcessor:
        """With another limit of an image's pixels, of one frame."""
        if max_pixels is None:
            return self
        most = min(self.most, max_pixels * self.frames)
        return replace(self, most=most, least=min(self.least, most))

    @property
    def max_patches(self) -> int:
        """Patches of the largest image."""
        return self.most // self.frames // self.patch**2

    def __call__(self, images: Sequence[Any], return_tensors: str = "np") -> Any:
        """One PIL image in RGB -> `pixel_values` [P, patch width] float32, by token, and `image_grid_thw` [1, 3]."""
        from transformers.models.glm4v.image_processing_pil_glm4v import Glm4vImageProcessorPil

        size = {"shortest_edge": self.least, "longest_edge": self.most}
        return Glm4vImageProcessorPil(**self.settings, size=size)(images=images, return_tensors=return_tensors)
