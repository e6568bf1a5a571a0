"""Endpoints of trainers that send weights through a process group. Work continues if the client disconnects."""

from __future__ import annotations

import asyncio

from starlette.requests import Request
from starlette.responses import Response

from moe_engine.frontend.weights.group_updates import GroupUpdates, Trainer
from moe_engine.frontend.weights.weight_updates import Updated, WeightUpdates
from moe_engine.server.engine_api import updated_response
from moe_engine.server.http_io import decode_body, json_response, read_large
from moe_engine.server.native_types import DestroyGroupRequest, GroupChanged, InitGroupRequest, ReceiveWeightsRequest
from moe_engine.server.state import ServerState


class TrainerApi:
    """Args: updates: of all endpoints, since one update runs at a time."""

    def __init__(self, state: ServerState, updates: WeightUpdates) -> None:
        self._groups = GroupUpdates(state.frontend, updates)

    async def init_group(self, request: Request) -> Response:
        """Joins every rank to a torch.distributed group with a trainer.

        The trainer is rank 0, and joins at the same time. Status 400 with the reason if it does not join.
        """
        asked = decode_body(await read_large(request), InitGroupRequest)
        trainer = Trainer(
            asked.master_address,
            asked.master_port,
            asked.rank_offset,
            asked.world_size,
            asked.group_name,
            asked.backend,
        )
        return _changed(await asyncio.shield(self._groups.init(trainer, asked.timeout)))

    async def destroy_group(self, request: Request) -> Response:
        """Ends the membership of every rank in a group."""
        asked = decode_body(await read_large(request) or b"{}", DestroyGroupRequest)
        return _changed(await asyncio.shield(self._groups.destroy(asked.group_name)))

    async def update_weights(self, request: Request) -> Response:
        """Replaces weights by tensors that the trainer broadcasts meanwhile.

        Requests run while the tensors arrive, and then wait or end as in /update_weights_from_disk. A failure changes
        no weight and destroys the group: status 400 with the reason.
        """
        asked = decode_body(await read_large(request), ReceiveWeightsRequest)
        update = self._groups.update(
            asked.names,
            asked.dtypes,
            asked.shapes,
            asked.group_name,
            asked.weight_version,
            abort=bool(asked.abort_all_requests),
            seconds=asked.timeout,
        )
        return updated_response(await asyncio.shield(update))


def _changed(done: Updated) -> Response:
    answer: GroupChanged = {"success": done.success, "message": done.message}
    return json_response(answer, 200 if done.success else 400)
