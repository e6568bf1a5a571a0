"""The event loop of an offline engine: its end while another thread waits for a call."""

from __future__ import annotations

import asyncio
import threading
from contextlib import aclosing
from types import SimpleNamespace
from typing import Any

import pytest

from moe_engine.errors import EngineDeadError
from moe_engine.frontend import engine_loop
from moe_engine.frontend.engine import Engine
from moe_engine.frontend.engine_loop import EngineLoop


def test_a_pending_call_of_another_thread_gets_an_error():
    loop, errors, waits = EngineLoop([]), [], threading.Event()

    async def never() -> None:
        waits.set()
        await asyncio.Event().wait()

    def call() -> None:
        try:
            loop.run(never())
        except EngineDeadError as error:
            errors.append(str(error))

    thread = threading.Thread(target=call, daemon=True)
    thread.start()
    assert waits.wait(60)
    assert loop.begin_close()
    loop.close(asyncio.sleep(0))
    thread.join(60)
    assert errors == ["this Engine was shut down"]


@pytest.fixture
def patience(monkeypatch: pytest.MonkeyPatch) -> None:
    """On a busy machine a thread may wait a second for a core."""
    monkeypatch.setattr(engine_loop, "WIND_UP_SECONDS", 60.0)


@pytest.mark.usefixtures("patience")
@pytest.mark.parametrize("end", ["abandon", "close", "fail"])
def test_streams_of_an_ended_engine_are_closed(end: str) -> None:
    """asyncio cannot close the stream of a task that is destroyed, and warns of it."""
    loop, begun, closed, problems = EngineLoop([]), threading.Event(), list[str](), list[Any]()
    loop.loop.set_exception_handler(lambda _, problem: problems.append(problem))

    async def chunks() -> Any:
        try:
            begun.set()
            await asyncio.Event().wait()
            yield
        finally:
            await asyncio.sleep(0)
            await asyncio.sleep(0)
            closed.append("chunks")

    async def pump() -> None:
        async with aclosing(chunks()) as stream:
            async for _ in stream:
                pass

    stream = loop.submit(pump())
    assert begun.wait(60)
    if end == "abandon":
        loop.abandon()
    else:
        if end == "fail":
            loop._failed("the loop failed")
        loop.begin_close()
        loop.close(asyncio.sleep(0))
    loop.thread.join(60)
    assert closed == ["chunks"] and problems == []
    if end != "abandon":
        cause = "the loop failed" if end == "fail" else "this Engine was shut down"
        with pytest.raises(EngineDeadError, match=cause):
            stream.result(0)


@pytest.mark.usefixtures("patience")
def test_the_cleanup_of_a_cancelled_call_is_not_interrupted(monkeypatch: pytest.MonkeyPatch) -> None:
    loop, begun, cleans, cleaned = EngineLoop([]), threading.Event(), threading.Event(), list[bool]()
    ends, wind_up = asyncio.Event(), engine_loop._wind_up

    def end(of: asyncio.AbstractEventLoop) -> None:
        wind_up(of)
        ends.set()

    monkeypatch.setattr(engine_loop, "_wind_up", end)

    async def call() -> None:
        try:
            begun.set()
            await asyncio.Event().wait()
        finally:
            cleans.set()
            await ends.wait()
            cleaned.append(True)

    future = loop.submit(call())
    assert begun.wait(60)
    future.cancel()
    assert cleans.wait(60)
    loop.begin_close()
    loop.close(asyncio.sleep(0))
    loop.thread.join(60)
    assert cleaned


def test_the_end_of_a_failed_loop_is_not_waited_for() -> None:
    def fail() -> None:
        raise SystemExit

    loop = EngineLoop([])
    loop.loop.call_soon_threadsafe(fail)
    loop.thread.join(60)
    loop.begin_close()
    loop.close(asyncio.sleep(0))


@pytest.mark.parametrize("cause", ["the loop failed", None], ids=["loop failed", "task cancelled"])
def test_an_async_stream_ends_with_its_engine(cause: str | None):
    engine: Any = Engine.__new__(Engine)
    engine._loop = EngineLoop([])

    async def chunks(request: object) -> Any:
        yield {"text": "a"}
        while not engine._loop._running:  # `submit` has not returned yet
            await asyncio.sleep(0)
        if cause is None:
            asyncio.current_task().cancel()  # type: ignore[union-attr]
        else:
            engine._loop._failed(cause)
        await asyncio.Event().wait()

    engine._frontend = SimpleNamespace(stream=chunks)

    async def read() -> list[Any]:
        return [chunk async for chunk in await engine.async_generate("a", stream=True)]

    with pytest.raises(EngineDeadError, match=cause or "this Engine was shut down"):
        asyncio.run(asyncio.wait_for(read(), 60))
    engine._loop.begin_close()
    engine._loop.close(asyncio.sleep(0))
