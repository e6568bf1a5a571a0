"""``moe-engine demo``: prints the folder of the embedded model."""

from __future__ import annotations

from collections.abc import Sequence

from moe_engine.config.flags import Parser
from moe_engine.planning.inputs.checkpoint import embedded_model


def main(argv: Sequence[str], prog: str) -> int:
    Parser(prog=prog, description="Prints the folder of the embedded model.").parse_args(list(argv))
    print(embedded_model())
    return 0
