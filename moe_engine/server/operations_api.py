"""SGLang's /configure_logging, /freeze_gc and /clear_hicache_storage_backend: the request log, the garbage collectors
and the KV storage of a running server."""

from __future__ import annotations

import asyncio
import gc
import time
from dataclasses import replace
from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import PlainTextResponse, Response

from moe_engine.errors import InputError
from moe_engine.server.http_io import read_small
from moe_engine.server.request_log import RequestLogSettings, with_request_log
from moe_engine.server.state import ServerState
from moe_engine.validation import NotAvailable, refuse_unavailable

CLEAR_SECONDS = 60.0
CLEAR_POLL_SECONDS = 0.05


class ConfigureLoggingRequest(Struct):
    """null: unchanged."""

    log_requests: Annotated[bool | None, Meta(description="as --log-requests")] = None
    log_requests_level: Annotated[int, Meta(ge=0, le=3, description="as --log-requests-level")] | None = None
    dump_requests_folder: NotAvailable = None
    dump_requests_threshold: NotAvailable = None
    crash_dump_folder: NotAvailable = None


class OperationsApi:
    def __init__(self, state: ServerState) -> None:
        self._state = state
        flags = state.settings.args.logging
        self._log_requests, self._log = flags.log_requests, RequestLogSettings.of(flags)

    async def configure_logging(self, request: Request) -> Response:
        """Switches the request log on or off, and sets its level."""
        asked = await read_small(request, ConfigureLoggingRequest)
        refuse_unavailable(asked)
        self._log_requests = self._log_requests if asked.log_requests is None else asked.log_requests
        if asked.log_requests_level is not None:
            self._log = replace(self._log, level=asked.log_requests_level)
        frontend = self._state.frontend
        frontend.observers = with_request_log(frontend.observers, self._log if self._log_requests else None)
        return Response(status_code=200)

    async def freeze_gc(self, request: Request) -> Response:
        """Keeps the garbage collectors of all processes from scanning the objects that exist now."""
        gc.collect()
        gc.freeze()
        await self._state.client.collective_rpc("freeze_gc")
        return PlainTextResponse("Garbage collection frozen.\n")

    async def clear_storage(self, request: Request) -> Response:
        """Removes all pages of the storage below the KV cache, including those of other models. Prefixes in the KV
        cache and in the host-RAM tier stay."""
        client = self._state.client
        if client.info.hicache_storage_backend is None:
            raise InputError("there is no storage below the KV cache; start with --hicache-storage-backend")
        await client.collective_rpc("clear_storage")
        deadline = time.monotonic() + CLEAR_SECONDS
        while any(rank["is_clearing"] for rank in await client.collective_rpc("storage_facts")):
            if time.monotonic() > deadline:
                raise InputError(f"the storage is not cleared after {CLEAR_SECONDS:g} s; it continues", status=503)
            await asyncio.sleep(CLEAR_POLL_SECONDS)
        return PlainTextResponse("Hierarchical cache storage backend cleared.\n")
