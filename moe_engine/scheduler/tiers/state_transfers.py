"""Transfers between servers for a model with a state for each request: the KV of a prompt, and the state after it.

The state travels behind the KV as if it were `state_rows` more tokens, in pieces of the same size, so that the protocol
(`transfer_state`) and its threads do not handle it. Its rows have places of their own behind those of the host pool:
entry e has the places num_places + e * state_rows and the following ones. A transfer without its state is of no use
and counts as failed. Both servers have the same ranks and page size (`core.kv_transfer.schema`).
"""

from __future__ import annotations

from moe_engine.scheduler.kv_cache.radix_cache import RadixCache
from moe_engine.scheduler.kv_cache.state_snapshots import NONE
from moe_engine.scheduler.tiers.decode_tier import DecodeTier, Incoming
from moe_engine.scheduler.tiers.prefill_tier import Outgoing, PrefillTier
from moe_engine.scheduler.tiers.state_tier import StateHostTier
from moe_engine.scheduler.tiers.tiered_snapshots import TierStateNode
from moe_engine.types import Request, Status
from moe_engine.types.kv_ops import KVOps
from moe_engine.types.row_sizes import TRANSFER_PIECE_TOKENS as PIECE_TOKENS


class StatePlaces(StateHostTier):
    """A `StateHostTier` whose entries have places too."""

    state_rows = 0

    def places_of(self, entry: int) -> list[int]:
        first = self.num_places + entry * self.state_rows
        return list(range(first, first + self.state_rows))

    def entry_of(self, places: list[int]) -> int:
        """The entry that has these places; NONE if they are of tokens."""
        return (places[0] - self.num_places) // self.state_rows if places and places[0] >= self.num_places else NONE

    def _pages(self, places: list[int]) -> list[int]:
        return super()._pages(places) if self.entry_of(places) == NONE else []


class StatePrefillTier(PrefillTier, StatePlaces):
    """A `PrefillTier` that sends the state after the last token, from an entry that belongs to the transfer."""

    def _granted(self, outgoing: Outgoing, begin: int, limit: int) -> None:
        super()._granted(outgoing, begin, max(begin, limit - self.state_rows))

    def _finish(self, room: int, outgoing: Outgoing) -> None:
        is_whole = outgoing.staged >= outgoing.limit
        if is_whole and outgoing.begin == outgoing.limit:
            super()._finish(room, outgoing)  # the decode server has the prompt
        elif is_whole and (node := self._node_of(outgoing)) is not None:
            entry = self._take_state(node)
            if entry == NONE:
                return  # other transfers will free entries
            places, end = self.places_of(entry), outgoing.limit
            for first in range(0, self.state_rows, PIECE_TOKENS):
                part = places[first : first + PIECE_TOKENS]
                end += len(part)
                outgoing.pieces.append((end, part))
                self.link.command("send", room, end, part, self._serial + 1)
            self._stages = True
            super()._finish(room, outgoing)
        elif outgoing.request.status is Status.FINISHED:
            outgoing.is_done = True
            self.link.command("end", room, "the state at the end of the prompt is not cached any more")

    def _node_of(self, outgoing: Outgoing) -> TierStateNode | None:
        """The node at the end of the prompt, if its state is cached."""
        found = RadixCache.peek(self.tree, outgoing.keys, outgoing.limit, outgoing.request.namespace)
        node = found.node
        if not isinstance(node, TierStateNode) or node.end != outgoing.limit:
            return None
        return None if node.snapshot == node.entry == NONE else node

    def _take_state(self, node: TierStateNode) -> int:
        """An entry with the state of a node: a copy of its snapshot, or its own entry; NONE if there is no room now."""
        if node.snapshot != NONE:
            return self._store_state(node.snapshot)
        return NONE if node.state_load else self.tree.take_from(node)

    def give_places(self, places: list[int]) -> None:
        entry = self.entry_of(places)
        if entry == NONE:
            super().give_places(places)
        elif places[-1] == self.places_of(entry)[-1]:
            self._release_entry(entry)

    def _give_unstored(self, places: list[int]) -> None:
        self._new_states.pop(self.entry_of(places), None)
        super()._give_unstored(places)

    def held_entries(self, *, flushed: bool = False) -> list[int]:
        pieces = (places for outgoing in self.outgoing.values() for _, places in outgoing.pieces)
        return [*super().held_entries(flushed=flushed), *({self.entry_of(places) for places in pieces} - {NONE})]


class StateDecodeTier(DecodeTier, StatePlaces):
    """A `DecodeTier` that receives the state after the last token, in an entry that belongs to the transfer."""

    def _receive(self, request: Request, keys: list[int], begin: int, places: list[int]) -> Incoming | None:
        entry = self._alloc_entry()
        if entry == NONE:
            self.give_places(places)
            return None
        return Incoming(request, keys, begin, places, entry, self.places_of(entry))

    def _filled(self, incoming: Incoming, end: int) -> None:
        limit = incoming.begin + len(incoming.places)
        if end < limit + len(incoming.state_places):
            self._drop(incoming)
            return
        super()._filled(incoming, limit)
        tokens, namespace = incoming.keys[:limit], incoming.request.namespace
        if incoming.cancelled or not self.tree.add_state(tokens, incoming.entry, namespace):
            self._release_entry(incoming.entry)

    def _drop(self, incoming: Incoming) -> None:
        super()._drop(incoming)
        self._release_entry(incoming.entry)

    def _written(self, ops: KVOps) -> list[int]:
        return [*super()._written(ops), *(self.places_of(entry)[0] for _, entry in ops.state_stores)]

    def held_entries(self, *, flushed: bool = False) -> list[int]:
        return [*super().held_entries(flushed=flushed), *(incoming.entry for incoming in self.incoming.values())]
