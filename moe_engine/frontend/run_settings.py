"""Settings of the schedulers that change while serving (`scheduler.run_settings`)."""

from __future__ import annotations

import asyncio
import logging
from collections.abc import Mapping
from typing import Any

from moe_engine.errors import InputError
from moe_engine.frontend.client_api import EngineClient

logger = logging.getLogger("moe_engine")


class RunSettingsOfAll:
    """Args: client: of the running engine; its schedulers get the same values."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._in_turn = asyncio.Lock()

    async def set(self, changes: Mapping[str, Any]) -> list[dict[str, Any]]:
        """Changes these settings on every scheduler, or on none. Returns the values in force, by scheduler.

        Raises:
            InputError: names the setting that cannot have the value.
            EngineDeadError: no scheduler is alive.
        """
        async with self._in_turn:
            for check_only in (True, False):
                try:
                    answers = await self._client.call("set_settings", changes=dict(changes), check_only=check_only)
                except OverflowError:  # of the messages to the schedulers
                    raise InputError.at(
                        "server_args", "a number is out of range; /get_internal_state has the bounds"
                    ) from None
                for answer in answers:
                    if "refused" in answer:
                        raise InputError(answer["refused"], field="server_args")
        logger.info("Settings changed: %s", ", ".join(f"{name} {value}" for name, value in changes.items()))
        return [answer["values"] for answer in answers]

    async def get(self) -> list[dict[str, Any]]:
        """By scheduler: values in force, and their bounds."""
        return await self._client.call("settings")
