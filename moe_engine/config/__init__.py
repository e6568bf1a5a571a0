"""Flags: a field is a flag, a key of the offline API and a line of --help. `planning` makes them concrete."""

from moe_engine.config.args import EngineArgs, build_parser

__all__ = ["EngineArgs", "build_parser"]
