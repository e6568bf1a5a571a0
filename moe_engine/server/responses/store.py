"""Stored responses of /v1/responses, with the conversation that each of them ends, and responses in the background."""

from __future__ import annotations

import asyncio
from collections import OrderedDict
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec

from moe_engine.errors import InputError
from moe_engine.server.responses.items import output_items

MAX_RESPONSES = 4096
MAX_BYTES = 64 * 2**20
"""Limits of the store. The responses used longest ago are removed first."""


@dataclass(frozen=True)
class Running:
    """A response in the background. `show`: the response so far. `task` ends after it was stored."""

    show: Callable[[], Any]
    task: asyncio.Task[Any]


class ResponseStore:
    """Kept in this process's memory: a restart loses all responses. Every client with the API key reads every
    response."""

    def __init__(self, max_responses: int = MAX_RESPONSES, max_bytes: int = MAX_BYTES) -> None:
        self._kept: OrderedDict[str, tuple[bytes, bytes]] = OrderedDict()
        self._running: dict[str, Running] = {}
        self._max_responses, self._max_bytes = max_responses, max_bytes
        self.num_bytes = 0

    def __len__(self) -> int:
        return len(self._kept)

    def put(self, response: Any, items: list[dict[str, Any]]) -> None:
        """`items`: the conversation that the response continues, and its own input."""
        self._remove(response["id"])
        entry = msgspec.json.encode(response), msgspec.json.encode(items)
        self._kept[response["id"]] = entry
        self.num_bytes += sum(map(len, entry))
        while len(self._kept) > self._max_responses or self.num_bytes > self._max_bytes:
            self._remove(next(iter(self._kept)))

    def response(self, name: str) -> bytes:
        """The response's JSON. Raises InputError (404): it is not stored."""
        if (running := self._running.get(name)) is not None:
            return msgspec.json.encode(running.show())
        return self._entry(name, "response_id")[0]

    def conversation(self, name: str) -> list[dict[str, Any]]:
        """The items that a response was made from, and its output. Raises like `items`."""
        items = self.items(name, "previous_response_id")
        return items + output_items(msgspec.json.decode(self._kept[name][0]))

    def items(self, name: str, field: str = "response_id") -> list[dict[str, Any]]:
        """The items that a response was made from. Raises like `response`, and InputError for one that has not ended;
        `field`: the client's name of the id."""
        if name in self._running:
            raise InputError.at(field, f"the response {name!r:.80} has not ended; wait until its status is completed")
        found: list[dict[str, Any]] = msgspec.json.decode(self._entry(name, field)[1])
        return found

    async def delete(self, name: str) -> None:
        """Ends the response first, if it is in the background. Raises like `response`."""
        await self._end(name)
        self._entry(name, "response_id")
        self._remove(name)

    # -- responses in the background

    def begin(self, name: str, running: Running) -> None:
        """`put` follows, and `ended`."""
        self._running[name] = running

    def check_begin(self, name: str) -> None:
        """Raises InputError: its id is that of a response in the background, or there are too many of them (503)."""
        if name in self._running:
            raise InputError.at("rid", f"the response {name!r:.80} has not ended; use another id")
        if len(self._running) >= self._max_responses:
            raise InputError(f"{len(self._running)} responses are in the background already; try later", status=503)

    def ended(self, name: str) -> None:
        del self._running[name]

    async def cancel(self, name: str) -> bytes:
        """The JSON of the response, which has ended then. Raises like `response`, and InputError for a response that
        was not in the background."""
        await self._end(name)
        found = self.response(name)
        if not msgspec.json.decode(found)["background"]:
            raise InputError.at(
                "response_id", f"the response {name!r:.80} is not in the background; the end of its connection ends it"
            )
        return found

    async def _end(self, name: str) -> None:
        if (running := self._running.get(name)) is not None:
            running.task.cancel()
            await asyncio.wait([running.task])

    async def close(self) -> None:
        """Cancels the responses in the background: no client can read them after a stop."""
        for name in list(self._running):
            await self._end(name)

    def _entry(self, name: str, field: str) -> tuple[bytes, bytes]:
        if name not in self._kept:
            raise InputError.at(
                field,
                f"no response {name!r:.80} is stored; it was created with store: false, was deleted, was "
                "replaced by newer ones, or the server has restarted",
                status=404,
            )
        self._kept.move_to_end(name)
        return self._kept[name]

    def _remove(self, name: str) -> None:
        self.num_bytes -= sum(map(len, self._kept.pop(name, ())))
