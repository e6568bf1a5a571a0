"""Image tokens of a prompt: their places, their content, and the ids that represent them in caches.

The placeholder token of a model is the same for all images. In `Request.prompt_ids` ids outside the vocabulary replace
it, computed from the content of the image, so that every cache keyed by token ids (radix cache, KV tiers) distinguishes
images. The worker restores the placeholder. Standard library only.
"""

from __future__ import annotations

import hashlib
from array import array
from collections.abc import Sequence
from dataclasses import dataclass, replace

FIRST_KEY = 1 << 30
"""Ids from here on represent image tokens; vocabularies end below. They fit into a signed 32-bit integer."""


@dataclass(frozen=True, slots=True)
class ImageTokens:
    """An image of a prompt, whose tokens are [start, start + count).

    Attributes:
        key: hash of pixels and grid.
        grid: frames, rows and columns of patches.
        pixels: float32 [patches, width of a patch] in native byte order, from the model's image processor; empty if
        they are not needed.
    """

    start: int
    count: int
    key: bytes
    grid: tuple[int, int, int]
    pixels: bytes = b""

    @property
    def stop(self) -> int:
        return self.start + self.count


def image_key(pixels: bytes | memoryview, grid: Sequence[int]) -> bytes:
    """`ImageTokens.key`."""
    return hashlib.blake2b(pixels, digest_size=16, person=repr(tuple(grid)).encode()[:16]).digest()


def keyed_ids(ids: Sequence[int], images: Sequence[ImageTokens]) -> list[int]:
    """The ids with those of image tokens replaced: token j of an image has 30 bits of a stream from its key."""
    out = list(ids)
    for image in images:
        words = array("I", hashlib.shake_128(image.key).digest(4 * image.count))
        out[image.start : image.stop] = [word & (FIRST_KEY - 1) | FIRST_KEY for word in words]
    return out


def needed_behind(images: Sequence[ImageTokens], cached: int) -> tuple[ImageTokens, ...]:
    """The images of a prompt whose first `cached` tokens are cached: without pixels if all tokens of the image are."""
    return tuple(replace(image, pixels=b"") if image.stop <= cached else image for image in images)
