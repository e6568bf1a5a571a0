"""Weight updates, from disk or by tensors, over all ranks of all replicas.

1. every rank compares the checkpoint's config and headers, which threads have read ahead, with the model, while
   requests run;
2. new requests wait, running ones end (or are aborted), the schedulers become idle;
3. every rank stages the checkpoint in new memory; if one fails, all drop it, and the old weights serve on;
4. the prefix caches are flushed, and every rank copies the staged weights into place;
5. waiting requests run with the new weights, version and path.

While generation is paused, nothing is awaited in step 2: requests in the middle of their output are retracted, and
continue with the new weights after the tokens that clients have.
"""

from __future__ import annotations

import asyncio
import logging
import os
import time
import uuid
from collections.abc import Awaitable, Callable, Coroutine, Mapping
from dataclasses import dataclass
from typing import Any

from moe_engine.errors import EngineDeadError, InputError, MoeEngineError
from moe_engine.frontend.client_api import CallError
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.read_ahead import read_ahead
from moe_engine.frontend.weights.tensor_files import TensorFiles

logger = logging.getLogger("moe_engine")

DRAIN_SECONDS = 300.0
"""Time for running requests to end; after it the update is cancelled."""
IDLE_SECONDS = 60.0
IDLE_POLL_SECONDS = 0.01
CHECK_SECONDS = 300.0
LOAD_SECONDS = 3600.0
COMMIT_SECONDS = 600.0
SPARE_BYTES = 1 << 28
"""Host memory of a node that must stay free in addition to the staged weights."""


@dataclass(frozen=True)
class Updated:
    """`num_paused`: requests that waited for the update."""

    success: bool
    message: str
    num_paused: int = 0


async def _nothing_to_prepare() -> None: ...


@dataclass(frozen=True)
class Change:
    """Methods of the ranks with their arguments; the checkpoint in force afterwards; the message of a success."""

    check: str
    stage: str
    args: Mapping[str, Any]
    model_path: str
    done: str
    stage_args: Mapping[str, Any] | None = None
    """None: `args`."""
    headers: str | None = None
    """Files whose headers `check` reads on the ranks."""
    prepare: Callable[[], Awaitable[None]] = _nothing_to_prepare
    """Called between check and stage, while requests run."""


class WeightUpdates:
    def __init__(self, frontend: Frontend, drain_seconds: float = DRAIN_SECONDS) -> None:
        self._frontend, self._client = frontend, frontend.client
        self._drain_seconds = drain_seconds
        self._running = False

    async def update(
        self, model_path: str, load_format: str | None = None, version: str | None = None, *, abort: bool = False
    ) -> Updated:
        """
        Args:
            version: name of the new weights; None: as before.
            abort: running requests are aborted instead of awaited.

        Raises:
            EngineDeadError: no scheduler is alive.
        """
        path = os.path.abspath(os.path.expanduser(model_path))
        args = {"model_path": path, "load_format": load_format}
        done = f"Succeeded to update model weights from {path}."
        change = Change("check_weights", "stage_weights", args, path, done, headers=path)
        return await self.alone(self.apply(change, version, abort))

    async def update_tensors(
        self, write: Callable[[TensorFiles], None], version: str | None = None, *, abort: bool = False
    ) -> Updated:
        """Replaces some weights, under the names of the checkpoint.

        Args:
            write: puts them into files; called in a thread. Raises InputError.
            version, abort: as in `update`.

        Raises:
            EngineDeadError: no scheduler is alive.
        """
        with TensorFiles() as files:
            try:
                await asyncio.get_running_loop().run_in_executor(None, write, files)
            except InputError as error:
                return Updated(False, f"the weights were not updated: {error.message}")
            args = {"paths": files.paths}
            done = "Succeeded to update model weights from tensors."
            change = Change("check_tensors", "stage_tensors", args, self._frontend.weights.model_path, done)
            return await self.alone(self.apply(change, version, abort))

    async def alone(self, work: Coroutine[Any, Any, Updated], failed: str = "the weights were not updated") -> Updated:
        """The result of an update that runs without another; its errors as a message after `failed`.

        Raises:
            EngineDeadError: no scheduler is alive.
        """
        if self._running:
            work.close()
            return Updated(False, "another weight update is running")
        self._running = True
        try:
            return await work
        except EngineDeadError as error:
            if not self._client.health().alive:
                raise
            return Updated(False, f"{failed}: {error}")
        except MoeEngineError as error:
            return Updated(False, f"{failed}: {error}")
        finally:
            self._running = False

    async def apply(self, change: Change, version: str | None, abort: bool) -> Updated:
        """The steps of an update, inside `alone`. Raises MoeEngineError: nothing has changed."""
        weights, client = self._frontend.weights, self._client
        began = time.monotonic()
        if change.headers is not None:
            await read_ahead(client, change.headers, CHECK_SECONDS, headers_only=True)
        _check_memory(await client.collective_rpc(change.check, change.args, CHECK_SECONDS))
        await change.prepare()
        try:
            drain = None if self._frontend.paused and not abort else self._drain_seconds
            async with weights.exclusive(drain, self._abort if abort else _nothing):
                if drain is None:
                    await client.call("pause", retract=True)  # their KV is of the old weights
                else:
                    await self.wait_idle()
                await self._stage(change, version)
                await self._commit()
                weights.replace(change.model_path, version)
                self._frontend.weights_changed()
                paused = weights.num_waiting
        except TimeoutError:
            raise MoeEngineError(
                f"requests still run after {self._drain_seconds:g} s; try again, or send abort_all_requests: true"
            ) from None
        logger.info("%s Version %s, %.1f s", change.done, weights.version, time.monotonic() - began)
        return Updated(True, change.done, paused)

    def _abort(self) -> None:
        self._frontend.abort(all=True, reason="Aborted by a weight update")

    async def wait_idle(self) -> None:
        """Waits until the schedulers have ended what the frontend considers ended: steps in flight, aborted
        requests."""
        deadline = time.monotonic() + IDLE_SECONDS
        while not all(await self._client.call("is_idle")):
            if time.monotonic() > deadline:
                raise MoeEngineError(f"the schedulers are not idle after {IDLE_SECONDS:g} s; repeat the update")
            await asyncio.sleep(IDLE_POLL_SECONDS)

    async def _stage(self, change: Change, version: str | None) -> None:
        """Stages the weights on every rank, or on none."""
        try:
            await self._client.collective_rpc(change.stage, change.stage_args or change.args, LOAD_SECONDS)
            if not all(await self._client.call("flush_cache")):
                raise MoeEngineError("the prefix cache could not be flushed")
            if self._client.info.hicache_storage_backend is not None:
                await self._client.call("renew_storage", weights=uuid.uuid4().hex)
            if self._client.info.disaggregation_mode != "null":
                await self._client.call("renew_transfers", weights=version or f"unnamed {uuid.uuid4().hex}")
        except MoeEngineError:
            if self._client.health().alive:
                await self._client.ask_ranks("discard_weights")
            raise

    async def _commit(self) -> None:
        """Commits the weights on every live rank. If one fails, the ranks hold different weights: the engine then
        ends."""
        groups = await self._client.ask_ranks("commit_weights", deadline=COMMIT_SECONDS)
        problems = {rank: error for group in groups for rank, error in group.problems().items()}
        if problems:
            reason = f"weight update: {'; '.join(f'{rank}: {error}' for rank, error in problems.items())}"
            self._client.stop_stalled(lambda health: reason)
            raise EngineDeadError(reason)
        if all(group.lost is not None for group in groups):
            raise EngineDeadError(groups[0].lost or "")


def _nothing() -> None: ...


def _check_memory(ranks: list[Any]) -> None:
    """Raises CallError: the ranks of a node do not have the memory to stage the weights."""
    for host in sorted({rank["host"] for rank in ranks}):
        there = [rank for rank in ranks if rank["host"] == host]
        needed, available = sum(rank["needed"] for rank in there), min(rank["available"] for rank in there)
        if needed + SPARE_BYTES > available:
            raise CallError(
                f"{host}: staging the new weights of {len(there)} ranks needs {needed / 2**30:.2f} GiB of host memory "
                f"beside the served ones, and {available / 2**30:.2f} GiB are available"
            )
