"""Requests and answers of Ollama's endpoints. Unknown fields, and options of Ollama's own engine, have no effect."""

from __future__ import annotations

from typing import Annotated, Any, Literal, NotRequired, Required, TypedDict

import msgspec
from msgspec import Meta

from moe_engine.server.openai.types import Tool
from moe_engine.validation import Effort, OffOnly

Images = Annotated[list[str], Meta(description="base64")]


class OllamaFunction(TypedDict):
    name: str
    arguments: dict[str, Any]


class OllamaCall(TypedDict):
    function: OllamaFunction


class OllamaMessage(TypedDict, total=False):
    role: Required[Annotated[str, Meta(pattern="^(system|user|assistant|tool)$")]]
    content: str
    thinking: str
    images: Images | None
    tool_calls: list[OllamaCall] | None
    tool_name: str


class Options(msgspec.Struct, kw_only=True):
    """null: the default of `/v1/chat/completions`, not of Ollama's engine."""

    num_predict: Annotated[int, Meta(description="max tokens; below 1: up to the context length")] | None = None
    temperature: float | None = None
    top_k: int | None = None
    top_p: float | None = None
    min_p: float | None = None
    seed: int | None = None
    stop: str | list[str] | None = None
    repeat_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None


class OllamaRequest(msgspec.Struct, kw_only=True):
    """Fields of both endpoints."""

    model: Annotated[str | None, Meta(description="as in /v1/chat/completions; `:latest` is left out")] = None
    options: Options | None = None
    format: Annotated[str, Meta(pattern="^(json|)$")] | dict[str, Any] | None = None
    think: Annotated[
        bool | Effort | None, Meta(description="sets thinking and enable_thinking of the chat template, or its effort")
    ] = None
    stream: bool | None = True
    keep_alive: Annotated[Any, Meta(description="no effect: the model stays loaded")] = None
    logprobs: OffOnly = None
    top_logprobs: OffOnly = None


class OllamaChatRequest(OllamaRequest, kw_only=True):
    messages: Annotated[list[OllamaMessage], Meta(description="empty: is the model loaded?")] = []
    tools: list[Tool] | None = None


class OllamaGenerateRequest(OllamaRequest, kw_only=True):
    prompt: Annotated[str, Meta(description="empty: is the model loaded?")] = ""
    system: str | None = None
    raw: Annotated[bool | None, Meta(description="the prompt as it is, without the chat template")] = False
    suffix: Annotated[str | None, Meta(description="text behind the answer, as in /v1/completions")] = None
    images: Images | None = None
    template: OffOnly = None
    context: OffOnly = None


class ShowRequest(msgspec.Struct, kw_only=True):
    model: str | None = None
    verbose: Any = None


class AnsweredMessage(TypedDict):
    role: Literal["assistant"]
    content: str
    thinking: NotRequired[str]
    tool_calls: NotRequired[list[OllamaCall]]


class OllamaAnswer(TypedDict):
    """An answer, or a line of a stream. Durations are nanoseconds."""

    model: str
    created_at: str
    message: NotRequired[AnsweredMessage]
    response: NotRequired[str]
    thinking: NotRequired[str]
    done: bool
    done_reason: NotRequired[Literal["stop", "length", "load"] | str]
    total_duration: NotRequired[int]
    load_duration: NotRequired[int]
    prompt_eval_count: NotRequired[int]
    prompt_eval_duration: NotRequired[int]
    eval_count: NotRequired[int]
    eval_duration: NotRequired[int]


class Details(TypedDict):
    parent_model: str
    format: str
    family: str
    families: list[str]
    parameter_size: str
    quantization_level: str


class ListedModel(TypedDict):
    name: str
    model: str
    modified_at: str
    size: int
    digest: str
    details: Details


class ModelTags(TypedDict):
    models: list[ListedModel]


class LoadedModel(ListedModel):
    expires_at: str
    size_vram: int
    context_length: int


class LoadedModels(TypedDict):
    models: list[LoadedModel]


class ShownModel(TypedDict):
    modified_at: str
    template: str
    parameters: str
    details: Details
    model_info: dict[str, Any]
    capabilities: list[str]


class Version(TypedDict):
    version: str


class OllamaError(TypedDict):
    error: str
