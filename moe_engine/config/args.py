"""`EngineArgs`: the server arguments, from a command line, a YAML file or keywords; the same checks for all three."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moe_engine.config.absent_flag import AbsentFlag
from moe_engine.config.backends import BackendArgs
from moe_engine.config.dropped import DROPPED, SATISFIED
from moe_engine.config.experts import ExpertArgs
from moe_engine.config.field import FieldInfo, fields_of, option_of
from moe_engine.config.flags import Parser, add_flags, parse_flags
from moe_engine.config.graphs import GraphArgs
from moe_engine.config.logging import LoggingArgs
from moe_engine.config.memory import MemoryArgs
from moe_engine.config.model import ModelArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.server import ServerArgs
from moe_engine.config.speculative import SpeculativeArgs
from moe_engine.config.unknown_flag import keyword_of, unknown_flag
from moe_engine.config.unsupported_flags import UNSUPPORTED_FLAGS
from moe_engine.config.values import to_field_value
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

REMOVED = "removed from SGLang too"


@dataclass(frozen=True)
class EngineArgs:
    """Every flag, checked one by one and not yet resolved: flags left out are still None or ``auto``.

    `given` names the fields that the user set; `notes` are remarks on flags without effect.
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
            NotAvailableYet: the flag or value is not supported yet.
        """
        table = _by_spelling()
        notes: list[str] = []
        chosen: dict[str, Any] = {}
        spelled: dict[str, str] = {}  # field -> the keyword that set it
        idle: list[tuple[AbsentFlag, Any]] = []  # settings of unsupported features
        for keyword, value in values.items():
            known = table.get(keyword)
            if isinstance(known, AbsentFlag):
                if not known.asks_nothing(value):
                    raise known.refusal(keyword, value)
                if known.needs_a_note(value):
                    idle.append((known, value))
            elif known is not None:
                made = to_field_value(known, value)
                before = spelled.setdefault(known.name, keyword)
                if before != keyword and chosen[known.name] != made:
                    raise ConfigError(f"{option_of(before)} and {option_of(keyword)} are one flag; give one of the two")
                chosen[known.name] = made
            elif keyword in SATISFIED:
                if _switched_on(keyword, value):
                    notes.append(f"{option_of(keyword)}: no effect ({SATISFIED[keyword]})")
            else:
                wrong = unknown_flag(keyword, (*table, *SATISFIED))
                raise ConfigError(f"{keyword}: {wrong}; `moe-engine serve --help` lists all flags")
        notes += _idle_note(idle)
        parts: dict[str, Any] = {
            name: part(**{info.name: chosen[info.name] for info in fields_of(part) if info.name in chosen})
            for name, part in PARTS.items()
        }
        given = frozenset(name for name, value in chosen.items() if value is not None)
        return cls(**parts, given=given, notes=tuple(notes))

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
    """The command-line parser with every flag."""
    parser = Parser(prog=prog, **options)
    add_flags(parser, list(PARTS.values()))
    return parser


@lru_cache
def _by_spelling() -> dict[str, AbsentFlag | FieldInfo]:
    """Field or absent flag by each of its spellings, as a Python identifier (``model``, ``tp``)."""
    table: dict[str, AbsentFlag | FieldInfo] = {}
    for cls in PARTS.values():
        for info in fields_of(cls):
            for spelling in info.spellings:
                table[keyword_of(spelling)] = info
    for row in (*UNSUPPORTED_FLAGS.values(), *DROPPED.values()):
        for spelling in (row.option, *row.spellings):
            table[keyword_of(spelling)] = row
    return table


def _idle_note(idle: list[tuple[AbsentFlag, Any]]) -> list[str]:
    """One note for all settings of unsupported features: a dump of SGLang's flags holds dozens."""
    by_reason: dict[str, list[str]] = {}
    for flag, value in idle:
        text = " ".join(map(str, value)) if isinstance(value, (list, tuple)) else str(value)
        reason = flag.reason if flag.name in UNSUPPORTED_FLAGS else REMOVED
        by_reason.setdefault(reason, []).append(f"{flag.option} {text}")
    if not by_reason:
        return []
    parts = "; ".join(f"{', '.join(given)} ({reason})" for reason, given in by_reason.items())
    return [f"no effect, as these belong to features that are not supported yet: {parts}"]


def _switched_on(keyword: str, value: Any) -> bool:
    if value is not None and not isinstance(value, bool):
        raise ConfigError(f"{option_of(keyword)}: a switch is true or false, not {value!r}")
    return bool(value)
