"""Expert-recording endpoints, with SGLang's paths and responses, and the live page."""

from __future__ import annotations

import asyncio
from typing import Any

from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from moe_engine import __version__
from moe_engine.errors import InputError
from moe_engine.frontend.expert_gain import gain_view
from moe_engine.frontend.expert_records import ExpertRecords
from moe_engine.server.expert_types import ExpertGain, ExpertLaunch
from moe_engine.server.http_io import json_response
from moe_engine.server.live_pages import HEADERS, page
from moe_engine.server.openapi import HTML
from moe_engine.server.state import ServerState

VIEW_TIMEOUT = 5.0


class ExpertsApi:
    def __init__(self, state: ServerState) -> None:
        self._records = ExpertRecords(state.client)
        args, info = state.settings.args, state.client.info
        self._launch: ExpertLaunch = {
            "model": info.served_model_name,
            "version": __version__,
            "mode": args.experts.expert_distribution_recorder_mode,
            "ranks": args.parallel.ep_size,
            "nodes": args.parallel.nnodes,
            "redundant_experts": args.experts.ep_num_redundant_experts,
            "eplb": args.experts.enable_eplb,
        }
        self._planning = asyncio.Lock()

    async def start(self, request: Request) -> Response:
        """Starts expert recording."""
        await self._records.start()
        return PlainTextResponse("Start recording expert distribution.\n")

    async def stop(self, request: Request) -> Response:
        """Stops expert recording."""
        await self._records.stop()
        return PlainTextResponse("Stop recording expert distribution.\n")

    async def dump(self, request: Request) -> Response:
        """Writes the recorded counts to the server's folder.

        The log names the files. The response lists lost records.
        """
        dump = await self._records.dump()
        lost = [f"Without the records of what was lost: {loss}" for loss in dump.lost]
        return PlainTextResponse("\n".join(["Dump expert distribution record.", *lost, ""]))

    async def page(self, request: Request) -> Response:
        """Live page of the experts."""
        return Response(page("experts_live"), media_type=HTML, headers=HEADERS)

    async def data(self, request: Request) -> Response:
        """Data of the live page."""
        return json_response({**(await self._view() or NOTHING), "launch": self._launch})

    async def gain(self, request: Request) -> Response:
        """The gain of EPLB on the counts recorded so far."""
        view = await self._view()
        counts = None if view is None else view["counts"]
        if not counts or not any(map(any, counts)):
            nothing: ExpertGain = {"ranks": [], "planned": [], "rows": []}
            return json_response(nothing)
        launch = self._launch
        sizes = launch["ranks"], launch["nodes"], launch["redundant_experts"]
        async with self._planning:
            return json_response(await asyncio.to_thread(gain_view, counts, *sizes))

    async def _view(self) -> dict[str, Any] | None:
        try:
            return await asyncio.wait_for(self._records.snapshot(), VIEW_TIMEOUT)
        except TimeoutError:
            raise InputError("a long step is running; try again", status=503) from None


NOTHING: dict[str, Any] = {"layers": 0, "experts": 0, "counts": [], "balancedness": {}, "recording": False, "pass": -1}
"""The view of a server with recording off."""
