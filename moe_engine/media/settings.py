"""Limits of the images that requests may name."""

from __future__ import annotations

from dataclasses import dataclass
from typing import NamedTuple


@dataclass(frozen=True, slots=True)
class MediaSettings:
    """A field with the name of a flag has that flag's value."""

    allowed_local_media_path: str | None = None
    allow_private_media_urls: bool = False
    media_fetch_timeout: float = 10.0
    max_media_mb: int = 32
    max_media_megapixels: int = 64
    min_pixels: int | None = None
    max_pixels: int | None = None
    """Bounds of a scaled image (--mm-process-config); None: those of the checkpoint."""
    allowed_media_domains: str = ""
    """Host names, with spaces between; empty: all."""
    max_images: int = 16
    """Max images of a request."""

    @property
    def max_bytes(self) -> int:
        return self.max_media_mb << 20

    @property
    def max_decoded_pixels(self) -> int:
        return self.max_media_megapixels << 20


class ImageSource(NamedTuple):
    """An image of a request: an address, a path or base64 data, and the client's name of the field."""

    text: str
    field: str = "image_data"
