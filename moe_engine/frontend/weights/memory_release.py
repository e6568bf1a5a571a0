"""Releases memory of weights and KV cache to the system between two phases of a training loop.

The engine must be idle, or generation paused. Requests in the middle of their output are then retracted and recompute
their KV later. No request begins until all memory is allocated again.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence

from moe_engine.errors import InputError, MoeEngineError
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.weights.weight_updates import Updated, WeightUpdates

logger = logging.getLogger("moe_engine")

TAGS = ("kv_cache", "weights")
RELEASE_SECONDS = 3600.0


class MemoryReleases:
    """Args: updates: does not run meanwhile."""

    def __init__(self, frontend: Frontend, updates: WeightUpdates) -> None:
        self._frontend, self._updates = frontend, updates

    async def release(self, tags: Sequence[str] | None = None) -> Updated:
        """Releases memory, on every rank or on none. `tags`: None: all.

        Raises:
            InputError: the launch does not allow it, or a tag is unknown.
            EngineDeadError: no scheduler is alive.
        """
        if not self._frontend.settings.enable_memory_saver:
            raise InputError("release_memory_occupation: start with --enable-memory-saver")
        return await self._updates.alone(self._release(_checked(tags)), "memory was not released")

    async def resume(self, tags: Sequence[str] | None = None) -> Updated:
        """Allocates released memory again. Raises as `release`."""
        return await self._updates.alone(self._resume(_checked(tags)), "memory was not resumed")

    async def _release(self, tags: list[str]) -> Updated:
        frontend = self._frontend
        client = frontend.client
        if frontend.num_live and not frontend.paused:
            raise MoeEngineError(f"{frontend.num_live} requests run; wait for their end, or call /pause_generation")
        before = set(frontend.released)
        frontend.released |= set(tags)  # no request begins from here on
        try:
            if frontend.paused:
                await client.call("pause", retract=True)
            else:
                await self._updates.wait_idle()
            if not all(await client.call("flush_cache")):
                raise MoeEngineError("the prefix cache could not be flushed")
            given = await client.collective_rpc("release_memory", {"tags": tags}, RELEASE_SECONDS)
        except BaseException:
            frontend.released = before
            back = [tag for tag in tags if tag not in before]
            if back and client.health().alive:
                await client.ask_ranks("resume_memory", {"tags": back}, RELEASE_SECONDS)
            raise
        total = sum(sum(rank.values()) for rank in given)
        message = f"Released {', '.join(tags)}: {total / 2**30:.3f} GiB on {len(given)} ranks."
        logger.info("%s", message)
        return Updated(True, message)

    async def _resume(self, tags: list[str]) -> Updated:
        frontend = self._frontend
        await frontend.client.collective_rpc("resume_memory", {"tags": tags}, RELEASE_SECONDS)
        frontend.released -= set(tags)
        message = f"Resumed {', '.join(tags)}."
        logger.info("%s", message)
        return Updated(True, message)


def _checked(tags: Sequence[str] | None) -> list[str]:
    for tag in tags or ():
        if tag == "cuda_graph":
            raise InputError.at("tags", "cuda_graph is not available yet in moe-engine; leave it out")
        if tag not in TAGS:
            raise InputError.at("tags", f"{tag!r:.40}: use {' or '.join(TAGS)}")
    return list(dict.fromkeys(tags)) if tags else list(TAGS)
