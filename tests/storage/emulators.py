"""Emulators of libraries below the storage tier, which check the caller's use of the API: NIXL's POSIX plugin and
Mooncake's store, as their Python APIs document them."""

from __future__ import annotations

import ctypes
import os
import re
import threading
import types
from typing import Any, ClassVar

NOT_FOUND, LEASED, BAD_REQUEST = -704, -706, -600


class NixlBackendError(Exception):
    pass


class NixlAgent:
    """`nixl._api.nixl_agent` with the POSIX plugin: a transfer ends at the second poll."""

    names: ClassVar[set[str]] = set()

    def __init__(self, name: str, config: Any) -> None:
        assert name not in self.names, "two agents of one name"
        self.names.add(name)
        self._name, self._thread = name, threading.get_ident()
        self._backends: list[str] = []
        self._registered: list[tuple[str, tuple[int, int, int]]] = []
        self.open_handles = 0

    def create_backend(self, name: str) -> None:
        if name != "POSIX":
            raise NixlBackendError(f"no plugin {name}")
        self._backends.append(name)

    def register_memory(self, spans: list[tuple[Any, ...]], kind: str, backends: list[str]) -> Any:
        assert backends == self._backends and kind in ("DRAM", "FILE") and spans
        assert all(len(span) == 4 and isinstance(span[3], str) for span in spans)
        added = [(kind, (span[0], span[1], span[2])) for span in spans]
        self._registered += added
        return added

    def deregister_memory(self, spans: list[Any], backends: list[str]) -> None:
        for span in spans:
            self._registered.remove(span)

    def get_xfer_descs(self, spans: list[tuple[int, int, int]], kind: str) -> Any:
        assert all(len(span) == 3 for span in spans)
        return kind, spans

    def initialize_xfer(self, operation: str, local: Any, remote: Any, name: str, note: bytes, backends: Any) -> Any:
        assert threading.get_ident() == self._thread, "an agent is used by another thread"
        assert operation in ("READ", "WRITE") and name == self._name and backends == self._backends
        assert local[0] == "DRAM" and remote[0] == "FILE" and len(local[1]) == len(remote[1])
        for kind, spans in (local, remote):
            assert all((kind, tuple(span)) in self._registered for span in spans), "not registered"
        assert all(a[1] == b[1] for a, b in zip(local[1], remote[1]))
        self.open_handles += 1
        return {"operation": operation, "parts": list(zip(local[1], remote[1])), "polls": 0}

    def transfer(self, handle: dict[str, Any]) -> str:
        return "PROC"

    def check_xfer_state(self, handle: dict[str, Any]) -> str:
        handle["polls"] += 1
        if handle["polls"] < 2:
            return "PROC"
        for (address, size, _), (offset, _, descriptor) in handle["parts"]:
            memory = (ctypes.c_char * size).from_address(address)
            if handle["operation"] == "WRITE":
                done = os.pwrite(descriptor, bytes(memory), offset)
            else:
                found = os.pread(descriptor, size, offset)
                ctypes.memmove(address, found, len(found))
                done = len(found)
            if done != size:
                raise NixlBackendError("NIXL_ERR_BACKEND")
        return "DONE"

    def release_xfer_handle(self, handle: dict[str, Any]) -> None:
        self.open_handles -= 1


def nixl_modules() -> dict[str, types.ModuleType]:
    api = types.ModuleType("nixl._api")
    api.nixl_agent = NixlAgent  # type: ignore[attr-defined]
    api.nixl_agent_config = lambda backends: backends  # type: ignore[attr-defined]
    return {"nixl": types.ModuleType("nixl"), "nixl._api": api}


class MooncakeStore:
    """`mooncake.store.MooncakeDistributedStore`: clients of one master share its objects. A put keeps an existing
    object; a read object has a lease, during which only `force` removes it."""

    masters: ClassVar[dict[str, dict[str, bytes]]] = {}

    def __init__(self) -> None:
        self._objects: dict[str, bytes] | None = None
        self._buffers: list[tuple[int, int]] = []
        self._leased: set[str] = set()

    def setup(
        self, host: str, metadata: str, segment: int, buffer: int, protocol: str, devices: str, master: str
    ) -> int:
        assert host and metadata and segment >= 0 and buffer > 0 and protocol in ("tcp", "rdma")
        if master not in self.masters:
            return BAD_REQUEST
        self._objects = self.masters[master]
        return 0

    def register_buffer(self, address: int, size: int) -> int:
        assert not any(address < b + s and b < address + size for b, s in self._buffers), "registered twice"
        self._buffers.append((address, size))
        return 0

    def _check(self, address: int, size: int) -> dict[str, bytes]:
        assert self._objects is not None, "closed"
        assert any(b <= address and address + size <= b + s for b, s in self._buffers), "not registered"
        return self._objects

    def batch_put_from(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        assert len(keys) == len(addresses) == len(sizes)
        for key, address, size in zip(keys, addresses, sizes):
            self._check(address, size).setdefault(key, ctypes.string_at(address, size))
        return [0] * len(keys)

    def batch_get_into(self, keys: list[str], addresses: list[int], sizes: list[int]) -> list[int]:
        read = []
        for key, address, size in zip(keys, addresses, sizes):
            found = self._check(address, size).get(key)
            if found is None:
                read.append(NOT_FOUND)
            elif len(found) > size:
                read.append(BAD_REQUEST)
            else:
                ctypes.memmove(address, found, len(found))
                self._leased.add(key)
                read.append(len(found))
        return read

    def batch_is_exist(self, keys: list[str]) -> list[int]:
        assert self._objects is not None
        return [int(key in self._objects) for key in keys]

    def remove(self, key: str, force: bool = False) -> int:
        assert self._objects is not None
        if key in self._leased and not force:
            return LEASED
        return 0 if self._objects.pop(key, None) is not None else NOT_FOUND

    def remove_by_regex(self, pattern: str, force: bool = False) -> int:
        assert self._objects is not None
        found = [key for key in self._objects if re.search(pattern, key) and (force or key not in self._leased)]
        for key in found:
            del self._objects[key]
        return len(found)

    def close(self) -> int:
        self._objects = None
        return 0


def mooncake_modules() -> dict[str, types.ModuleType]:
    store = types.ModuleType("mooncake.store")
    store.MooncakeDistributedStore = MooncakeStore  # type: ignore[attr-defined]
    return {"mooncake": types.ModuleType("mooncake"), "mooncake.store": store}
