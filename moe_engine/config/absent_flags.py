"""Flags of SGLang that have no field here: which of their values are accepted, and the errors for all others.

The names are in absent_flags.toml, which is read only when such a flag, or an unknown one, is given.
"""

from __future__ import annotations

import tomllib
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

from moe_engine.config.field import option_of
from moe_engine.config.values import refuse_unsupported
from moe_engine.errors import ConfigError, nearest

IN_FORCE = (False, 0, 1, "", "{}", "none", "null", "disabled", "auto", "default", "lru")
"""Values of absent features that match this engine's behavior: off, a count of one, or its only policy."""
REMOVED = "removed from SGLang too"


@dataclass(frozen=True)
class AbsentFlag:
    """
    Attributes:
        name: SGLang's field.
        accepted: values that request nothing, SGLang's default first; None is always one. ``(False,)``: a switch.
        reason: the missing feature; of a flag that SGLang has removed, the advice.
    """

    name: str
    accepted: tuple[Any, ...]
    reason: str
    removed: bool
    spellings: tuple[str, ...]

    @property
    def is_switch(self) -> bool:
        return any(value is False for value in self.accepted)

    def check(self, keyword: str, value: Any) -> None:
        """Raises ConfigError for a value that requests the feature. `keyword`: the spelling that the user gave."""
        values = value if isinstance(value, list | tuple) else [value]
        if all(any(_same(item, known) for known in (None, *self.accepted)) for item in values):
            return
        if self.removed:
            raise ConfigError(f"{option_of(keyword)}: {REMOVED}; {self.reason}")
        shown = " ".join(str(item) for item in values if item is not True)
        default = next(iter(self.accepted), "")
        is_true = not self.is_switch and default != "" and _in_force(default)
        instead = f"leave it out or use {default}" if is_true else "leave it out"
        raise refuse_unsupported(f"{option_of(keyword)} {shown}".rstrip(), self.reason, instead)


@dataclass(frozen=True)
class AbsentFlags:
    """The data file. All names are Python identifiers (``pp_size``)."""

    flags: Mapping[str, AbsentFlag]
    no_effect: Mapping[str, str]
    """Switches that disable features absent from this engine, with the reason."""
    docker_run: tuple[str, ...]
    facts: frozenset[str]
    """Keys of /server_info that are not flags; they are accepted in a dump, and have no effect."""
    vllm: Mapping[str, str]
    """Advice for flags of vLLM."""
    name_of: Mapping[str, str]
    """Name of a flag, or of a switch without effect, by each spelling."""


@lru_cache
def absent_flags() -> AbsentFlags:
    data = tomllib.loads(Path(__file__).with_name("absent_flags.toml").read_text(encoding="utf-8"))
    other, no_effect = data["other_spellings"], data["no_effect"]
    flags = {
        name: AbsentFlag(
            name, (False,) if values is False else tuple(values), reason, kind == "removed",
            tuple(spelling for spelling, meant in other.items() if meant == name),
        )
        for kind in ("unsupported", "removed")
        for reason, rows in data[kind].items()
        for name, values in rows.items()
    }  # fmt: skip
    own = {name: name for name in (*flags, *no_effect)}
    return AbsentFlags(flags, no_effect, tuple(data["docker_run"]), frozenset(data["facts"]), data["vllm"], own | other)


def check_absent(given: Mapping[str, Any], accepted: Iterable[str]) -> tuple[str, ...]:
    """Remarks on keywords that are not fields.

    Args:
        accepted: spellings of the fields, for suggestions.

    Raises:
        ConfigError: a keyword is unknown, or a value requests a feature that this engine lacks.
    """
    absent, notes = absent_flags(), []
    idle: dict[str, list[str]] = {}  # reason -> settings of absent features; a dump of SGLang's flags has dozens
    for keyword, value in given.items():
        if keyword in absent.facts:
            continue
        name = absent.name_of.get(keyword)
        if name is None:
            problem = unknown_flag(keyword, accepted)
            raise ConfigError(f"{keyword}: {problem}; `moe-engine serve --help all` lists the flags")
        if name in absent.no_effect:
            if value is not None and not isinstance(value, bool):
                raise ConfigError(f"{option_of(keyword)}: a switch is true or false, not {value!r}")
            if value:
                notes.append(f"{option_of(keyword)}: no effect ({absent.no_effect[name]})")
            continue
        flag = absent.flags[name]
        flag.check(keyword, value)
        values = value if isinstance(value, list | tuple) else [value]
        if not all(item is None or _in_force(item) for item in values):
            setting = f"{option_of(name)} {' '.join(map(str, values))}"
            idle.setdefault(REMOVED if flag.removed else flag.reason, []).append(setting)
    if idle:
        listed = "; ".join(f"{', '.join(settings)} ({reason})" for reason, settings in idle.items())
        notes.append(f"no effect, as these belong to features that are not supported yet: {listed}")
    return tuple(notes)


def keyword_of(option: str) -> str:
    """``--page-size`` -> ``page_size``."""
    return option.lstrip("-").replace("-", "_")


def unknown_flag(word: str, accepted: Iterable[str]) -> str:
    """The error text for an unknown flag; names the nearest flag if that one is accepted.

    Args:
        accepted: spellings in the form of `word`, an option or a keyword.
    """
    absent, keyword = absent_flags(), keyword_of(word)
    if keyword in absent.docker_run:
        return "unknown flag; it is a flag of `docker run`, not of the server"
    if keyword in absent.vllm:
        return f"unknown flag; it is a flag of vLLM: {absent.vllm[keyword]}"
    known = {keyword_of(spelling): spelling for spelling in accepted}
    known |= {name: option_of(name) if word.startswith("-") else name for name in absent.no_effect}
    close = nearest(keyword, [*known, *absent.name_of])
    return f"unknown flag (did you mean {known[close]}?)" if close in known else "unknown flag"


def _in_force(value: Any) -> bool:
    return any(_same(value, known) for known in IN_FORCE)


def _same(value: Any, known: Any) -> bool:
    """Equal as text or as numbers: the command line passes ``1``, a keyword 1. A bool never equals a number."""
    if str(value).strip().lower() == str(known).lower():
        return True
    if isinstance(value, bool) or isinstance(known, bool):
        return False
    try:
        return float(value) == float(known)
    except (TypeError, ValueError):
        return False
