"""Expert-recording control calls of an engine core, forwarded to all of its ranks. One core writes the dump of all.

    call                 reply
    expert_start         {} when every rank records, or an error
    expert_stop          {}
    expert_take          {"parts": [...]}: the recorded counts, which the core drops; {"parts": [], "lost": sentence}
                         if a rank was lost meanwhile, and with it the replies of other ranks
    expert_write         {"paths": [...]}: files written from the argument `parts` (of all cores)
    expert_snapshot      {"view": {...}}: the live view, summed over the ranks; None if recording is off

A reply may be {"error": sentence} instead, with "off" if recording is off.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path
from typing import Any, Protocol

from moe_engine.errors import MoeEngineError
from moe_engine.parallel.recording.snapshots import sum_snapshots

NOT_RECORDED = (
    "expert recording is off: start the server with --expert-distribution-recorder-mode stat (or per_pass, per_token), "
    "for a model with experts"
)


class Ranks(Protocol):
    """The part of a worker that calls all ranks of a core."""

    def call_all(self, method: str) -> Future[list[Any]]:
        """Calls one of `worker.CALLS` on every rank, between two of its steps; replies by rank."""


NO_ARGUMENTS: Mapping[str, Any] = {}
OFF = {"error": NOT_RECORDED, "off": True}


class ExpertCalls:
    """Begins calls; a call's future holds its reply. Waiting and writing happen on a separate thread.

    Args:
        ranks: called on the thread that calls `begin`.
        directory: output directory of dumps.
    """

    def __init__(self, ranks: Ranks, directory: Path) -> None:
        self._ranks = ranks
        self._directory = directory
        self._thread = ThreadPoolExecutor(1, "expert-calls")
        # method -> the ranks' method, and the conversion of their replies
        self._known: dict[str, tuple[str, Callable[[list[Any]], dict[str, Any]]]] = {
            "expert_start": ("start_experts", self._acknowledged),
            "expert_stop": ("stop_experts", self._acknowledged),
            "expert_take": ("dump_experts", self._taken),
            "expert_snapshot": ("view_experts", self._viewed),
        }

    def begin(self, method: str, args: Mapping[str, Any] = NO_ARGUMENTS) -> Future[dict[str, Any]] | None:
        """None if `method` is not an expert call."""
        if method == "expert_write":
            written: Future[list[Any]] = Future()
            written.set_result(args["parts"])
            return self._thread.submit(_finish, written, self._written)
        if method not in self._known:
            return None
        ask, finish = self._known[method]
        failed: dict[str, Any] = {"parts": []} if method == "expert_take" else {}
        return self._thread.submit(_finish, self._ranks.call_all(ask), finish, failed)

    def _acknowledged(self, able: list[bool]) -> dict[str, Any]:
        return {} if all(able) else OFF

    def _taken(self, of_ranks: list[Any]) -> dict[str, Any]:
        from moe_engine.parallel.recording.merge import sum_counts

        if of_ranks and all(part is None for part in of_ranks):
            return OFF
        parts = [part for part in of_ranks if part is not None]
        counts = [part for part in parts if "counts" in part]
        others = [part for part in parts if "counts" not in part]
        return {"parts": ([sum_counts(counts)] if counts else []) + others}

    def _written(self, parts: list[Any]) -> dict[str, Any]:
        from moe_engine.parallel.recording.merge import write_parts

        return {"paths": [str(path) for path in write_parts(self._directory, parts)]}

    def _viewed(self, of_ranks: list[Any]) -> dict[str, Any]:
        return {"view": sum_snapshots(of_ranks)}


def _finish(
    asked: Future[list[Any]], finish: Callable[[list[Any]], dict[str, Any]], failed: Mapping[str, Any] = NO_ARGUMENTS
) -> dict[str, Any]:
    """Args: failed: reply fields in case of a failure; the reason is then "lost", not "error": a retry cannot help."""
    try:
        return finish(asked.result())
    except MoeEngineError as error:
        return {**failed, "lost" if failed else "error": str(error)}
