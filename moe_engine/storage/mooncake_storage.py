"""Storage in Mooncake's distributed store (`--hicache-storage-backend mooncake`): memory of many machines, behind one
master process (``mooncake_master``).

Contract: the Python API of mooncake-transfer-engine 0.3 (`mooncake.store`): `batch_put_from` and `batch_get_into` take
keys, addresses in registered buffers and sizes; a put returns 0 for a stored object (also for one stored before), a get
returns the bytes read; negative numbers are errors. Pages pass through a registered buffer of each thread.

Settings (`--hicache-storage-backend-extra-config`, SGLang's names; in brackets its environment variable):

| setting               | default                                                                                  |
|-----------------------|------------------------------------------------------------------------------------------|
| master_server_address | required, host:port [MOONCAKE_MASTER]                                                    |
| metadata_server       | P2PHANDSHAKE: no metadata server [MOONCAKE_TE_META_DATA_SERVER]                          |
| local_hostname        | this machine's name [LOCAL_HOSTNAME]                                                     |
| global_segment_size   | bytes that this rank gives to the store, 4 GiB; 0: none [MOONCAKE_GLOBAL_SEGMENT_SIZE]   |
| protocol              | tcp; rdma [MOONCAKE_PROTOCOL]                                                            |
| device_name           | RDMA devices, comma-separated [MOONCAKE_DEVICE]                                          |
"""

from __future__ import annotations

import ctypes
import socket
import threading
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from moe_engine.errors import ConfigError
from moe_engine.storage.protocol import Buffer
from moe_engine.storage.sealed_pages import copy_bytes

PREFIX = "moe-engine-"
"""Prefix of this engine's objects in a store that other programs may use too."""
STAGING = 8 << 20
"""Min bytes of a thread's buffer; at least one page."""
LOCAL_BUFFER = 16 << 20
"""The store's own buffer; pages do not pass through it."""
VARIABLES = {
    "master_server_address": "MOONCAKE_MASTER",
    "metadata_server": "MOONCAKE_TE_META_DATA_SERVER",
    "local_hostname": "LOCAL_HOSTNAME",
    "global_segment_size": "MOONCAKE_GLOBAL_SEGMENT_SIZE",
    "protocol": "MOONCAKE_PROTOCOL",
    "device_name": "MOONCAKE_DEVICE",
}


class MooncakeStorage:
    """Implements `PageStorage`.

    Args:
        extra: the settings above.

    Raises:
        ConfigError: the package is missing or does not load, a setting is wrong, or the master does not answer.
    """

    def __init__(self, extra: Mapping[str, Any]) -> None:
        settings = settings_of(extra)
        try:
            from mooncake.store import MooncakeDistributedStore
        except ImportError as error:
            raise ConfigError(
                f"--hicache-storage-backend mooncake: {error}; install it: pip install -e '.[mooncake]' (without a GPU "
                "mooncake-transfer-engine-non-cuda), and the system's libibverbs"
            ) from error
        self._max_bytes = settings["global_segment_size"]
        self._store = MooncakeDistributedStore()
        self._threads = threading.local()
        self._staging: list[_Staging] = []
        status = self._store.setup(
            settings["local_hostname"],
            settings["metadata_server"],
            settings["global_segment_size"],
            LOCAL_BUFFER,
            settings["protocol"],
            settings["device_name"],
            settings["master_server_address"],
        )
        if status:
            raise ConfigError(
                f"--hicache-storage-backend mooncake: setup with the master at {settings['master_server_address']} and "
                f"protocol {settings['protocol']} failed with code {status}; is mooncake_master running there?"
            )

    def exists(self, names: Sequence[str]) -> int:
        found = self._store.batch_is_exist([PREFIX + name for name in names])
        return next((i for i, one in enumerate(found) if one != 1), len(names))

    def get(self, names: Sequence[str], targets: Sequence[Buffer]) -> list[bool]:
        there: list[bool] = []
        for begin, end, staging in self._parts(targets):
            places = staging.places(targets[begin:end])
            keys, sizes = [PREFIX + name for name in names[begin:end]], [len(target) for target in targets[begin:end]]
            read = self._store.batch_get_into(keys, [staging.address + place for place in places], sizes)
            for place, size, count, target in zip(places, sizes, read, targets[begin:end]):
                there.append(count == size)
                if count == size:
                    copy_bytes(staging.view[place : place + size], target)
        return there

    def put(self, names: Sequence[str], pages: Sequence[Buffer]) -> list[bool]:
        stored: list[bool] = []
        for begin, end, staging in self._parts(pages):
            places = staging.places(pages[begin:end])
            for place, page in zip(places, pages[begin:end]):
                copy_bytes(page, staging.view[place : place + len(page)])
            keys, sizes = [PREFIX + name for name in names[begin:end]], [len(page) for page in pages[begin:end]]
            status = self._store.batch_put_from(keys, [staging.address + place for place in places], sizes)
            stored += [one == 0 for one in status]
        return stored

    def delete(self, names: Sequence[str]) -> None:
        for name in names:
            self._store.remove(PREFIX + name, force=True)

    def clear(self) -> None:
        self._store.remove_by_regex(f"^{PREFIX}.*", force=True)

    def describe(self) -> dict[str, Any]:
        return {"used_bytes": 0, "max_bytes": 0, "segment_bytes": self._max_bytes}

    def close(self) -> None:
        self._store.close()
        self._staging.clear()

    def _parts(self, pages: Sequence[Buffer]) -> Iterator[tuple[int, int, _Staging]]:
        """Runs of pages that fit into this thread's buffer together."""
        begin = 0
        while begin < len(pages):
            staging, end, size = self._staging_for(len(pages[begin])), begin, 0
            while end < len(pages) and size + len(pages[end]) <= staging.size:
                size += len(pages[end])
                end += 1
            yield begin, end, staging
            begin = end

    def _staging_for(self, num_bytes: int) -> _Staging:
        staging: _Staging | None = getattr(self._threads, "staging", None)
        if staging is None or staging.size < num_bytes:
            staging = self._threads.staging = _Staging(max(num_bytes, STAGING))
            if self._store.register_buffer(staging.address, staging.size):
                raise OSError(f"Mooncake cannot register a buffer of {staging.size} bytes")
            self._staging.append(staging)  # registered memory stays until the store is closed
        return staging


class _Staging:
    """Memory whose address does not change."""

    def __init__(self, size: int) -> None:
        self.size = size
        self._memory = bytearray(size)
        self.view = memoryview(self._memory)
        self.address = ctypes.addressof((ctypes.c_char * size).from_buffer(self._memory))

    def places(self, pages: Sequence[Buffer]) -> list[int]:
        """Addresses of the pages, one after the other."""
        found, at = [], 0
        for page in pages:
            found.append(at)
            at += len(page)
        return found


def settings_in(environ: Mapping[str, str]) -> dict[str, Any]:
    """The settings given by the environment."""
    return {name: environ[variable] for name, variable in VARIABLES.items() if environ.get(variable)}


def settings_of(extra: Mapping[str, Any]) -> dict[str, Any]:
    """Raises ConfigError: an unknown or wrong setting, or no master."""
    flag = "--hicache-storage-backend-extra-config"
    unknown = sorted(set(extra) - set(VARIABLES))
    if unknown:
        raise ConfigError(f"{flag}: {unknown[0]}: unknown; the mooncake backend has {', '.join(VARIABLES)}")
    found: dict[str, Any] = {
        "metadata_server": "P2PHANDSHAKE",
        "local_hostname": socket.gethostname(),
        "global_segment_size": 4 << 30,
        "protocol": "tcp",
        "device_name": "",
    }
    found |= extra
    if not found.get("master_server_address"):
        raise ConfigError(
            f"--hicache-storage-backend mooncake needs its master: MOONCAKE_MASTER, or {flag} "
            '\'{"master_server_address": "host:50051"}\''
        )
    try:
        found["global_segment_size"] = int(found["global_segment_size"])
    except (TypeError, ValueError):
        found["global_segment_size"] = -1
    if found["global_segment_size"] < 0:
        raise ConfigError(f"{flag}: global_segment_size: must be a number of bytes, 0 for none")
    if found["protocol"] not in ("tcp", "rdma"):
        raise ConfigError(f"{flag}: protocol {found['protocol']!r}: use tcp or rdma")
    return found
