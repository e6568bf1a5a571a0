"""The command line: one argparse parser, derived from the fields of the config dataclasses."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Sequence
from typing import Any, NoReturn

from moe_engine.config.absent_flags import absent_flags, keyword_of, unknown_flag
from moe_engine.config.field import FieldInfo, fields_of, option_of
from moe_engine.config.numbers import READERS
from moe_engine.errors import ConfigError, did_you_mean

GROUPS = {
    "ModelArgs": "model",
    "ParallelArgs": "ranks and nodes",
    "ExpertArgs": "experts",
    "MemoryArgs": "memory",
    "GraphArgs": "CUDA graphs",
    "SchedulingArgs": "scheduling",
    "SpeculativeArgs": "speculative decoding",
    "LoraArgs": "LoRA adapters",
    "MultimodalArgs": "images",
    "DisaggregationArgs": "prefill and decode on separate servers",
    "BackendArgs": "backends",
    "LoggingArgs": "logging and metrics",
    "ServerArgs": "server",
}
CLEARER = (
    ("ignored explicit argument", "takes no value; leave out"),
    (": invalid int value: (.*)", r" \1: expected a whole number"),
    (": invalid float value: (.*)", r" \1: expected a number"),
    ("expected (at least )?one argument", "has no value; give one, behind = if it begins with -"),
)
"""argparse's words without a fix, as patterns, and the words in their place."""


class Parser(argparse.ArgumentParser):
    """An argument parser that raises ConfigError with one message, without argparse's usage page."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        for kind, read in READERS.items():
            self.register("type", kind, read)

    def error(self, message: str) -> NoReturn:
        message = message.removeprefix("argument ")
        for words, clear in CLEARER:
            message = re.sub(words, clear, message)
        raise ConfigError(message)

    def parse_args(self, args: Any = None, namespace: Any = None) -> Any:
        """Raises ConfigError for an unknown argument, with the nearest flag."""
        found, unknown = self.parse_known_args(args, namespace)
        if unknown:
            word = unknown[0].split("=")[0]
            self.error(f"{word}: unknown argument{did_you_mean(word, known_options(self))}; --help lists all")
        return found


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
    """Adds the `--config` file and a flag for each field of the parts."""
    parser.add_argument(
        "--config",
        metavar="FILE.yaml",
        help="YAML file with flags (`page-size: 16`). Flags on the command line override it.",
    )
    for part in parts:
        group = parser.add_argument_group(GROUPS.get(part.__name__, part.__name__))
        for info in fields_of(part):
            _add_field(group, info)


def _add_field(group: argparse._ArgumentGroup, info: FieldInfo) -> None:
    allowed = info.flag.allowed()
    text = info.flag.help
    if not info.optional and info.type is not bool and info.default != "":
        text += f" Default: {info.default}."
    options: dict[str, Any] = {"dest": info.name, "help": text.replace("%", "%%"), "default": argparse.SUPPRESS}
    if info.type is bool:
        group.add_argument(*info.spellings, action=_Store, info=info, nargs=0, **options)
        return
    metavar = info.flag.metavar or ("{" + ",".join(filter(None, allowed)) + "}" if allowed else info.name.upper())
    if info.flag.many:
        options["nargs"] = "+"
    group.add_argument(*info.spellings, action=_Store, info=info, metavar=metavar, **options)


def parse_flags(parser: argparse.ArgumentParser, argv: Sequence[str], own: Sequence[str] = ()) -> dict[str, Any]:
    """The given flags by field name, still as text; flags of a `--config` file included.

    Args:
        own: options that the command has itself and has parsed, for the nearest spelling.

    Raises:
        ConfigError: for an unknown flag (with the nearest spelling), a missing value or a bad file.
    """
    namespace, unknown = parser.parse_known_args([_with_dashes(word) for word in argv])
    given = vars(namespace) | (_parse_absent([*own, *known_options(parser)], unknown) if unknown else {})
    path = given.pop("config", None)
    return {**_of_file(parser, path), **given} if path is not None else given


def _with_dashes(word: str) -> str:
    """A flag's name may be written with - or _, as in vLLM; its value is left as it is."""
    name, equals, value = word.partition("=")
    return name.replace("_", "-") + equals + value if word.startswith("--") else word


def _of_file(parser: argparse.ArgumentParser, path: str) -> dict[str, Any]:
    """A file's values by field name, so that the command line's `--tp-size 1` overrides its `tp: 4`."""
    fields = {keyword_of(spelling): action.dest for action in parser._actions for spelling in action.option_strings}
    absent, values = absent_flags(), read_yaml(path)
    names = {**{name: name for name in absent.facts}, **absent.name_of, **fields}
    for key in values:
        if key not in names:
            raise ConfigError(f"--config {path}: {key}: {unknown_flag(key, fields)}; --help all lists the flags")
    return {names[key]: value for key, value in values.items()}


def _parse_absent(accepted: Sequence[str], argv: Sequence[str]) -> dict[str, Any]:
    """Flags of SGLang without a field, by name; True without a value. Raises ConfigError for all other words.
    `accepted`: the other options."""
    parser, absent = Parser(add_help=False), absent_flags()
    for spelling, name in absent.name_of.items():
        is_switch = name in absent.no_effect or absent.flags[name].is_switch
        kind: dict[str, Any] = {"action": "store_true"} if is_switch else {"nargs": "*"}
        parser.add_argument(option_of(spelling), dest=name, default=argparse.SUPPRESS, **kind)
    namespace, unknown = parser.parse_known_args(argv)
    _refuse_unknown(accepted, unknown)
    return {name: values or True for name, values in vars(namespace).items()}


def _refuse_unknown(accepted: Sequence[str], unknown: Sequence[str]) -> None:
    if not unknown:
        return
    word = next((text for text in unknown if text.startswith("-")), None)
    if word is None:
        raise ConfigError(
            f"{unknown[0]}: stray argument; every option has a name, for instance --model-path PATH; a text of several "
            "words needs quotes; flags that switch something on take no value"
        )
    word = word.split("=")[0]
    raise ConfigError(f"{word}: {unknown_flag(word, accepted)}; --help all lists the flags")


def known_options(parser: argparse.ArgumentParser) -> list[str]:
    return [spelling for action in parser._actions for spelling in action.option_strings]


def read_yaml(path: str) -> dict[str, Any]:
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
