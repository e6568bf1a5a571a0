"""SGLang's /open_session and /close_session; requests name a session in `session_params`."""

from __future__ import annotations

from typing import Annotated

from msgspec import Meta, Struct
from starlette.requests import Request
from starlette.responses import Response

from moe_engine.frontend.sessions import Sessions
from moe_engine.server.http_io import json_response, read_small

MAX_SECONDS = 10**9


class OpenSessionRequest(Struct):
    """`timeout`: seconds without a request after which the session closes; null: none."""

    capacity_of_str_len: Annotated[int, Meta(ge=0, description="no effect")] | None = None
    session_id: Annotated[str, Meta(min_length=1, max_length=256)] | None = None
    streaming: Annotated[bool | None, Meta(description="each request continues the one before")] = None
    timeout: Annotated[float, Meta(gt=0, le=MAX_SECONDS)] | None = None


class CloseSessionRequest(Struct):
    session_id: Annotated[str, Meta(max_length=256)]


class SessionsApi:
    def __init__(self, sessions: Sessions) -> None:
        self._sessions = sessions

    async def open(self, request: Request) -> Response:
        """Opens a session, whose requests continue earlier ones; returns its id."""
        asked = await read_small(request, OpenSessionRequest)
        name = self._sessions.open(asked.session_id, streaming=bool(asked.streaming), timeout=asked.timeout)
        return json_response(name)

    async def close(self, request: Request) -> Response:
        """Closes a session; status 200 also if it is not open."""
        self._sessions.close((await read_small(request, CloseSessionRequest)).session_id)
        return Response(status_code=200)
