"""Validates a text against a JSON schema: the `jsonschema` package, with checks of the formats that it omits."""

from __future__ import annotations

import datetime
import json
import re
from collections.abc import Callable
from decimal import Decimal, localcontext
from functools import partial
from typing import Any
from urllib.parse import urlsplit

DIGITS = 20_000
LABEL = r"[A-Za-z0-9]([A-Za-z0-9-]{0,61}[A-Za-z0-9])?"
HOSTNAME = re.compile(rf"(?=.{{1,253}}\Z){LABEL}(\.{LABEL})*", re.ASCII)
TIME = re.compile(r"\d{2}:\d{2}:\d{2}(\.\d+)?([zZ]|[+-]\d{2}:\d{2})", re.ASCII)
_TIME_OF_DURATION = r"T(\d+H(\d+M(\d+S)?)?|\d+M(\d+S)?|\d+S)"
_DATE_OF_DURATION = r"(\d+Y(\d+M(\d+D)?)?|\d+M(\d+D)?|\d+D)"
DURATION = re.compile(rf"P({_DATE_OF_DURATION}({_TIME_OF_DURATION})?|{_TIME_OF_DURATION}|\d+W)", re.ASCII)


def _is_time(value: str) -> bool:
    """RFC 3339; a leap second is read as the previous second."""
    if not TIME.fullmatch(value):
        return False
    if value[6:8] == "60":
        value = f"{value[:6]}59{value[8:]}"
    # nanoseconds are valid, and Python's class has none
    return bool(datetime.time.fromisoformat(re.sub(r"\.\d+", "", value).upper()))


def _is_date(value: str) -> bool:
    """RFC 3339, which has a year 0, a leap year like 2000."""
    if not re.fullmatch(r"\d{4}-\d{2}-\d{2}", value, re.ASCII):
        return False
    return bool(datetime.date.fromisoformat(re.sub("^0000", "2000", value)))


def _is_date_time(value: str) -> bool:
    return _is_date(value[:10]) and value[10:11] in ("T", "t", " ") and _is_time(value[11:])


def _is_uri(value: str) -> bool:
    return bool(re.match(r"[A-Za-z][A-Za-z0-9+.-]*:", value)) and value.isascii() and urlsplit(value) is not None


FORMATS: dict[str, Callable[[str], bool]] = {
    "date": _is_date,
    "time": _is_time,
    "date-time": _is_date_time,
    "hostname": lambda value: HOSTNAME.fullmatch(value) is not None,
    "duration": lambda value: DURATION.fullmatch(value) is not None,
    "uri": _is_uri,
}


def problem_of(text: str, schema: Any) -> str | None:
    """The error of a finished output; None if it is JSON that the schema allows."""
    import jsonschema

    try:
        value = json.loads(text, parse_float=_exact)
    except ValueError as error:
        return f"no JSON: {error}"
    kind = jsonschema.validators.validator_for(schema, default=jsonschema.Draft202012Validator)
    checker = jsonschema.FormatChecker()
    for name, check in FORMATS.items():
        checker.checks(name, raises=ValueError)(partial(_check, check))
    exact = json.loads(json.dumps(schema), parse_float=_exact)
    try:
        with localcontext(prec=DIGITS):  # remainders of large numbers are exact too
            wrong = jsonschema.exceptions.best_match(kind(exact, format_checker=checker).iter_errors(value))
    except Exception as error:  # an accepted invalid schema is a fault, with any exception class
        return f"not checked: {type(error).__name__}: {error}"
    return None if wrong is None else f"{wrong.json_path}: {wrong.message}"


def _check(check: Callable[[str], bool], value: object) -> bool:
    return not isinstance(value, str) or check(value)


def _exact(text: str) -> Decimal | int:
    """A number with a decimal point, without rounding: `multipleOf` is exact, and 3.0 is an integer."""
    value = Decimal(text)
    whole = value == value.to_integral_value() and abs(value.adjusted()) < 100
    return int(value) if whole else value
