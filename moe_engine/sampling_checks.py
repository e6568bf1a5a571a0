"""Validates a client's sampling fields and builds `SamplingParams`. Errors give the field's name and range."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

from moe_engine.errors import InputError
from moe_engine.types import MAX_N, MAX_STOP_LENGTH, MAX_STOP_STRINGS, SamplingParams
from moe_engine.unicode_checks import check_unicode

MAX_STOP_TOKEN_IDS = 1024
MAX_LOGIT_BIAS = 4096
MAX_COUNT = 2**31 - 1

_UNSUPPORTED = {"json_schema", "regex", "ebnf", "structural_tag", "stop_regex", "custom_params", "beam_width"}
_IGNORED_WHEN_NONE = _UNSUPPORTED | {"custom_logit_processor"}

# name -> (minimum, maximum, minimum allowed)
_FLOAT_RANGES: dict[str, tuple[float, float, bool]] = {
    "temperature": (0.0, 1e4, True),
    "top_p": (0.0, 1.0, False),
    "min_p": (0.0, 1.0, True),
    "frequency_penalty": (-2.0, 2.0, True),
    "presence_penalty": (-2.0, 2.0, True),
    "repetition_penalty": (0.0, 2.0, False),
}
_BOOLS = {"ignore_eos", "skip_special_tokens", "spaces_between_special_tokens", "no_stop_trim"}


def parse_sampling(values: Mapping[str, Any], prefix: str = "sampling_params") -> SamplingParams:
    """Checks every field of a client's JSON object and builds the parameters.

    Args:
        prefix: name of the object in messages ("" for the top level).

    Raises:
        InputError: naming `prefix`.field, for unknown fields, wrong types, values out of range and structured output
            (json_schema, regex, ebnf, structural_tag), which is not implemented yet.
    """
    if not isinstance(values, Mapping):
        raise InputError(f"{prefix}: expected an object, got {type(values).__name__}", field=prefix)
    known = {f.name for f in fields(SamplingParams)}
    out: dict[str, Any] = {}
    for name, value in values.items():
        where = f"{prefix}.{name}" if prefix else name
        if name in _UNSUPPORTED or name in _IGNORED_WHEN_NONE:
            if value is not None:
                raise InputError(f"{where}: not available yet in moe-engine; leave it out", field=where)
            continue
        if name not in known:
            raise InputError(f"{where}: unknown field; known ones are {', '.join(sorted(known))}", field=where)
        if value is None:
            if name == "max_new_tokens":
                out[name] = None
            continue
        out[name] = _PARSERS[name](value, where) if name in _PARSERS else _parse_plain(name, value, where)
    params = SamplingParams(**out)
    if params.max_new_tokens is not None and params.min_new_tokens > params.max_new_tokens:
        where = f"{prefix}.min_new_tokens" if prefix else "min_new_tokens"
        raise InputError(
            f"{where}: {params.min_new_tokens} is above max_new_tokens ({params.max_new_tokens}); lower it", field=where
        )
    return params


def _parse_plain(name: str, value: Any, where: str) -> Any:
    if name in _BOOLS:
        if not isinstance(value, bool):
            raise InputError(f"{where}: expected true or false, got {value!r:.80}", field=where)
        return value
    low, high, closed = _FLOAT_RANGES[name]
    number = _number(value, where)
    if not (low <= number <= high) or (number == low and not closed):
        bracket = "[" if closed else "("
        raise InputError(f"{where}: must be in {bracket}{low:g}, {high:g}], got {value!r:.80}", field=where)
    return number


def _number(value: Any, where: str) -> float:
    if isinstance(value, bool) or not isinstance(value, (int, float)):
        raise InputError(f"{where}: expected a number, got {value!r:.80}", field=where)
    try:
        number = float(value)
    except OverflowError:
        number = math.inf
    if not math.isfinite(number):
        raise InputError(f"{where}: must be a finite number, got {value!r:.80}", field=where)
    return number


def _integer(low: int, high: int):
    def parse(value: Any, where: str) -> int:
        if isinstance(value, bool) or not isinstance(value, int):
            if isinstance(value, float) and value.is_integer():
                value = int(value)
            else:
                raise InputError(f"{where}: expected an integer, got {value!r:.80}", field=where)
        if not low <= value <= high:
            raise InputError(f"{where}: must be in [{low}, {high}], got {value!r:.80}", field=where)
        return value

    return parse


def _top_k(value: Any, where: str) -> int:
    number = _integer(-1, MAX_COUNT)(value, where)
    if number == 0:
        raise InputError(f"{where}: must be -1 (whole vocabulary) or at least 1, got 0", field=where)
    return number


def _stop(value: Any, where: str) -> tuple[str, ...]:
    stops = [value] if isinstance(value, str) else value
    if not isinstance(stops, (list, tuple)) or not all(isinstance(s, str) for s in stops):
        raise InputError(f"{where}: expected a string or a list of strings", field=where)
    if len(stops) > MAX_STOP_STRINGS:
        raise InputError(f"{where}: at most {MAX_STOP_STRINGS} stop strings, got {len(stops)}", field=where)
    for s in stops:
        if not s:
            raise InputError(f"{where}: a stop string must not be empty", field=where)
        check_unicode(s, where)
        if len(s) > MAX_STOP_LENGTH:
            raise InputError(
                f"{where}: a stop string may have {MAX_STOP_LENGTH} characters at most, got {len(s)}", field=where
            )
    return tuple(stops)


def _stop_token_ids(value: Any, where: str) -> tuple[int, ...]:
    if not isinstance(value, (list, tuple)):
        raise InputError(f"{where}: expected a list of token ids", field=where)
    if len(value) > MAX_STOP_TOKEN_IDS:
        raise InputError(f"{where}: at most {MAX_STOP_TOKEN_IDS} ids, got {len(value)}", field=where)
    return tuple(_integer(0, MAX_COUNT)(v, where) for v in value)


def _logit_bias(value: Any, where: str) -> tuple[tuple[int, float], ...]:
    if not isinstance(value, Mapping):
        raise InputError(f"{where}: expected an object of token id to bias", field=where)
    if len(value) > MAX_LOGIT_BIAS:
        raise InputError(f"{where}: at most {MAX_LOGIT_BIAS} entries, got {len(value)}", field=where)
    out = []
    for key, bias in value.items():
        try:
            token = int(key)
        except (TypeError, ValueError):
            raise InputError(f"{where}: key {key!r:.80} is not a token id", field=where) from None
        number = _number(bias, where)
        if not -100 <= number <= 100:
            raise InputError(f"{where}: bias of token {token} must be in [-100, 100], got {bias!r:.80}", field=where)
        out.append((token, number))
    return tuple(out)


_PARSERS = {
    "max_new_tokens": _integer(0, MAX_COUNT),
    "min_new_tokens": _integer(0, MAX_COUNT),
    "n": _integer(1, MAX_N),
    "top_k": _top_k,
    "sampling_seed": _integer(-(2**63), 2**64 - 1),
    "stream_interval": _integer(1, 4096),
    "stop": _stop,
    "stop_token_ids": _stop_token_ids,
    "logit_bias": _logit_bias,
}
