"""`EngineArgs`: the server arguments, from a command line, a YAML file or keywords; the same checks for all three."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from moe_engine.config.absent_flags import check_absent, keyword_of
from moe_engine.config.backends import BackendArgs
from moe_engine.config.disaggregation import DisaggregationArgs
from moe_engine.config.experts import ExpertArgs
from moe_engine.config.field import FieldInfo, fields_of, option_of
from moe_engine.config.flags import GROUPS, Parser, add_flags, parse_flags
from moe_engine.config.graphs import GraphArgs
from moe_engine.config.help import OF_SERVERS, USUAL, Formatter, Help
from moe_engine.config.logging import LoggingArgs
from moe_engine.config.lora import LoraArgs
from moe_engine.config.memory import MemoryArgs
from moe_engine.config.model import ModelArgs
from moe_engine.config.multimodal import MultimodalArgs
from moe_engine.config.parallel import ParallelArgs
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.server import ServerArgs
from moe_engine.config.speculative import SpeculativeArgs
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
    "lora": LoraArgs,
    "multimodal": MultimodalArgs,
    "disaggregation": DisaggregationArgs,
    "backends": BackendArgs,
    "logging": LoggingArgs,
    "server": ServerArgs,
}


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
    lora: LoraArgs = field(default_factory=LoraArgs)
    multimodal: MultimodalArgs = field(default_factory=MultimodalArgs)
    disaggregation: DisaggregationArgs = field(default_factory=DisaggregationArgs)
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
        chosen: dict[str, Any] = {}
        spelled: dict[str, str] = {}  # field -> the keyword that set it
        absent: dict[str, Any] = {}
        for keyword, value in values.items():
            if (info := table.get(keyword)) is None:
                absent[keyword] = value
                continue
            made = to_field_value(info, value)
            before = spelled.setdefault(info.name, keyword)
            if before != keyword and chosen[info.name] != made:
                raise ConfigError(f"{option_of(before)} and {option_of(keyword)} are one flag; give one of the two")
            chosen[info.name] = made
        notes = check_absent(absent, table) if absent else ()
        parts: dict[str, Any] = {
            name: part(**{info.name: chosen[info.name] for info in fields_of(part) if info.name in chosen})
            for name, part in PARTS.items()
        }
        given = frozenset(name for name, keyword in spelled.items() if values[keyword] is not None)
        return cls(**parts, given=given, notes=notes)

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
        parts = ((getattr(self, name), part) for name, part in PARTS.items())
        return {info.name: getattr(values, info.name) for values, part in parts for info in fields_of(part)}


def build_parser(prog: str | None = None, *, serves: bool = True, **options: Any) -> Parser:
    """The command-line parser with every flag and `--help [TOPIC]`; `options` of argparse.

    Args:
        serves: whether `--help` explains the flags of the HTTP server.
    """
    options.setdefault("formatter_class", Formatter)
    options.setdefault("usage", prog and f"{prog} [--model-path PATH] [flags]")
    parser = Parser(prog=prog, add_help=False, **options)
    usual = [name for name in USUAL if serves or name not in OF_SERVERS]
    parser.add_argument("-h", "--help", action=Help, titles=GROUPS.values(), usual=usual)
    add_flags(parser, list(PARTS.values()))
    return parser


@lru_cache
def _by_spelling() -> dict[str, FieldInfo]:
    """The field by each of its spellings, as a Python identifier (``model``, ``tp``)."""
    infos = [info for part in PARTS.values() for info in fields_of(part)]
    return {keyword_of(spelling): info for info in infos for spelling in info.spellings}
