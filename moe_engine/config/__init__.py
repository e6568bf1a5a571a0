"""Server arguments: a field is a flag, a keyword of the offline API and a line of --help. `planning` resolves them."""

from moe_engine.config.args import EngineArgs, build_parser

__all__ = ["EngineArgs", "build_parser"]
