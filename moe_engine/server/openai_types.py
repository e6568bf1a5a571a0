"""Request types of the OpenAI endpoints, and conversion of their sampling fields.

Types are msgspec structs: validation takes microseconds and errors contain the field's path. Sampling values are typed
`Any` because `sampling_checks` validates them with better messages. Unknown fields are ignored, as in SGLang.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, TypeVar

import msgspec

from moe_engine.errors import InputError
from moe_engine.sampling_checks import parse_sampling
from moe_engine.types import SamplingParams


class StreamOptions(msgspec.Struct):
    include_usage: bool | None = False
    continuous_usage_stats: bool | None = False


class CommonRequest(msgspec.Struct, kw_only=True):
    """Fields common to chat and plain completions."""

    model: str | None = None
    stream: bool | None = False
    stream_options: StreamOptions | None = None
    user: Any = None
    rid: Any = None
    priority: int | None = None
    extra_key: str | None = None
    routed_dp_rank: int | None = None
    data_parallel_rank: int | None = None
    """The older name of `routed_dp_rank`."""
    response_format: dict[str, Any] | None = None
    # sampling, OpenAI's names
    temperature: Any = None
    top_p: Any = None
    n: Any = None
    seed: Any = None
    stop: Any = None
    frequency_penalty: Any = None
    presence_penalty: Any = None
    logit_bias: Any = None
    max_tokens: Any = None
    # sampling, SGLang's additions
    top_k: Any = None
    min_p: Any = None
    min_tokens: Any = None
    repetition_penalty: Any = None
    stop_token_ids: Any = None
    stop_regex: Any = None
    regex: Any = None
    ebnf: Any = None
    ignore_eos: Any = None
    skip_special_tokens: Any = None
    spaces_between_special_tokens: Any = None
    no_stop_trim: Any = None
    # not implemented yet
    lora_path: Any = None
    session_params: Any = None
    custom_logit_processor: Any = None
    custom_params: Any = None
    return_hidden_states: Any = None
    return_routed_experts: Any = None
    bootstrap_host: Any = None
    bootstrap_room: Any = None
    cache_salt: Any = None


class CompletionRequest(CommonRequest, kw_only=True):
    prompt: Any
    echo: bool | None = False
    logprobs: int | None = None
    suffix: Any = None
    best_of: int | None = None
    json_schema: Any = None


class ChatRequest(CommonRequest, kw_only=True):
    messages: list[Any]
    max_completion_tokens: Any = None
    logprobs: bool | None = False
    top_logprobs: int | None = None
    tools: list[dict[str, Any]] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = True
    chat_template_kwargs: dict[str, Any] | None = None
    reasoning_effort: Any = None
    separate_reasoning: bool | None = True
    stream_reasoning: bool | None = True
    continue_final_message: bool | None = False
    add_generation_prompt: bool | None = None


R = TypeVar("R", bound=CommonRequest)

_SAME = (
    "temperature", "top_p", "top_k", "min_p", "n", "stop", "frequency_penalty", "presence_penalty",
    "repetition_penalty", "logit_bias", "stop_token_ids", "stop_regex", "regex", "ebnf", "ignore_eos",
    "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim", "custom_params", "custom_logit_processor",
)  # fmt: skip
_RENAMED = {"seed": "sampling_seed", "min_tokens": "min_new_tokens"}
_REFUSED = (
    "lora_path", "session_params", "return_hidden_states", "return_routed_experts", "bootstrap_host", "bootstrap_room",
    "cache_salt",
)  # fmt: skip


def parse_request(body: Mapping[str, Any], kind: type[R]) -> R:
    """Parses the body into a typed request.

    Raises:
        InputError: names the field of the wrong type, or the feature that is not implemented yet.
    """
    try:
        request = msgspec.convert(body, kind)
    except msgspec.ValidationError as exc:
        raise _named(str(exc)) from None
    for name in _REFUSED:
        if getattr(request, name) not in (None, False, [], {}):
            raise InputError(f"{name}: not available yet in moe-engine; leave it out", field=name)
    form = (request.response_format or {}).get("type", "text")
    if form != "text":
        raise InputError(
            f"response_format.type: {form!r:.40} is not available yet in moe-engine; use 'text'",
            field="response_format",
        )
    return request


_SHAPING = ("stream", "stream_options", "n", "echo", "logprobs", "top_logprobs")


def response_fields(request: R, **bulk: Any) -> R:
    """A copy with only the fields that shape the response. `bulk`: small values for required fields."""
    names = {field.name for field in msgspec.structs.fields(request)}
    return type(request)(**bulk, **{name: getattr(request, name) for name in _SHAPING if name in names})


def _named(message: str) -> InputError:
    """Rewrites msgspec's "Expected `int`, got `str` - at `$.n`" with the field first."""
    what, _, path = message.partition(" - at `$")
    if "missing required field" in what:
        field = what.split("`")[1]
        return InputError(f"{field}: is required", field=field)
    field = path.rstrip("`").lstrip(".")
    what = what.replace("`", "").replace(" | null", "")
    return InputError(f"{field}: {what[0].lower()}{what[1:]}", field=field)


def parse_openai_sampling(
    request: CommonRequest, defaults: Mapping[str, Any], max_tokens: Any, length_field: str = "max_tokens"
) -> SamplingParams:
    """Sampling parameters of a request; missing ones default to the model's, then to SGLang's.

    Args:
        length_field: the request field that holds `max_tokens`.

    Raises:
        InputError: names the field as the client spelled it.
    """
    values = dict(defaults)
    values |= {name: value for name in _SAME if (value := getattr(request, name)) is not None}
    values |= {ours: value for name, ours in _RENAMED.items() if (value := getattr(request, name)) is not None}
    values["max_new_tokens"] = max_tokens
    if getattr(request, "json_schema", None) is not None:
        values["json_schema"] = True
    try:
        return parse_sampling(values, "")
    except InputError as exc:
        spellings = {ours: name for name, ours in _RENAMED.items()} | {"max_new_tokens": length_field}
        message, field = exc.message, exc.field or ""
        for ours, name in spellings.items():
            message = message.replace(ours, name)
        raise InputError(message, field=spellings.get(field, field), status=exc.status) from None
