"""`--reasoning-parser auto` and `--tool-call-parser auto`: the parsers of the chat template that the server uses; and
those of Hy3 by its vocabulary."""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.config.field import option_of
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.planning.flags.resolve_names import DEMO_PARSERS
from moe_engine.tokenizer.reasoning import HY3, HY3_SUFFIX

AUTO = "auto"
_NAMES = ("reasoning_parser", "tool_call_parser")


def with_template_parsers(args: EngineArgs, folder: Path) -> tuple[EngineArgs, tuple[str, ...]]:
    """The flags with the chosen parsers instead of auto and of Hy3's names, and remarks. Reads the tokenizer only
    with these.

    Args:
        folder: of the checkpoint, or its GGUF file.

    Raises:
        ConfigError: no such template, or a broken one.
    """
    asked = {name: value for name in _NAMES if (value := getattr(args.server, name)) in (AUTO, *HY3)}
    if not asked:
        return args, ()
    found: Mapping[str, str | None] = DEMO_PARSERS if folder == CHECKPOINT_DIR else _of_tokenizer(args, folder, asked)
    chosen: dict[str, Any] = {name: found.get(name) for name in asked}
    remarks = tuple(
        f"{option_of(name)} {value}: {chosen[name] or 'none, the chat template shows no known format'}"
        for name, value in asked.items()
        if chosen[name] != value
    )
    return dataclasses.replace(args, server=dataclasses.replace(args.server, **chosen)), remarks


def _of_tokenizer(args: EngineArgs, folder: Path, asked: Mapping[str, str]) -> Mapping[str, str | None]:
    from moe_engine.tokenizer.tokenizer import load_tokenizer

    if args.model.skip_tokenizer_init:
        return {name: value for name, value in asked.items() if value != AUTO}
    path = args.model.tokenizer_path or folder
    trust, revision = args.model.trust_remote_code, args.model.revision
    tokenizer = load_tokenizer(path, mode=args.model.tokenizer_mode, trust_remote_code=trust, revision=revision)
    of_template = _of_template(args, folder, tokenizer.chat_template) if AUTO in asked.values() else {}
    found = {name: of_template.get(name) if value == AUTO else value for name, value in asked.items()}
    hy3 = HY3[tokenizer.token_id(f"<tool_calls{HY3_SUFFIX}>") is not None]
    return {name: hy3 if value in HY3 else value for name, value in found.items()}


def _of_template(args: EngineArgs, folder: Path, own: str | dict[str, str] | None) -> dict[str, str | None]:
    from moe_engine.tokenizer.chat_template import load_chat_template

    template = load_chat_template(args.model.chat_template, own, {}, folder if folder.is_dir() else folder.parent)
    return {} if template is None else dict(zip(_NAMES, template.parsers))
