"""Images of prompts: the images of a request, and prompts with the tokens of their images."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineInfo
from moe_engine.media.images import Images, SizeTexts, place_images
from moe_engine.media.settings import ImageSource, MediaSettings
from moe_engine.tokenizer.tokenizer import Tokenizer
from moe_engine.types.image_tokens import ImageTokens, keyed_ids

FIELD = "image_data"


def sources_of(image_data: Any, index: int, count: int, is_batch: bool) -> list[ImageSource]:
    """The images of one prompt: `image_data` is one image, the images of one prompt, or for a batch a list with the
    image or images of each prompt.

    Raises:
        InputError: a value of another kind.
    """
    if not image_data:
        return []
    if is_batch:
        if not isinstance(image_data, list) or len(image_data) != count:
            raise InputError.at(FIELD, f"a batch of {count} prompts needs a list with the images of each")
        image_data = image_data[index]
    own = image_data if isinstance(image_data, list) else [image_data]
    field = f"{FIELD}[{index}]" if is_batch else FIELD
    several = len(own) > 1
    return [_source(one, f"{field}[{i}]" if several else field) for i, one in enumerate(own) if one is not None]


def _source(value: Any, field: str) -> ImageSource:
    if isinstance(value, ImageSource):
        return value
    if not isinstance(value, str) or not value:
        raise InputError.at(field, f"expected an address, a path or base64, got {value!r:.80}")
    return ImageSource(value, field)


def text_only(model_name: str, field: str) -> InputError:
    """The refusal of an image by a model without a vision tower."""
    return InputError.at(field, f"{model_name} takes text alone; leave the images out")


class ImagePrompts:
    """Images of requests; their readers and processors start with the first one."""

    def __init__(self, info: EngineInfo, settings: MediaSettings, tokenizer: Tokenizer | None = None) -> None:
        self._info, self._settings = info, settings
        marks = None if info.vision is None else info.vision.size_marks
        self._sizes: SizeTexts | None = None
        if marks is not None and tokenizer is not None:
            encode = partial(tokenizer.encode, add_special_tokens=False)
            before, behind = (encode(mark) for mark in marks)
            if len(before) == len(behind) == 1:  # tokens of the vocabulary
                self._sizes = SizeTexts(before[0], behind[0], encode)
        self._images: Images | None = None

    def check(self, ids: Sequence[int], sources: Sequence[ImageSource], is_joined: bool, field: str) -> None:
        """Checks a prompt before its images are read; `is_joined`: it continues a session.

        Raises:
            InputError: names the field, `field` for the prompt's.
        """
        vision = self._info.vision
        if vision is None:
            if sources:
                raise text_only(self._info.served_model_name, sources[0].field)
            return
        if not sources:
            if vision.image_token in ids or vision.video_token in ids:
                raise InputError.at(
                    field,
                    "the prompt has a placeholder of an image or video, and the request has no images; leave "
                    f"the placeholder out, or send the image ({FIELD}, or an image_url part of a message)",
                )
            return
        if is_joined:
            raise InputError(f"{sources[0].field}: not available yet in sessions; leave out session_params")
        most = self._settings.max_images
        if len(sources) > most:
            surplus = sources[most].field
            words = f"image {most + 1} of {len(sources)}; this server takes {most} in a request"
            raise InputError.at(surplus, f"{words} (--limit-mm-data-per-request)")

    def written(self, text: str, sources: Sequence[ImageSource]) -> str:
        """A text with its placeholders written out (`VisionConfig.written`), where they are not already."""
        vision = self._info.vision
        if not sources or vision is None or vision.written is None:
            return text
        short, whole = vision.written
        marker = "\0"
        return text.replace(whole, marker).replace(short, whole).replace(marker, whole)

    async def place(
        self, ids: Sequence[int], sources: Sequence[ImageSource], field: str
    ) -> tuple[list[int], list[ImageTokens]]:
        """The prompt with the tokens of its images, and the images. Raises InputError."""
        vision = self._info.vision
        assert vision is not None
        if self._images is None:
            self._images = Images(vision, self._info.model_path, self._settings)
        return place_images(ids, await self._images.load(sources), vision, field, self._sizes)

    async def place_all(self, prompts: Sequence[Any], field: str) -> list[Any]:
        """`place` for the prompts (`prompts.Prompt`) that have images; returns these."""
        chosen = [prompt for prompt in prompts if prompt.sources]
        found = await asyncio.gather(*(self.place(prompt.ids, prompt.sources, field) for prompt in chosen))
        for prompt, (ids, images) in zip(chosen, found):
            prompt.ids, prompt.images, prompt.sources = ids, images, []
        return chosen

    def close(self) -> None:
        if self._images is not None:
            self._images.close()


def engine_ids(ids: list[int], images: Sequence[ImageTokens]) -> list[int]:
    """The prompt's ids as used by the engine's caches."""
    return keyed_ids(ids, images) if images else ids
