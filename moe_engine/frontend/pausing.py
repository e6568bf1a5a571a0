"""Pauses of generation, for weight updates in the middle of requests (reinforcement learning) and for maintenance.

While generation is paused, schedulers plan no step. Requests that arrive wait in the queue; aborts take effect.
"""

from __future__ import annotations

import logging
from contextlib import suppress
from typing import Literal

from moe_engine.errors import InputError, MoeEngineError
from moe_engine.frontend.frontend import Frontend, released_message

logger = logging.getLogger("moe_engine")

PauseMode = Literal["abort", "retract", "in_place"]
"""Effect on running requests: they are aborted; they return to the queue and recompute their KV; they keep their place
and KV."""


class Pausing:
    def __init__(self, frontend: Frontend) -> None:
        self._frontend = frontend

    async def pause(self, mode: PauseMode = "abort") -> int:
        """Returns once no step runs: the number of requests that wait for `resume`. A second pause may change the mode.

        Raises:
            EngineDeadError: no scheduler is alive.
        """
        frontend = self._frontend
        if mode == "abort":
            frontend.abort(all=True, reason="Aborted by a pause of generation")
        frontend.paused = True  # also if the call fails on one scheduler: the others are paused then
        await frontend.client.call("pause", retract=mode == "retract")
        logger.info("Generation is paused (%s); %d requests wait", mode, frontend.num_live)
        return frontend.num_live

    async def resume(self) -> bool:
        """False: generation was not paused. Waits for the end of a weight update that runs during the pause: steps
        between its parts would compute KV of the old weights.

        Raises:
            EngineDeadError: no scheduler is alive.
            InputError: memory is released.
        """
        if self._frontend.released:
            raise InputError(released_message(self._frontend.released))
        await self._frontend.weights.until_whole()
        was_paused, self._frontend.paused = self._frontend.paused, False
        await self._frontend.client.call("resume")
        if was_paused:
            logger.info("Generation continues")
        return was_paused

    async def end(self) -> None:
        """Before a drain, after which no client can resume: requests that wait run to their end, or are aborted if the
        memory for it is released."""
        frontend = self._frontend
        if not frontend.paused:
            return
        if frontend.released:
            frontend.abort(all=True, reason=f"the server is shutting down, and {released_message(frontend.released)}")
        with suppress(MoeEngineError):  # the engine is dead: its requests have failed, or memory is released
            await self.resume()
