"""`ServerArgs`: all flags of a server as one flat object, with SGLang's methods, for ``Engine(server_args=...)``."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from moe_engine.config.args import PARTS, EngineArgs
from moe_engine.config.field import fields_of
from moe_engine.config.flags import add_flags, read_yaml

_FIELDS = [
    (info.name, info.type, dataclasses.field(default=info.default))
    for part in PARTS.values()
    for info in fields_of(part)
]
_Flat: Any = dataclasses.make_dataclass("_Flat", _FIELDS, init=False)


class ServerArgs(_Flat):  # type: ignore[misc]  # mypy accepts no computed bases
    """A dataclass with a field for each flag: ``dataclasses.asdict`` gives keywords of `Engine`. Fields may be changed.

    Args:
        model_path: as of `Engine`.
        flags: any flag of the server, as a keyword. Flags of SGLang without a field are accepted or refused by their
            value, as on the command line.

    Raises:
        ConfigError: naming the flag.
    """

    def __init__(self, model_path: str | None = None, **flags: Any) -> None:
        if model_path is not None:
            flags["model_path"] = model_path
        self._args = EngineArgs.from_kwargs(**flags)
        for name, value in self._args.flat().items():
            setattr(self, name, value)

    @staticmethod
    def add_cli_args(parser: argparse.ArgumentParser) -> None:
        """Adds all flags to a program's own parser; they are checked in `from_cli_args`."""
        add_flags(parser, list(PARTS.values()))

    @classmethod
    def from_cli_args(cls, args: argparse.Namespace) -> ServerArgs:
        """From the arguments of a parser with `add_cli_args`. The program's own arguments are left out."""
        given = vars(args)
        values = read_yaml(given["config"]) if given.get("config") else {}
        return cls(**values | {name: given[name] for name, _, _ in _FIELDS if name in given})

    def engine_args(self) -> EngineArgs:
        """The flags, with changes of the fields checked. Raises ConfigError: naming the flag."""
        before = self._args.flat()
        changed = {name: getattr(self, name) for name in before if getattr(self, name) != before[name]}
        return self._args.replace(**changed) if changed else self._args
