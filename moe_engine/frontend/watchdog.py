"""Watchdog of a frontend: kills engine processes that no longer make progress, so that their requests fail."""

from __future__ import annotations

import asyncio
import time
from functools import partial

from moe_engine.frontend.client import CoreClient
from moe_engine.frontend.client_api import Health
from moe_engine.processes.stopped import LOOK_SECONDS


async def watch(client: CoreClient, timeout: float) -> None:
    """Kills a stalled engine (`--watchdog-timeout`), and one that a signal has stopped; runs until the engine is dead.

    A stall must be seen twice in a row: after this process was itself blocked, the engine gets time to update its
    status.
    """
    seen, due = None, time.monotonic()
    while client.cause_of_death() is None:
        await asyncio.sleep(min(LOOK_SECONDS, timeout / 4))
        client.stop_held()
        if time.monotonic() < due:
            continue
        due = time.monotonic() + min(1.0, timeout / 4)
        before, seen = seen, stall(client.health(), timeout)
        if before and seen:
            client.stop_stalled(partial(stall, watchdog_timeout=timeout))


def stall(health: Health, watchdog_timeout: float) -> str | None:
    """Reason the engine is stalled (no progress for --watchdog-timeout), or None."""
    if health.last_step_age > watchdog_timeout and (health.num_running or health.num_waiting):
        return (
            f"stalled: step {health.last_step + 1} not finished for {health.last_step_age:.1f} s (--watchdog-timeout "
            f"{watchdog_timeout:g}) with {health.num_running} requests running and {health.num_waiting} waiting"
        )
    if health.silence > watchdog_timeout:
        return (
            f"stalled: no heartbeat from the engine core for {health.silence:.1f} s (--watchdog-timeout "
            f"{watchdog_timeout:g}); check whether its process is stopped"
        )
    return None
