"""The command line: one argparse parser, derived from the fields of the config dataclasses."""

from __future__ import annotations

import argparse
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_engine.config.dropped import DROPPED, SATISFIED
from moe_engine.config.field import FieldInfo, fields_of, option_of
from moe_engine.config.unknown_flag import accepted_matches, keyword_of, unknown_flag
from moe_engine.config.unsupported_flags import UNSUPPORTED_FLAGS
from moe_engine.errors import ConfigError

GROUPS = {
    "ModelArgs": "model",
    "ParallelArgs": "ranks and nodes",
    "ExpertArgs": "experts",
    "MemoryArgs": "memory",
    "GraphArgs": "CUDA graphs",
    "SchedulingArgs": "scheduling",
    "SpeculativeArgs": "speculative decoding",
    "BackendArgs": "backends",
    "LoggingArgs": "logging and metrics",
    "ServerArgs": "server",
}


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError with one message, without argparse's usage page."""

    def error(self, message: str) -> NoReturn:
        message = accepted_matches(message)
        raise ConfigError(message.replace("argument ", "", 1) if message.startswith("argument ") else message)


class _Store(argparse.Action):
    """Stores the text; prints a note with the current name of an old spelling."""

    def __init__(self, *args: Any, info: FieldInfo, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self._info = info

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if option in self._info.flag.old:
            print(f"note: {option} is now called {self._info.option}", file=sys.stderr)
        setattr(namespace, self.dest, True if self.nargs == 0 else values)


def add_flags(parser: argparse.ArgumentParser, parts: Sequence[type]) -> None:
    """Adds a flag for each field of the parts, the `--config` file and, hidden, the flags that are refused."""
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="YAML file with flags (`page-size: 16`). Flags on the command line override it.",
    )
    for part in parts:
        group = parser.add_argument_group(GROUPS.get(part.__name__, part.__name__))
        for info in fields_of(part):
            _add_field(group, info)
    _add_hidden(parser)


def _add_field(group: argparse._ArgumentGroup, info: FieldInfo) -> None:
    allowed = info.flag.allowed()
    text = info.flag.help
    if not info.optional and info.type is not bool:
        text += f" Default: {info.default}."
    options: dict[str, Any] = {"dest": info.name, "help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if info.type is bool:
        group.add_argument(*info.spellings, action=_Store, info=info, nargs=0, **options)
        return
    metavar = info.flag.metavar or ("{" + ",".join(allowed) + "}" if allowed else info.name.upper())
    if info.flag.many:
        options["nargs"] = "+"
    group.add_argument(*info.spellings, action=_Store, info=info, metavar=metavar, **options)


def _add_hidden(parser: argparse.ArgumentParser) -> None:
    """Flags of SGLang that are refused or have no effect: known to the parser so that abbreviations find them."""
    for row in (*UNSUPPORTED_FLAGS.values(), *DROPPED.values()):
        names = (row.option, *row.spellings)
        if row.is_switch:
            _hide(parser, names, row.name, action="store_true")
        else:
            one_or_more = row.name in UNSUPPORTED_FLAGS
            _hide(parser, names, row.name, **({"nargs": "+"} if one_or_more else {"nargs": "?", "const": True}))
    for name in SATISFIED:
        _hide(parser, (option_of(name),), name, action="store_true")


def _hide(parser: argparse.ArgumentParser, names: tuple[str, ...], dest: str, **options: Any) -> None:
    parser.add_argument(*names, dest=dest, help=argparse.SUPPRESS, default=argparse.SUPPRESS, **options)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str]) -> dict[str, Any]:
    """The given flags by field name, still as text; flags of a `--config` file included.

    Raises:
        ConfigError: for an unknown flag (with the nearest spelling), a missing value or a bad file.
    """
    namespace, unknown = parser.parse_known_args(list(argv))
    _refuse_unknown(parser, unknown)
    given = vars(namespace)
    path = given.pop("config", None)
    return {**_canonical(parser, _read_yaml(path)), **given} if path is not None else given


def _canonical(parser: argparse.ArgumentParser, values: dict[str, Any]) -> dict[str, Any]:
    """The same values by field name, so that the command line's `--tp-size 1` overrides a file's `tp: 4`."""
    fields = {keyword_of(spelling): action.dest for action in parser._actions for spelling in action.option_strings}
    return {fields.get(key, key): value for key, value in values.items()}


def _refuse_unknown(parser: argparse.ArgumentParser, unknown: Sequence[str]) -> None:
    if not unknown:
        return
    word = next((text for text in unknown if text.startswith("-")), None)
    if word is None:
        raise ConfigError(f"{unknown[0]}: stray argument; every option has a name, for instance --model-path PATH")
    word = word.split("=")[0]
    raise ConfigError(f"{word}: {unknown_flag(word, known_options(parser))}; --help lists all flags")


def known_options(parser: argparse.ArgumentParser) -> list[str]:
    return [spelling for action in parser._actions for spelling in action.option_strings]


def _read_yaml(path: str) -> dict[str, Any]:
    """Flags in a YAML file, by field name. Keys may be written with - or _."""
    import yaml

    try:
        with open(path, encoding="utf-8") as file:
            values = yaml.safe_load(file)
    except OSError as error:
        raise ConfigError(f"--config {path}: cannot read it: {error.strerror}") from None
    except (yaml.YAMLError, ValueError) as error:
        raise ConfigError(f"--config {path}: not valid YAML: {' '.join(str(error).split())}") from None
    if values is None:
        return {}
    if not isinstance(values, dict):
        raise ConfigError(f"--config {path}: must hold `flag: value` lines")
    return {keyword_of(str(key)): value for key, value in values.items()}
