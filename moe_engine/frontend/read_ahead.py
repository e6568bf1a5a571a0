"""Waits until the files of a folder are in the page caches of all ranks' nodes (`worker.read_ahead`), and reads their
fingerprint.

A rank reads between two steps, and the frontend on its event loop: a slow or hanging mount would delay all requests.
"""

from __future__ import annotations

import asyncio
import uuid
from contextlib import suppress

from moe_engine.frontend.client_api import CallError, EngineClient
from moe_engine.frontend.rank_polling import poll_ranks
from moe_engine.processes.watched_thread import start_watched
from moe_engine.storage.fingerprint import fingerprint_of


async def read_ahead(client: EngineClient, path: str, seconds: float, *, headers_only: bool = False) -> None:
    """Reads the files of a folder, or a file. Those that cannot be read are left to the ranks, which report them.

    Args:
        headers_only: leaves weights out.

    Raises:
        CallError: names the ranks that still read after `seconds`.
        EngineDeadError: no scheduler is alive.
    """
    args = {"id": uuid.uuid4().hex, "path": path, "headers_only": headers_only}
    answers = await poll_ranks(client, "read_ahead", args, bool, seconds)
    if late := [rank for rank, is_reading in answers.items() if is_reading]:
        raise _not_read(path, seconds, f" on {', '.join(late)}")


async def read_fingerprint(folder: str, seconds: float) -> str:
    """`known_fingerprint`, outside the event loop. Raises CallError: it is not read after `seconds`."""
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def finish(fingerprint: str) -> None:
        if not done.done():  # the time limit may have passed
            done.set_result(fingerprint)

    def run() -> None:
        fingerprint = known_fingerprint(folder)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, fingerprint)

    start_watched("fingerprint", run, lambda message: None)  # a daemon thread: the server ends despite a hanging mount
    try:
        return await asyncio.wait_for(done, seconds)
    except TimeoutError:
        raise _not_read(folder, seconds) from None


def known_fingerprint(folder: str) -> str:
    """`fingerprint_of`; empty if a file cannot be read."""
    try:
        return fingerprint_of(folder)
    except OSError:
        return ""


def _not_read(path: str, seconds: float, where: str = "") -> CallError:
    return CallError(f"{path}: not read after {seconds:.0f} s{where}; check its file system")
