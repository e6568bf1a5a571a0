"""Reads files into the page cache before the ranks read them.

A rank reads between two steps. A slow or hanging mount then delays the thread of this module, not the steps of all
requests.
"""

from __future__ import annotations

import asyncio
import os
from contextlib import suppress

from moe_engine.processes.watched_thread import start_watched
from moe_engine.storage.fingerprint import fingerprint_of

CHUNK_BYTES = 4 << 20


async def read_ahead(folder: str) -> str:
    """Waits until all regular files of a folder have been read, however long it takes.

    Returns:
        The fingerprint of the files. Files that cannot be read are left to the ranks, which report them.
    """
    loop = asyncio.get_running_loop()
    done: asyncio.Future[str] = loop.create_future()

    def finish(fingerprint: str) -> None:
        if not done.done():  # the time limit of the caller may have passed
            done.set_result(fingerprint)

    def run() -> None:
        with suppress(OSError):
            _read(folder)
        fingerprint = known_fingerprint(folder)
        with suppress(RuntimeError):  # the loop has ended
            loop.call_soon_threadsafe(finish, fingerprint)

    start_watched("read ahead", run, lambda message: None)  # a daemon thread: the server ends beside a hanging mount
    return await done


def known_fingerprint(folder: str) -> str:
    """`fingerprint_of`; empty if a file cannot be read."""
    try:
        return fingerprint_of(folder)
    except OSError:
        return ""


def _read(folder: str) -> None:
    buffer = bytearray(CHUNK_BYTES)
    with os.scandir(folder) as entries:
        for entry in entries:
            if entry.is_file():  # no pipe
                with open(entry.path, "rb", buffering=0) as file:
                    while file.readinto(buffer):
                        pass
