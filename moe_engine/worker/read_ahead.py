"""Reads files into the page cache of a rank's node, in a thread while steps run.

Other methods of a rank then read them between two steps. A slow or hanging mount delays the thread, not the steps.
"""

from __future__ import annotations

import os
import threading
from contextlib import suppress

import msgspec

from moe_engine.processes.watched_thread import start_watched

CHUNK_BYTES = 4 << 20
HEAD_BYTES = TAIL_BYTES = 16 << 20
"""Parts of a file that hold its headers, whatever its format is; a safetensors file gives its header's length."""
SAFETENSORS = ".safetensors"


class FilesArgs(msgspec.Struct, forbid_unknown_fields=True):
    """`id`: of this reading, never used again. `path`: a folder, or a file. `headers_only`: weights are not read."""

    id: str
    path: str
    headers_only: bool = False


class PageCacheReads:
    """Readings by their ids; the loader of weights has its own (`models.read_ahead`)."""

    def __init__(self) -> None:
        self._threads: dict[str, threading.Thread] = {}

    def is_reading(self, args: FilesArgs) -> bool:
        """Begins to read at the first call with an id. Files that cannot be read are left to the next method."""
        if args.id not in self._threads:
            self._threads = {name: thread for name, thread in self._threads.items() if thread.is_alive()}
            self._threads[args.id] = start_watched("read ahead", lambda: _read_all(args), lambda message: None)
        return self._threads[args.id].is_alive()


def _read_all(args: FilesArgs) -> None:
    with suppress(OSError):
        if not os.path.isdir(args.path):
            _read(args.path, args.headers_only)
            return
        with os.scandir(args.path) as entries:
            for entry in entries:
                with suppress(OSError):  # of this file only
                    if entry.is_file():  # no pipe
                        _read(entry.path, args.headers_only)


def _read(path: str, headers_only: bool) -> None:
    buffer = memoryview(bytearray(CHUNK_BYTES))
    with open(path, "rb", buffering=0) as file:
        size = end = os.fstat(file.fileno()).st_size
        if headers_only and path.endswith(SAFETENSORS):
            end = 8 + int.from_bytes(file.read(8), "little")
        elif headers_only and size > HEAD_BYTES + TAIL_BYTES:
            file.seek(size - TAIL_BYTES)
            while file.readinto(buffer):
                pass
            file.seek(0)
            end = HEAD_BYTES
        while file.tell() < end and file.readinto(buffer):
            pass
