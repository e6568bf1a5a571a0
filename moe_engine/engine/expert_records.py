"""The front end's way to record experts, over one core or several (see `expert_calls`)."""

from __future__ import annotations

from typing import Any

from moe_engine.engine.client_api import EngineClient
from moe_engine.errors import InputError
from moe_engine.parallel.recording.replicas import align_passes
from moe_engine.parallel.recording.snapshots import sum_snapshots


class ExpertRecords:
    """Starts, stops, dumps and shows what every rank of every core counts."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client

    async def start(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._call("expert_start", status=400)

    async def stop(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._call("expert_stop", status=400)

    async def dump(self) -> list[str]:
        """The files written: one for all cores, or one for each rank.

        Raises:
            InputError: 400 if nothing can be recorded; 500 if a file could not be written, and then nothing was lost.
        """
        taken = await self._call("expert_take", status=500)
        parts = align_passes([answer["parts"] for answer in taken])
        written = _unless_refused([await self._client.call_one("expert_write", parts=parts)], status=500)
        return list(written[0]["paths"])

    async def snapshot(self) -> dict[str, Any] | None:
        """The live view; None where nothing can be recorded."""
        return sum_snapshots([answer["view"] for answer in await self._call("expert_snapshot", status=500)])

    async def _call(self, method: str, status: int) -> list[dict[str, Any]]:
        return _unless_refused(await self._client.call(method), status)


def _unless_refused(answers: list[dict[str, Any]], status: int) -> list[dict[str, Any]]:
    for found in answers:
        if "error" in found:
            raise InputError(found["error"], status=400 if found.get("off") else status)
    return answers
