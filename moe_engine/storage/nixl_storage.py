"""Files through NIXL (`--hicache-storage-backend nixl`): the folder, limit and pages of `file`, read and written by a
NIXL plugin, many pages in one transfer.

Contract: the Python API of nixl 1.x (`nixl._api`): `register_memory` takes (address, bytes, device, tag) of DRAM and
(offset, bytes, file descriptor, tag) of FILE; `check_xfer_state` returns PROC, DONE or ERR, or raises; a short read is
an error of the whole transfer. A failed read is repeated page by page; a failed write is repeated without NIXL, whose
errors do not contain the reason (such as a full disk).

Settings (`--hicache-storage-backend-extra-config`): `plugin`: POSIX (default), GDS or GDS_MT, which need NVIDIA's
GPUDirect Storage.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import threading
import time
from collections.abc import Mapping, Sequence
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.storage.file_storage import FileStorage
from moe_engine.storage.protocol import Buffer

PLUGINS = ("POSIX", "GDS", "GDS_MT")
BATCH = 64
"""Pages of a transfer: each has an open file."""
_POLL = 50e-6
_agents = itertools.count(1)


class NixlStorage(FileStorage):
    """Implements `PageStorage`. An agent for each thread: agents are not used by several threads concurrently.

    Raises:
        ConfigError: as `FileStorage`; the package is missing or does not load, or has no such plugin.
    """

    def __init__(self, directory: str, max_bytes: int, extra: Mapping[str, Any]) -> None:
        unknown = sorted(set(extra) - {"plugin"})
        self._plugin = str(extra.get("plugin", "POSIX"))
        if unknown or self._plugin not in PLUGINS:
            what = f"{unknown[0]}: unknown" if unknown else f"plugin {self._plugin!r:.40}"
            raise ConfigError(
                f"--hicache-storage-backend-extra-config: {what}; the nixl backend has plugin: {', '.join(PLUGINS)}"
            )
        super().__init__(directory, max_bytes)
        self._threads = threading.local()
        try:
            self._agent()
        except ImportError as error:
            raise ConfigError(f"--hicache-storage-backend nixl: {error}; pip install -e '.[nixl]'") from error
        except Exception as error:  # of the library's own types
            raise ConfigError(f"--hicache-storage-backend nixl: plugin {self._plugin}: {error}") from error

    def describe(self) -> dict[str, Any]:
        return super().describe() | {"plugin": self._plugin}

    def get(self, names: Sequence[str], targets: Sequence[Buffer]) -> list[bool]:
        found: list[bool] = []
        for begin in range(0, len(names), BATCH):
            found += self._get(names[begin : begin + BATCH], targets[begin : begin + BATCH])
        return found

    def _get(self, names: Sequence[str], targets: Sequence[Buffer]) -> list[bool]:
        there = [False] * len(names)
        with contextlib.ExitStack() as files:
            opened: list[tuple[int, int]] = []
            for i, name in enumerate(names):
                with contextlib.suppress(FileNotFoundError):
                    file = files.enter_context(open(self._path(name), "rb", buffering=0))
                    if self._is_whole(file.fileno(), self._path(name), len(targets[i])):
                        opened.append((i, file.fileno()))
            if not opened:
                return there
            parts = [(targets[i], descriptor) for i, descriptor in opened]
            if self._transfer("READ", parts):
                good = [True] * len(opened)
            else:
                good = [self._transfer("READ", [part]) for part in parts]
        for (i, _), whole in zip(opened, good):
            there[i] = whole
            if whole:
                with contextlib.suppress(OSError):
                    os.utime(self._path(names[i]))  # used: removed last
        return there

    def put(self, names: Sequence[str], pages: Sequence[Buffer]) -> list[bool]:
        stored: list[bool] = []
        for begin in range(0, len(names), BATCH):
            some, content = names[begin : begin + BATCH], pages[begin : begin + BATCH]
            stored += self._put(some, content) or super().put(some, content)
        return stored

    def _put(self, names: Sequence[str], pages: Sequence[Buffer]) -> list[bool] | None:
        """None if the transfer failed, or there is no room for all."""
        total = sum(map(len, pages))
        if not self._make_room(total):
            return None
        paths = [self._path(name) for name in names]
        temporary = [f"{path}.{os.getpid()}-{threading.get_ident()}" for path in paths]
        try:
            with contextlib.ExitStack() as files:
                parts = []
                for path, page in zip(temporary, pages):
                    os.makedirs(os.path.dirname(path), exist_ok=True)
                    file = files.enter_context(open(path, "w+b", buffering=0))
                    parts.append((page, file.fileno()))
                if not self._transfer("WRITE", parts):
                    return None
                if any(os.fstat(descriptor).st_size != len(page) for page, descriptor in parts):
                    return None
            for here, path in zip(temporary, paths):
                os.replace(here, path)
        except OSError:
            return None
        finally:
            for path in temporary:
                with contextlib.suppress(OSError):
                    os.unlink(path)
        self._wrote(total)
        return [True] * len(names)

    # -- NIXL

    def _agent(self) -> tuple[Any, str]:
        """This thread's agent, and its name."""
        known: tuple[Any, str] | None = getattr(self._threads, "agent", None)
        if known is None:
            from nixl._api import nixl_agent, nixl_agent_config

            name = f"moe-engine storage {os.getpid()} {next(_agents)}"
            agent = nixl_agent(name, nixl_agent_config(backends=[]))
            agent.create_backend(self._plugin)
            known = self._threads.agent = agent, name
        return known

    def _transfer(self, operation: str, parts: Sequence[tuple[Buffer, int]]) -> bool:
        """Transfers between buffers and the beginnings of files (descriptors); whether the whole transfer succeeded."""
        agent, name = self._agent()
        spans = [(_address(buffer), len(buffer)) for buffer, _ in parts]
        registered: list[Any] = []
        handle = None
        try:
            memory = [(address, size, 0, "") for address, size in spans]
            files = [(0, size, parts[i][1], "") for i, (_, size) in enumerate(spans)]
            for what, kind in ((memory, "DRAM"), (files, "FILE")):
                registered.append(agent.register_memory(what, kind, backends=[self._plugin]))
            local = agent.get_xfer_descs([part[:3] for part in memory], "DRAM")
            remote = agent.get_xfer_descs([part[:3] for part in files], "FILE")
            handle = agent.initialize_xfer(operation, local, remote, name, b"", backends=[self._plugin])
            state = agent.transfer(handle)
            while state == "PROC":
                time.sleep(_POLL)
                state = agent.check_xfer_state(handle)
        except Exception:  # of the library's own types: a miss
            return False
        finally:
            with contextlib.suppress(Exception):
                if handle is not None:
                    agent.release_xfer_handle(handle)
            for one in reversed(registered):
                with contextlib.suppress(Exception):
                    agent.deregister_memory(one, backends=[self._plugin])
        return bool(state == "DONE")


def _address(buffer: Buffer) -> int:
    """Address of the bytes of a buffer, which may be read-only."""
    import numpy as np

    return int(np.frombuffer(buffer, np.uint8).ctypes.data)
