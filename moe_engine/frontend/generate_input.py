"""Generate requests to `Frontend`, and the checks that need no tokenizer. SGLang's field names and defaults."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Annotated, Any

from msgspec import UNSET, Meta, Struct

from moe_engine.errors import InputError
from moe_engine.frontend.image_prompts import sources_of
from moe_engine.frontend.logprob_format import LogprobOptions
from moe_engine.frontend.session_params import SessionParams
from moe_engine.frontend.session_turns import Joined
from moe_engine.media.settings import ImageSource
from moe_engine.sampling_checks import MAX_COUNT, Count, CustomProcessor, SamplingRequest, TokenId, parse_sampling
from moe_engine.types import ImageTokens, SamplingParams
from moe_engine.types.constraint import Constraint, FreeReasoning
from moe_engine.validation import OffOnly, check_unicode

Text = Annotated[str, Meta(min_length=1)]
Ids = Annotated[list[TokenId], Meta(min_length=1)]
CacheSalt = Annotated[
    str, Meta(min_length=1, description="only requests with the same salt share cached prefixes; vLLM's field")
]
Rid = Annotated[str, Meta(min_length=1, max_length=256)]
LogprobStart = Annotated[int, Meta(ge=-1, le=MAX_COUNT, description="-1: no log-probabilities of the prompt")]
Priority = Annotated[int, Meta(ge=-(2**31), le=MAX_COUNT)]
DpRank = Annotated[int, Meta(ge=0, le=2**16, description="data-parallel rank that serves the request")]

BootstrapHost = Annotated[str, Meta(max_length=255, description="host of the prefill server")]
BootstrapPort = Annotated[int, Meta(ge=0, le=65535, description="its --disaggregation-bootstrap-port")]
BootstrapRoom = Annotated[int, Meta(ge=0, le=2**63 - 1, description="number of the transfer, the same on both servers")]

Image = Annotated[str, Meta(min_length=1, description="data, http, https or file address, absolute path, or base64")]
ImageData = Annotated[
    Image | list[Image | list[Image] | None],
    Meta(description="an image, the images of a prompt, or a list with those of each prompt of a batch"),
]

_NOTHING: frozenset[int] = frozenset()


class GenerateRequest(Struct, kw_only=True):
    """One prompt or a batch. Exactly one of `text` and `input_ids` is set; a list of prompts is a batch.

    In a batch, a list has one value per prompt; any other value is for all prompts. null: the default.
    """

    text: Text | Annotated[list[Text], Meta(min_length=1)] | None = None
    input_ids: Annotated[list[TokenId | Ids], Meta(min_length=1, description="of one prompt or a batch")] | None = None
    sampling_params: SamplingRequest | list[SamplingRequest | None] | None = None
    stream: bool | None = None
    rid: Rid | list[Rid] | None = None
    return_logprob: bool | list[bool | None] | None = None
    logprob_start_len: LogprobStart | list[LogprobStart | None] | None = None
    top_logprobs_num: Count | list[Count | None] | None = None
    token_ids_logprob: list[TokenId | list[TokenId] | None] | None = None
    return_text_in_logprobs: bool | None = None
    log_metrics: Annotated[bool, Meta(description="false: without metrics and request log")] | None = None
    priority: Priority | None = None
    extra_key: str | list[str | None] | None = None
    custom_logit_processor: CustomProcessor | list[CustomProcessor | None] | None = None
    require_reasoning: Annotated[
        bool | None, Meta(description="true: the output starts inside the reasoning, and constraints apply behind it")
    ] = None
    routed_dp_rank: DpRank | None = None
    data_parallel_rank: Annotated[DpRank, Meta(description="older name of routed_dp_rank")] | None = None
    input_embeds: OffOnly = None
    image_data: ImageData | None = None
    video_data: OffOnly = None
    audio_data: OffOnly = None
    lora_path: Annotated[
        str | list[str | None] | None, Meta(description="name of a loaded LoRA adapter; null: the base model")
    ] = None
    bootstrap_host: BootstrapHost | list[BootstrapHost | None] | None = None
    bootstrap_port: BootstrapPort | list[BootstrapPort | None] | None = None
    bootstrap_room: BootstrapRoom | list[BootstrapRoom | None] | None = None
    session_params: Annotated[
        SessionParams | list[SessionParams | None] | None, Meta(description="the session that the request continues")
    ] = None
    return_hidden_states: bool | list[bool | None] | None = None
    return_prompt_token_ids: Annotated[bool | None, Meta(description="`prompt_token_ids` in each answer")] = None
    max_thinking_tokens: Annotated[
        Count | None, Meta(description="of every prompt; replaces the one in sampling_params")
    ] = None
    return_routed_experts: OffOnly = None
    return_indexer_topk: OffOnly = None
    return_sampling_mask: OffOnly = None
    sampling_logprobs_mode: OffOnly = None
    return_flat_raw_top_logprobs: OffOnly = None
    return_flat_raw_output_top_logprobs: OffOnly = None
    return_entropy: OffOnly = None
    watermark: OffOnly = None
    cache_salt: CacheSalt | list[CacheSalt | None] | None = None


class GenerateInput(GenerateRequest, kw_only=True):
    """A request of /generate, the OpenAI endpoints or the offline engine. The caller sets the fields below."""

    sampling_params: Any = None
    """One of `SamplingRequest`, `SamplingParams` and a dict with the fields of the former, or a list of those."""
    add_special_tokens: bool = True
    keep_special: frozenset[int] = _NOTHING
    """Special tokens kept in the text even with skip_special_tokens (tool-call markers)."""
    reasoning: FreeReasoning | None = None
    """Before constrained outputs."""
    text_field: str = "text"
    ids_field: str = "input_ids"
    sampling_field: str = "sampling_params"
    max_tokens_field: str = "sampling_params.max_new_tokens"
    top_logprobs_field: str = "top_logprobs_num"
    """The client's names of these fields, for messages."""
    max_tokens_asked: bool = True
    """With `SamplingParams`: whether `max_new_tokens` is the client's exact number; a default, or the upper bound of
    an API whose clients do not know the space, is reduced to fit."""
    cumulative: bool = True
    """Stream chunks hold the whole output so far, unless the server's settings override it."""
    model: str | None = None
    """OpenAI's `model`, which may select a LoRA adapter."""
    image_data: Any = None
    """As in the request; or a list of `ImageSource`, of one prompt."""
    pooled: bool = False
    """Requests the vector of each prompt instead of text; `dimensions`: its first numbers, None for all."""
    dimensions: int | None = None

    @property
    def dp_rank(self) -> int | None:
        return self.data_parallel_rank if self.routed_dp_rank is None else self.routed_dp_rank


@dataclass(slots=True)
class Prompt:
    """One prompt of a request; each field checked by itself."""

    text: str | None
    ids: list[int]
    sampling: SamplingParams
    rid: str
    logprobs: LogprobOptions | None
    extra_key: str | None
    hidden: bool = False
    """Return its final hidden states."""
    lora: str | None = None
    """Name of its LoRA adapter, as `lora_path` gives it."""
    sources: list[ImageSource] = field(default_factory=list)
    """Its images until they are read; `images`: from then on, and `ids` has their tokens."""
    images: list[ImageTokens] = field(default_factory=list)
    bootstrap: tuple[str, int, int] | None = None
    """Host, port (0: the server's own) and bootstrap room of a transfer between servers."""
    session: SessionParams | None = None
    joined: Joined | None = None
    """With a session: the beginning of `ids`, once its earlier tokens are put before them."""
    length_asked: bool = True
    """`max_new_tokens` is refused if it does not fit; else it is reduced to the free space."""
    prepared: Constraint | None = None
    """The constraint in the form that the engine gets, once its grammar is checked."""
    max_new_tokens: int = field(default=0)
    """Resolved against the context length."""


def split_prompts(
    inp: GenerateInput, preferred: Mapping[str, Any] | None = None, max_sequences: int | None = None
) -> tuple[list[Prompt], bool]:
    """The prompts of a request, and whether it was a batch. `max_sequences`: maximum of prompts times n.

    Raises:
        InputError: names the field.
    """
    if (inp.text is None) == (inp.input_ids is None):
        state = "both are" if inp.text is not None else "neither is"
        raise InputError(
            f"{inp.text_field}: give exactly one of {inp.text_field} and input_ids; {state} set", field=inp.text_field
        )
    texts, batch_of_ids, is_batch = _prompts(inp)
    count = len(texts) if texts is not None else len(batch_of_ids)
    _check_count(count, max_sequences, inp.text_field)
    rids = _rids(inp.rid, count, is_batch)
    samplings = _samplings(inp.sampling_params, count, is_batch, preferred or {})
    _check_count(sum(s.n for s in samplings), max_sequences, inp.text_field)
    prompts = []
    for i in range(count):
        extra_key = _namespace(inp, i, count, is_batch)
        if inp.max_thinking_tokens is not None:
            samplings[i] = replace(samplings[i], max_thinking_tokens=inp.max_thinking_tokens)
        processor = _pick(inp.custom_logit_processor, i, count, is_batch, "custom_logit_processor")
        prompts.append(
            Prompt(
                text=texts[i] if texts is not None else None,
                ids=batch_of_ids[i] if texts is None else [],
                sampling=_with_processor(samplings[i], processor) if processor else samplings[i],
                rid=rids[i] if rids else uuid.uuid4().hex,
                logprobs=_logprobs(inp, i, count, is_batch),
                extra_key=extra_key,
                hidden=bool(_pick(inp.return_hidden_states, i, count, is_batch, "return_hidden_states")),
                lora=_pick(inp.lora_path, i, count, is_batch, "lora_path") or None,
                bootstrap=_bootstrap(inp, i, count, is_batch),
                length_asked=_length_asked(inp, i),
                session=_session(inp, i, count, is_batch),
                sources=sources_of(inp.image_data, i, count, is_batch) if inp.image_data else [],
            )
        )
    return prompts, is_batch


def _bootstrap(inp: GenerateInput, index: int, count: int, is_batch: bool) -> tuple[str, int, int] | None:
    room = _pick(inp.bootstrap_room, index, count, is_batch, "bootstrap_room")
    if room is None:
        return None
    if is_batch and count > 1 and not isinstance(inp.bootstrap_room, list):
        raise InputError("bootstrap_room: a batch needs a list with a room for each prompt", field="bootstrap_room")
    host = _pick(inp.bootstrap_host, index, count, is_batch, "bootstrap_host")
    if not host:
        raise InputError("bootstrap_host: bootstrap_room needs the prefill server's host", field="bootstrap_host")
    return host.strip("[]"), _pick(inp.bootstrap_port, index, count, is_batch, "bootstrap_port") or 0, room


def _session(inp: GenerateInput, index: int, count: int, is_batch: bool) -> SessionParams | None:
    params: SessionParams | None = _pick(inp.session_params, index, count, is_batch, "session_params")
    return None if params is None or params.is_empty else params


def _length_asked(inp: GenerateInput, index: int) -> bool:
    values = inp.sampling_params[index] if isinstance(inp.sampling_params, list) else inp.sampling_params
    if isinstance(values, SamplingRequest):
        return values.max_new_tokens is not UNSET
    return inp.max_tokens_asked if isinstance(values, SamplingParams) else "max_new_tokens" in (values or {})


def _prompts(inp: GenerateInput) -> tuple[list[str] | None, list[list[int]], bool]:
    if inp.text is not None:
        where = inp.text_field
        if isinstance(inp.text, str):
            return [_checked_text(inp.text, where)], [], False
        if not isinstance(inp.text, list):
            raise InputError(
                f"{where}: expected a string or a list of strings, got {type(inp.text).__name__}", field=where
            )
        _not_empty(inp.text, where)
        return [_checked_text(text, f"{where}[{i}]") for i, text in enumerate(inp.text)], [], True
    ids: Any = inp.input_ids
    where = inp.ids_field
    if not isinstance(ids, list):
        raise InputError(f"{where}: expected a list of token ids, got {type(ids).__name__}", field=where)
    _not_empty(ids, where)
    if isinstance(ids[0], list):
        for i, one in enumerate(ids):
            if not isinstance(one, list):
                raise InputError(f"{where}[{i}]: expected a list of token ids, got {one!r:.80}", field=where)
            _not_empty(one, f"{where}[{i}]")
        return None, ids, True
    return None, [ids], False


def _check_count(count: int, limit: int | None, where: str) -> None:
    if limit is not None and count > limit:
        raise InputError(
            f"{where}: {count} sequences (prompts times n); send at most {limit} in one request", field=where
        )


def _not_empty(values: Sequence[Any], where: str) -> None:
    if not values:
        raise InputError(f"{where}: the prompt is empty; give at least one token", field=where)


def _checked_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise InputError(f"{where}: expected a string, got {text!r:.80}", field=where)
    _not_empty(text, where)
    check_unicode(text, where)
    return text


def check_token_ids(ids: Sequence[Any], vocab_size: int, where: str) -> None:
    """Raises InputError if an entry, which is an integer, a list or a text, is not a token id. Fast for long lists."""
    with suppress(TypeError):  # several types
        if min(ids) >= 0 and max(ids) < vocab_size:
            return
    for i, token in enumerate(ids):
        if type(token) is not int:
            raise InputError(f"{where}[{i}]: expected a token id, got {token!r:.80}", field=where)
        if not 0 <= token < vocab_size:
            raise InputError(f"{where}[{i}]: token id {token} is outside the vocabulary [0, {vocab_size})", field=where)


def _rids(rid: Any, count: int, is_batch: bool) -> list[str]:
    """The client's request ids; empty if there are none."""
    if rid is None:
        return []
    if isinstance(rid, str):
        rids = [f"{rid}_{i}" for i in range(count)] if is_batch else [rid]
    elif isinstance(rid, list) and is_batch:
        if len(rid) != count:
            raise InputError(f"rid: {len(rid)} ids for {count} prompts; give one for each", field="rid")
        rids = rid
    else:
        raise InputError(f"rid: expected a string, got {rid!r:.80}", field="rid")
    for one in rids:
        if not one.isprintable():
            raise InputError(f"rid: {one!r:.80} holds characters that cannot be printed", field="rid")
    if len(set(rids)) < len(rids):
        raise InputError("rid: duplicate id in one batch; make the ids unique", field="rid")
    return rids


def _samplings(values: Any, count: int, is_batch: bool, preferred: Mapping[str, Any]) -> list[SamplingParams]:
    if isinstance(values, list):
        each = [_pick(values, i, count, is_batch, "sampling_params") for i in range(count)]
        return [_sampling(one, preferred, f"sampling_params[{i}]") for i, one in enumerate(each)]
    return [_sampling(values, preferred, "sampling_params")] * count


def _sampling(values: Any, preferred: Mapping[str, Any], where: str) -> SamplingParams:
    return values if isinstance(values, SamplingParams) else parse_sampling(values or {}, where, preferred)


def _with_processor(sampling: SamplingParams, processor: str) -> SamplingParams:
    return replace(sampling, custom_logit_processor=processor)


def _pick(value: Any, index: int, count: int, is_batch: bool, where: str) -> Any:
    """The value of one prompt: an entry of a batch's list, or the value shared by all."""
    if not isinstance(value, list):
        return value
    if not is_batch:
        raise InputError(f"{where}: a list is for a batch of prompts, and this is one; give one value", field=where)
    if len(value) != count:
        raise InputError(f"{where}: {len(value)} values for {count} prompts; give one for each", field=where)
    return value[index]


def _namespace(inp: GenerateInput, index: int, count: int, is_batch: bool) -> str | None:
    """Requests share cached prefixes if their `extra_key` and `cache_salt` are the same."""
    extra_key = _pick(inp.extra_key, index, count, is_batch, "extra_key")
    salt = _pick(inp.cache_salt, index, count, is_batch, "cache_salt")
    check_unicode(extra_key or "", "extra_key")
    check_unicode(salt or "", "cache_salt")
    return extra_key if salt is None else f"{len(salt)}:{salt}{extra_key or ''}"


def _logprobs(inp: GenerateInput, index: int, count: int, is_batch: bool) -> LogprobOptions | None:
    if not _pick(inp.return_logprob, index, count, is_batch, "return_logprob"):
        return None
    start = _pick(inp.logprob_start_len, index, count, is_batch, "logprob_start_len")
    asked: Any = inp.token_ids_logprob
    if any(isinstance(ids, list) for ids in asked or ()):
        asked = _pick(asked, index, count, is_batch, "token_ids_logprob")
    if not isinstance(asked, list | None):
        raise InputError(f"token_ids_logprob[{index}]: expected a list, got {asked!r:.80}", field="token_ids_logprob")
    return LogprobOptions(
        start=None if start is None or start < 0 else start,
        top=_pick(inp.top_logprobs_num, index, count, is_batch, "top_logprobs_num") or 0,
        token_ids=tuple(asked or ()),
        with_text=bool(inp.return_text_in_logprobs),
    )
