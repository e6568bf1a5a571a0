"""Parses and checks the value of a flag, from text or from a keyword; every error names the flag."""

from __future__ import annotations

import json
from typing import Any

from moe_engine.config.field import FieldInfo, Flag
from moe_engine.config.numbers import READERS, real_number, whole_number
from moe_engine.errors import ConfigError, NotAvailableYet, did_you_mean

SUFFIXES = {"k": 10**3, "m": 10**6, "g": 10**9, "ki": 2**10, "mi": 2**20, "gi": 2**30}


def parse_count(text: str) -> int:
    """``4096``, ``64k`` (64000), ``1M``, ``8Ki`` (8192). Raises ValueError."""
    lower = text.strip().lower().replace("_", "")
    for suffix in sorted(SUFFIXES, key=len, reverse=True):
        if lower.endswith(suffix):
            value = real_number(lower[: -len(suffix)]) * SUFFIXES[suffix]
            if value != int(value):
                raise ValueError(f"{text} is not a whole number")
            return int(value)
    return whole_number(lower)


def parse_json_object(text: str) -> str:
    """Checks that the text is a JSON object and returns it unchanged. Raises ValueError."""
    try:
        value = json.loads(text)
    except RecursionError:
        raise ValueError("nested too deeply") from None
    if not isinstance(value, dict):
        raise ValueError("must be a JSON object such as '{\"rope_theta\": 10000}'")
    return text


def refuse_unsupported(given: str, feature: str, instead: str) -> NotAvailableYet:
    """The error for a flag or value that is not supported yet; `feature` is the missing one."""
    return NotAvailableYet(f"{given}: not supported yet: {feature}; {instead}")


def to_field_value(info: FieldInfo, value: Any) -> Any:
    """The checked value of a field.

    Args:
        value: text from the command line, or a Python value from a keyword or a YAML file.

    Raises:
        ConfigError: naming the flag, when the value has the wrong type or is not one of the choices.
    """
    if value is None:
        return None if info.optional else info.default  # a dump of SGLang's flags has None for many defaults
    converted = _convert(info, value)
    return _choose(info.option, info.flag, converted) if isinstance(converted, str) else converted


def _convert(info: FieldInfo, value: Any) -> Any:
    if info.type is bool:
        return _switch(info, value)
    text = _text_of(info, value)
    return _number(info, value) if text is None else _parse(info, text)


def _switch(info: FieldInfo, value: Any) -> bool:
    if isinstance(value, bool):
        return value
    if isinstance(value, str) and value.lower() in ("true", "false"):
        return value.lower() == "true"
    raise ConfigError(f"{info.option}: a switch is true or false, not {value!r}")


def _text_of(info: FieldInfo, value: Any) -> str | None:
    """The value as the command line's text; None for a number of a field of numbers."""
    if isinstance(value, str):
        return value
    if isinstance(value, dict) and info.flag.parse is parse_json_object:
        return json.dumps(value)
    if info.flag.many and info.type is str and isinstance(value, dict):
        return " ".join(f"{name}={item}" for name, item in value.items())
    if info.flag.many and isinstance(value, (list, tuple)):
        return " ".join(json.dumps(item) if isinstance(item, dict) else str(item) for item in value)
    if info.type is not str:
        return None
    if info.flag.parse is not None and isinstance(value, int) and not isinstance(value, bool):
        return str(value)  # text that may be a number
    raise ConfigError(f"{info.option}: expected text, not {value!r}")


def _number(info: FieldInfo, value: Any) -> int | float:
    if info.type is int and isinstance(value, float) and value.is_integer():
        return int(value)
    if isinstance(value, bool) or not isinstance(value, int if info.type is int else (int, float)):
        raise ConfigError(f"{info.option}: expected {_noun(info)}, not {value!r}")
    return info.type(value)


def _parse(info: FieldInfo, text: str) -> Any:
    if any("\ud800" <= char <= "\udfff" for char in text):  # neither messages nor JSON answers can hold it
        raise ConfigError(f"{info.option} {text!a}: is not UTF-8; rename the file or folder, or give a link to it")
    parse = info.flag.parse or READERS.get(info.type, info.type)
    try:
        return parse(text)
    except ValueError as error:
        python = any(words in str(error) for words in ("invalid literal", "could not convert"))
        detail = f" ({error})" if info.flag.parse and not python else ""
        raise ConfigError(f"{info.option} {text}: expected {_noun(info)}{detail}") from None


def _noun(info: FieldInfo) -> str:
    if info.flag.parse is parse_json_object:
        return "a JSON object"
    if info.flag.many and info.flag.parse is not None:
        return "whole numbers"
    return {int: "a whole number", float: "a number", str: "text"}[info.type]


def _choose(option: str, flag: Flag, value: str) -> str:
    allowed = flag.allowed()
    if allowed is None or value in allowed:
        return value
    if value in flag.synonyms:
        return flag.synonyms[value]
    listed = ", ".join(allowed)
    if value in flag.unsupported:
        instead = f"leave it out or use one of: {listed}"
        raise refuse_unsupported(f"{option} {value}", flag.unsupported[value], instead)
    raise ConfigError(f"{option} {value}: unknown value{did_you_mean(value, allowed)}; choose one of: {listed}")
