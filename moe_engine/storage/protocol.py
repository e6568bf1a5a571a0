"""Interface of a storage backend: byte strings by name.

Pages passed to a backend are sealed (`sealed_pages.py`): the backend need not detect wrong bytes, and may lose any page
at any time. Several processes may use one storage concurrently. All methods are called from threads of the storage
tier, several concurrently, never from the thread of the steps; every error is a miss.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, Protocol, runtime_checkable

Buffer = memoryview
"""Contiguous bytes."""


@runtime_checkable
class PageStorage(Protocol):
    """A backend (`--hicache-storage-backend`). Names are of letters, digits and dashes, at most 128 characters."""

    def exists(self, names: Sequence[str]) -> int:
        """Number of leading names that are stored."""

    def get(self, names: Sequence[str], targets: Sequence[Buffer]) -> list[bool]:
        """Reads pages into buffers of their exact sizes; whether each page existed with that size."""

    def put(self, names: Sequence[str], pages: Sequence[Buffer]) -> list[bool]:
        """Stores pages; whether each is stored now. A page that is stored already may be kept as it is. The buffers are
        valid during the call only."""

    def delete(self, names: Sequence[str]) -> None:
        """Removes pages; unknown names are ignored."""

    def clear(self) -> None:
        """Removes all pages of this engine's storage, including those of other models."""

    def describe(self) -> dict[str, Any]:
        """Plain facts for /server_info: at least `used_bytes` and `max_bytes` (0: not known)."""

    def close(self) -> None: ...


METHODS = ("exists", "get", "put", "delete", "clear", "describe", "close")
