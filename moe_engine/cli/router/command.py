"""``moe-engine router``: starts several servers of this machine and sglang-router in front of them."""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.cli.router import processes
from moe_engine.cli.router.fleet import parse


def main(argv: Sequence[str], prog: str) -> int:
    return processes.run(parse(argv, prog))
