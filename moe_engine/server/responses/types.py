"""Requests, answers and events of /v1/responses. Unknown fields are ignored."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec
from msgspec import Meta

from moe_engine.frontend.generate_input import CacheSalt, DpRank, Priority, Rid, Text
from moe_engine.sampling_checks import MAX_COUNT, SamplingFields
from moe_engine.server.openai.answers import TokenLogprob
from moe_engine.server.openai.types import STRUCTURED_OUTPUTS
from moe_engine.validation import Effort, NotAvailable

LOGPROBS = "message.output_text.logprobs"
ITEMS = (
    "message, function_call, function_call_output, custom_tool_call, custom_tool_call_output or reasoning; other kinds "
    "are refused"
)
TOOLS = (
    "function, custom or namespace; web_search and image_generation have no effect, other tools of OpenAI's servers "
    "are refused"
)


class InputItem(TypedDict, total=False):
    """`type` may be missing from messages."""

    type: Annotated[str, Meta(description=ITEMS)]
    id: str | None
    role: Annotated[str, Meta(pattern="^(system|developer|user|assistant)$")]
    content: str | list[Any] | None
    call_id: str
    name: str
    namespace: str | None
    arguments: str
    input: Annotated[str, Meta(description="of a custom_tool_call")]
    output: str | list[Any]
    summary: list[Any]


class CallableTool(TypedDict, total=False):
    type: Required[Annotated[str, Meta(description=TOOLS)]]
    name: str
    description: str | None
    parameters: dict[str, Any] | None
    strict: bool | None
    format: Annotated[dict[str, Any] | None, Meta(description="of a custom tool's input; not enforced")]


class OfferedTool(CallableTool, total=False):
    tools: Annotated[list[CallableTool], Meta(description="of a namespace: functions and custom tools")]


class TextFormat(TypedDict, total=False):
    type: Required[Annotated[str, Meta(pattern="^(text|json_object|json_schema)$")]]
    name: str
    schema: dict[str, Any]
    strict: bool | None


class TextOptions(TypedDict, total=False):
    format: TextFormat | None
    verbosity: str | None


class ReasoningOptions(TypedDict, total=False):
    """`effort` is passed to the chat template."""

    effort: Effort | None
    summary: str | None


class ResponsesRequest(SamplingFields, kw_only=True):
    input: Text | Annotated[list[InputItem], Meta(min_length=1)]
    model: Annotated[str | None, Meta(description="any name; base:adapter is refused")] = None
    instructions: Annotated[str | None, Meta(description="system message; not part of a stored conversation")] = None
    previous_response_id: Annotated[str | None, Meta(description="a stored response that the input continues")] = None
    store: Annotated[bool | None, Meta(description="keeps the response for GET and previous_response_id")] = True
    stream: bool | None = False
    max_output_tokens: Annotated[int, Meta(ge=1, le=MAX_COUNT)] | None = None
    tools: list[OfferedTool] | None = None
    tool_choice: Annotated[str, Meta(pattern="^(auto|none|required)$")] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    text: TextOptions | None = None
    reasoning: ReasoningOptions | None = None
    metadata: dict[str, str] | None = None
    truncation: Annotated[str, Meta(pattern="^(auto|disabled)$")] | None = None
    include: Annotated[list[str] | None, Meta(description=f"{LOGPROBS}; else no effect")] = None
    top_logprobs: Annotated[int, Meta(ge=0, le=MAX_COUNT)] | None = None
    user: Any = None
    rid: Rid | None = None
    priority: Priority | None = None
    extra_key: str | None = None
    cache_salt: CacheSalt | None = None
    routed_dp_rank: DpRank | None = None
    seed: int | None = None
    structured_outputs: Annotated[dict[str, Any] | None, Meta(description=STRUCTURED_OUTPUTS)] = None
    chat_template_kwargs: dict[str, Any] | None = None
    background: Annotated[bool | None, Meta(description="answers immediately; GET shows the response so far")] = False
    conversation: NotAvailable = None
    context_management: NotAvailable = None
    moderation: NotAvailable = None
    prompt: NotAvailable = None
    lora_path: Annotated[str | None, Meta(description="name of a loaded LoRA adapter")] = None


class OutputContent(TypedDict):
    """Content of a message or of reasoning."""

    type: Literal["output_text", "reasoning_text"]
    text: str
    annotations: NotRequired[list[Any]]
    logprobs: NotRequired[list[TokenLogprob]]


class OutputItem(TypedDict):
    type: Literal["message", "reasoning", "function_call", "custom_tool_call"]
    id: str
    status: Literal["in_progress", "completed", "incomplete"]
    role: NotRequired[Literal["assistant"]]
    content: NotRequired[list[OutputContent]]
    summary: NotRequired[list[Any]]
    call_id: NotRequired[str]
    name: NotRequired[str]
    namespace: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class InputDetails(TypedDict):
    cached_tokens: int
    cache_write_tokens: int


class OutputDetails(TypedDict):
    reasoning_tokens: int


class ResponseUsage(TypedDict):
    input_tokens: int
    input_tokens_details: InputDetails
    output_tokens: int
    output_tokens_details: OutputDetails
    total_tokens: int


class IncompleteDetails(TypedDict):
    reason: Literal["max_output_tokens"]


class ResponseError(TypedDict):
    code: Literal["server_error"]
    message: str


class ResponseObject(TypedDict):
    """`status`: in_progress only within a stream or in the background, queued and cancelled only in the background."""

    id: str
    object: Literal["response"]
    created_at: int
    status: Literal["queued", "in_progress", "completed", "incomplete", "failed", "cancelled"]
    background: bool
    error: ResponseError | None
    incomplete_details: IncompleteDetails | None
    instructions: str | None
    max_output_tokens: int | None
    metadata: dict[str, Any]
    model: str
    output: list[OutputItem]
    parallel_tool_calls: bool
    previous_response_id: str | None
    reasoning: dict[str, Any]
    store: bool
    temperature: float | None
    text: dict[str, Any]
    tool_choice: str | dict[str, Any]
    tools: list[dict[str, Any]]
    top_logprobs: int
    top_p: float | None
    truncation: str
    usage: ResponseUsage | None
    user: Any


class RetrieveQuery(msgspec.Struct):
    stream: bool = False


class InputItemsQuery(msgspec.Struct):
    limit: Annotated[int, Meta(ge=1, le=100)] = 20
    order: Annotated[str, Meta(pattern="^(asc|desc)$")] = "desc"
    after: Annotated[str | None, Meta(description="id of the item before the first one of the answer")] = None


class ItemList(TypedDict):
    object: Literal["list"]
    data: list[dict[str, Any]]
    first_id: str
    last_id: str
    has_more: bool


class InputTokens(TypedDict):
    object: Literal["response.input_tokens"]
    input_tokens: int


class DeletedResponse(TypedDict):
    id: str
    object: Literal["response.deleted"]
    deleted: Literal[True]


class ResponseEvent(TypedDict):
    """The data of an event; `type` is also the event's name."""

    type: Literal[
        "response.created", "response.in_progress", "response.completed", "response.incomplete", "response.failed",
        "response.output_item.added", "response.output_item.done",
        "response.content_part.added", "response.content_part.done",
        "response.output_text.delta", "response.output_text.done",
        "response.reasoning_text.delta", "response.reasoning_text.done",
        "response.function_call_arguments.delta", "response.function_call_arguments.done",
        "response.custom_tool_call_input.delta", "response.custom_tool_call_input.done",
    ]  # fmt: skip
    sequence_number: int
    response: NotRequired[ResponseObject]
    output_index: NotRequired[int]
    item: NotRequired[OutputItem]
    item_id: NotRequired[str]
    content_index: NotRequired[int]
    part: NotRequired[OutputContent]
    delta: NotRequired[str]
    text: NotRequired[str]
    logprobs: NotRequired[list[TokenLogprob]]
    name: NotRequired[str]
    arguments: NotRequired[str]
    input: NotRequired[str]


class ResponsesPlan(msgspec.Struct):
    """A request in OpenAI's chat form.

    Attributes:
        fields: the fields that the response repeats.
        before: items of the conversation that the request continues, for the store; empty if it is not stored.
        input: of the request, likewise.
        cut: the request and the messages in the prompt, where `truncation: auto` may drop more of them when the tokens
            of their images are known.
    """

    stream: bool
    background: bool
    store: bool
    fields: dict[str, Any]
    before: list[dict[str, Any]]
    input: str | list[InputItem]
    cut: tuple[ResponsesRequest, list[dict[str, Any]]] | None = None
