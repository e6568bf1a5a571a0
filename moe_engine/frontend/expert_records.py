"""The front end's way to record experts, over one core or several (see `expert_calls`).

What cores have handed over for a dump stays here until a file holds it: a core that dies between the two takes none of
it away, as any other can write.
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
    """`paths`: the files written, one for all cores or one for each rank. `lost`: a sentence for each process that died
    since the last dump, whose records are in none of them."""

    paths: list[str]
    lost: list[str]


class ExpertRecords:
    """Starts, stops, dumps and shows what every rank of every core counts."""

    def __init__(self, client: EngineClient) -> None:
        self._client = client
        self._unwritten: list[dict[str, Any]] = []
        """Counts that cores have handed over and forgotten."""
        self._told: set[str] = set()
        """Losses that a dump has named, or that were there before the recording."""
        self._dumping = asyncio.Lock()

    async def start(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._call("expert_start", status=400)
        self._unwritten, self._told = [], set(self._losses())

    async def stop(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._call("expert_stop", status=400)

    async def dump(self) -> Dump:
        """
        Raises:
            InputError: 400 if nothing can be recorded; 500 if a file could not be written, and then nothing was lost.
            EngineDeadError: nobody is left to write.
        """
        async with self._dumping:
            answers = await self._take()
            lost = [answer["lost"] for answer in answers if isinstance(answer, dict) and "lost" in answer]
            taken = [answer for answer in answers if isinstance(answer, dict) and "parts" in answer]
            parts = align_passes([answer["parts"] for answer in taken])
            self._unwritten += [part for part in parts if "counts" in part]
            _unless_refused([answer for answer in answers if isinstance(answer, dict)], status=500)
            others = [part for part in parts if "counts" not in part]  # files of ranks, and why there is none
            paths = await self._write(self._unwritten + others)
            self._unwritten = []
            lost += [loss for loss in self._losses() if loss not in self._told]
            self._told.update(lost)
            return Dump(paths, lost)

    async def _take(self) -> list[Any]:
        """What every scheduler answers. Asks anew where one was lost meanwhile and nobody had anything: it may be the
        one that was to ask the ranks of the others, before or after they told it."""
        said: list[Any] = []
        for _ in self._client.healths():  # each loss comes once
            known = self._losses()
            said += (answers := await self._client.call_each("expert_take"))
            new = [loss for loss in self._losses() if loss not in known]
            if any(isinstance(answer, dict) and answer.get("parts") for answer in answers):
                break
            if not new or not self._client.health().alive:
                break
            said.append({"lost": f"{'; '.join(new)}: what others had told it for this dump, if they had"})
        return said

    async def _write(self, parts: list[dict[str, Any]]) -> list[str]:
        """By the first scheduler that lives to tell."""
        cause = ""
        for _ in self._client.healths():
            try:
                written = await self._client.call_one("expert_write", parts=parts)
            except EngineDeadError as error:
                cause = str(error)
                continue
            return list(_unless_refused([written], status=500)[0]["paths"])
        raise EngineDeadError(f"{cause}; the dump was not written, and what was recorded is lost")

    def _losses(self) -> list[str]:
        return list(dict.fromkeys(health.dead for health in self._client.healths() if health.dead))

    async def snapshot(self) -> dict[str, Any] | None:
        """The live view; None where nothing can be recorded."""
        return sum_snapshots([answer["view"] for answer in await self._call("expert_snapshot", status=500)])

    async def _call(self, method: str, status: int) -> list[dict[str, Any]]:
        """Of all cores. Asks anew where a scheduler was lost meanwhile: it may be the one that was to ask the ranks of
        the others, who have answered as if it had."""
        for _ in self._client.healths():  # each loss comes once
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
