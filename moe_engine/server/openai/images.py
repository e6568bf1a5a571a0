"""Images in the content parts of a conversation."""

from __future__ import annotations

from typing import Any

from moe_engine.errors import InputError
from moe_engine.frontend.image_prompts import text_only
from moe_engine.media.settings import ImageSource
from moe_engine.server.state import ServerState

TEXT_KINDS = {"text": "text", "input_text": "text", "output_text": "text", "refusal": "refusal"}
"""Field of the text by type; `input_text` and `output_text` are those of the Responses API."""
THOUGHT_KINDS = ("thinking", "reasoning")
OTHER_KINDS = {"video_url": "videos are", "input_audio": "audio is", "audio_url": "audio is", "file": "files are"}


class PlacedImage(dict[str, Any]):
    """The image part of a conversation that came in another API's form; `field`: its name there, for errors."""

    def __init__(self, address: str, field: str) -> None:
        super().__init__(type="image_url", image_url={"url": address})
        self.field = field


def take_images(state: ServerState, messages: list[dict[str, Any]]) -> tuple[list[dict[str, Any]], list[ImageSource]]:
    """The conversation with plain image parts for chat templates, and its images in order.

    Raises:
        InputError: names the part that is neither text nor an image, or the image that the model cannot take.
    """
    messages = [_with_reasoning(message, f"messages[{i}]") for i, message in enumerate(messages)]
    if not any(isinstance(message.get("content"), list) for message in messages):
        return messages, []
    sources: list[ImageSource] = []
    made = []
    for i, message in enumerate(messages):
        content = message.get("content")
        if isinstance(content, list):
            parts = [_part(part, f"messages[{i}].content[{j}]", sources) for j, part in enumerate(content)]
            message = {**message, "content": parts}
        made.append(message)
    if sources:
        check_images(state, sources[0].field)
    return made, sources


def _with_reasoning(message: dict[str, Any], where: str) -> dict[str, Any]:
    """An assistant's earlier reasoning in the field that templates read: of vLLM's `reasoning`, or of parts."""
    content, thoughts = message.get("content"), message.get("reasoning")
    if message["role"] != "assistant":
        return message
    if isinstance(content, list) and any(part["type"] in THOUGHT_KINDS for part in content):
        found = [part.get("thinking", part.get("text")) for part in content if part["type"] in THOUGHT_KINDS]
        if not all(isinstance(text, str) for text in found):
            raise InputError.at(f"{where}.content", "parts of reasoning need the text `thinking`")
        thoughts = "\n".join(found)
        message = {**message, "content": [part for part in content if part["type"] not in THOUGHT_KINDS]}
    if isinstance(thoughts, str) and message.get("reasoning_content") is None:
        message = {**message, "reasoning_content": thoughts}
    return message


def _part(part: dict[str, Any], where: str, sources: list[ImageSource]) -> dict[str, Any]:
    kind = part["type"]
    if kind in THOUGHT_KINDS:
        raise InputError.at(f"{where}.type", f"{kind} is part of the assistant's messages alone")
    if kind in OTHER_KINDS:
        raise InputError(f"{where}: {OTHER_KINDS[kind]} not supported; send text and images", field=f"{where}.type")
    if kind in TEXT_KINDS:
        name = TEXT_KINDS[kind]
        if not isinstance(part.get(name), str):
            raise InputError.at(f"{where}.{name}", "is required")
        return part if kind == "text" else {"type": "text", "text": part[name]}
    image = part.get("image_url")
    address = image.get("url") if isinstance(image, dict) else None
    if not isinstance(address, str) or not address:
        raise InputError.at(
            f"{where}.image_url.url",
            'is required: {"type": "image_url", "image_url": {"url": "data:image/png;base64,..."}}',
        )
    field = part.field if isinstance(part, PlacedImage) else f"{where}.image_url.url"
    sources.append(ImageSource(address, field))
    return {"type": "image"}


def check_images(state: ServerState, field: str) -> None:
    """Raises InputError, which names the `field` of an image, unless the model and its chat template take images."""
    if state.client.info.vision is None:
        raise text_only(state.model_name, field)
    if state.chat_template is not None and not state.chat_template.reads_parts:
        raise InputError.at(
            field,
            "the chat template reads no content parts, so it cannot place images; start the server with "
            "--chat-template FILE of a template that does",
        )
