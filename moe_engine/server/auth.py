"""API keys, except for health and metrics: `Authorization: Bearer KEY`, or `x-api-key: KEY` as Anthropic's clients send
it. Control endpoints take an admin key.
"""

from __future__ import annotations

import hmac

from starlette.types import ASGIApp, Receive, Scope, Send

from moe_engine.server.errors import Problem, error_format_of, error_response
from moe_engine.server.live_pages import wants_page

FREE_PREFIXES = ("/health", "/metrics", "/ready", "/ping")
FREE_PATHS = frozenset({"/", "/docs", "/openapi.json", "/experts"})
"""Pages without served data; also /doctor if the client accepts HTML. /experts and /doctor prompt for the key and
send it with their requests."""

ADMIN_PATHS = frozenset(
    {"/flush_cache", "/reset_prefix_cache", "/abort_request", "/configure_logging", "/freeze_gc", "/set_internal_state",
     "/clear_hicache_storage_backend", "/hicache/storage-backend", "/hicache/storage-backend/clear",
     "/start_profile", "/stop_profile", "/load_lora_adapter", "/unload_lora_adapter", "/get_weights_by_name"}
)  # fmt: skip
ADMIN_PREFIXES = (
    *(
        "/update_weight",
        "/init_weights",
        "/destroy_weights",
        "/release_memory",
        "/resume_memory",
        "/pause_",
        "/continue_",
    ),
    *("/start_expert_", "/stop_expert_", "/dump_expert_"),
)


class KeyCheck:
    """ASGI middleware that rejects requests without the right key.

    Args:
        api_key: required on all endpoints; None: no authentication.
        admin_api_key: required instead on endpoints that change the engine; None: `api_key`.
    """

    def __init__(self, app: ASGIApp, api_key: str | None, admin_api_key: str | None = None) -> None:
        self._app = app
        self._api_key = api_key
        self._admin_api_key = admin_api_key

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http" and not self._allowed(scope):
            problem = Problem(401, self._hint(scope["path"]), "authentication_error", None, "invalid_api_key")
            await error_response(problem, error_format_of(scope["path"]))(scope, receive, send)
            return
        await self._app(scope, receive, send)

    def _allowed(self, scope: Scope) -> bool:
        path = scope["path"]
        if path == "/doctor" and scope["method"] == "GET" and wants_page(_header(scope, b"accept")):
            return True
        if scope["method"] == "OPTIONS" or path.startswith(FREE_PREFIXES) or path in FREE_PATHS:
            return True
        wanted = self._api_key
        if self._admin_api_key and changes_engine(path):
            wanted = self._admin_api_key
        if not wanted:
            return True
        return any(hmac.compare_digest(key, wanted.encode()) for key in _keys(scope))

    def _hint(self, path: str) -> str:
        which = "admin API key" if self._admin_api_key and changes_engine(path) else "API key"
        return f"Missing or wrong {which}; send the header 'Authorization: Bearer <key>'."


def _header(scope: Scope, wanted: bytes) -> str:
    return b",".join(value for name, value in scope["headers"] if name == wanted).decode("latin-1")


def _keys(scope: Scope) -> list[bytes]:
    """The keys in a request's headers."""
    keys = []
    for name, value in scope["headers"]:
        scheme, _, key = value.partition(b" ")
        if name == b"x-api-key":
            keys.append(value)
        elif name == b"authorization" and scheme.lower() == b"bearer":
            keys.append(key.strip(b" "))
    return keys


def changes_engine(path: str) -> bool:
    """Whether a path's endpoint changes the engine's state."""
    return path in ADMIN_PATHS or path.startswith(ADMIN_PREFIXES)
