"""The event loop of an offline engine: its end while another thread waits for a call."""

from __future__ import annotations

import asyncio
import threading

from moe_engine.errors import EngineDeadError
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
