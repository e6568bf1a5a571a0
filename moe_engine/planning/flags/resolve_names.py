"""Resolves the served name, the tokenizer and the parsers; those of the embedded model are known."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

from moe_engine.config.args import EngineArgs
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.planning.resolution_log import Record

DEMO_NAME = "demo"
DEMO_PARSERS = {"reasoning_parser": "deepseek-v3", "tool_call_parser": "deepseekv31"}


def _is_demo(args: EngineArgs, path: str) -> bool:
    return args.model.model_path is None or Path(path) == CHECKPOINT_DIR


def with_demo_parsers(args: EngineArgs, path: str, record: Record) -> EngineArgs:
    """Sets the parsers of the embedded model, whose reasoning and tool-call formats are known."""
    if not _is_demo(args, path) or args.model.skip_tokenizer_init:
        return args
    chosen: dict[str, Any] = {n: parser for n, parser in DEMO_PARSERS.items() if getattr(args.server, n) is None}
    for name, parser in chosen.items():
        record.note(name, parser, "the embedded model's format")
    return dataclasses.replace(args, server=dataclasses.replace(args.server, **chosen))


def resolve_served_name(args: EngineArgs, path: str, record: Record) -> str:
    if _is_demo(args, path):
        return record.note("served_model_name", DEMO_NAME, "the embedded model")
    return record.note("served_model_name", args.model.model_path or path, "the model path")
