"""The decode server's side of disaggregation: a host tier whose places are also filled by prefill servers.

A request with a room waits for KV while its prompt's KV arrives in places of the tier. After that the KV is a cached
prefix in the tier: the request loads it like any other prefix and computes the missing tokens, at least the last one. A
failed transfer leaves no KV behind, and the request computes its prompt here.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe_engine.scheduler.kv_cache.radix_cache import Match
from moe_engine.scheduler.tiers.host_tier import MIN_LOAD
from moe_engine.scheduler.tiers.transfer_tier import TransferTier
from moe_engine.scheduler.waiting_queue import prefix_limit
from moe_engine.types import Request, Status
from moe_engine.types.kv_ops import KVOps

logger = logging.getLogger("moe_engine")


@dataclass(slots=True)
class Incoming:
    """A transfer. It locks nothing: if the prefix before it is evicted before the transfer ends, its KV is dropped."""

    request: Request
    keys: list[int]
    begin: int
    places: list[int]
    entry: int = -1
    state_places: list[int] = field(default_factory=list)
    """The entry of the state behind the last token, and its places; in a model with states (`state_transfers`)."""
    cancelled: bool = False


class DecodeTier(TransferTier):
    """Implements `KVConnector`; see the module docstring."""

    def _prepare(self) -> None:
        super()._prepare()
        self.incoming: dict[int, Incoming] = {}
        self.num_transferred_tokens = 0
        self.num_failed_transfers = 0
        self._stored_by: dict[int, int] = {}
        """Place -> number of the last plan that stores to it. The transfer thread waits for no step, but writes to
        a place behind that plan's copies only."""

    @property
    def num_transfers(self) -> int:
        return len(self.incoming)

    def enter(self, request: Request, step: int) -> None:
        """Begins the transfer of a request that was queued, unless its prompt is cached, or the tier is full."""
        assert request.bootstrap is not None
        host, port, room = request.bootstrap
        if room in self.incoming:
            logger.warning("bootstrap_room %d is in use: the prompt of %s is computed here", room, request.rid)
            return
        keys = self._keys(request)
        limit = min(prefix_limit(request), len(keys))
        limit -= limit % self.tree.page_size
        digest = self.link.digest_of(request)
        found = Match(node := self.tree.match(keys, limit, request.namespace), node.end)
        self.tree.touch_absent(found, keys, limit)
        begin = node.end + self.tree.peek_absent(found, keys, limit)[0]
        places = self.take_places(limit - begin) if limit - begin >= MIN_LOAD else None
        if places is not None and node.end + self.tree.peek_absent(found, keys, limit)[0] < begin:
            self.give_places(places)  # they were the places of the prefix itself: the tier is small
            begin = node.end
            places = self.take_places(limit - begin)
        incoming = None if places is None else self._receive(request, keys, begin, places)
        if incoming is None:
            self.link.command("want", room, host, port, digest, begin, begin, 0, [])  # ends the peer's transfer
            return
        self.incoming[room] = incoming
        request.status = Status.WAITING_FOR_KV
        places = [*incoming.places, *incoming.state_places]
        after = max([self._stored_by.get(place, 0) for place in places])
        self.link.command("want", room, host, port, digest, begin, begin + len(places), after, places)

    def _receive(self, request: Request, keys: list[int], begin: int, places: list[int]) -> Incoming | None:
        """The transfer of tokens from `begin` on to these places; None, and the places are free, if there is no room
        for what belongs to them."""
        return Incoming(request, keys, begin, places)

    def _written(self, ops: KVOps) -> list[int]:
        """Places that the copies of a plan write."""
        return ops.store_places

    def build_connector_meta(self) -> KVOps | None:
        ops = super().build_connector_meta()
        if ops is None or not (written := self._written(ops)):
            return ops
        self._serial += 1
        self._stored_by.update(dict.fromkeys(written, self._serial))
        return replace(ops, serial=self._serial)

    def exchange(self, step: int) -> None:
        for room, incoming in self.incoming.items():
            if incoming.request.status is Status.FINISHED and not incoming.cancelled:
                incoming.cancelled = True
                self.link.command("cancel", room)
        while self.link.reports:
            kind, room, *values = self.link.reports.popleft()
            if room not in self.incoming:
                continue
            incoming = self.incoming.pop(room)
            if kind == "filled":
                self._filled(incoming, values[0])
            else:
                self.num_failed_transfers += not incoming.cancelled
                self._drop(incoming)
                if not incoming.cancelled:
                    logger.warning(
                        "Transfer of KV for %s failed: %s; its prompt is computed here", incoming.request.rid, values[0]
                    )
            if incoming.request.status is Status.WAITING_FOR_KV:
                incoming.request.status = Status.WAITING

    def _filled(self, incoming: Incoming, end: int) -> None:
        """Adds the tokens to the tier as a prefix, except tokens computed here meanwhile."""
        end -= end % self.tree.page_size
        self.num_transferred_tokens += end - incoming.begin
        pages = self._pages(incoming.places)
        count = (end - incoming.begin) // self.tree.page_size
        if count > 0 and not incoming.cancelled:
            namespace = incoming.request.namespace
            self._give(self.tree.add_absent(incoming.keys[:end], incoming.begin, pages[:count], namespace))
            pages = pages[count:]
        self._give(pages)

    def _drop(self, incoming: Incoming) -> None:
        """Frees what a transfer was to fill."""
        self.give_places(incoming.places)

    # -- failures

    def steps_failed(self, ops: Sequence[KVOps], step: int) -> None:
        """Workers have ended the copies of these steps, or will not run them."""
        super().steps_failed(ops, step)
        self._stored_by = {}
        self.link.command("settled", -1, self._serial)

    def reset(self) -> None:
        super().reset()
        for room, incoming in self.incoming.items():
            incoming.cancelled = True
            self.link.command("cancel", room)
            if incoming.request.status is Status.WAITING_FOR_KV:
                incoming.request.status = Status.WAITING

    # -- integrity

    def held_pages(self) -> list[int]:
        return [page for incoming in self.incoming.values() for page in self._pages(incoming.places)]
