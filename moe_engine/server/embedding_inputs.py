"""Inputs of /v1/embeddings that are rendered by the chat template: texts with images (SGLang's objects) and
conversations (vLLM's `messages`)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.errors import InputError
from moe_engine.media.settings import ImageSource
from moe_engine.server.openai.images import check_images, take_images
from moe_engine.server.openai.messages import render_prompt
from moe_engine.server.openai.types import EmbeddingRequest
from moe_engine.server.state import ServerState


@dataclass
class _Options:
    """`openai.messages.Options` of an object, which has no options."""

    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = True


def rendered_input(state: ServerState, req: EmbeddingRequest, messages: list[dict[str, Any]] | None) -> dict[str, Any]:
    """Fields of `GenerateInput`: texts and their images. Empty if `input` has plain texts or token ids.

    Args:
        messages: those of the request, with the fields that the types lack.

    Raises:
        InputError: names the field.
    """
    if (req.input is None) == (messages is None):
        raise InputError.at("input", "give exactly one of input and messages")
    if messages is not None:
        plain, images = take_images(state, messages)
        return _fields([render_prompt(state, plain, req)], [images], "messages", is_batch=False)
    items = req.input
    if not isinstance(items, list) or not any(isinstance(item, dict) for item in items):
        return {}
    found = [_item(state, item, f"input[{i}]") for i, item in enumerate(items)]
    return _fields([text for text, _ in found], [images for _, images in found], "input", is_batch=True)


def _item(state: ServerState, item: Any, field: str) -> tuple[str, list[ImageSource]]:
    """The prompt of {"text", "image"} and its images. Without a chat template the text is the prompt."""
    if not isinstance(item, dict):
        raise InputError.at(field, "the other inputs are objects; give all as objects, or all as texts")
    text, image = item.get("text"), item.get("image")
    if item.get("video"):
        raise InputError.at(f"{field}.video", "videos are not supported; send text and images")
    if not text and not image:
        raise InputError.at(field, "needs text, image or both")
    images = [ImageSource(image, f"{field}.image")] if image else []
    if images:
        check_images(state, images[0].field)
    if state.chat_template is None:
        return text or "", images
    content: Any = text
    if images:
        content = [{"type": "image"}, *([{"type": "text", "text": text}] if text else [])]
    return render_prompt(state, [{"role": "user", "content": content}], _Options()), images


def _fields(texts: list[str], images: list[list[ImageSource]], field: str, *, is_batch: bool) -> dict[str, Any]:
    sources: Any = images if is_batch else images[0]
    return {
        "text": texts if is_batch else texts[0],
        "input_ids": None,
        "image_data": sources if any(images) else None,
        "add_special_tokens": False,
        "text_field": field,
    }
