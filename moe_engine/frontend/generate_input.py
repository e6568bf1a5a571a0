"""Generate requests to `Frontend`, and the checks that need no tokenizer. SGLang's field names and defaults."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from moe_engine.errors import InputError
from moe_engine.frontend.logprob_format import LogprobOptions
from moe_engine.sampling_checks import parse_sampling
from moe_engine.types import SamplingParams
from moe_engine.unicode_checks import check_unicode

MAX_RID_LENGTH = 256

UNSUPPORTED_FIELDS = (
    "input_embeds", "image_data", "video_data", "audio_data", "lora_path", "session_params", "custom_logit_processor",
    "bootstrap_host", "bootstrap_room", "return_hidden_states", "return_routed_experts", "max_thinking_tokens",
    "cache_salt",
)  # fmt: skip
"""Fields of SGLang's /generate that are not implemented yet."""

_NOTHING: frozenset[int] = frozenset()


@dataclass(slots=True)
class GenerateInput:
    """One prompt or a batch. Exactly one of `text` and `input_ids` is set; a list of prompts is a batch.

    In a batch, every other field is one value for all prompts or a list with one value per prompt.
    """

    text: Any = None
    input_ids: Any = None
    sampling_params: Any = None
    rid: Any = None
    return_logprob: Any = False
    logprob_start_len: Any = -1
    top_logprobs_num: Any = 0
    token_ids_logprob: Any = None
    return_text_in_logprobs: bool = False
    stream: bool = False
    priority: int | None = None
    extra_key: Any = None
    routed_dp_rank: int | None = None
    """Index of the scheduler (DP rank) that serves the request; None: chosen by the load balancer."""
    log_metrics: bool = True
    """Whether the request is reported to the observer (metrics, request log)."""

    # set by callers inside this package, not by clients
    add_special_tokens: bool = True
    keep_special: frozenset[int] = _NOTHING
    """Special tokens kept in the text even with skip_special_tokens (tool-call markers)."""
    text_field: str = "text"
    ids_field: str = "input_ids"
    sampling_field: str = "sampling_params"
    max_tokens_field: str = "sampling_params.max_new_tokens"
    top_logprobs_field: str = "top_logprobs_num"
    """The client's names of these fields, for messages."""
    max_tokens_asked: bool = True
    """With `SamplingParams`: whether `max_new_tokens` is the client's own; a default may be reduced."""
    cumulative: bool = True
    """Stream chunks hold the whole output so far, unless the server's settings override it."""


def refuse_unsupported_fields(fields: Mapping[str, Any]) -> None:
    """Raises InputError for fields that are set and not implemented yet."""
    for name in UNSUPPORTED_FIELDS:
        if fields.get(name) not in (None, False, [], {}):
            raise InputError(f"{name}: not available yet in moe-engine; leave it out", field=name)


@dataclass(slots=True)
class Prompt:
    """One prompt of a request; each field checked by itself."""

    text: str | None
    ids: list[int]
    sampling: SamplingParams
    rid: str
    logprobs: LogprobOptions | None
    extra_key: str | None
    length_asked: bool = True
    """The client chose `max_new_tokens`; a default is reduced to the free room."""
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
    _check_int(inp.priority, "priority", -(2**31), 2**31 - 1, optional=True)
    _check_int(inp.routed_dp_rank, "routed_dp_rank", 0, 2**16, optional=True)
    prompts = []
    for i in range(count):
        extra_key = _pick(inp.extra_key, i, count, is_batch, "extra_key")
        if extra_key is not None and not isinstance(extra_key, str):
            raise InputError(f"extra_key: expected a string, got {extra_key!r:.80}", field="extra_key")
        check_unicode(extra_key or "", "extra_key")
        prompts.append(
            Prompt(
                text=texts[i] if texts is not None else None,
                ids=batch_of_ids[i] if texts is None else [],
                sampling=samplings[i],
                rid=rids[i] if rids else uuid.uuid4().hex,
                logprobs=_logprobs(inp, i, count, is_batch),
                extra_key=extra_key,
                length_asked=_length_asked(inp, i),
            )
        )
    return prompts, is_batch


def _length_asked(inp: GenerateInput, index: int) -> bool:
    values = inp.sampling_params[index] if isinstance(inp.sampling_params, list) else inp.sampling_params
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
    ids, where = inp.input_ids, inp.ids_field
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
    """Raises InputError if an entry is not a token id of the vocabulary. Fast for long lists."""
    if set(map(type, ids)) <= {int} and min(ids) >= 0 and max(ids) < vocab_size:
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
        if not isinstance(one, str) or not one:
            raise InputError(f"rid: expected a string that is not empty, got {one!r:.80}", field="rid")
        if len(one) > MAX_RID_LENGTH:
            raise InputError(f"rid: {len(one)} characters long; at most {MAX_RID_LENGTH} are allowed", field="rid")
        if not one.isprintable():
            raise InputError(f"rid: {one!r:.80} holds characters that cannot be printed", field="rid")
    if len(set(rids)) < len(rids):
        raise InputError("rid: duplicate id in one batch; make the ids unique", field="rid")
    return rids


def _samplings(values: Any, count: int, is_batch: bool, preferred: Mapping[str, Any]) -> list[SamplingParams]:
    if isinstance(values, list) and is_batch:
        if len(values) != count:
            raise InputError(
                f"sampling_params: {len(values)} objects for {count} prompts; give one, or one for each",
                field="sampling_params",
            )
        return [_sampling(v, preferred, f"sampling_params[{i}]") for i, v in enumerate(values)]
    return [_sampling(values, preferred, "sampling_params")] * count


def _sampling(values: Any, preferred: Mapping[str, Any], where: str) -> SamplingParams:
    if isinstance(values, SamplingParams):
        return values
    if values is None:
        values = {}
    if isinstance(values, Mapping) and preferred:
        values = {**preferred, **values}
    return parse_sampling(values, where)


def _pick(value: Any, index: int, count: int, is_batch: bool, where: str) -> Any:
    """The value of one prompt: an entry of a batch's list, or the value shared by all."""
    if not (isinstance(value, list) and is_batch):
        return value
    if len(value) != count:
        raise InputError(f"{where}: {len(value)} values for {count} prompts; give one for each", field=where)
    return value[index]


def _check_int(value: Any, where: str, low: int, high: int, *, optional: bool = False) -> None:
    if value is None and optional:
        return
    if isinstance(value, bool) or not isinstance(value, int):
        raise InputError(f"{where}: expected an integer, got {value!r:.80}", field=where)
    if not low <= value <= high:
        raise InputError(f"{where}: must be in [{low}, {high}], got {value}", field=where)


def _logprobs(inp: GenerateInput, index: int, count: int, is_batch: bool) -> LogprobOptions | None:
    wanted = _pick(inp.return_logprob, index, count, is_batch, "return_logprob")
    if wanted is not None and not isinstance(wanted, bool):
        raise InputError(f"return_logprob: expected true or false, got {wanted!r:.80}", field="return_logprob")
    if not wanted:
        return None
    start = _pick(inp.logprob_start_len, index, count, is_batch, "logprob_start_len")
    start = -1 if start is None else start
    _check_int(start, "logprob_start_len", -1, 2**31 - 1)
    top = _pick(inp.top_logprobs_num, index, count, is_batch, "top_logprobs_num") or 0
    _check_int(top, inp.top_logprobs_field, 0, 2**31 - 1)
    asked = inp.token_ids_logprob
    if is_batch and isinstance(asked, list) and any(isinstance(x, list) for x in asked):
        asked = _pick(asked, index, count, is_batch, "token_ids_logprob")
    if asked is None:
        asked = []
    if not isinstance(asked, list):
        raise InputError(
            f"token_ids_logprob: expected a list of token ids, got {asked!r:.80}", field="token_ids_logprob"
        )
    return LogprobOptions(
        start=None if start < 0 else start,
        top=top,
        token_ids=tuple(asked),
        with_text=bool(inp.return_text_in_logprobs),
    )
