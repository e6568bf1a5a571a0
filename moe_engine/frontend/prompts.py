"""The prompts of a generate request, with their own values of its fields, and the checks that need no tokenizer."""

from __future__ import annotations

import uuid
from collections.abc import Mapping, Sequence
from contextlib import suppress
from dataclasses import dataclass, field, replace
from typing import Any

from msgspec import UNSET

from moe_engine.errors import InputError
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.frontend.image_prompts import sources_of
from moe_engine.frontend.logprob_format import LogprobOptions
from moe_engine.frontend.session_params import SessionParams
from moe_engine.frontend.session_turns import Joined
from moe_engine.media.settings import ImageSource
from moe_engine.sampling_checks import SamplingRequest, parse_sampling
from moe_engine.types import ImageTokens, SamplingParams
from moe_engine.types.constraint import Constraint
from moe_engine.validation import check_unicode


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
    """Return its final hidden states; `routed`: the experts of its tokens."""
    routed: bool = False
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
    max_new_tokens: int = 0
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
        raise InputError.at(inp.text_field, f"give exactly one of {inp.text_field} and input_ids; {state} set")
    texts, batch_of_ids, is_batch = _prompts(inp)
    count = len(texts) if texts is not None else len(batch_of_ids)
    _check_count(count, max_sequences, inp.text_field)
    rids = _rids(inp.rid, count, is_batch)
    samplings = _samplings(inp.sampling_params, count, is_batch, preferred or {})
    _check_count(sum(s.n for s in samplings), max_sequences, inp.text_field)
    prompts = []
    for i in range(count):
        one = _One(inp, i, count, is_batch)
        extra_key = _namespace(one)
        if inp.max_thinking_tokens is not None:
            samplings[i] = replace(samplings[i], max_thinking_tokens=inp.max_thinking_tokens)
        if processor := one.value("custom_logit_processor"):
            samplings[i] = replace(samplings[i], custom_logit_processor=processor)
        prompts.append(
            Prompt(
                text=texts[i] if texts is not None else None,
                ids=batch_of_ids[i] if texts is None else [],
                sampling=samplings[i],
                rid=rids[i] if rids else uuid.uuid4().hex,
                logprobs=_logprobs(one),
                extra_key=extra_key,
                hidden=bool(one.value("return_hidden_states")),
                routed=bool(one.value("return_routed_experts")),
                lora=one.value("lora_path") or None,
                bootstrap=_bootstrap(one),
                length_asked=_length_asked(inp, i),
                session=_session(one),
                sources=sources_of(inp.image_data, i, count, is_batch) if inp.image_data else [],
            )
        )
    return prompts, is_batch


@dataclass(slots=True)
class _One:
    """A prompt of a request: number `index` of `count`."""

    inp: GenerateInput
    index: int
    count: int
    is_batch: bool

    def value(self, name: str) -> Any:
        """Its value of a field of the request."""
        return _pick(getattr(self.inp, name), self.index, self.count, self.is_batch, name)


def _bootstrap(one: _One) -> tuple[str, int, int] | None:
    room = one.value("bootstrap_room")
    if room is None:
        return None
    if one.is_batch and one.count > 1 and not isinstance(one.inp.bootstrap_room, list):
        raise InputError.at("bootstrap_room", "a batch needs a list with a room for each prompt")
    host = one.value("bootstrap_host")
    if not host:
        raise InputError.at("bootstrap_host", "bootstrap_room needs the prefill server's host")
    return host.strip("[]"), one.value("bootstrap_port") or 0, room


def _session(one: _One) -> SessionParams | None:
    params: SessionParams | None = one.value("session_params")
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
            raise InputError.at(where, f"expected a string or a list of strings, got {type(inp.text).__name__}")
        _not_empty(inp.text, where)
        return [_checked_text(text, f"{where}[{i}]") for i, text in enumerate(inp.text)], [], True
    ids: Any = inp.input_ids
    where = inp.ids_field
    if not isinstance(ids, list):
        raise InputError.at(where, f"expected a list of token ids, got {type(ids).__name__}")
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
        raise InputError.at(where, f"{count} sequences (prompts times n); send at most {limit} in one request")


def _not_empty(values: Sequence[Any], where: str) -> None:
    if not values:
        raise InputError.at(where, "the prompt is empty; give at least one token")


def _checked_text(text: Any, where: str) -> str:
    if not isinstance(text, str):
        raise InputError.at(where, f"expected a string, got {text!r:.80}")
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
            raise InputError.at("rid", f"{len(rid)} ids for {count} prompts; give one for each")
        rids = rid
    else:
        raise InputError.at("rid", f"expected a string, got {rid!r:.80}")
    for one in rids:
        if not one.isprintable():
            raise InputError.at("rid", f"{one!r:.80} holds characters that cannot be printed")
    if len(set(rids)) < len(rids):
        raise InputError.at("rid", "duplicate id in one batch; make the ids unique")
    return rids


def _samplings(values: Any, count: int, is_batch: bool, preferred: Mapping[str, Any]) -> list[SamplingParams]:
    if isinstance(values, list):
        each = [_pick(values, i, count, is_batch, "sampling_params") for i in range(count)]
        return [_sampling(one, preferred, f"sampling_params[{i}]") for i, one in enumerate(each)]
    return [_sampling(values, preferred, "sampling_params")] * count


def _sampling(values: Any, preferred: Mapping[str, Any], where: str) -> SamplingParams:
    return values if isinstance(values, SamplingParams) else parse_sampling(values or {}, where, preferred)


def _pick(value: Any, index: int, count: int, is_batch: bool, where: str) -> Any:
    """The value of one prompt: an entry of a batch's list, or the value shared by all."""
    if not isinstance(value, list):
        return value
    if not is_batch:
        raise InputError.at(where, "a list is for a batch of prompts, and this is one; give one value")
    if len(value) != count:
        raise InputError.at(where, f"{len(value)} values for {count} prompts; give one for each")
    return value[index]


def _namespace(one: _One) -> str | None:
    """Requests share cached prefixes if their `extra_key` and `cache_salt` are the same."""
    extra_key = one.value("extra_key")
    salt = one.value("cache_salt")
    check_unicode(extra_key or "", "extra_key")
    check_unicode(salt or "", "cache_salt")
    return extra_key if salt is None else f"{len(salt)}:{salt}{extra_key or ''}"


def _logprobs(one: _One) -> LogprobOptions | None:
    if not one.value("return_logprob"):
        return None
    start = one.value("logprob_start_len")
    asked: Any = one.inp.token_ids_logprob
    if any(isinstance(ids, list) for ids in asked or ()):
        asked = one.value("token_ids_logprob")
    if not isinstance(asked, list | None):
        where = f"token_ids_logprob[{one.index}]"
        raise InputError(f"{where}: expected a list, got {asked!r:.80}", field="token_ids_logprob")
    return LogprobOptions(
        start=None if start is None or start < 0 else start,
        top=one.value("top_logprobs_num") or 0,
        token_ids=tuple(asked or ()),
        with_text=bool(one.inp.return_text_in_logprobs),
    )
