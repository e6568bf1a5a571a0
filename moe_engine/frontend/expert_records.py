"""Expert recording from the frontend, on all ranks of one or several replicas (calls of `worker.rank_methods`).

Counts collected from ranks for a dump are kept here until a file is written: if the core that writes dies, another core
writes them.
"""

from __future__ import annotations

import asyncio
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import EngineDeadError, InputError
from moe_engine.frontend.client_api import CallError, EngineClient, GroupAnswers, values_of
from moe_engine.parallel.recording.joined_replies import align_passes, sum_snapshots

NOT_RECORDED = (
    "expert recording is off: start the server with --expert-distribution-recorder-mode stat (or per_pass, per_token), "
    "for a model with experts"
)


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
        """Counts collected from ranks, which no longer hold them."""
        self._reported: set[str] = set()
        """Losses that a dump has reported, or that precede the recording."""
        self._dumping = asyncio.Lock()

    async def start(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._switch("start_experts")
        self._unwritten, self._reported = [], set(self._losses())

    async def stop(self) -> None:
        """Raises InputError: nothing can be recorded on this server."""
        await self._switch("stop_experts")

    async def dump(self) -> Dump:
        """
        Raises:
            InputError: 400 if nothing can be recorded; 500 if a file could not be written; the counts are kept.
            EngineDeadError: no core is left to write.
        """
        async with self._dumping:
            groups = await self._client.ask_ranks("dump_experts")
            parts = align_passes(_by_replica(groups))
            self._unwritten += [part for part in parts if "counts" in part]
            others = [part for part in parts if "counts" not in part]  # files of ranks, or the reason for a missing one
            failed = [f"{rank}: {error}" for group in groups for rank, error in group.problems().items()]
            if failed:
                raise InputError("; ".join(failed), status=500)
            if not self._unwritten and not others and not self._new_losses(groups):
                raise InputError(NOT_RECORDED)
            paths = await self._write(self._unwritten + others)
            self._unwritten = []
            lost = self._new_losses(groups)
            self._reported.update(lost)
            return Dump(paths, lost)

    def _new_losses(self, groups: list[GroupAnswers]) -> list[str]:
        """Schedulers lost with their ranks' records since the last dump."""
        found = [group.lost for group in groups if group.lost is not None] + self._losses()
        return [loss for loss in dict.fromkeys(found) if loss not in self._reported]

    async def _write(self, parts: list[dict[str, Any]]) -> list[str]:
        """Writes through the first scheduler that survives the call; returns the paths."""
        cause = ""
        for _ in self._client.healths():
            try:
                return list(await self._client.call_one("write_experts", parts=parts))
            except EngineDeadError as error:
                cause = str(error)
            except CallError as error:
                raise InputError(str(error), status=500) from None
        raise EngineDeadError(f"{cause}; the dump was not written, and the recorded counts are lost")

    def _losses(self) -> list[str]:
        return list(dict.fromkeys(health.dead for health in self._client.healths() if health.dead))

    async def snapshot(self) -> dict[str, Any] | None:
        """The live view; None if recording is off."""
        return sum_snapshots(await self._call("view_experts"))

    async def _switch(self, method: str) -> None:
        if not all(await self._call(method)):
            raise InputError(NOT_RECORDED)

    async def _call(self, method: str) -> list[Any]:
        """The values of the ranks of all schedulers that are not lost during the call."""
        groups = await self._client.ask_ranks(method)
        try:
            return values_of([group for group in groups if group.lost is None], method)
        except CallError as error:
            raise InputError(str(error), status=500) from None


def _by_replica(groups: list[GroupAnswers]) -> list[list[dict[str, Any]]]:
    """The parts of the ranks that record."""
    parts: dict[int | None, list[dict[str, Any]]] = {}
    for group in groups:
        parts.setdefault(group.replica, []).extend(part for part in group.values if part is not None)
    return list(parts.values())
