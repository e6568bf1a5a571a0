"""`--help [TOPIC]` of the commands that take the flags of `serve`: hundreds of flags in parts that can be read."""

from __future__ import annotations

import argparse
import shutil
import textwrap
from collections.abc import Iterable
from typing import Any

from moe_engine.errors import ConfigError

USUAL = {
    "--model-path": "checkpoint: a folder, a GGUF file or a hub id; left out: the embedded model",
    "--host": "address to listen on (127.0.0.1)",
    "--port": "port to listen on (30000)",
    "--api-key": "key that clients must send",
    "--tp-size": "ranks of a model, one GPU each (1)",
    "--attn-dp-size": "DP attention: groups of ranks with their own requests and KV cache (1)",
    "--ep-size": "groups of ranks over which the experts are distributed (1)",
    "--moe-a2a-backend": "all-to-all of tokens to the ranks of their experts: auto, deepep, ... (none)",
    "--quantization": "quantize a checkpoint while loading: int4, int8, fp8, ...",
    "--kv-cache-dtype": "format of the KV cache: fp8_e4m3, ... (that of the activations)",
    "--context-length": "most tokens of a prompt with its answer (the model's)",
    "--mem-fraction-static": "share of the memory for weights and KV cache (by the memory ledger)",
    "--max-running-requests": "most requests that run at once (by the KV cache)",
    "--chunked-prefill-size": "most prompt tokens of a step (by the memory)",
    "--speculative-algorithm": "speculative decoding: NEXTN, EAGLE3, NGRAM, ...",
    "--enable-metrics": "Prometheus metrics at /metrics",
}
"""Flags that most launches set, and a line for each: the help without a topic."""
OF_SERVERS = {"--host", "--port", "--api-key", "--enable-metrics"}
"""Flags that affect nothing but the HTTP server."""
TOPICS = """\
all flags of serve, by group (`--help memory` shows a group, `--help WORD` the flags with a word, `--help all` all):
"""


class Formatter(argparse.RawDescriptionHelpFormatter):
    """Values are named by their types (argparse repeats the flag's name)."""

    def _get_default_metavar_for_optional(self, action: argparse.Action) -> str:
        return "N" if action.type is int else "X" if action.type is float else "TEXT"


class Help(argparse.Action):
    """Prints the help for the topic, a group or a word, and exits.

    Args:
        titles: the groups of `serve`'s flags.
        usual: the flags that the overview explains.
    """

    def __init__(
        self, option_strings: list[str], dest: str, *, titles: Iterable[str], usual: Iterable[str] = USUAL
    ) -> None:
        text = "the usual flags; with TOPIC a group of flags, the flags with a word, or all"
        super().__init__(option_strings, dest, nargs="?", metavar="TOPIC", default=argparse.SUPPRESS, help=text)
        self._titles = tuple(titles)
        self._usual = tuple(usual)

    def __call__(
        self, parser: argparse.ArgumentParser, namespace: argparse.Namespace, values: Any, option: str | None = None
    ) -> None:
        if values == "all":
            parser.print_help()
        elif values is None:
            print(self._overview(parser))
        else:
            print(_found(parser, values))
        parser.exit()

    def _overview(self, parser: argparse.ArgumentParser) -> str:
        """Usage, the command's own flags, the usual flags of `serve` and the names of all, by group."""
        served = [group for group in parser._action_groups if group.title in self._titles]
        formatter = parser._get_formatter()
        formatter.add_usage(parser.usage, parser._actions, parser._mutually_exclusive_groups)
        formatter.add_text(parser.description)
        for group in parser._action_groups:
            if group not in served:
                _add(formatter, group.title, group._group_actions)
        flags = {action.option_strings[0]: action for group in served for action in group._group_actions}
        _add(formatter, "usual flags of serve (default)", [_short(flags[name]) for name in self._usual])
        groups = "\n".join(f"  {group.title}\n{_names(group._group_actions)}" for group in served)
        return f"{formatter.format_help()}\n{TOPICS}{groups}\n\n{parser.epilog or ''}"


class _Shown(argparse.Action):
    """A flag that is only printed."""

    def __call__(self, *args: Any) -> None:
        raise AssertionError


def _short(flag: argparse.Action) -> argparse.Action:
    """With one spelling, without its choices, and with its line of USUAL."""
    kind = flag.metavar if isinstance(flag.metavar, str) and "{" not in flag.metavar else "NAME"
    option = flag.option_strings[0]
    return _Shown([option], flag.dest, nargs=flag.nargs, metavar=kind, help=USUAL[option])


def _names(actions: list[argparse.Action]) -> str:
    names = " ".join(action.option_strings[0] for action in actions)
    indent = " " * 4
    return textwrap.fill(
        names, shutil.get_terminal_size().columns - 2, initial_indent=indent, subsequent_indent=indent,
        break_on_hyphens=False,
    )  # fmt: skip


def _found(parser: argparse.ArgumentParser, topic: str) -> str:
    """The group of that title, or the groups with the topic in their titles, or the flags with the topic in their
    names, then those with it in their texts."""
    word = topic.lower().lstrip("-").replace("_", "-")
    groups = [group for group in parser._action_groups if (group.title or "").lower() == word]
    groups = groups or [group for group in parser._action_groups if word in (group.title or "").lower()]
    formatter = parser._get_formatter()
    if groups:
        for group in groups:
            _add(formatter, group.title, group._group_actions)
        return formatter.format_help().rstrip()
    actions = [action for action in parser._actions if word in " ".join(action.option_strings)]
    actions += [act for act in parser._actions if act not in actions and topic.lower() in (act.help or "").lower()]
    if not actions:
        raise ConfigError(f"--help {topic}: no group and no flag has this word; --help lists the groups")
    _add(formatter, f"flags with {topic!r}", actions)
    return formatter.format_help().rstrip()


def _add(formatter: argparse.HelpFormatter, title: str | None, actions: list[argparse.Action]) -> None:
    formatter.start_section(title)
    formatter.add_arguments(actions)
    formatter.end_section()
