"""`EngineArgs`: what the user asked for, from a command line, a YAML file or keywords; all three read alike."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moe_engine.config.backends import BackendArgs
from moe_engine.config.experts import ExpertArgs
from moe_engine.config.field import FieldInfo, fields_of, option_of
from moe_engine.config.flags import Parser, add_flags, parse_flags
from moe_engine.config.graphs import GraphArgs
from moe_engine.config.later import DROPPED, LATER, SATISFIED, LaterFlag
from moe_engine.config.logging import LoggingArgs
from moe_engine.config.memory import MemoryArgs
from moe_engine.config.model import ModelArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.server import ServerArgs
from moe_engine.config.speculative import SpeculativeArgs
from moe_engine.config.values import nearest, refuse_later, to_field_value
from moe_engine.errors import ConfigError

PARTS: dict[str, type] = {
    "model": ModelArgs,
    "parallel": ParallelArgs,
    "experts": ExpertArgs,
    "memory": MemoryArgs,
    "graphs": GraphArgs,
    "scheduling": SchedulingArgs,
    "speculative": SpeculativeArgs,
    "backends": BackendArgs,
    "logging": LoggingArgs,
    "server": ServerArgs,
}


@dataclass(frozen=True)
class EngineArgs:
    """Every flag, checked one by one and not yet resolved: None and ``auto`` still stand where nothing was said.

    `given` names the fields that the user set; `notes` are remarks on flags that need nothing.
    """

    model: ModelArgs = field(default_factory=ModelArgs)
    parallel: ParallelArgs = field(default_factory=ParallelArgs)
    experts: ExpertArgs = field(default_factory=ExpertArgs)
    memory: MemoryArgs = field(default_factory=MemoryArgs)
    graphs: GraphArgs = field(default_factory=GraphArgs)
    scheduling: SchedulingArgs = field(default_factory=SchedulingArgs)
    speculative: SpeculativeArgs = field(default_factory=SpeculativeArgs)
    backends: BackendArgs = field(default_factory=BackendArgs)
    logging: LoggingArgs = field(default_factory=LoggingArgs)
    server: ServerArgs = field(default_factory=ServerArgs)
    given: frozenset[str] = field(default_factory=frozenset)
    notes: tuple[str, ...] = ()

    @classmethod
    def from_kwargs(cls, **values: Any) -> EngineArgs:
        """From keywords named like the flags (``page_size=16``): the same checks and the same refusals.

        Raises:
            ConfigError: naming the flag.
            NotAvailableYet: for what a later part brings.
        """
        table = _by_spelling()
        notes: list[str] = []
        parts: dict[str, dict[str, Any]] = {name: {} for name in PARTS}
        for keyword, value in values.items():
            known = table.get(keyword)
            if isinstance(known, LaterFlag):
                _check_later(known, keyword, value)
            elif known is not None:
                part, info = known
                parts[part][info.name] = to_field_value(info, value)
            elif keyword in SATISFIED:
                if _switched_on(keyword, value):
                    notes.append(f"{option_of(keyword)}: nothing to do ({SATISFIED[keyword]})")
            elif keyword in DROPPED:
                raise ConfigError(f"{option_of(keyword)}: gone from SGLang too; {DROPPED[keyword]}")
            else:
                hint = nearest(keyword, (*table, *SATISFIED))
                raise ConfigError(f"{keyword}: unknown flag{hint}; `moe-engine serve --help` lists all flags")
        made: dict[str, Any] = {name: part(**parts[name]) for name, part in PARTS.items()}
        given = frozenset(name for chosen in parts.values() for name in chosen)
        return cls(**made, given=given, notes=tuple(notes))

    @classmethod
    def from_cli(cls, argv: Sequence[str], parser: Parser | None = None) -> EngineArgs:
        """From a command line (without the program's name). Raises as `from_kwargs` does; ``--help`` exits."""
        return cls.from_kwargs(**parse_flags(parser or build_parser(), argv))

    def replace(self, **values: Any) -> EngineArgs:
        """A copy with other values, named and checked as in `from_kwargs`."""
        kept = {name: value for name, value in self.flat().items() if name in self.given}
        made = EngineArgs.from_kwargs(**{**kept, **values})
        return dataclasses.replace(made, notes=self.notes + made.notes)

    def flat(self) -> dict[str, Any]:
        """All fields by flag name, as /server_info shows them. Keys are not hidden here."""
        return {name: value for part in PARTS for name, value in dataclasses.asdict(getattr(self, part)).items()}


def build_parser(prog: str | None = None, **options: Any) -> Parser:
    """A parser with every flag of every part."""
    parser = Parser(prog=prog, **options)
    add_flags(parser, list(PARTS.values()))
    return parser


@lru_cache
def _by_spelling() -> dict[str, LaterFlag | tuple[str, FieldInfo]]:
    """Field or later flag for each name and each other spelling, as Python writes it (``model``, ``tp``)."""
    table: dict[str, LaterFlag | tuple[str, FieldInfo]] = {}
    for part, cls in PARTS.items():
        for info in fields_of(cls):
            for spelling in info.spellings:
                table[_keyword(spelling)] = (part, info)
    for row in LATER.values():
        for spelling in (row.option, *row.spellings):
            table[_keyword(spelling)] = row
    return table


def _keyword(option: str) -> str:
    return option.lstrip("-").replace("-", "_")


def _check_later(row: LaterFlag, keyword: str, value: Any) -> None:
    values = value if isinstance(value, (list, tuple)) else [value]
    if all(row.asks_nothing(item) for item in values):
        return
    if row.is_switch:
        raise refuse_later(option_of(keyword), row.part, "leave it out")
    shown = " ".join(str(item) for item in values)
    instead = "leave it out" if row.default is None else f"leave it out or use {row.default}"
    raise refuse_later(f"{option_of(keyword)} {shown}", row.part, instead)


def _switched_on(keyword: str, value: Any) -> bool:
    if not isinstance(value, bool):
        raise ConfigError(f"{option_of(keyword)}: a switch is true or false, not {value!r}")
    return value
