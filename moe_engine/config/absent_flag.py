"""A flag of SGLang without a field here: what it means when it is given, and how it is refused."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.config.field import option_of
from moe_engine.config.values import refuse_unsupported
from moe_engine.errors import ConfigError

SWITCH = False
IN_FORCE = (False, 0, 1, "", "{}", "none", "null", "disabled", "auto", "default", "lru")
"""Values of absent parts that describe this engine as it is: off, one of something, or its only policy."""


@dataclass(frozen=True)
class AbsentFlag:
    """
    Attributes:
        name: SGLang's field.
        default: its value when left out; False makes it a switch.
        reason: the part that brings the flag, or what to do instead of it.
        spellings: further spellings.
        harmless: values that ask for nothing, besides the default.
    """

    name: str
    default: Any
    reason: str
    spellings: tuple[str, ...] = ()
    harmless: tuple[Any, ...] = ()

    @property
    def option(self) -> str:
        return option_of(self.name)

    @property
    def is_switch(self) -> bool:
        return self.default is SWITCH

    def asks_nothing(self, value: Any) -> bool:
        """Whether the value, or each of a list of values, is what the flag means when left out."""
        if isinstance(value, (list, tuple)):
            return all(map(self.asks_nothing, value))
        if value is None:
            return True
        if self.is_switch:
            return value in (False, "false", "False")
        return any(_same(value, known) for known in (self.default, *self.harmless))

    def needs_a_note(self, value: Any) -> bool:
        """Whether a value that asks for nothing still names something that this engine does not have."""
        values = value if isinstance(value, (list, tuple)) else [value]
        return not all(item is None or any(_same(item, known) for known in IN_FORCE) for item in values)

    def refusal(self, keyword: str, value: Any) -> ConfigError:
        """The error for a value that asks for something; `keyword` is the spelling that was given."""
        raise NotImplementedError


class UnsupportedFlag(AbsentFlag):
    """A flag that a later part (`reason`) brings."""

    def refusal(self, keyword: str, value: Any) -> ConfigError:
        if self.is_switch:
            return refuse_unsupported(option_of(keyword), self.reason, "leave it out")
        values = value if isinstance(value, (list, tuple)) else [value]
        shown = " ".join(str(item) for item in values)
        is_true = any(_same(self.default, known) for known in IN_FORCE)
        instead = f"leave it out or use {self.default}" if is_true else "leave it out"
        return refuse_unsupported(f"{option_of(keyword)} {shown}", self.reason, instead)


class DroppedFlag(AbsentFlag):
    """A flag that SGLang itself has no more; `reason` says what to do instead."""

    def refusal(self, keyword: str, value: Any) -> ConfigError:
        return ConfigError(f"{option_of(keyword)}: removed from SGLang too; {self.reason}")


def _same(value: Any, known: Any) -> bool:
    """Equal as text or as numbers: the command line gives ``1``, a keyword 1. A switch is no number."""
    if isinstance(value, bool) != isinstance(known, bool):
        return False
    if str(value).strip().lower() == str(known).lower():
        return True
    try:
        return float(value) == float(known)
    except (TypeError, ValueError):
        return False
