"""The configuration of an engine: part configs with their flags, and `resolve`, which makes them concrete.

`EngineArgs` says what was asked; `prepare` (with files and machine) or `resolve` (pure) turns it into a
`ResolvedConfig`. Imports no torch.
"""

from moe_engine.config.args import EngineArgs, build_parser
from moe_engine.config.decisions import Decision
from moe_engine.config.launch_plan import choose_backends, need_of, prepare
from moe_engine.config.ledger import MemoryLedger
from moe_engine.config.machine import Machine, probe_machine
from moe_engine.config.resolve import ResolvedConfig, resolve

__all__ = [
    "Decision",
    "EngineArgs",
    "Machine",
    "MemoryLedger",
    "ResolvedConfig",
    "build_parser",
    "choose_backends",
    "need_of",
    "prepare",
    "probe_machine",
    "resolve",
]
