"""Radix cache of a model with states whose evicted nodes stay in the tree with KV and states in host memory.

The state after a node's run is in a snapshot on the device, in an entry of the host pool, or in both. KV is stored by
token, states only where a snapshot was kept, so a prefix outside the device ends at the last node with an entry. Its
KV may be on the device already: then only the state is loaded.
"""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.scheduler.kv_cache.radix_cache import Match, Node, RadixCache
from moe_engine.scheduler.kv_cache.state_snapshots import NONE, SnapshotNode, SnapshotTree, usefulness
from moe_engine.scheduler.tiers.tiered_cache import TieredCache, TierNode

STATES_AT_ONCE = 4
"""Max states that write-through stores in a step."""


class TierStateNode(TierNode):
    """`entry`: the host entry of the state after the last token of the run, or NONE. `state_load`: the load that
    copies it to a snapshot; 0 if there is none."""

    __slots__ = ("entry", "state_load")

    def __init__(self, parent: Node | None, tokens: list[int], slots: list[int], serial: int) -> None:
        super().__init__(parent, tokens, slots, serial)
        self.entry = NONE
        self.state_load = 0


class TieredSnapshots(TieredCache, SnapshotTree):
    """
    Args:
        store_state: takes a snapshot that leaves the device; returns its entry, or NONE if there is no room.
        release_entry: frees an entry.
    """

    make_node = TierStateNode
    on_state_stored: Callable[[TierStateNode], None] | None = None
    """Called with each node whose state was stored."""

    def __init__(
        self,
        page_size: int,
        free: Callable[[list[int], int], None],
        store: Callable[[list[int]], list[int] | None],
        release: Callable[[list[int]], None],
        num_snapshots: int,
        store_state: Callable[[int], int],
        release_entry: Callable[[int], None],
    ) -> None:
        self._store, self._release = store, release
        self._store_state, self._release_entry = store_state, release_entry
        SnapshotTree.__init__(self, page_size, free, num_snapshots)

    def _clear(self) -> None:
        super()._clear()
        self.owners: dict[int, TierStateNode] = {}
        """By entry: the node whose state it has."""
        self._due_states: list[TierStateNode] = []

    # -- loads

    def reach(self, found: Match, tokens: list[int], limit: int) -> tuple[list[TierStateNode], int]:
        """The nodes behind a match on the device up to the last one with an entry, and the first load in progress on
        the way (0 if there is none), which ends the walk."""
        limit -= limit % self.page_size
        kv, behind = self._walk_kv(found, tokens, limit)
        walked, node, begin = list[TierStateNode](), kv.node, kv.length
        while node is not None and node is not found.node:
            assert isinstance(node, TierStateNode)
            walked.append(node)
            node = node.parent
        walked.reverse()
        for child in behind:
            assert isinstance(child, TierStateNode)
            if child.end > limit or child.tokens != tokens[begin : child.end]:
                break
            walked.append(child)
            begin = child.end
        count = 0
        for i, node in enumerate(walked):
            if load := node.load or node.state_load:
                return walked[: i + 1], load
            if node.entry != NONE:
                count = i + 1
        return walked[:count], 0

    def peek_absent(self, found: Match, tokens: list[int], limit: int) -> tuple[int, int]:
        nodes, load = self.reach(found, tokens, limit)
        return (nodes[-1].end - found.length if nodes else 0), load

    def touch_absent(self, found: Match, tokens: list[int], limit: int) -> None:
        nodes, _ = self.reach(found, tokens, limit)
        if nodes:
            self.touch(nodes[-1])

    def begin_state_load(self, nodes: list[TierStateNode], load: int) -> list[TierNode]:
        """Marks the nodes of `reach` as being loaded, and the last one's state. Returns those without KV on the
        device."""
        path: list[TierNode] = [node for node in nodes if not node.alive]
        for node in path:
            node.load = load
        nodes[-1].state_load = load
        self.touch(nodes[-1])
        return path

    def state_arrived(self, node: TierStateNode, snapshot: int) -> None:
        """The snapshot has the state of the node, whose KV is on the device."""
        node.state_load = 0
        if node.snapshot != NONE:
            self.give_slot(snapshot)  # a request has computed it meanwhile
            return
        self.made_in[snapshot] = 0
        node.snapshot = snapshot
        self.holders[snapshot] = node
        self.version += 1

    # -- states that leave the device

    def keep(self, node: Node, length: int, slot: int) -> None:
        super().keep(node, length, slot)
        if self.write_through == "inserted" and (kept := self.holders.get(slot)) is not None:
            self._make_state_due(kept)

    def _make_due(self, node: Node | None) -> None:
        super()._make_due(node)
        if self.write_through == "reused" and node is not None:
            self._make_state_due(node)

    def _make_state_due(self, node: Node) -> None:
        if isinstance(node, TierStateNode) and node.snapshot != NONE and node.entry == NONE:
            self._due_states.append(node)

    @property
    def has_due(self) -> bool:
        return super().has_due or bool(self._due_states)

    def store_due(self, num_tokens: int) -> None:
        super().store_due(num_tokens)
        due, self._due_states = self._due_states[:STATES_AT_ONCE], self._due_states[STATES_AT_ONCE:]
        for node in due:
            if node.alive:
                self._copy_state(node)

    def _copy_state(self, node: TierStateNode) -> None:
        """Stores the state of a node with a snapshot in the host pool, if it is not there and there is room."""
        if node.snapshot == NONE or node.entry != NONE:
            return
        node.entry = self._store_state(node.snapshot)
        if node.entry != NONE:
            self.owners[node.entry] = node
            if self.on_state_stored is not None:
                self.on_state_stored(node)

    def _evict_snapshot(self, node: SnapshotNode, step: int) -> None:
        assert isinstance(node, TierStateNode)
        if self.made_in[node.snapshot] < step:  # else this step overwrites it before it has stored it
            self._copy_state(node)
        self._give_up(node)

    def _leave_device(self, node: TierNode) -> None:
        super()._leave_device(node)
        assert isinstance(node, TierStateNode)
        if node.places is None:
            self.drop_state(node)
        elif node.snapshot != NONE:
            self._copy_state(node)
        self._shortened(node)

    # -- entries

    def take_entry(self, node: TierStateNode, entry: int) -> bool:
        """Gives a node the entry with its state; False if it has one."""
        if node.entry != NONE:
            return False
        node.entry = entry
        self.owners[entry] = node
        return True

    def add_state(self, tokens: list[int], entry: int, namespace: object) -> bool:
        """Gives the entry with the state after `tokens` to the node that ends there. False if the tree has lost their
        KV, or has the state."""
        found = RadixCache.peek(self, tokens, len(tokens), namespace)  # type: ignore[arg-type]
        node, pos = found.node, found.length
        if node is None:
            return False
        if found.partial is not None:
            if pos < len(tokens):
                return False
            node = self._split(found.partial, pos - node.end)
        assert isinstance(node, TierNode)
        for child in self._walk_absent(node, tokens, len(tokens)):
            same = self._common(child.tokens, tokens, pos, len(tokens))
            pos += same
            node = child
            if same < len(child.tokens):
                if pos < len(tokens) or child.load:
                    return False
                node = self._split_absent(child, same)
        if node.end != len(tokens) or node.parent is None:
            return False
        assert isinstance(node, TierStateNode)
        return self.take_entry(node, entry)

    def drop_oldest_state(self) -> bool:
        """Frees the entry of the node used least recently; False if all are being loaded."""
        nodes = [node for node in self.owners.values() if not node.state_load]
        if not nodes:
            return False
        # states that are also on the device come first: they are stored again when they leave it
        self.drop_state(min(nodes, key=lambda node: (node.snapshot == NONE, *usefulness(node))))
        return True

    def drop_state(self, node: TierNode) -> None:
        """Frees the entry of a node, if it has one."""
        assert isinstance(node, TierStateNode)
        if (entry := self.take_from(node)) != NONE:
            self._release_entry(entry)

    def take_from(self, node: TierStateNode) -> int:
        """Takes the entry of a node from it; NONE if it has none."""
        entry, node.entry = node.entry, NONE
        self.owners.pop(entry, None)
        return entry

    def forget_entries(self, entries: set[int]) -> None:
        """Removes the states of these entries, which may be wrong."""
        for entry in entries & self.owners.keys():
            self.drop_state(self.owners[entry])

    def check_entries(self) -> list[str]:
        """Findings of the integrity check on entries and their nodes."""
        nodes = [node for root in self.roots.values() for node in _all_below(root)]
        owners = {node.entry: node for node in nodes if node.entry != NONE}
        if owners != self.owners:
            return [f"states of the host tier: {len(owners)} nodes have one, {len(self.owners)} are registered"]
        return []

    # -- nodes that leave the tree

    def _drop_places(self, node: TierNode) -> None:
        super()._drop_places(node)
        if not node.slots:
            self.drop_state(node)

    def _drop_below(self, node: TierNode) -> None:
        stack = list(node.absent.values())
        while stack:
            below = stack.pop()
            stack += below.absent.values()
            self.drop_state(below)
        super()._drop_below(node)

    def _drop(self, node: Node, after_step: int) -> None:
        super()._drop(node, after_step)
        assert isinstance(node, TierNode)
        self.drop_state(node)


def _all_below(root: Node) -> list[TierStateNode]:
    """The node and all nodes below it, on the device or not."""
    nodes = [root]
    for node in nodes:  # grows while it runs
        assert isinstance(node, TierStateNode)
        nodes += node.children.values()
        nodes += node.absent.values()
    return nodes  # type: ignore[return-value]
