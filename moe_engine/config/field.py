"""The metadata that makes a dataclass field a flag; `flags` turns it into the command line."""

from __future__ import annotations

import dataclasses
import typing
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from typing import Any

METADATA_KEY = "flag"


@dataclass(frozen=True)
class Flag:
    """A flag: the metadata of a field beyond its name, type and default.

    Attributes:
        help: one or two sentences with the unit and the meaning of the default.
        aliases: further spellings, equal to the first (``--model``).
        old: spellings of earlier SGLang releases; accepted with a one-line note.
        choices: allowed values, or a function that lists them (so that a table can own them).
        synonyms: values of SGLang that map to one of ours (``half`` -> ``float16``).
        unsupported: values of SGLang that this engine does not support, each with the missing feature.
        many: takes several words (``1 2 4``), which are joined by spaces.
        parse: parser of the command line's text; the type's own parser when None.
    """

    help: str
    aliases: tuple[str, ...] = ()
    old: tuple[str, ...] = ()
    choices: tuple[str, ...] | Callable[[], tuple[str, ...]] | None = None
    synonyms: Mapping[str, str] = dataclasses.field(default_factory=dict)
    unsupported: Mapping[str, str] = dataclasses.field(default_factory=dict)
    metavar: str | None = None
    many: bool = False
    parse: Callable[[str], Any] | None = None

    def allowed(self) -> tuple[str, ...] | None:
        return self.choices() if callable(self.choices) else self.choices


def flag(default: Any, help: str, **more: Any) -> Any:
    """A dataclass field with that default and that flag."""
    return dataclasses.field(default=default, metadata={METADATA_KEY: Flag(help, **more)})


@dataclass(frozen=True)
class FieldInfo:
    """A field of a part: its name, plain type (bool, int, float or str), default and flag."""

    name: str
    part: str
    type: type
    optional: bool
    default: Any
    flag: Flag

    @property
    def option(self) -> str:
        return option_of(self.name)

    @property
    def spellings(self) -> tuple[str, ...]:
        return (self.option, *self.flag.aliases, *self.flag.old)


def option_of(name: str) -> str:
    """``page_size`` -> ``--page-size``."""
    return "--" + name.replace("_", "-")


@lru_cache
def fields_of(part: type) -> tuple[FieldInfo, ...]:
    """The fields of a part config, in order. Raises TypeError for a field without a flag or of an unknown type."""
    hints = typing.get_type_hints(part)
    found = []
    for item in dataclasses.fields(part):
        if METADATA_KEY not in item.metadata:
            raise TypeError(f"{part.__name__}.{item.name} has no flag metadata; declare it with flag(default, help)")
        members = typing.get_args(hints[item.name]) or (hints[item.name],)
        plain = [member for member in members if member is not type(None)]
        if len(plain) != 1 or plain[0] not in (bool, int, float, str):
            raise TypeError(f"{part.__name__}.{item.name}: a flag is a bool, int, float or str, or one of them or None")
        found.append(
            FieldInfo(item.name, part.__name__, plain[0], len(members) > 1, item.default, item.metadata[METADATA_KEY])
        )
    return tuple(found)
