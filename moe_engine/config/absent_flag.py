"""A flag of SGLang that has no field here: which values are accepted, and the error for the others."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from moe_engine.config.field import option_of
from moe_engine.config.values import refuse_unsupported
from moe_engine.errors import ConfigError

SWITCH = False
IN_FORCE = (False, 0, 1, "", "{}", "none", "null", "disabled", "auto", "default", "lru")
"""Values of absent features that match this engine's behaviour: off, a count of one, or its only policy."""


@dataclass(frozen=True)
class AbsentFlag:
    """
    Attributes:
        name: SGLang's field.
        default: its value when left out; False makes it a switch.
        reason: the missing feature, or the replacement of the flag.
        spellings: further spellings.
        harmless: values besides the default that request nothing.
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
        """Whether the value, or each value of a list, means the same as leaving the flag out."""
        if isinstance(value, (list, tuple)):
            return all(map(self.asks_nothing, value))
        if value is None:
            return True
        if self.is_switch:
            return value in (False, "false", "False")
        return any(_same(value, known) for known in (self.default, *self.harmless))

    def needs_a_note(self, value: Any) -> bool:
        """Whether a value that requests nothing still names a feature that this engine lacks."""
        values = value if isinstance(value, (list, tuple)) else [value]
        return not all(item is None or any(_same(item, known) for known in IN_FORCE) for item in values)

    def refusal(self, keyword: str, value: Any) -> ConfigError:
        """The error for a value that requests the feature; `keyword` is the spelling that the user gave."""
        raise NotImplementedError


class UnsupportedFlag(AbsentFlag):
    """A flag that is not supported yet; `reason` names the missing feature."""

    def refusal(self, keyword: str, value: Any) -> ConfigError:
        if self.is_switch:
            return refuse_unsupported(option_of(keyword), self.reason, "leave it out")
        values = value if isinstance(value, (list, tuple)) else [value]
        shown = " ".join(str(item) for item in values)
        is_true = any(_same(self.default, known) for known in IN_FORCE)
        instead = f"leave it out or use {self.default}" if is_true else "leave it out"
        return refuse_unsupported(f"{option_of(keyword)} {shown}", self.reason, instead)


class DroppedFlag(AbsentFlag):
    """A flag that SGLang itself has removed; `reason` names the replacement."""

    def refusal(self, keyword: str, value: Any) -> ConfigError:
        return ConfigError(f"{option_of(keyword)}: removed from SGLang too; {self.reason}")


def _same(value: Any, known: Any) -> bool:
    """Equal as text or as numbers: the command line passes ``1``, a keyword 1. A bool never equals a number."""
    if isinstance(value, bool) != isinstance(known, bool):
        return False
    if str(value).strip().lower() == str(known).lower():
        return True
    try:
        return float(value) == float(known)
    except (TypeError, ValueError):
        return False
