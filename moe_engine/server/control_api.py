"""Control endpoints: health, model and server info, load; 501 for endpoints that are not implemented."""

from __future__ import annotations

import asyncio
import uuid
from datetime import UTC, datetime
from importlib import metadata
from typing import Any

from fastapi import Request, Response

from moe_engine.errors import InputError, MoeEngineError, NotAvailableYet
from moe_engine.frontend.client_api import kernel_flags
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.server.http_io import cancel_on_disconnect, json_response, plain_floats
from moe_engine.server.state import ServerState, health_problem

STATE_TIMEOUT = 2.0

UNSUPPORTED_ENDPOINTS = (
    "/update_weights", "/update_weights_from_disk", "/update_weights_from_distributed", "/update_weights_from_tensor",
    "/update_weights_from_ipc", "/update_weight_version", "/init_weights_update_group", "/destroy_weights_update_group",
    "/begin_weight_update", "/end_weight_update", "/weights_checker", "/get_weights_by_name",
    "/release_memory_occupation", "/resume_memory_occupation", "/pause_generation", "/continue_generation",
    "/start_profile", "/stop_profile", "/open_session", "/close_session", "/load_lora_adapter", "/unload_lora_adapter",
    "/encode", "/classify", "/configure_logging", "/set_internal_state",
    "/slow_down", "/freeze_gc", "/generate_from_file", "/clear_hicache_storage_backend", "/vertex_generate",
    "/invocations", "/v1/embeddings", "/v1/score", "/v1/rerank", "/v1/responses", "/v1/classify",
    "/v1/audio/transcriptions", "/v1/messages", "/v1/files", "/v1/batches",
)  # fmt: skip


class ControlApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._probe: asyncio.Task[None] | None = None

    async def health(self, request: Request) -> Response:
        """Liveness and progress, from shared memory: needs neither generation nor a queue."""
        problem = health_problem(self._state.client.health(), self._state.flags.watchdog_timeout)
        if problem is not None:
            raise InputError(problem, status=503)
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """Generates one token. Concurrent requests share it, because the endpoint needs no key (as in SGLang)."""
        if self._probe is None or self._probe.done():
            self._probe = asyncio.create_task(self._generate_one())
            self._probe.add_done_callback(
                lambda task: task.cancelled() or task.exception()
            )  # retrieves the exception: all clients may have disconnected
        timeout = self._state.settings.health_timeout
        try:
            await cancel_on_disconnect(request, asyncio.shield(self._probe))
        except TimeoutError:
            raise InputError(f"no token within {timeout:g} s", status=503) from None
        return Response(status_code=200)

    async def _generate_one(self) -> None:
        inp = GenerateInput(
            input_ids=[0],
            # a fixed seed: probes must not change the seeds drawn for requests
            sampling_params={"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0},
            rid=f"HEALTH_CHECK_{uuid.uuid4().hex}",
            log_metrics=False,
        )
        await asyncio.wait_for(self._state.frontend.generate(inp), self._state.settings.health_timeout)

    async def model_info(self, request: Request) -> Response:
        info, settings = self._state.client.info, self._state.settings
        return json_response(
            {
                "model_path": info.model_path,
                "tokenizer_path": info.tokenizer_path or info.model_path,
                "is_generation": True,
                "preferred_sampling_params": dict(settings.frontend.preferred_sampling_params) or None,
                "weight_version": settings.frontend.weight_version,
                "served_model_name": self._state.model_name,
                "model_type": info.model_type,
                "architectures": list(info.architectures),
                "reasoning_parser": self._state.flags.reasoning_parser,
                "tool_call_parser": self._state.flags.tool_call_parser,
                "has_image_understanding": False,
                "has_audio_understanding": False,
                "max_context_length": info.context_len,
                "vocab_size": info.vocab_size,
            }
        )

    async def server_info(self, request: Request) -> Response:
        info = self._state.client.info
        internal = await internal_states(self._state)
        throughput = sum(s.get("last_gen_throughput") or 0.0 for s in internal)
        healths = self._state.client.healths()
        hidden = {name: "***" for name in ("api_key", "admin_api_key") if self._state.settings.server_args.get(name)}
        return json_response(
            plain_floats(
                {
                    "max_running_requests": info.max_running_requests,
                    **self._state.settings.server_args,
                    **kernel_flags(info.backends),
                    **hidden,
                    "status": "ready",
                    "max_total_num_tokens": info.max_total_num_tokens,
                    "max_req_input_len": info.max_req_input_len,
                    "last_gen_throughput": throughput,
                    "alive_dp_ranks": [rank for rank, health in enumerate(healths) if health.alive],
                    "lost_dp_ranks": {str(rank): health.dead for rank, health in enumerate(healths) if health.dead},
                    "internal_states": [{**s, "memory_usage": self._memory()} for s in internal],
                    "startup_time": self._state.started_at,
                    "version": version(),
                }
            )
        )

    def _memory(self) -> dict[str, Any]:
        info = self._state.client.info
        gib = 2**30
        return {
            "weight": round(info.weight_bytes / gib, 3),
            "kvcache": round(info.kv_bytes / gib, 3),
            "graph": round(info.graph_bytes / gib, 3),
            "token_capacity": info.max_total_num_tokens,
        }

    async def loads(self, request: Request) -> Response:
        """Load per data-parallel rank, in the form SGLang's routers read; query parameter `dp_rank` selects one."""
        info, healths = self._state.client.info, self._state.client.healths()
        wanted = _loads_query(request, len(healths))
        loads = [
            {
                "dp_rank": dp_rank,
                "num_running_reqs": health.num_running,
                "num_waiting_reqs": health.num_waiting,
                "num_total_reqs": health.num_running + health.num_waiting,
                "num_used_tokens": health.num_used_tokens,
                "max_total_num_tokens": info.max_total_num_tokens,
                "token_usage": health.num_used_tokens / max(1, info.max_total_num_tokens),
                "max_running_requests": info.max_running_requests,
            }
            for dp_rank, health in enumerate(healths)
            if wanted in (None, dp_rank)
        ]
        aggregate = {
            "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
            "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
            "total_reqs": sum(load["num_total_reqs"] for load in loads),
            "total_used_tokens": sum(load["num_used_tokens"] for load in loads),
            "avg_token_usage": sum(load["token_usage"] for load in loads) / len(loads),
        }
        return json_response(
            {
                "timestamp": datetime.now(UTC).isoformat(),
                "version": version(),
                "dp_rank_count": len(loads),
                "loads": loads,
                "aggregate": aggregate,
            }
        )

    async def get_load(self, request: Request) -> Response:
        return json_response(
            [
                {
                    "dp_rank": dp_rank,
                    "num_reqs": health.num_running + health.num_waiting,
                    "num_waiting_reqs": health.num_waiting,
                    "num_tokens": health.num_used_tokens,
                }
                for dp_rank, health in enumerate(self._state.client.healths())
            ]
        )

    async def not_implemented(self, request: Request) -> Response:
        raise NotAvailableYet(f"{request.url.path}: not available yet in moe-engine {version()}")


def _loads_query(request: Request, num_ranks: int) -> int | None:
    """The data-parallel rank of a /v1/loads query; None for all.

    Raises:
        InputError: an unknown rank, or a section or format that is not implemented.
    """
    query = request.query_params
    for name, known in (("include", {"core", "all"}), ("format", {"json"})):
        other = set(query[name].split(",")) - known if name in query else set()
        if other:
            raise InputError(
                f"{name}: {','.join(sorted(other))!r:.40} is not available yet in moe-engine; "
                f"use {' or '.join(sorted(known))}",
                field=name,
            )
    rank = query.get("dp_rank")
    if rank is None:
        return None
    if not rank.isdecimal() or int(rank) >= num_ranks:
        ranks = "one data-parallel rank, 0" if num_ranks == 1 else f"ranks 0 to {num_ranks - 1}"
        raise InputError(f"dp_rank {rank!r:.40}: this server has {ranks}", field="dp_rank")
    return int(rank)


async def internal_states(state: ServerState) -> list[dict[str, Any]]:
    """Internal state of the cores, one dict per rank; empty if they do not reply in time."""
    try:
        return await asyncio.wait_for(state.client.call("internal_state"), STATE_TIMEOUT)
    except (TimeoutError, MoeEngineError):
        return []


def version() -> str:
    try:
        return metadata.version("moe-engine")
    except metadata.PackageNotFoundError:
        return "0+unknown"
