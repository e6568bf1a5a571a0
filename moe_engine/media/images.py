"""Images of requests for the frontend: read and processed off the event loop, results kept by content."""

from __future__ import annotations

import asyncio
import hashlib
from collections import OrderedDict
from collections.abc import Callable, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from moe_engine.errors import InputError
from moe_engine.media.addresses import MediaError
from moe_engine.media.image_process import ImageSetup
from moe_engine.media.processors import Processors
from moe_engine.media.read import read_media
from moe_engine.media.settings import ImageSource, MediaSettings
from moe_engine.models.config_sections.vision import VisionConfig
from moe_engine.types.image_tokens import ImageTokens, image_key

READERS, PROCESSES = 8, 2
"""Threads that read images, and processes (with a thread each) that process them."""
MAX_WAITING = 512
KEPT_BYTES = 128 << 20
"""Max pixels of cached processed images."""


@dataclass(frozen=True, slots=True)
class Picture:
    """A processed image."""

    key: bytes
    grid: tuple[int, int, int]
    pixels: bytes
    size: tuple[int, int] = (0, 0)
    """Width and height in pixels, as sent."""


@dataclass(frozen=True, slots=True)
class SizeTexts:
    """The texts of images' sizes, for models whose prompts have them (`VisionConfig.size_marks`).

    `before`, `behind`: ids of the marks; `encode`: a text -> its ids.
    """

    before: int
    behind: int
    encode: Callable[[str], list[int]]

    def of(self, ids: Sequence[int], picture: Picture) -> tuple[int, list[int]]:
        """How many last ids the size's ids come before, with these; `ids` end before a placeholder. No ids: the prompt
        has no marks, or a text between them."""
        if list(ids[-2:]) != [self.before, self.behind]:
            return 0, []
        return 1, self.encode("image {}x{}".format(*picture.size))


class Images:
    """Args:
    folder: of the checkpoint, with preprocessor_config.json.
    """

    def __init__(self, vision: VisionConfig, folder: str, settings: MediaSettings) -> None:
        self.vision, self._settings = vision, settings
        bounds = settings.min_pixels, settings.max_pixels
        self._processors = Processors(ImageSetup(folder, settings.max_decoded_pixels, *bounds))
        self._readers = ThreadPoolExecutor(READERS, thread_name_prefix="image reads")
        self._threads = ThreadPoolExecutor(PROCESSES, thread_name_prefix="images")
        self._known: OrderedDict[bytes, Picture] = OrderedDict()
        self._kept = 0
        self._running: dict[bytes, asyncio.Future[Picture]] = {}
        self._waiting = 0

    async def load(self, sources: Sequence[ImageSource]) -> list[Picture]:
        """All images of a prompt, in order.

        Raises:
            InputError: names the field of an image that cannot be read.
        """
        if self._waiting + len(sources) > MAX_WAITING:
            raise InputError("too many images wait to be read; try again later", status=503)
        self._waiting += len(sources)
        tasks = [asyncio.create_task(self._load(source)) for source in sources]
        try:
            return list(await asyncio.gather(*tasks))
        finally:
            self._waiting -= len(sources)
            for task in tasks:
                task.cancel()

    def close(self) -> None:
        for pool in (self._readers, self._threads):
            pool.shutdown(wait=False, cancel_futures=True)
        self._processors.close()

    async def _load(self, source: ImageSource) -> Picture:
        loop = asyncio.get_running_loop()
        try:
            data = await loop.run_in_executor(self._readers, read_media, source.text, self._settings)
            digest = hashlib.blake2b(data, digest_size=16).digest()
            if (found := self._known.get(digest)) is not None:
                self._known.move_to_end(digest)
                return found
            return await asyncio.shield(self._running.get(digest) or self._begin(digest, data))
        except MediaError as error:
            raise InputError.at(source.field, str(error)) from None

    def _begin(self, digest: bytes, data: bytes) -> asyncio.Future[Picture]:
        future = asyncio.get_running_loop().run_in_executor(self._threads, self._process, data)
        self._running[digest] = future
        future.add_done_callback(lambda done: self._ended(digest, done))
        return future

    def _process(self, data: bytes) -> Picture:
        done = self._processors.process(data)
        return Picture(image_key(done.pixels, done.grid), done.grid, done.pixels, done.size)

    def _ended(self, digest: bytes, done: asyncio.Future[Picture]) -> None:
        del self._running[digest]
        if done.cancelled() or done.exception() is not None:
            return
        self._known[digest] = done.result()
        self._kept += len(done.result().pixels)
        while self._kept > KEPT_BYTES:
            self._kept -= len(self._known.popitem(last=False)[1].pixels)


def place_images(
    ids: Sequence[int], pictures: Sequence[Picture], vision: VisionConfig, field: str, sizes: SizeTexts | None = None
) -> tuple[list[int], list[ImageTokens]]:
    """The prompt with the tokens of its images in the places of their placeholders, and the images. Tokens around an
    image (`VisionConfig.around`) are text, and so is its size (`sizes`).

    Raises:
        InputError: as many placeholders as images are needed; names `field`.
    """
    placeholders = [place for place, token in enumerate(ids) if token == vision.image_token]
    if len(placeholders) != len(pictures):
        raise InputError.at(
            field,
            f"{len(pictures)} images for {len(placeholders)} image placeholders in the prompt (token "
            f"{vision.image_token}); the prompt needs one for each image",
        )
    if pictures and vision.video_token in ids:
        raise InputError.at(
            field,
            f"{len(pictures)} images and token {vision.video_token} in the prompt, which needs a placeholder "
            f"(token {vision.image_token}) for each image, and takes no videos",
        )
    out: list[int] = []
    images, begin = [], 0
    before, behind = ([], []) if vision.around is None else ([token] for token in vision.around)
    for place, picture in zip(placeholders, pictures):
        out += [*ids[begin:place], *before]
        if sizes is not None:
            behind_size, written = sizes.of(out, picture)
            out[len(out) - behind_size : len(out) - behind_size] = written
        count = vision.num_tokens(picture.grid)
        images.append(ImageTokens(len(out), count, picture.key, picture.grid, picture.pixels))
        out += [*[vision.image_token] * count, *behind]
        begin = place + 1
    return out + list(ids[begin:]), images
