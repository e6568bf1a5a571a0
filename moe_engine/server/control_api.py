"""Control endpoints: health, model and server info, load; the answer of endpoints that are not offered."""

from __future__ import annotations

import asyncio
import uuid
from collections.abc import Awaitable, Callable, Sequence
from datetime import UTC, datetime
from typing import Any

from starlette.requests import Request
from starlette.responses import Response

from moe_engine import __version__
from moe_engine.config.server import SECRETS
from moe_engine.errors import InputError, MoeEngineError
from moe_engine.frontend.client_api import Health, kernel_flags
from moe_engine.frontend.encoding import encode_input
from moe_engine.frontend.generate_input import GenerateInput
from moe_engine.server.http_io import cancel_on_disconnect, json_response, plain_floats, read_query
from moe_engine.server.native_types import Loads, LoadsQuery, ModelInfo, OldLoad, RankLoad, TotalLoad
from moe_engine.server.state import ServerState, health_problem

STATE_TIMEOUT = 2.0


class ControlApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        self._probe: asyncio.Task[None] | None = None

    async def health(self, request: Request) -> Response:
        """200 while the engine is healthy, else 503 with the reason.

        From shared memory: needs neither generation nor a queue.
        """
        problem = health_problem(self._state.client.health(), self._state.flags.watchdog_timeout)
        if problem is not None:
            raise InputError(problem, status=503)
        return Response(status_code=200)

    async def health_generate(self, request: Request) -> Response:
        """200 after generating one token, or a vector.

        Concurrent requests share the token, because the endpoint needs no key (as in SGLang).
        """
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
        probe: dict[str, Any] = {"input_ids": [0], "rid": f"HEALTH_CHECK_{uuid.uuid4().hex}", "log_metrics": False}
        if self._state.client.info.pooling is not None:
            inp = encode_input(probe)
        else:  # a fixed seed: probes must not change the seeds drawn for requests
            sampling = {"max_new_tokens": 1, "temperature": 0.0, "sampling_seed": 0}
            inp = GenerateInput(**probe, sampling_params=sampling)
        await asyncio.wait_for(self._state.frontend.generate(inp), self._state.settings.health_timeout)

    async def model_info(self, request: Request) -> Response:
        """Model information."""
        info, settings = self._state.client.info, self._state.settings
        answer: ModelInfo = {
            "model_path": self._state.frontend.weights.model_path,
            "tokenizer_path": info.tokenizer_path or info.model_path,
            "is_generation": info.pooling is None,
            "preferred_sampling_params": dict(settings.frontend.preferred_sampling_params) or None,
            "weight_version": self._state.frontend.weights.version,
            "served_model_name": self._state.model_name,
            "model_type": info.model_type,
            "architectures": list(info.architectures),
            "reasoning_parser": self._state.flags.reasoning_parser,
            "tool_call_parser": self._state.flags.tool_call_parser,
            "has_image_understanding": info.vision is not None,
            "has_audio_understanding": False,
            "max_context_length": info.context_len,
            "vocab_size": info.vocab_size,
        }
        return json_response(answer)

    async def server_info(self, request: Request) -> Response:
        """Every flag with its value, memory, throughput."""
        info = self._state.client.info
        internal = await internal_states(self._state)
        throughput = sum(s.get("last_gen_throughput") or 0.0 for s in internal)
        healths = self._state.client.healths()
        flags = self._state.settings.server_args
        only = internal[0] if len(internal) == 1 else {}
        changed = {name: value for name, value in only.items() if name in flags and not isinstance(value, (dict, list))}
        hidden = {name: "***" for name in SECRETS if self._state.settings.server_args.get(name)}
        return json_response(
            plain_floats(
                {
                    "max_running_requests": info.max_running_requests,
                    **flags,
                    **changed,
                    **kernel_flags(info.backends),
                    **hidden,
                    **self._state.frontend.weights.flags,
                    "status": "ready",
                    "max_total_num_tokens": info.max_total_num_tokens,
                    "max_req_input_len": info.max_req_input_len,
                    "last_gen_throughput": throughput,
                    "alive_dp_ranks": [rank for rank, health in enumerate(healths) if health.alive],
                    "lost_dp_ranks": {str(rank): health.dead for rank, health in enumerate(healths) if health.dead},
                    "released_memory": sorted(self._state.frontend.released),
                    "internal_states": [{**s, "memory_usage": self._memory()} for s in internal],
                    "startup_time": self._state.started_at,
                    "version": __version__,
                }
            )
        )

    def _memory(self) -> dict[str, Any]:
        info = self._state.client.info
        gib = 2**30
        windows = {"swa_token_capacity": info.num_window_slots} if info.num_window_slots else {}
        return {
            **windows,
            "weight": round(info.weight_bytes / gib, 3),
            "kvcache": round(info.kv_bytes / gib, 3),
            "graph": round(info.graph_bytes / gib, 3),
            "token_capacity": info.max_total_num_tokens,
        }

    async def loads(self, request: Request) -> Response:
        """Requests and tokens of each data-parallel rank.

        Without lost ranks, which have none: a balancer would choose them.
        """
        info, healths = self._state.client.info, self._state.client.healths()
        wanted = _loads_query(request, healths)
        loads: list[RankLoad] = [
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
            if wanted in (None, dp_rank) and health.alive
        ]
        aggregate: TotalLoad = {
            "total_running_reqs": sum(load["num_running_reqs"] for load in loads),
            "total_waiting_reqs": sum(load["num_waiting_reqs"] for load in loads),
            "total_reqs": sum(load["num_total_reqs"] for load in loads),
            "total_used_tokens": sum(load["num_used_tokens"] for load in loads),
            "avg_token_usage": sum(load["token_usage"] for load in loads) / max(1, len(loads)),
        }
        answer: Loads = {
            "timestamp": datetime.now(UTC).isoformat(),
            "version": __version__,
            "dp_rank_count": len(loads),
            "loads": loads,
            "aggregate": aggregate,
        }
        return json_response(answer)

    async def get_load(self, request: Request) -> Response:
        """Old form of /v1/loads."""
        answer: list[OldLoad] = [
            {
                "dp_rank": dp_rank,
                "num_reqs": health.num_running + health.num_waiting,
                "num_waiting_reqs": health.num_waiting,
                "num_tokens": health.num_used_tokens,
            }
            for dp_rank, health in enumerate(self._state.client.healths())
            if health.alive
        ]
        return json_response(answer)

    @staticmethod
    def refuse(reason: str) -> Callable[[Request], Awaitable[Response]]:
        """Handler of an endpoint that is not offered."""

        async def refused(request: Request) -> Response:
            raise InputError(f"{request.url.path}: not offered by moe-engine: {reason}", status=501)

        return refused


def _loads_query(request: Request, healths: Sequence[Health]) -> int | None:
    """The data-parallel rank of a /v1/loads query; None for all.

    Raises:
        InputError: an unknown or lost rank, an unknown section or format.
    """
    rank, num_ranks = read_query(request, LoadsQuery).dp_rank, len(healths)
    if rank is not None and rank >= num_ranks:
        ranks = "one data-parallel rank, 0" if num_ranks == 1 else f"ranks 0 to {num_ranks - 1}"
        raise InputError(f"dp_rank {rank}: this server has {ranks}", field="dp_rank")
    if rank is not None and not healths[rank].alive:
        raise InputError(f"dp_rank {rank}: this rank is lost: {healths[rank].dead}", field="dp_rank", status=503)
    return rank


async def internal_states(state: ServerState) -> list[dict[str, Any]]:
    """Internal state of the cores, one dict per rank; empty if they do not reply in time."""
    try:
        return await asyncio.wait_for(state.client.call("internal_state"), STATE_TIMEOUT)
    except (TimeoutError, MoeEngineError):
        return []
