"""Stored responses of /v1/responses, with the conversation that each of them ends."""

from __future__ import annotations

from collections import OrderedDict
from typing import Any

import msgspec

from moe_engine.errors import InputError

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
"""Limits of the store. The responses used longest ago are removed first."""


class ResponseStore:
    """Kept in this process's memory: a restart loses all responses. Every client with the API key reads every
    response."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: Any, messages: list[dict[str, Any]]) -> None:
        """`messages`: the conversation, with the response's own message at its end."""
        self._remove(response["id"])
        entry = msgspec.json.encode(response), msgspec.json.encode(messages)
        self._kept[response["id"]] = entry
        self.num_bytes += sum(map(len, entry))
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def response(self, name: str) -> bytes:
        """The response's JSON. Raises InputError (404): it is not stored."""
        return self._entry(name, "response_id")[0]

    def messages(self, name: str) -> list[dict[str, Any]]:
        """Raises like `response`."""
        found: list[dict[str, Any]] = msgspec.json.decode(self._entry(name, "previous_response_id")[1])
        return found

    def delete(self, name: str) -> None:
        """Raises like `response`."""
        self._entry(name, "response_id")
        self._remove(name)

    def _entry(self, name: str, field: str) -> tuple[bytes, bytes]:
        if name not in self._kept:
            raise InputError(
                f"{field}: no response {name!r:.80} is stored; it was created with store: false, was deleted, was "
                "replaced by newer ones, or the server has restarted",
                field=field,
                status=404,
            )
        self._kept.move_to_end(name)
        return self._kept[name]

    def _remove(self, name: str) -> None:
        self.num_bytes -= sum(map(len, self._kept.pop(name, ())))
