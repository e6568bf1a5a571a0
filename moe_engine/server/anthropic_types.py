"""Requests and answers of Anthropic's endpoints. Unknown fields are ignored."""

from __future__ import annotations

from datetime import UTC, datetime
from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec
from msgspec import Meta

from moe_engine.sampling_checks import MAX_COUNT
from moe_engine.server.openai.answers import ModelCard
from moe_engine.validation import Effort, NotAvailable, OffOnly

BLOCKS = (
    "text, image, document, search_result, tool_use, tool_result, thinking or redacted_thinking; other types are "
    "refused"
)


class Source(TypedDict, total=False):
    """`type` base64, or text of documents: `media_type` and `data`; content of documents: `content`; url: `url`."""

    type: Required[Annotated[str, Meta(pattern="^(base64|url|text|content)$")]]
    media_type: str
    data: str
    content: str | list[Any]
    url: str


class Block(TypedDict, total=False):
    """A part of a message."""

    type: Required[Annotated[str, Meta(description=BLOCKS)]]
    text: str
    thinking: str
    id: str
    name: str
    input: Any
    tool_use_id: str
    source: Annotated[Source | str, Meta(description="a text in a search_result")]
    title: str | None
    content: str | list[Any] | None
    is_error: bool | None


class InputMessage(TypedDict):
    role: Annotated[str, Meta(pattern="^(user|assistant|system)$")]
    content: str | list[Block]


class ToolDefinition(TypedDict, total=False):
    name: Required[str]
    description: str | None
    input_schema: dict[str, Any] | None
    strict: bool | None
    type: str | None


class ToolChoice(TypedDict, total=False):
    type: Required[Annotated[str, Meta(pattern="^(auto|any|tool|none)$")]]
    name: str
    disable_parallel_tool_use: bool | None


class Thinking(TypedDict, total=False):
    type: Required[Annotated[str, Meta(pattern="^(enabled|adaptive|between_tools|disabled)$")]]
    budget_tokens: int | None


class OutputFormat(TypedDict):
    type: Annotated[str, Meta(pattern="^json_schema$")]
    schema: dict[str, Any]


class OutputConfig(TypedDict, total=False):
    format: Annotated[OutputFormat | None, Meta(description="the text is JSON of this schema")]
    effort: Effort | None


class CountRequest(msgspec.Struct, kw_only=True):
    messages: Annotated[list[InputMessage], Meta(min_length=1)]
    model: Annotated[str | None, Meta(description="any name; base:adapter is refused")] = None
    system: str | list[Block] | None = None
    tools: list[ToolDefinition] | None = None
    tool_choice: ToolChoice | None = None
    thinking: Annotated[
        Thinking | None,
        Meta(
            description="sets thinking and enable_thinking of the chat template (between_tools: behind results of "
            "tools only); the budget is enforced with a reasoning parser whose tags are tokens"
        ),
    ] = None
    output_config: OutputConfig | None = None
    output_format: Annotated[OutputFormat | None, Meta(description="older name of output_config.format")] = None


class MessagesRequest(CountRequest, kw_only=True):
    max_tokens: Annotated[
        int, Meta(ge=0, le=MAX_COUNT, description="reduced to the context length; 0: only caches the prompt")
    ]
    temperature: float | None = None
    top_p: float | None = None
    top_k: int | None = None
    stop_sequences: list[str] | None = None
    stream: bool | None = False
    mcp_servers: OffOnly = None
    container: NotAvailable = None
    thread: NotAvailable = None
    compaction: NotAvailable = None
    metadata: Any = None


class AnthropicOutputDetails(TypedDict):
    thinking_tokens: int


class AnthropicUsage(TypedDict):
    """`input_tokens` is without `cache_read_input_tokens`."""

    input_tokens: int
    cache_creation_input_tokens: int
    cache_read_input_tokens: int
    output_tokens: int
    output_tokens_details: AnthropicOutputDetails


class OutputBlock(TypedDict):
    type: Literal["text", "thinking", "tool_use"]
    text: NotRequired[str]
    thinking: NotRequired[str]
    signature: NotRequired[str]
    id: NotRequired[str]
    name: NotRequired[str]
    input: NotRequired[Any]


class AnthropicMessage(TypedDict):
    id: str
    type: Literal["message"]
    role: Literal["assistant"]
    model: str
    content: list[OutputBlock]
    stop_reason: str | None
    stop_sequence: str | None
    usage: AnthropicUsage


class StreamEvent(TypedDict):
    """The data of an event; `type` is also the event's name."""

    type: Literal[
        "message_start",
        "content_block_start",
        "content_block_delta",
        "content_block_stop",
        "message_delta",
        "message_stop",
    ]
    message: NotRequired[AnthropicMessage]
    index: NotRequired[int]
    content_block: NotRequired[OutputBlock]
    delta: NotRequired[dict[str, Any]]
    usage: NotRequired[AnthropicUsage]


class TokenCount(TypedDict):
    input_tokens: int


class ModelInfo(TypedDict):
    type: Literal["model"]
    id: str
    display_name: str
    lifecycle: Literal["active"]
    created_at: str
    max_input_tokens: int
    max_tokens: int


def model_info(card: ModelCard) -> ModelInfo:
    """A model in Anthropic's form."""
    return {
        "type": "model",
        "id": card["id"],
        "display_name": card["id"],
        "lifecycle": "active",
        "created_at": datetime.fromtimestamp(card["created"], UTC).isoformat(),
        "max_input_tokens": card["max_model_len"],
        "max_tokens": card["max_model_len"],
    }


class ErrorDetail(TypedDict):
    type: str
    message: str
    details: NotRequired[dict[str, Any]]
    """Of a request with `thread`."""


class AnthropicError(TypedDict):
    type: Literal["error"]
    error: ErrorDetail
