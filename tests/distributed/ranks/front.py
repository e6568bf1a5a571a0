"""Node 0 of a two-node failure drill, in its own process; prints the result and its time as JSON.

``python -m tests.distributed.ranks.front CHECKPOINT HOST:PORT FLAG PHASE``
"""

from __future__ import annotations

import asyncio
import json
import sys
import time
from pathlib import Path
from typing import Any

from moe_engine.errors import EngineDeadError
from tests.distributed.ranks.drill import drill
from tests.distributed.ranks.node import two_nodes

PROMPTS = [[5 + i % 190 for i in range(first, first + 40)] for first in (1, 9)]
NUM_TOKENS = 400


async def run(checkpoint: str, address: str, flag: str, phase: str) -> dict[str, Any]:
    fates: list[str] = []
    try:
        async with drill(Path(checkpoint), two_nodes(address, 0, Path(flag), phase)) as running:
            for prompt in PROMPTS:
                running.ask(prompt, NUM_TOKENS)
            fates = [fate.text for fate in await running.fates()]
            ended = time.monotonic()
            cause = str(running.core.dead)
    except EngineDeadError as error:
        ended, cause = time.monotonic(), str(error)
    return {"ended": ended, "cause": cause, "fates": fates}


if __name__ == "__main__":
    print(json.dumps(asyncio.run(run(*sys.argv[1:]))))
