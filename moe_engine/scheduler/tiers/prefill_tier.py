"""The prefill server's side of disaggregation: a host tier that also stages the KV that decode servers request.

Any part of a prompt that is in the radix cache can be sent: chunks as soon as they are computed, and cached prefixes. A
transfer locks a prefix only until it has read it. It copies pieces to places of the tier with the next plan, and frees
a place when its bytes were sent, so a transfer needs few places.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Sequence
from dataclasses import dataclass, field, replace

from moe_engine.scheduler.kv_cache.radix_cache import Node
from moe_engine.scheduler.tiers.transfer_tier import TransferTier
from moe_engine.types import Request, Status
from moe_engine.types.kv_ops import KVOps
from moe_engine.types.row_sizes import TRANSFER_PIECE_TOKENS as PIECE_TOKENS

MAX_STAGED = 4
"""Pieces of a transfer that are staged and not sent."""


@dataclass(slots=True)
class Outgoing:
    """A transfer of tokens [begin, limit): those before `staged` were copied, others can be read at `node`."""

    request: Request
    keys: list[int]
    begin: int = 0
    staged: int = 0
    limit: int = -1
    """-1: no request from a decode server yet."""
    node: Node | None = None
    pieces: deque[tuple[int, list[int]]] = field(default_factory=deque)
    """(end, places) of pieces that are not sent yet."""
    is_done: bool = False
    version: int = -1


class PrefillTier(TransferTier):
    """Implements `KVConnector`; see the module docstring."""

    def _prepare(self) -> None:
        super()._prepare()
        self.outgoing: dict[int, Outgoing] = {}
        self._stages = False

    @property
    def num_transfers(self) -> int:
        return len(self.outgoing)

    @property
    def has_new_ops(self) -> bool:
        return self._stages or super().has_new_ops

    def enter(self, request: Request, step: int) -> None:
        """Registers a request whose KV a decode server will request."""
        assert request.bootstrap is not None
        room = request.bootstrap[2]
        keys = self._keys(request)
        if room in self.outgoing:
            return  # a copy (n > 1), or a room in use: the decode server computes the prompt
        self.outgoing[room] = Outgoing(request, keys)
        self.link.command("offer", room, self.link.digest_of(request))

    def exchange(self, step: int) -> None:
        """Applies the reports of the transfer thread, and stages what can be sent; on the scheduler's thread."""
        while self.link.reports:
            kind, room, *values = self.link.reports.popleft()
            outgoing = self.outgoing.get(room)
            if outgoing is None:
                continue
            if kind == "granted":
                self._granted(outgoing, *values[:2])
            elif kind == "sent":
                while outgoing.pieces and outgoing.pieces[0][0] <= values[0]:
                    self.give_places(outgoing.pieces.popleft()[1])
            else:
                self._close(room, outgoing, step)
        for room, outgoing in list(self.outgoing.items()):
            if not outgoing.is_done:
                self._advance(room, outgoing, step)

    def _advance(self, room: int, outgoing: Outgoing, step: int) -> None:
        request = outgoing.request
        finish = request.finish_reason
        if finish is not None and finish.type == "abort":
            outgoing.is_done = True
            self.link.command("end", room, finish.message or "aborted")
            return
        if outgoing.limit < 0:
            return
        self._hold(outgoing, step)
        while (
            outgoing.node is not None
            and outgoing.staged < min(outgoing.node.end, outgoing.limit)
            and len(outgoing.pieces) < MAX_STAGED
            and self._stage(room, outgoing)
        ):
            pass
        if outgoing.node is not None and outgoing.staged >= min(outgoing.node.end, outgoing.limit):
            self.tree.unlock(outgoing.node, step)  # a locked prefix could prevent its own request from getting slots
            outgoing.node = None
        if outgoing.staged >= outgoing.limit or (request.status is Status.FINISHED and outgoing.node is None):
            self._finish(room, outgoing)

    def _granted(self, outgoing: Outgoing, begin: int, limit: int) -> None:
        outgoing.begin = outgoing.staged = begin
        outgoing.limit = limit

    def _finish(self, room: int, outgoing: Outgoing) -> None:
        """All tokens are staged, or no more will be."""
        outgoing.is_done = True
        self.link.command("done", room)

    def _hold(self, outgoing: Outgoing, step: int) -> None:
        """Locks the cached part of the prompt."""
        if outgoing.version == self.tree.version:
            return
        outgoing.version = self.tree.version
        found = self.tree.peek(outgoing.keys, outgoing.limit, outgoing.request.namespace)
        if found.length <= (outgoing.staged if outgoing.node is None else outgoing.node.end):
            return
        node = self.tree.match(outgoing.keys, outgoing.limit, outgoing.request.namespace)
        self.tree.lock(node)
        if outgoing.node is not None:
            self.tree.unlock(outgoing.node, step)
        outgoing.node = node

    def _stage(self, room: int, outgoing: Outgoing) -> bool:
        assert outgoing.node is not None
        begin = outgoing.staged
        end = min(outgoing.node.end, outgoing.limit, begin + PIECE_TOKENS)
        places = self.take_places(end - begin)
        if places is None:
            return False  # other transfers will free places
        slots = self.tree.prefix_slots(outgoing.node)[begin:end]
        self._new_stores.update(zip(places, slots))
        self._stages = True
        outgoing.staged = end
        outgoing.pieces.append((end, places))
        self.link.command("send", room, end, places, self._serial + 1)
        return True

    def build_connector_meta(self) -> KVOps | None:
        ops = super().build_connector_meta()
        if self._stages:
            self._serial += 1
            self._stages = False
            ops = replace(ops or KVOps(), serial=self._serial)
        return ops

    def _close(self, room: int, outgoing: Outgoing, step: int) -> None:
        del self.outgoing[room]
        for _, places in outgoing.pieces:
            self._give_unstored(places)
        if outgoing.node is not None:
            self.tree.unlock(outgoing.node, step)

    def _give_unstored(self, places: list[int]) -> None:
        for place in places:
            self._new_stores.pop(place, None)
        self.give_places(places)

    # -- failures

    def steps_failed(self, ops: Sequence[KVOps], step: int) -> None:
        """Ends all transfers: copies of these steps may not have run, and their prefixes leave the radix cache."""
        self._end_all("a step of the prefill server failed", step)
        super().steps_failed(ops, step)
        self._serial += 1  # no transfer waits for copies that did not run
        self._stages = False

    def reset(self) -> None:
        self._end_all("the cache of the prefill server was cleared", None)
        self._stages = False
        super().reset()

    def _end_all(self, reason: str, step: int | None) -> None:
        """Ends all transfers. Their places are freed when the thread has reported the ends: it may be reading them."""
        for room, outgoing in self.outgoing.items():
            self.link.command("end", room, reason)
            outgoing.is_done = True
            if outgoing.node is not None and step is not None:
                self.tree.unlock(outgoing.node, step)
            outgoing.node = None

    # -- integrity

    def held_nodes(self) -> list[Node]:
        own = [outgoing.node for outgoing in self.outgoing.values() if outgoing.node is not None]
        return super().held_nodes() + own

    def held_pages(self) -> list[int]:
        return [page for o in self.outgoing.values() for _, places in o.pieces for page in self._pages(places)]
