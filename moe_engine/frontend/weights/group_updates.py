"""Weight updates from a trainer in a process group, over all ranks of all replicas.

The trainer is rank 0 of the group; it opens the store and broadcasts whole tensors in the order of the call. All ranks
receive while requests run, and stage and commit as in other updates (`frontend.weights.weight_updates`).

Broadcasts have no names: if the trainer sends and the engine does not receive, both stay out of step. A failed update
therefore ends its group on every rank.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

from moe_engine.errors import MoeEngineError
from moe_engine.frontend.client_api import CallError, EngineClient, values_of
from moe_engine.frontend.frontend import Frontend
from moe_engine.frontend.rank_polling import poll_ranks
from moe_engine.frontend.weights.weight_updates import Change, Updated, WeightUpdates

logger = logging.getLogger("moe_engine")

GROUP = "weight_update_group"
GROUP_SECONDS = 300.0
"""Time limit for the members of a group to join, and for the tensors of an update to arrive."""
GRACE_SECONDS = 30.0
"""Time beyond the limit after which a rank counts as hanging in the library."""


@dataclass(frozen=True)
class Trainer:
    """Where the trainer's store is, and the group: `rank_offset` is the rank of the engine's rank 0 in it."""

    master_address: str
    master_port: int
    rank_offset: int
    world_size: int
    group_name: str = GROUP
    backend: str = "nccl"


class GroupUpdates:
    def __init__(self, frontend: Frontend, updates: WeightUpdates) -> None:
        self._frontend, self._updates = frontend, updates
        self._client: EngineClient = frontend.client
        self._in_turn: defaultdict[str, asyncio.Lock] = defaultdict(asyncio.Lock)
        """Updates of one group run one at a time, in the order of the trainer's broadcasts."""

    async def init(self, trainer: Trainer, seconds: float = GROUP_SECONDS) -> Updated:
        """Joins every rank to the trainer's group.

        Args:
            seconds: for all members to join.

        Raises:
            EngineDeadError: no scheduler is alive.
        """
        async with self._in_turn[trainer.group_name]:
            return await self._updates.alone(self._init(trainer, seconds))

    async def _init(self, trainer: Trainer, seconds: float) -> Updated:
        groups = await self._client.ask_ranks("list_groups")
        ranks = values_of(groups, "init_weights_update_group")
        if any(trainer.group_name in rank["groups"] for rank in ranks):
            raise MoeEngineError(f"group_name {trainer.group_name!r} exists; destroy it first")
        if trainer.rank_offset < 1 or trainer.rank_offset + len(ranks) > trainer.world_size:
            raise MoeEngineError(
                f"rank_offset {trainer.rank_offset}, world_size {trainer.world_size}: the engine has {len(ranks)} "
                "ranks, and rank 0 is the trainer's"
            )
        size = ranks[0]["world_size"]
        common = {
            "master_address": trainer.master_address,
            "master_port": trainer.master_port,
            "world_size": trainer.world_size,
            "group_name": trainer.group_name,
            "backend": trainer.backend,
            "seconds": seconds,
        }

        def args(replica: int | None) -> Mapping[str, Any]:
            return {**common, "first_rank": trainer.rank_offset + (replica or 0) * size}

        try:
            await self._client.collective_rpc("join_group", args)
            await self._wait(trainer.group_name, seconds)
        except MoeEngineError:
            await self._leave(trainer.group_name)
            raise
        message = f"Succeeded to initialize the weights update group {trainer.group_name}."
        logger.info("%s %d ranks of %d", message, len(ranks), trainer.world_size)
        return Updated(True, message)

    async def destroy(self, group_name: str = GROUP) -> Updated:
        """Ends the membership of every rank."""
        async with self._in_turn[group_name]:
            if not any(await self._leave(group_name)):
                return Updated(False, f"group_name {group_name!r}: no such group")
            return Updated(True, f"Succeeded to destroy the weights update group {group_name}.")

    async def update(
        self,
        names: Sequence[str],
        dtypes: Sequence[str],
        shapes: Sequence[Sequence[int]],
        group_name: str = GROUP,
        version: str | None = None,
        *,
        abort: bool = False,
        seconds: float = GROUP_SECONDS,
    ) -> Updated:
        """Receives tensors that the trainer broadcasts, and replaces those weights. A failure ends the group.

        Args:
            seconds: for all tensors to arrive.
            version, abort: as in `WeightUpdates.update`.

        Raises:
            EngineDeadError: no scheduler is alive.
        """
        name = {"group_name": group_name}
        args = {
            **name,
            "names": list(names), "dtypes": list(dtypes), "shapes": [list(shape) for shape in shapes],
            "seconds": seconds,
        }  # fmt: skip

        async def receive() -> None:
            await self._client.collective_rpc("receive_tensors", args)
            await self._wait(group_name, seconds)

        done = f"Succeeded to update model weights from the group {group_name}."
        path = self._frontend.weights.model_path
        change = Change("check_received", "stage_received", args, path, done, stage_args=name, prepare=receive)
        async with self._in_turn[group_name]:
            updated = await self._updates.alone(self._updates.apply(change, version, abort))
            if not updated.success and any(await self._leave(group_name)):
                ended = f"{updated.message}; group {group_name!r} was destroyed, init it again"
                return Updated(False, ended, updated.num_paused)
            return updated

    async def _wait(self, group_name: str, seconds: float) -> None:
        """Waits until no rank joins or receives. Raises CallError: names the ranks that failed."""
        limit = seconds + GRACE_SECONDS
        states = await poll_ranks(self._client, "group_state", {"group_name": group_name}, itemgetter("busy"), limit)
        if any(state["busy"] for state in states.values()):
            raise CallError(f"group {group_name!r}: a rank still waits after {limit:g} s")
        errors: dict[str, list[str]] = defaultdict(list)
        for rank, state in states.items():
            if state["error"]:
                errors[state["error"]].append(rank)
        if errors:
            raise CallError("; ".join(f"{', '.join(ranks)}: {error}" for error, ranks in errors.items()))

    async def _leave(self, group_name: str) -> list[bool]:
        """By rank: whether it was a member."""
        if not self._client.health().alive:
            return []
        groups = await self._client.ask_ranks("leave_group", {"group_name": group_name})
        return [value for group in groups for value in group.values]
