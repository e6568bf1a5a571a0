"""Waits for work of all ranks that runs during their steps."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable, Mapping
from typing import Any

from moe_engine.frontend.client_api import EngineClient, values_of

POLL_SECONDS = (0.005, 0.1)
"""First and longest poll interval."""


async def poll_ranks(
    client: EngineClient, method: str, args: Mapping[str, Any], is_busy: Callable[[Any], bool], seconds: float
) -> dict[str, Any]:
    """Calls a method of all ranks until none is busy by its answer, or `seconds` have passed.

    Returns:
        the last answers, by the rank's name.

    Raises:
        CallError: names the ranks that failed.
        EngineDeadError: no scheduler is alive.
    """
    deadline = time.monotonic() + seconds
    pause, longest = POLL_SECONDS
    while True:
        groups = await client.ask_ranks(method, args)
        values_of(groups, method)
        found = {
            f"{'' if group.replica is None else f'replica {group.replica} '}rank {answer.rank}": answer.value
            for group in groups
            for answer in group.answers
        }
        if not any(map(is_busy, found.values())) or time.monotonic() > deadline:
            return found
        await asyncio.sleep(pause)
        pause = min(longest, 2 * pause)
