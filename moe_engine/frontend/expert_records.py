"""Expert recording from the front end, over one or several cores (see `core.expert_calls`).

Counts collected from cores for a dump are kept here until a file is written: if the core that writes dies, another one
writes them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import EngineDeadError, InputError
from moe_engine.frontend.client_api import EngineClient
from moe_engine.parallel.recording.replicas import align_passes
from moe_engine.parallel.recording.snapshots import sum_snapshots


@dataclass(frozen=True)
class Dump:
    """`paths`: files written, one in total or one per rank. `lost`: one sentence per process that died since the last
    dump; its records are missing from the files."""

    paths: list[str]
    lost: list[str]


class ExpertRecords:
    """Starts, stops, dumps and shows the expert counts of all ranks of all cores."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unwritten: list[dict[str, Any]] = []
        """Counts collected from cores, which no longer hold them."""
        self._reported: set[str] = set()
        """Losses that a dump has reported, or that precede the recording."""
        self._dumping = asyncio.Lock()

    async def start(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._call("expert_start", status=400)
        self._unwritten, self._reported = [], set(self._losses())

    async def stop(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._call("expert_stop", status=400)

    async def dump(self) -> Dump:
        """
        Raises:
            InputError: 400 if nothing can be recorded; 500 if a file could not be written; the counts are kept.
            EngineDeadError: no core is left to write.
        """
        async with self._dumping:
            answers = await self._take()
            lost = [answer["lost"] for answer in answers if isinstance(answer, dict) and "lost" in answer]
            taken = [answer for answer in answers if isinstance(answer, dict) and "parts" in answer]
            parts = align_passes([answer["parts"] for answer in taken])
            self._unwritten += [part for part in parts if "counts" in part]
            _unless_refused([answer for answer in answers if isinstance(answer, dict)], status=500)
            others = [part for part in parts if "counts" not in part]  # files of ranks, or the reason for a missing one
            paths = await self._write(self._unwritten + others)
            self._unwritten = []
            lost += [loss for loss in self._losses() if loss not in self._reported]
            self._reported.update(lost)
            return Dump(paths, lost)

    async def _take(self) -> list[Any]:
        """The reply of every scheduler. Retries if one was lost meanwhile and no reply had counts: the lost one may
        have been the one that collects the counts of the other ranks, before or after they sent them."""
        replies: list[Any] = []
        for _ in self._client.healths():  # at most one retry per lost scheduler
            known = self._losses()
            replies += (answers := await self._client.call_each("expert_take"))
            new = [loss for loss in self._losses() if loss not in known]
            if any(isinstance(answer, dict) and answer.get("parts") for answer in answers):
                break
            if not new or not self._client.health().alive:
                break
            replies.append({"lost": f"{'; '.join(new)}: any records that other ranks had sent it for this dump"})
        return replies

    async def _write(self, parts: list[dict[str, Any]]) -> list[str]:
        """Writes through the first scheduler that survives the call; returns the paths."""
        cause = ""
        for _ in self._client.healths():
            try:
                written = await self._client.call_one("expert_write", parts=parts)
            except EngineDeadError as error:
                cause = str(error)
                continue
            return list(_unless_refused([written], status=500)[0]["paths"])
        raise EngineDeadError(f"{cause}; the dump was not written, and the recorded counts are lost")

    def _losses(self) -> list[str]:
        return list(dict.fromkeys(health.dead for health in self._client.healths() if health.dead))

    async def snapshot(self) -> dict[str, Any] | None:
        """The live view; None if recording is off."""
        return sum_snapshots([answer["view"] for answer in await self._call("expert_snapshot", status=500)])

    async def _call(self, method: str, status: int) -> list[dict[str, Any]]:
        """Calls all cores. Retries if a scheduler was lost meanwhile: it may have been the one that forwards the call
        to the other ranks, whose schedulers reply as if it had."""
        for _ in self._client.healths():  # at most one retry per lost scheduler
            lost = self._losses()
            answers = await self._client.call(method)
            failed = any("error" in answer and not answer.get("off") for answer in answers)
            if not failed and self._losses() == lost:
                break
        return _unless_refused(answers, status)


def _unless_refused(answers: list[dict[str, Any]], status: int) -> list[dict[str, Any]]:
    for found in answers:
        if "error" in found:
            raise InputError(found["error"], status=400 if found.get("off") else status)
    return answers
