"""Endpoints that call every scheduler or rank: weight updates, pauses, LoRA adapters, profiling."""

from __future__ import annotations

import asyncio
from typing import Any, TypeVar

from msgspec import Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from moe_engine.errors import InputError
from moe_engine.frontend.pausing import Pausing
from moe_engine.frontend.profiling import Profiling
from moe_engine.frontend.run_settings import RunSettingsOfAll
from moe_engine.frontend.served_adapters import AdapterChange
from moe_engine.frontend.weights.memory_release import MemoryReleases
from moe_engine.frontend.weights.weight_reads import read_weight
from moe_engine.frontend.weights.weight_updates import Updated, WeightUpdates
from moe_engine.server.http_io import json_response, read_query, read_small, read_weights_body
from moe_engine.server.native_types import (
    Continued,
    ContinueRequest,
    GroupChanged,
    LoadLoraRequest,
    LoraChanged,
    MemoryChanged,
    MemoryRequest,
    Paused,
    PauseRequest,
    PostProcessRequest,
    ProfileRequest,
    SetStateRequest,
    StateSet,
    UnloadLoraRequest,
    UpdateTensorsRequest,
    UpdateWeightsRequest,
    WeightQuery,
    WeightRequest,
    WeightsUpdated,
    WeightVersion,
    WeightVersionRequest,
    WeightVersionUpdated,
)
from moe_engine.server.state import ServerState

Body = TypeVar("Body", bound=Struct)


class EngineApi:
    def __init__(self, state: ServerState) -> None:
        self._frontend = state.frontend
        self._profiling = Profiling(state.client)
        self.updates = WeightUpdates(state.frontend)
        self._pausing = Pausing(state.frontend)
        self._memory = MemoryReleases(state.frontend, self.updates)
        self._settings = RunSettingsOfAll(state.client)
        self._adapters = state.frontend.adapters

    async def update_weights(self, request: Request) -> Response:
        """Replaces the weights by a checkpoint of the same architecture.

        Running requests end first, or are aborted with `abort_all_requests`; new ones wait. A checkpoint that cannot be
        used changes nothing: status 400 with the reason.
        """
        asked = await read_small(request, UpdateWeightsRequest)
        _refuse(asked, "keep_pause")
        if asked.flush_cache is False:
            raise InputError.at("flush_cache", "false would continue prompts cached with other weights; leave it out")
        abort = bool(asked.abort_all_requests)
        updated = self.updates.update(asked.model_path, asked.load_format, asked.weight_version, abort=abort)
        done = await asyncio.shield(updated)  # continues if the client disconnects
        return updated_response(done)

    async def update_tensors(self, request: Request) -> Response:
        """Replaces some weights, under the names of the checkpoint.

        Names, shapes and dtypes of all are checked before anything changes: status 400 with the reason. Requests wait
        or end as in /update_weights_from_disk. Pickles are refused.
        """
        asked = await read_weights_body(request, UpdateTensorsRequest)
        updated = self.updates.update_tensors(
            lambda files: files.add_serialized(asked.serialized_named_tensors),
            asked.weight_version,
            abort=bool(asked.abort_all_requests),
        )
        return updated_response(await asyncio.shield(updated))  # continues if the client disconnects

    async def update_version(self, request: Request) -> Response:
        """Renames the weights, without a change of them."""
        asked = await read_small(request, WeightVersionRequest)
        if asked.abort_all_requests:
            self._frontend.abort(all=True, reason="Aborted by an update of the weight version")
        self._frontend.weights.replace(self._frontend.weights.model_path, asked.new_version)
        message = f"Weight version updated to {asked.new_version}"
        answer: WeightVersionUpdated = {"success": True, "message": message, "new_version": asked.new_version}
        return json_response(answer)

    async def version(self, request: Request) -> Response:
        """Name of the weights, as in /model_info."""
        answer: WeightVersion = {"weight_version": self._frontend.weights.version}
        return json_response(answer)

    async def post_process(self, request: Request) -> Response:
        """No effect, for trainers of quantized weights: every update leaves the weights in the form of the kernels."""
        await _read_or_default(request, PostProcessRequest)
        answer: GroupChanged = {"success": True, "message": "Every update prepares the weights for the kernels."}
        return json_response(answer)

    async def weights_by_name(self, request: Request) -> Response:
        """The first rows of a weight, by its name in the checkpoint, as lists of numbers.

        Read from the memory that the kernels multiply, on all ranks. With several replicas a list of these.
        """
        asked = await read_small(request, WeightRequest) if _has_body(request) else read_query(request, WeightQuery)
        found = await read_weight(self._frontend.client, asked.name, asked.truncate_size)
        return json_response(found[0] if len(found) == 1 else found)

    async def load_lora(self, request: Request) -> Response:
        """Loads a LoRA adapter on every rank; requests may name it afterwards.

        An adapter that cannot be used changes nothing: status 400 with the reason.
        """
        asked = await read_small(request, LoadLoraRequest)
        change = self._adapters.load(asked.lora_name, asked.lora_path, bool(asked.pinned))
        return _changed(await asyncio.shield(change))  # continues if the client disconnects

    async def unload_lora(self, request: Request) -> Response:
        """Unloads a LoRA adapter: new requests are refused immediately, and running ones end first."""
        asked = await read_small(request, UnloadLoraRequest)
        return _changed(await asyncio.shield(self._adapters.unload(asked.lora_name)))

    async def pause(self, request: Request) -> Response:
        """Stops computing, until /continue_generation: new requests wait.

        Running requests are aborted (`mode` abort), return to the queue and recompute their KV (retract), or keep their
        place and KV (in_place). A weight update while generation is paused replaces the weights of running requests.
        """
        mode = (await _read_or_default(request, PauseRequest)).mode
        count = await asyncio.shield(self._pausing.pause(mode))
        answer: Paused = {
            "status": "ok", "message": "Generation paused successfully.", "num_paused_requests": count,
        }  # fmt: skip
        return json_response(answer)

    async def resume(self, request: Request) -> Response:
        """Continues after /pause_generation."""
        await _read_or_default(request, ContinueRequest)
        was_paused = await asyncio.shield(self._pausing.resume())
        message = "Generation continued successfully." if was_paused else "Generation was not paused."
        answer: Continued = {"status": "ok", "message": message}
        return json_response(answer)

    async def release_memory(self, request: Request) -> Response:
        """Releases the memory of weights and KV cache to the system, until /resume_memory_occupation.

        Needs --enable-memory-saver, and an idle engine or paused generation. Requests get 503 meanwhile.
        """
        asked = await _read_or_default(request, MemoryRequest)
        return self._memory_changed(await asyncio.shield(self._memory.release(asked.tags)))

    async def resume_memory(self, request: Request) -> Response:
        """Allocates the memory again: the weights are as before, the KV cache is empty."""
        asked = await _read_or_default(request, MemoryRequest)
        return self._memory_changed(await asyncio.shield(self._memory.resume(asked.tags)))

    def _memory_changed(self, done: Updated) -> Response:
        answer: MemoryChanged = {
            "success": done.success, "message": done.message, "released": sorted(self._frontend.released),
        }  # fmt: skip
        return json_response(answer, 200 if done.success else 400)

    async def set_state(self, request: Request) -> Response:
        """Changes settings of the schedulers while they run: all of the body's, or none with status 400."""
        asked = await read_small(request, SetStateRequest)
        values = await self._settings.set(asked.server_args)
        answer: StateSet = {"updated": True, "server_args": values[0]}
        return json_response(answer)

    async def get_state(self, request: Request) -> Response:
        """The settings of each scheduler that can change while it runs, with their bounds."""
        return json_response(await self._settings.get())

    async def start_profile(self, request: Request) -> Response:
        """Starts a trace of every rank by torch's profiler.

        The answer names the files, one for each rank, which are complete after /stop_profile or `num_steps`.
        """
        asked = await _read_or_default(request, ProfileRequest)
        _refuse(asked, "start_step", "profile_by_stage", "merge_profiles")
        options = {
            "num_steps": asked.num_steps,
            "activities": asked.activities,
            "record_shapes": bool(asked.record_shapes),
            "with_stack": bool(asked.with_stack),
        }
        prefix = "-".join(part for part in (asked.profile_prefix, asked.profile_id) if part)
        if "/" in prefix:
            raise InputError.at("profile_id", "a name without '/'")
        paths = await self._profiling.start(asked.output_dir, prefix or None, options)
        return _lines("Start profiling.", paths)

    async def stop_profile(self, request: Request) -> Response:
        """Ends the traces and writes them. The answer names the files."""
        return _lines("Stop profiling.", await self._profiling.stop())


def updated_response(done: Updated) -> Response:
    answer: WeightsUpdated = {"success": done.success, "message": done.message, "num_paused_requests": done.num_paused}
    return json_response(answer, 200 if done.success else 400)


def _changed(change: AdapterChange) -> Response:
    answer: LoraChanged = {"success": change.success, "message": change.message, "loaded_adapters": change.adapters}
    if not change.success:
        answer["error_message"] = change.message
    return json_response(answer, 200 if change.success else 400)


async def _read_or_default(request: Request, kind: type[Body]) -> Body:
    """The request's body; the default without one."""
    return await read_small(request, kind) if _has_body(request) else kind()


def _has_body(request: Request) -> bool:
    return request.headers.get("content-length", "0") != "0" or "transfer-encoding" in request.headers


def _refuse(asked: Any, *names: str) -> None:
    for name in names:
        if getattr(asked, name):
            raise InputError.at(name, "not available yet in moe-engine; leave it out")


def _lines(first: str, paths: list[str]) -> Response:
    return PlainTextResponse("\n".join([first, *paths, ""]))
