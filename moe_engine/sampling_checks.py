"""A client's sampling fields: their types and bounds, and the `SamplingParams` built from them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct, UnsetType, structs

from moe_engine.errors import InputError
from moe_engine.structured_output.request import find_constraint
from moe_engine.types.constraint import Constraint
from moe_engine.types.sampling_params import MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from moe_engine.validation import NotAvailable, check_unicode, checked, refuse_unavailable

MAX_COUNT = 2**31 - 1

Count = Annotated[int, Meta(ge=0, le=MAX_COUNT)]
Penalty = Annotated[float, Meta(ge=-2, le=2)]
StopString = Annotated[str, Meta(min_length=1, max_length=MAX_STOP_LENGTH)]
Bias = Annotated[float, Meta(ge=-100, le=100)]
TokenId = Annotated[int, Meta(ge=0)]
CustomProcessor = Annotated[str, Meta(max_length=1 << 20, description="CustomLogitProcessor.to_str()")]
MAX_ALLOWED = 1 << 18
MAX_BAD_WORDS = 1024
MAX_STOP_PATTERNS = 8
Source = Annotated[str, Meta(min_length=1)]
JsonOrText = dict[str, Any] | bool | Source
Choices = Annotated[list[Source], Meta(min_length=1)]


class SamplingFields(Struct, kw_only=True):
    """Fields with the same name in `sampling_params` of /generate and in OpenAI's requests. null: the default."""

    temperature: Annotated[float, Meta(ge=0, le=1e4)] | None = None
    top_p: Annotated[float, Meta(gt=0, le=1)] | None = None
    top_k: Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="-1 or 0: the whole vocabulary")] | None = None
    min_p: Annotated[float, Meta(ge=0, le=1)] | None = None
    frequency_penalty: Penalty | None = None
    presence_penalty: Penalty | None = None
    repetition_penalty: Annotated[float, Meta(ge=1e-6, le=2)] | None = None
    n: Annotated[int, Meta(ge=1, le=MAX_N)] | None = None
    stop: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_STRINGS)] | None = None
    stop_token_ids: Annotated[list[Count], Meta(max_length=1024)] | None = None
    logit_bias: Annotated[dict[int, Bias], Meta(max_length=4096, description="token id: bias")] | None = None
    allowed_token_ids: Annotated[list[Count], Meta(min_length=1, max_length=MAX_ALLOWED)] | None = None
    bad_words: Annotated[list[StopString], Meta(max_length=MAX_BAD_WORDS)] | None = None
    custom_params: Annotated[dict[str, Any] | None, Meta(description="arguments of custom_logit_processor")] = None
    custom_logit_processor: CustomProcessor | None = None
    max_thinking_tokens: Annotated[Count, Meta(description="max tokens of reasoning, which then ends")] | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    spaces_between_special_tokens: Annotated[bool | None, Meta(description="no effect: no space is added")] = None
    no_stop_trim: bool | None = None
    json_schema: Annotated[JsonOrText, Meta(description="JSON schema, or its text")] | None = None
    regex: Source | None = None
    ebnf: Annotated[Source, Meta(description="grammar in GBNF (EBNF) or Lark")] | None = None
    structural_tag: Annotated[dict[str, Any] | Source, Meta(description="structural tag, or its JSON text")] | None = (
        None
    )
    stop_regex: StopString | Annotated[list[StopString], Meta(max_length=MAX_STOP_PATTERNS)] | None = None


class SamplingRequest(SamplingFields, kw_only=True, forbid_unknown_fields=True):
    """`sampling_params` of /generate and of the offline engine."""

    max_new_tokens: Count | UnsetType | None = UNSET
    """None: up to the context length."""
    min_new_tokens: Count | None = None
    sampling_seed: int | None = None
    stream_interval: Annotated[int, Meta(ge=1, le=4096)] | None = None
    json_object: Annotated[bool, Meta(description="true: any JSON object")] | None = None
    choice: Annotated[Choices, Meta(description="the output is one of these texts")] | None = None
    beam_width: NotAvailable = None


_NAMES = SamplingParams.__dataclass_fields__


def parse_sampling(
    values: Mapping[str, Any] | SamplingRequest, where: str = "sampling_params", defaults: Mapping[str, Any] = {}
) -> SamplingParams:
    """Checks the client's object and builds the parameters. `defaults`: an object of the same form.

    Raises:
        InputError: names `where`.field ("" for the top level).
    """
    request = values if isinstance(values, SamplingRequest) else checked(plain_numbers(values), SamplingRequest, where)
    preferred = checked(plain_numbers(defaults), SamplingRequest, where) if defaults else SamplingRequest()
    base = given(preferred)
    base["constraint"] = find_constraint(preferred, where)
    if request.max_new_tokens is None or (request.max_new_tokens is UNSET and preferred.max_new_tokens is None):
        base["max_new_tokens"] = None
    return build_sampling(request, base, where)


def plain_numbers(values: Any) -> Any:
    """As in JSON, 2.0 is an integer; subclasses of float (numpy's) become floats. No mapping: the same value."""
    if not isinstance(values, Mapping):
        return values
    return {k: (int(v) if v.is_integer() else float(v)) if isinstance(v, float) else v for k, v in values.items()}


def given(request: SamplingFields) -> dict[str, Any]:
    """The fields of `SamplingParams` that a request sets."""
    values = structs.asdict(request)
    return {name: values[name] for name in _NAMES if values.get(name, UNSET) not in (None, UNSET)}


def build_sampling(
    request: SamplingFields, defaults: Mapping[str, Any], where: str = "", names: Mapping[str, str] = {}
) -> SamplingParams:
    """The parameters of a request whose fields have been checked one by one.

    Args:
        names: the client's name of a field, where it differs.

    Raises:
        InputError: a field that is not available yet, or values that exclude each other.
    """
    refuse_unavailable(request, where)

    def refuse(name: str, words: str) -> InputError:
        field = f"{where}.{names.get(name, name)}".lstrip(".")
        return InputError.at(field, words)

    values = {**defaults, **given(request)}
    for name, theirs in names.items():
        if (value := getattr(request, theirs)) is not None:
            values[name] = value
    stops = values.get("stop", ())
    values["stop"] = (stops,) if isinstance(stops, str) else tuple(stops)
    patterns = values.get("stop_regex", ())
    values["stop_regex"] = (patterns,) if isinstance(patterns, str) else tuple(patterns)
    values["stop_token_ids"] = tuple(values.get("stop_token_ids", ()))
    for name in ("allowed_token_ids", "bad_words"):
        values[name] = tuple(values.get(name, ()))
    values["custom_logit_processor"] = values.get("custom_logit_processor") or None
    values["logit_bias"] = tuple(values.get("logit_bias", {}).items())
    constraint = find_constraint(request, where) or values.pop("constraint", None)
    if constraint is not None:
        _check_constrained(values.get("min_new_tokens"), values["allowed_token_ids"], constraint, where, names)
        values |= {"constraint": constraint, "ignore_eos": False}
    params = SamplingParams(**values)
    for stop in params.stop:
        check_unicode(stop, f"{where}.stop".lstrip("."))
    for word in params.bad_words:
        check_unicode(word, f"{where}.bad_words".lstrip("."))
    if params.top_k == 0:  # as in vLLM
        params = replace(params, top_k=-1)
    if not -(2**63) <= (params.sampling_seed or 0) < 2**64:
        raise refuse("sampling_seed", f"must have 64 bits at most, got {params.sampling_seed!r:.80}")
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        most = names.get("max_new_tokens", "max_new_tokens")
        words = f"{params.min_new_tokens} is above {most} ({params.max_new_tokens}); lower it"
        raise refuse("min_new_tokens", words)
    return params


def constrained(params: SamplingParams, constraint: Constraint, names: Mapping[str, str] = {}) -> SamplingParams:
    """The parameters with a constraint: the output ends where the grammar ends. Arguments as of `build_sampling`.

    Raises:
        InputError: a parameter cannot be combined with constraints.
    """
    _check_constrained(params.min_new_tokens, params.allowed_token_ids, constraint, "", names)
    return replace(params, constraint=constraint, ignore_eos=False)


def _check_constrained(
    min_new_tokens: int | None,
    allowed_token_ids: tuple[int, ...],
    constraint: Constraint,
    where: str,
    names: Mapping[str, str],
) -> None:
    for name, value in (("min_new_tokens", min_new_tokens), ("allowed_token_ids", allowed_token_ids)):
        if value:
            field = f"{where}.{names.get(name, name)}".lstrip(".")
            raise InputError.at(field, f"cannot be combined with {constraint.where}; leave one out")
