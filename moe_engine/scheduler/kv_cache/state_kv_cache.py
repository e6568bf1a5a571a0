"""KV cache of a model with a state for each request: KV as in any model, and snapshots of states for cached prefixes.

Snapshots are taken while a prompt is computed: after its last whole page that another request can match, at the end of
a chunk, and where the prompt diverges from cached KV, so that the next request with that prefix finds it. A decoding
request keeps its latest snapshot at a multiple of `mamba_track_interval` tokens. Until its KV is in the tree, a
snapshot belongs to the request.

The worker runs plans in order: it stores the saves of a plan, then sets the states of new rows, then runs the step,
which stores the cuts. A slot may therefore be given to another owner immediately, except that a save may not take a
slot that a new row of its plan reads.
"""

from __future__ import annotations

from collections.abc import Container, Iterable, Sequence
from typing import NamedTuple

from moe_engine.scheduler.admission import PrefillJob
from moe_engine.scheduler.config import SchedulerConfig
from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.kv_cache.kv_connector import KVConnector
from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.kv_cache.state_snapshots import NONE, SnapshotTree, snapshot_of
from moe_engine.scheduler.tiers.state_tier import StateHostTier
from moe_engine.scheduler.tiers.state_transfers import StateDecodeTier, StatePrefillTier
from moe_engine.types import Request, RowWrite, StateOps

TIERS = {"host": StateHostTier, "prefill": StatePrefillTier, "decode": StateDecodeTier}
"""By `SchedulerConfig.kv_connector`."""


class _Pending(NamedTuple):
    """A snapshot of a running request after `length` tokens; decoded: of its outputs."""

    length: int
    slot: int
    decoded: bool


class StateKVCacheManager(KVCacheManager):
    """A `KVCacheManager` with snapshots."""

    tree: SnapshotTree

    def __init__(self, config: SchedulerConfig) -> None:
        self._interval = config.ceil_page(config.mamba_track_interval)
        self._pending: dict[str, list[_Pending]] = {}
        self._branch: dict[str, int] = {}
        """Positions at which prompts in prefill diverge from cached KV."""
        super().__init__(config)

    def _new_connector(self, config: SchedulerConfig) -> KVConnector:
        return TIERS[config.kv_connector](
            config.host_tier_tokens, self.slots, self.make_room, config.num_snapshots, config.host_snapshots
        )

    def _new_tree(self, config: SchedulerConfig) -> RadixCache:
        return SnapshotTree(config.page_size, self.slots.free, config.num_snapshots)

    # -- requests

    def attach(self, request: Request, node: Node) -> None:
        super().attach(request, node)
        request.state_from = snapshot_of(node)
        self.tree.reading.add(request.state_from)

    def cache_unfinished(self, request: Request) -> RowWrite | None:
        write = super().cache_unfinished(request)
        self._settle(request, request.tree_node)
        return write

    def release(self, request: Request) -> Node:
        node = super().release(request)
        self._settle(request, node, ends=True)
        self._branch.pop(request.rid, None)
        return node

    def _settle(self, request: Request, node: Node, ends: bool = False) -> None:
        """Gives the request's snapshots to the nodes of its prefix in the tree; frees snapshots beyond it if it
        `ends`."""
        pending = self._pending.pop(request.rid, None)
        if pending is None:
            return
        left = []
        for item in pending:
            if item.length <= node.end:
                self.tree.keep(node, item.length, item.slot)
            elif ends:
                self.tree.give_slot(item.slot)
            else:
                left.append(item)
        if left:
            self._pending[request.rid] = left

    # -- the next plan

    def take_state_ops(self, jobs: Sequence[PrefillJob], decodes: Iterable[tuple[Request, int]]) -> StateOps | None:
        decodes = [] if self._reserves else decodes  # with drafts the lengths are not known here
        read = {job.entry.request.state_from for job in jobs if job.is_new}
        self.tree.reading.clear()
        saves = [save for request, length in decodes if (save := self._save(request, length, read)) is not None]
        cuts = [cut for job in jobs for cut in self._cuts(job)]
        return StateOps(saves, cuts) if saves or cuts else None

    def _save(self, request: Request, length: int, read: Container[int]) -> tuple[int, int] | None:
        """(row, slot) of the state after `length` tokens, before this plan's, at a multiple of the interval, in none
        of the slots `read`."""
        if length % self._interval:
            return None
        pending = self._pending.setdefault(request.rid, [])
        for item in [item for item in pending if item.decoded]:
            pending.remove(item)
            self.tree.give_slot(item.slot)
        slot = self._take(request, length, read, decoded=True)
        return None if slot == NONE else (request.row, slot)

    def _cuts(self, job: PrefillJob) -> list[tuple[int, int, int]]:
        """(row, tokens, slot) of the snapshots of a chunk."""
        entry, request = job.entry, job.entry.request
        end, page = job.start + len(job.slots), self.page_size
        if job.is_new:
            self._branch[request.rid] = self.tree.kv_length(entry.prefix_keys, entry.limit, request.namespace)
        last = len(entry.tokens) - 1
        wanted = {self._branch.get(request.rid, 0), last - last % page}
        if not job.is_last:
            wanted.add(end)
        found = []
        for length in sorted(wanted):
            if job.start < length <= end and length % page == 0 and (slot := self._take(request, length)) != NONE:
                found.append((request.row, length, slot))
        return found

    def _take(self, request: Request, length: int, but: Container[int] = (), decoded: bool = False) -> int:
        slot = self.tree.take_slot(self.step, but)
        if slot != NONE:
            self._pending.setdefault(request.rid, []).append(_Pending(length, slot, decoded))
        return slot

    # -- steps and integrity

    def steps_failed(self, number: int) -> None:
        self.tree.drop_since(number)
        made_in = self.tree.made_in
        for rid, pending in list(self._pending.items()):
            self._pending[rid] = [item for item in pending if made_in[item.slot] < number]
            for item in pending:
                if made_in[item.slot] >= number:
                    self.tree.give_slot(item.slot)

    def reset(self) -> None:
        self._pending.clear()
        self._branch.clear()
        super().reset()
        self.tree.reset_slots()

    def check_snapshots(self) -> list[str]:
        pending = [item.slot for items in self._pending.values() for item in items]
        held = self.connector.held_snapshots() if isinstance(self.connector, StateHostTier) else []
        return self.tree.check_snapshots([*pending, *held])
