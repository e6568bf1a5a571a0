"""Request types of the OpenAI endpoints, and the rules that concern several fields. Unknown fields are ignored."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Annotated, Any, Required, TypedDict, TypeVar

import msgspec
from msgspec import Meta

from moe_engine.errors import InputError
from moe_engine.frontend.encoding import Dimensions
from moe_engine.frontend.generate_input import (
    BootstrapHost,
    BootstrapPort,
    BootstrapRoom,
    CacheSalt,
    DpRank,
    GenerateInput,
    Priority,
    Rid,
    Text,
)
from moe_engine.frontend.session_params import SessionParams
from moe_engine.sampling_checks import Choices, Count, JsonOrText, SamplingFields, Source, TokenId, build_sampling
from moe_engine.validation import Effort, NotAvailable, OffOnly

RESPONSE_FORMAT = "type text, json_object, json_schema (with json_schema.schema) or structural_tag"
STRUCTURED_OUTPUTS = "vLLM's: one of json, json_object, regex, choice, grammar and structural_tag"
DEFAULT_MAX_TOKENS = 16
"""Default max_tokens of /v1/completions. Chat answers may use the whole context."""

MAX_BEST_OF = 128
THINKING_SWITCHES = "thinking", "enable_thinking"
"""Arguments of chat templates: DeepSeek's, and that of most others."""


class StreamOptions(msgspec.Struct):
    include_usage: Annotated[bool | None, Meta(description="null: --stream-response-default-include-usage")] = None
    continuous_usage_stats: bool | None = False


class CommonRequest(SamplingFields, kw_only=True):
    """Fields common to chat and plain completions. null: the default."""

    model: Annotated[str | None, Meta(description="a LoRA adapter's name or base:adapter; else any name")] = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    max_tokens: Count | None = None
    min_tokens: Count | None = None
    seed: int | None = None
    user: Any = None
    rid: Rid | list[Rid] | None = None
    request_id: Annotated[Rid, Meta(description="vLLM's name of rid")] | None = None
    priority: Priority | None = None
    extra_key: str | None = None
    routed_dp_rank: DpRank | None = None
    data_parallel_rank: Annotated[DpRank, Meta(description="older name of routed_dp_rank")] | None = None
    response_format: Annotated[dict[str, Any] | None, Meta(description=RESPONSE_FORMAT)] = None
    guided_json: Annotated[JsonOrText, Meta(description="vLLM's name of json_schema")] | None = None
    guided_json_object: bool | None = None
    guided_regex: Annotated[Source, Meta(description="vLLM's name of regex")] | None = None
    guided_grammar: Annotated[Source, Meta(description="vLLM's name of ebnf")] | None = None
    guided_choice: Annotated[Choices, Meta(description="the output is one of these texts")] | None = None
    guided_whitespace_pattern: NotAvailable = None
    structured_outputs: Annotated[dict[str, Any] | None, Meta(description=STRUCTURED_OUTPUTS)] = None
    lora_path: Annotated[
        str | list[str | None] | None, Meta(description="name of a loaded LoRA adapter; a list: for each prompt")
    ] = None
    session_params: Annotated[SessionParams | None, Meta(description="the session that the request continues")] = None
    return_hidden_states: Annotated[bool, Meta(description="the last state, in the choice; not in a stream")] | None = (
        None
    )
    return_token_ids: Annotated[bool | None, Meta(description="`token_ids` and `prompt_token_ids` in each choice")] = (
        False
    )
    return_tokens_as_token_ids: Annotated[bool | None, Meta(description="logprobs name tokens as token_id:ID")] = False
    return_cached_tokens_details: Annotated[bool | None, Meta(description="cached tokens by tier, in `sglext`")] = False
    return_spec_tokens_details: Annotated[bool | None, Meta(description="accepted drafts, in `sglext`")] = False
    return_routed_experts: Annotated[
        bool | None, Meta(description="experts of the first choice's tokens, in `sglext`; see /generate")
    ] = None
    include_stop_str_in_output: Annotated[bool | None, Meta(description="vLLM's name of no_stop_trim")] = None
    add_special_tokens: Annotated[
        bool | None, Meta(description="tokens like BOS before a text; null: only in completions, as vLLM does")
    ] = None
    use_beam_search: OffOnly = None
    logprob_token_ids: OffOnly = None
    watermark: OffOnly = None
    watermarking: OffOnly = None
    mm_processor_kwargs: OffOnly = None
    media_io_kwargs: OffOnly = None
    images_config: OffOnly = None
    prompt_logprobs: NotAvailable = None
    truncate_prompt_tokens: NotAvailable = None
    logits_processors: OffOnly = None
    repetition_detection: OffOnly = None
    kv_transfer_params: OffOnly = None
    bootstrap_host: BootstrapHost | list[BootstrapHost | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: BootstrapRoom | list[BootstrapRoom | None] | None = None
    cache_salt: CacheSalt | None = None

    def __post_init__(self) -> None:
        if self.no_stop_trim is None:
            self.no_stop_trim = self.include_stop_str_in_output
        if self.rid is None:
            self.rid = self.request_id


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1)]
    echo: bool | None = False
    logprobs: Count | None = None
    best_of: Annotated[
        Annotated[int, Meta(ge=1, le=MAX_BEST_OF)] | None,
        Meta(description="sequences to generate; the n with the highest log-probability per token are answered"),
    ] = None
    suffix: Annotated[str | None, Meta(description="text behind the completion")] = None
    prompt_embeds: OffOnly = None


class ClassifyRequest(msgspec.Struct, kw_only=True):
    """null: the default."""

    input: Text | Annotated[list[Text | TokenId | list[TokenId]], Meta(min_length=1)]
    model: Annotated[str | None, Meta(description="any name; base:adapter is refused")] = None
    user: Any = None
    rid: Rid | list[Rid] | None = None
    priority: Priority | None = None
    extra_key: str | None = None
    lora_path: OffOnly = None

    def prompts(self) -> dict[str, Any]:
        """The fields of `EncodeRequest`."""
        first = self.input[0] if isinstance(self.input, list) else self.input
        is_text = first is None or isinstance(first, str)
        prompt = {"text": self.input} if is_text else {"input_ids": self.input}
        return {**prompt, "rid": self.rid, "priority": self.priority, "extra_key": self.extra_key}


class RerankRequest(msgspec.Struct, kw_only=True):
    query: Text
    documents: Annotated[list[Text], Meta(min_length=1)]
    top_n: Annotated[int, Meta(ge=1)] | None = None
    return_documents: bool | None = True
    rid: Rid | list[Rid] | None = None
    instruct: OffOnly = None
    model: Any = None


class RerankDocument(msgspec.Struct):
    text: Text


class RelevanceRequest(RerankRequest, kw_only=True):
    documents: Annotated[list[Text | RerankDocument], Meta(min_length=1)]  # type: ignore[assignment]
    model: Annotated[str | None, Meta(description="any name")] = None

    def __post_init__(self) -> None:
        self.documents = [each.text if isinstance(each, RerankDocument) else each for each in self.documents]


class ImageAddress(TypedDict, total=False):
    url: Required[Annotated[str, Meta(description="data, http, https or file address, absolute path, or base64")]]
    detail: Annotated[str | None, Meta(description="no effect: the model's image processor chooses the size")]


PART_KINDS = "text|refusal|input_text|output_text|image_url|video_url|audio_url|input_audio|file|thinking|reasoning"


class ContentPart(TypedDict, total=False):
    """Text, or an image for models with a vision tower."""

    type: Required[Annotated[str, Meta(pattern=f"^({PART_KINDS})$")]]
    text: str
    refusal: Annotated[str, Meta(description="of an earlier answer; part of its text")]
    thinking: Annotated[str, Meta(description="of an earlier answer, read as `reasoning_content`")]
    image_url: ImageAddress


class Function(TypedDict, total=False):
    name: Required[str]
    description: str | None
    parameters: dict[str, Any] | None


class Tool(TypedDict, total=False):
    type: Annotated[str, Meta(pattern="^function$")]
    function: Required[Function]


class FunctionCall(TypedDict, total=False):
    name: Required[str]
    arguments: Any


class ToolCall(TypedDict, total=False):
    function: Required[FunctionCall]


class Message(TypedDict, total=False):
    """Further fields are passed to the chat template. Only the assistant's content may be missing."""

    role: Required[Annotated[str, Meta(pattern="^(system|developer|user|assistant|tool|function)$")]]
    content: str | list[ContentPart] | None
    tool_calls: list[ToolCall] | None


Messages = Annotated[list[Message], Meta(min_length=1)]


class EmbeddingItem(TypedDict, total=False):
    """A text, an image or both, as a prompt of the chat template."""

    text: str | None
    image: Annotated[str | None, Meta(description="data, http, https or file address, absolute path, or base64")]
    video: Annotated[Any, Meta(description="not supported; leave it out or empty")]


class EmbeddingRequest(ClassifyRequest, kw_only=True):
    """`input` or `messages`."""

    input: Text | Annotated[list[Text | TokenId | list[TokenId] | EmbeddingItem], Meta(min_length=1)] | None = None  # type: ignore[assignment]
    messages: Annotated[Messages | None, Meta(description="a conversation, as one prompt; vLLM's field")] = None
    chat_template_kwargs: dict[str, Any] | None = None
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = False
    encoding_format: Annotated[str, Meta(pattern="^(float|base64)$")] | None = None
    dimensions: Dimensions | None = None


class Reasoning(msgspec.Struct, forbid_unknown_fields=True):
    """SGLang's and OpenRouter's form of `reasoning_effort`; `enabled` switches the thinking on or off."""

    effort: Effort | None = None
    enabled: bool | None = None
    max_tokens: Annotated[Count | None, Meta(description="OpenRouter's name of max_thinking_tokens")] = None
    exclude: Annotated[bool | None, Meta(description="OpenRouter's opposite of include_reasoning")] = None


class ThinkingSwitch(TypedDict, total=False):
    type: Required[Annotated[str, Meta(pattern="^(enabled|adaptive|auto|disabled)$")]]


class ChatRequest(CommonRequest, kw_only=True):
    messages: Messages
    input_ids: Annotated[
        Annotated[list[TokenId], Meta(min_length=1)] | None,
        Meta(description="the prompt, in the place of the messages in the model's template"),
    ] = None
    return_prompt_token_ids: bool | None = False
    return_meta_info: Annotated[bool | None, Meta(description="`meta_info` of /generate, in each choice")] = False
    return_input_ids_in_sglext: bool | None = False
    return_output_ids_in_sglext: bool | None = False
    max_completion_tokens: Annotated[Count, Meta(description="newer name of max_tokens")] | None = None
    logprobs: bool | None = False
    top_logprobs: Count | None = None
    tools: list[Tool] | None = None
    tool_choice: Annotated[str, Meta(pattern="^(auto|none|required)$")] | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    functions: OffOnly = None
    echo: OffOnly = None
    modalities: list[Annotated[str, Meta(pattern="^text$")]] | None = None
    audio: NotAvailable = None
    web_search_options: NotAvailable = None
    chat_template: OffOnly = None
    documents: OffOnly = None
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Effort | None = None
    reasoning: Reasoning | None = None
    thinking: Annotated[
        ThinkingSwitch | bool | None, Meta(description="the switch of DeepSeek's, Moonshot's and Z.ai's APIs")
    ] = None
    thinking_token_budget: Annotated[Count | None, Meta(description="vLLM's name of max_thinking_tokens")] = None
    separate_reasoning: bool | None = True
    include_reasoning: Annotated[
        bool | None, Meta(description="false (vLLM's field): the reasoning is left out of the answer")
    ] = True
    stream_reasoning: bool | None = True
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None

    def __post_init__(self) -> None:
        """Templates differ in the switch of thinking and in its default: an effort sets both names, except where
        `chat_template_kwargs` has them."""
        super().__post_init__()
        asked = self.reasoning or Reasoning()
        self.reasoning_effort = asked.effort or self.reasoning_effort
        if self.thinking_token_budget is None:
            self.thinking_token_budget = asked.max_tokens
        if asked.exclude:
            self.include_reasoning = False
        enabled = asked.enabled
        if enabled is None and self.thinking is not None:
            enabled = self.thinking if isinstance(self.thinking, bool) else self.thinking["type"] != "disabled"
        if enabled is None and self.reasoning_effort is not None:
            enabled = self.reasoning_effort != "none"
        if enabled is not None:
            self.chat_template_kwargs = dict.fromkeys(THINKING_SWITCHES, enabled) | (self.chat_template_kwargs or {})


R = TypeVar("R", bound=CommonRequest)

_SHAPING = (
    "stream", "stream_options", "n", "echo", "logprobs", "top_logprobs", "best_of", "return_token_ids",
    "return_tokens_as_token_ids", "return_prompt_token_ids", "return_meta_info", "return_cached_tokens_details",
    "return_spec_tokens_details", "return_routed_experts", "return_input_ids_in_sglext", "return_output_ids_in_sglext",
)  # fmt: skip


def response_fields(request: R, **bulk: Any) -> R:
    """A copy with only the fields that shape the response. `bulk`: small values for required fields."""
    names = request.__struct_fields__  # `msgspec.structs.fields` evaluates all annotations again
    return type(request)(**bulk, **{name: getattr(request, name) for name in _SHAPING if name in names})


def generate_input(req: CommonRequest, defaults: Mapping[str, Any], length_field: str, **fields: Any) -> GenerateInput:
    """The request for the frontend; missing sampling fields default to the model's, then to SGLang's.

    Args:
        defaults: the model's sampling defaults.
        length_field: the request's field with the maximum number of tokens.
        fields: the fields of `GenerateInput` that differ between the endpoints.

    Raises:
        InputError: names the field as the client spelled it.
    """
    names = {"max_new_tokens": length_field, "min_new_tokens": "min_tokens", "sampling_seed": "seed"}
    if getattr(req, "thinking_token_budget", None) is not None:
        names["max_thinking_tokens"] = "thinking_token_budget"
    if req.return_hidden_states and req.stream:
        raise InputError.at("return_hidden_states", "not in a stream; leave out stream")
    return GenerateInput(
        return_hidden_states=req.return_hidden_states,
        return_routed_experts=req.return_routed_experts,
        sampling_params=build_sampling(req, defaults, names=names),
        sampling_field="",
        max_tokens_field=length_field,
        rid=req.rid,
        stream=req.stream,
        priority=req.priority,
        extra_key=req.extra_key,
        cache_salt=req.cache_salt,
        model=req.model,
        lora_path=req.lora_path,
        session_params=req.session_params,
        routed_dp_rank=req.routed_dp_rank,
        data_parallel_rank=req.data_parallel_rank,
        bootstrap_host=req.bootstrap_host,
        bootstrap_port=req.bootstrap_port,
        bootstrap_room=req.bootstrap_room,
        cumulative=False,
        **fields,
    )
