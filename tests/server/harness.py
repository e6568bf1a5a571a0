"""An application over the fake engine, called in process or over a real socket."""

from __future__ import annotations

import asyncio
import dataclasses
import json
import threading
from collections.abc import AsyncIterator, Awaitable, Callable, Iterator
from contextlib import asynccontextmanager, contextmanager
from typing import Any

import httpx

from moe_engine.config.args import EngineArgs
from moe_engine.frontend.frontend import Frontend, FrontendSettings
from moe_engine.server.app import create_app
from moe_engine.server.listen import bind
from moe_engine.server.serve import http_config, serve
from moe_engine.server.settings import ServerSettings
from moe_engine.server.tls import Certificate
from tests.server.fake_engine import FakeClient

CHAT = {"messages": [{"role": "user", "content": "hi"}]}
TEXT = "Hello world, how are you today?"
SECONDS = 240.0
"""Limit of a test's requests, far above the real durations."""


def make_app(client: FakeClient, **settings: Any) -> Any:
    """`settings`: fields of `ServerSettings` and `FrontendSettings`, and flags."""

    def fields_of(cls: type[Any]) -> dict[str, Any]:
        return {item.name: settings.pop(item.name) for item in dataclasses.fields(cls) if item.name in settings}

    own, front = fields_of(ServerSettings), fields_of(FrontendSettings)
    settings |= {name: front[name] for name in ("reasoning_parser",) if name in front}  # fields of both
    options = ServerSettings(EngineArgs.from_kwargs(**settings), FrontendSettings(**front), **own)
    tokenizer = None if options.args.model.skip_tokenizer_init else client.tokenizer
    return create_app(Frontend(client, tokenizer, options.frontend), client, options)


@asynccontextmanager
async def in_process(client: FakeClient, **settings: Any) -> AsyncIterator[httpx.AsyncClient]:
    """An HTTP client of the application, without a socket; ends after `SECONDS`."""
    app = make_app(client, **settings)
    try:
        async with (
            asyncio.timeout(SECONDS),
            httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://test") as http,
        ):
            yield http
    finally:
        app.state.server.bodies.close()


def talk(client: FakeClient, session: Callable[[httpx.AsyncClient], Awaitable[Any]], **settings: Any) -> Any:
    """Runs `session` with an in-process HTTP client."""

    async def main() -> Any:
        async with in_process(client, **settings) as http:
            return await session(http)

    return asyncio.run(main())


def post(client: FakeClient, path: str, body: Any, *, headers: Any = None, **settings: Any) -> httpx.Response:
    """One request. `body`: an object, or raw bytes."""

    async def session(http: httpx.AsyncClient) -> httpx.Response:
        content = body if isinstance(body, bytes) else json.dumps(body).encode()
        return await http.post(path, content=content, headers=headers)

    return talk(client, session, **settings)


def get(client: FakeClient, path: str, *, headers: Any = None, **settings: Any) -> httpx.Response:
    return talk(client, lambda http: http.get(path, headers=headers), **settings)


def events(response: httpx.Response) -> list[Any]:
    """The objects of a stream; checks its format."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("data: [DONE]\n\n")
    lines = response.text.removesuffix("\n\n").split("\n\n")
    assert all(line.startswith("data: ") and "\n" not in line for line in lines)
    return [json.loads(line.removeprefix("data: ")) for line in lines[:-1]]


def named_events(response: httpx.Response) -> list[Any]:
    """The data of a stream of /v1/messages or /v1/responses; checks its format."""
    assert response.status_code == 200, response.text
    assert response.headers["content-type"].startswith("text/event-stream")
    assert response.text.endswith("\n\n")
    found = []
    for event in response.text.removesuffix("\n\n").split("\n\n"):
        name, data = event.split("\n")
        found.append(json.loads(data.removeprefix("data: ")))
        assert name == f"event: {found[-1]['type']}"
    return found


@contextmanager
def real_server(client: FakeClient, certificate: Certificate | None = None, **settings: Any) -> Iterator[str]:
    """uvicorn on a free port, in a thread; yields its address. 127.0.0.1 without the flag `host`."""
    app, sock = make_app(client, **settings), bind(settings.get("host", "127.0.0.1"), 0)
    ready, stop = threading.Event(), threading.Event()

    async def main() -> None:
        task = asyncio.create_task(
            serve(
                http_config(app, log_level="warning", drain_seconds=1, certificate=certificate),
                sock,
                on_ready=lambda host, port: ready.set(),
            )
        )
        while not stop.is_set() and not task.done():
            await asyncio.sleep(0.01)
        task.cancel()
        await asyncio.gather(task, return_exceptions=True)
        app.state.server.bodies.close()

    thread = threading.Thread(target=lambda: asyncio.run(main()), daemon=True)
    thread.start()
    assert ready.wait(120)
    host, port = sock.getsockname()[:2]
    try:
        yield f"http{'s' if certificate else ''}://{f'[{host}]' if ':' in host else host}:{port}"
    finally:
        stop.set()
        thread.join(60)
        sock.close()
