"""Node 0 of a pair of replicas, in a process of its own: ``python -m tests.nodes.front HOST:PORT FLAG FLAGS...`` makes
FLAG when both generate, and prints, as JSON, what became of the other node's replica and of its own."""

from __future__ import annotations

import asyncio
import json
import sys
from pathlib import Path
from typing import Any

from moe_engine import Engine
from moe_engine.config.args import build_parser
from moe_engine.config.flags import parse_flags
from moe_engine.errors import EngineDeadError

PROMPT = [5 + i % 190 for i in range(40)]
LENGTH = 64


async def run(engine: Engine, flag: Path) -> dict[str, Any]:
    first = asyncio.Event()

    async def until_it_is_lost() -> str:
        """Asks anew as long as it answers."""
        while True:
            try:
                async for _ in await engine.async_generate(**request(1), stream=True):  # type: ignore[union-attr]
                    first.set()
            except EngineDeadError as error:
                return str(error)

    losing = [asyncio.create_task(until_it_is_lost()) for _ in range(2)]
    before: Any = await engine.async_generate(**request(0))
    await first.wait()
    flag.write_text("both generate")
    lost = await asyncio.gather(*losing)
    after: Any = await engine.async_generate(**{**request(0), "routed_dp_rank": None})
    return {"lost": lost, "before": before["output_ids"], "after": after["output_ids"]}


def request(lane: int) -> dict[str, Any]:
    sampling = {"temperature": 0.0, "max_new_tokens": LENGTH, "ignore_eos": True}
    return {"input_ids": PROMPT, "sampling_params": sampling, "routed_dp_rank": lane}


def main(address: str, flag: str, *flags: str) -> None:
    values = parse_flags(build_parser(), flags)
    with Engine(**values, nnodes=2, node_rank=0, dist_init_addr=address, dp_size=2) as engine:
        print(json.dumps(asyncio.run(run(engine, Path(flag)))))


if __name__ == "__main__":
    main(*sys.argv[1:])
