"""Prefix tree of a model with states: a request can continue only where a copy of the state, a snapshot, was kept.

The KV of a prefix is in the tree as in any model, the state after it in one of a fixed number of snapshot slots, owned
by the node whose run ends there. A match therefore ends at the last node with a snapshot. If no slot is free, the
snapshot of the least recently used node is dropped, locked or not: requests continue from copies.
"""

from __future__ import annotations

from collections.abc import Callable, Container, Hashable

from moe_engine.scheduler.kv_cache.radix_cache import Match, Node, RadixCache

NONE = -1


class SnapshotNode(Node):
    """`snapshot`: the slot of the state after the last token of the run, or NONE."""

    __slots__ = ("snapshot",)

    def __init__(self, parent: Node | None, tokens: list[int], slots: list[int], serial: int) -> None:
        super().__init__(parent, tokens, slots, serial)
        self.snapshot = NONE


class SnapshotTree(RadixCache):
    """Args:
    num_snapshots: slots 0 to num_snapshots - 1.
    """

    make_node = SnapshotNode

    def __init__(self, page_size: int, free: Callable[[list[int], int], None], num_snapshots: int) -> None:
        self.num_snapshots = num_snapshots
        self._free_slots = list(range(num_snapshots))
        self.reading: set[int] = set()
        """Slots that new rows of the next plan read."""
        self.holders: dict[int, SnapshotNode] = {}
        """By slot: the node that owns it."""
        self.made_in: dict[int, int] = {}
        """By slot in use: the step that stores it."""
        super().__init__(page_size, free)

    # -- matching

    def peek(self, tokens: list[int], limit: int, extra_key: Hashable = None, start: Node | None = None) -> Match:
        node = super().peek(tokens, limit, extra_key, start).node
        while node is not None and node.parent is not None and snapshot_of(node) == NONE:
            node = node.parent
        return Match(node, 0 if node is None else node.end)

    def kv_length(self, tokens: list[int], limit: int, extra_key: Hashable) -> int:
        """Leading tokens whose KV is in the tree, with a snapshot or not."""
        return super().peek(tokens, limit, extra_key).length

    # -- slots

    def take_slot(self, step: int, but: Container[int]) -> int:
        """A slot for a snapshot that step `step` stores, not one of `but`; NONE: all other slots belong to requests."""
        if not self._free_slots:
            nodes = [node for slot, node in self.holders.items() if slot not in but]
            if not nodes:
                return NONE
            self._evict_snapshot(min(nodes, key=usefulness), step)
        slot = self._free_slots.pop()
        self.made_in[slot] = step
        return slot

    def give_slot(self, slot: int) -> None:
        """Takes back a slot that no node owns."""
        del self.made_in[slot]
        self._free_slots.append(slot)

    def keep(self, node: Node, length: int, slot: int) -> None:
        """Gives the snapshot after the first `length` tokens of the path to `node` to a node."""
        while node.parent is not None and node.parent.end >= length:
            node = node.parent
        if length < node.end:
            assert node.parent is not None
            node = self._split(node, length - node.parent.end)
        assert isinstance(node, SnapshotNode) and node.end == length
        if node.snapshot != NONE:
            self.give_slot(slot)
            return
        node.snapshot = slot
        self.holders[slot] = node
        self.version += 1

    def drop_since(self, step: int) -> None:
        """Drops the snapshots of nodes that steps from `step` on were to store."""
        for slot, node in list(self.holders.items()):
            if self.made_in[slot] >= step:
                self._give_up(node)

    def check_snapshots(self, pending: list[int]) -> list[str]:
        """Findings of the integrity check; `pending`: slots of running requests. Repairs nothing: tests show that there
        is nothing to repair."""
        findings = []
        everything = [*self._free_slots, *self.holders, *pending]
        if sorted(everything) != list(range(self.num_snapshots)):
            findings.append(f"snapshots: {len(everything)} owners of {self.num_snapshots} slots")
        if any(not node.alive or node.snapshot != slot for slot, node in self.holders.items()):
            findings.append("snapshots: a slot belongs to a node that is not in the tree")
        return findings

    # -- nodes that lose their end

    def reset_slots(self) -> None:
        """Frees all slots; only without requests."""
        self._free_slots, self.holders, self.made_in = list(range(self.num_snapshots)), {}, {}
        self.reading.clear()

    def _evict_snapshot(self, node: SnapshotNode, step: int) -> None:
        """Frees a slot for a snapshot that step `step` stores."""
        self._give_up(node)

    def _give_up(self, node: SnapshotNode) -> None:
        slot, node.snapshot = node.snapshot, NONE
        del self.holders[slot]
        self.give_slot(slot)
        self.version += 1

    def _shortened(self, node: Node) -> None:
        if isinstance(node, SnapshotNode) and node.snapshot != NONE:
            self._give_up(node)

    def _drop(self, node: Node, after_step: int) -> None:
        self._shortened(node)
        super()._drop(node, after_step)

    def _remove_leaf(self, node: Node) -> None:
        self._shortened(node)
        super()._remove_leaf(node)


def snapshot_of(node: Node) -> int:
    """The slot of a node, or NONE."""
    return node.snapshot if isinstance(node, SnapshotNode) else NONE


def usefulness(node: SnapshotNode) -> tuple[int, bool, int]:
    """Sort key; the smallest is dropped first. Among the nodes of one path, which are used together, nodes that neither
    end it nor are shared by several continuations come first."""
    return node.last_access, len(node.children) != 1, node.end
