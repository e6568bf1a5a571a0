"""Endpoints that call every rank: weight updates, LoRA adapters, profiling."""

from __future__ import annotations

import asyncio
from typing import Any

from fastapi import Request, Response

from moe_engine.errors import InputError
from moe_engine.frontend.profiling import Profiling
from moe_engine.frontend.served_adapters import AdapterChange
from moe_engine.frontend.weight_updates import WeightUpdates
from moe_engine.server.http_io import json_response, read_small
from moe_engine.server.native_types import (
    LoadLoraRequest,
    LoraChanged,
    ProfileRequest,
    UnloadLoraRequest,
    UpdateWeightsRequest,
    WeightsUpdated,
)
from moe_engine.server.state import ServerState


class EngineApi:
    def __init__(self, state: ServerState) -> None:
        self._profiling = Profiling(state.client)
        self._updates = WeightUpdates(state.frontend)
        self._adapters = state.frontend.adapters

    async def update_weights(self, request: Request) -> Response:
        """Replaces the weights by a checkpoint of the same architecture.

        Running requests end first, or are aborted with `abort_all_requests`; new ones wait. A checkpoint that cannot be
        used changes nothing: status 400 with the reason.
        """
        asked = await read_small(request, UpdateWeightsRequest)
        _refuse(asked, "keep_pause")
        if asked.flush_cache is False:
            message = "flush_cache: false would continue prompts cached with other weights; leave it out"
            raise InputError(message, field="flush_cache")
        abort = bool(asked.abort_all_requests)
        updated = self._updates.update(asked.model_path, asked.load_format, asked.weight_version, abort=abort)
        done = await asyncio.shield(asyncio.ensure_future(updated))  # continues if the client disconnects
        answer: WeightsUpdated = {
            "success": done.success,
            "message": done.message,
            "num_paused_requests": done.num_paused,
        }
        return json_response(answer, 200 if done.success else 400)

    async def load_lora(self, request: Request) -> Response:
        """Loads a LoRA adapter on every rank; requests may name it afterwards.

        An adapter that cannot be used changes nothing: status 400 with the reason.
        """
        asked = await read_small(request, LoadLoraRequest)
        change = self._adapters.load(asked.lora_name, asked.lora_path, bool(asked.pinned))
        return _changed(await asyncio.shield(asyncio.ensure_future(change)))  # continues if the client disconnects

    async def unload_lora(self, request: Request) -> Response:
        """Unloads a LoRA adapter: new requests are refused at once, and running ones end first."""
        asked = await read_small(request, UnloadLoraRequest)
        return _changed(await asyncio.shield(asyncio.ensure_future(self._adapters.unload(asked.lora_name))))

    async def start_profile(self, request: Request) -> Response:
        """Starts a trace of every rank by torch's profiler.

        The answer names the files, one for each rank, which are complete after /stop_profile or `num_steps`.
        """
        asked = ProfileRequest()
        if request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers:
            asked = await read_small(request, ProfileRequest)
        _refuse(asked, "start_step", "profile_by_stage", "merge_profiles")
        options = {
            "num_steps": asked.num_steps,
            "activities": asked.activities,
            "record_shapes": bool(asked.record_shapes),
            "with_stack": bool(asked.with_stack),
        }
        prefix = "-".join(part for part in (asked.profile_prefix, asked.profile_id) if part)
        if "/" in prefix:
            raise InputError("profile_id: a name without '/'", field="profile_id")
        paths = await self._profiling.start(asked.output_dir, prefix or None, options)
        return _lines("Start profiling.", paths)

    async def stop_profile(self, request: Request) -> Response:
        """Ends the traces and writes them. The answer names the files."""
        return _lines("Stop profiling.", await self._profiling.stop())


def _changed(change: AdapterChange) -> Response:
    answer: LoraChanged = {
        "success": change.success,
        "message": change.message,
        "loaded_adapters": change.adapters,
    }
    if not change.success:
        answer["error_message"] = change.message
    return json_response(answer, 200 if change.success else 400)


def _refuse(asked: Any, *names: str) -> None:
    for name in names:
        if getattr(asked, name):
            raise InputError(f"{name}: not available yet in moe-engine; leave it out", field=name)


def _lines(first: str, paths: list[str]) -> Response:
    return Response("\n".join([first, *paths, ""]), media_type="text/plain; charset=utf-8")
