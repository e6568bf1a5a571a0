"""Radix cache whose evicted nodes can stay in the tree with their KV elsewhere (`KVConnector`).

A node is on the device (`slots`), elsewhere (`places`), or both: a loaded node keeps its places, so that its next
eviction copies nothing. Nodes without readable slots are in `absent` of their parent instead of `children`; below such
a node all nodes are absent. Matching, inserting, locking and evicting therefore see the nodes on the device only, as in
`RadixCache`. An inserted run takes over absent nodes of the same tokens.

An absent node with slots is being loaded (`load`): its slots are being written, and its path is locked.
"""

from __future__ import annotations

import heapq
from collections.abc import Callable, Hashable, Iterable, Iterator
from typing import Any

from moe_engine.scheduler.kv_cache.radix_cache import ChildKey, Match, Node, RadixCache, copy_use
from moe_engine.scheduler.kv_cache.state_snapshots import SnapshotNode


class TierNode(SnapshotNode):
    """A run of tokens. `alive` is true only on the device; `places` is None if the KV is not elsewhere."""

    __slots__ = ("absent", "digest", "from_storage", "in_tier_heap", "is_due", "load", "places")

    def __init__(self, parent: Node | None, tokens: list[int], slots: list[int], serial: int) -> None:
        super().__init__(parent, tokens, slots, serial)
        self.absent: dict[ChildKey, TierNode] = {}
        self.places: list[int] | None = None
        self.load = 0
        """The load in progress; 0 if there is none."""
        self.in_tier_heap = False
        self.is_due = False
        """Whether it is in the list of nodes that are stored before they leave the device (write-through)."""
        self.digest: bytes | None = None
        """Key of its last page in the storage (`storage_tier`), once computed."""
        self.from_storage = False
        """Whether it came from storage and was not loaded since."""


STEPS_DUE = 8
"""At least 1 / `STEPS_DUE` of the tokens of nodes that are due is stored with each step."""


class TieredCache(RadixCache):
    """
    Args:
        store: takes slots that are being evicted; returns their places, or None if there is no room.
        release: frees places.

    `write_through`: None, or the kind of nodes in `due`: "inserted" or "reused".
    """

    make_node = TierNode
    write_through: str | None = None
    on_stored: Callable[[TierNode], None] | None = None
    """Called with each node that was stored."""

    def __init__(
        self,
        page_size: int,
        free: Callable[[list[int], int], None],
        store: Callable[[list[int]], list[int] | None],
        release: Callable[[list[int]], None],
    ) -> None:
        self._store = store
        self._release = release
        super().__init__(page_size, free)

    def _clear(self) -> None:
        super()._clear()
        self._tier_heap: list[tuple[Any, int, TierNode]] = []
        self.due: list[TierNode] = []

    # -- absent nodes

    def peek_absent(self, found: Match, tokens: list[int], limit: int) -> tuple[int, int]:
        """The absent continuation of a match on the device: (number of absent tokens, load of the first of them; 0 if
        none)."""
        if found.node is None or found.partial is not None:
            return 0, 0
        limit -= limit % self.page_size
        pos, load = found.node.end, 0
        for child in self._walk_absent(found.node, tokens, limit):
            load = load or child.load
            pos += self._common(child.tokens, tokens, pos, limit)
            if load:
                break
        return pos - found.node.end, load

    def _walk_kv(self, found: Match, tokens: list[int], limit: int) -> tuple[Match, Iterable[TierNode]]:
        """The KV behind a match that ended where a window or a state is missing: the match of all KV on the device,
        and the absent nodes that continue it. `limit`: in whole pages."""
        if found.node is None or not found.node.alive:  # an empty root was dropped
            return Match(None, found.length), ()
        kv = RadixCache.peek(self, tokens, limit, None, found.node)
        assert kv.node is not None
        return kv, self._walk_absent(kv.node, tokens, limit) if kv.partial is None else ()

    def _walk_absent(self, node: Node, tokens: list[int], limit: int) -> Iterator[TierNode]:
        """The absent nodes that continue the prefix up to `node`; of the last one only a head may match."""
        while node.end < limit:
            assert isinstance(node, TierNode)
            child = node.absent.get(self.child_key(tokens, node.end))
            if child is None:
                return
            yield child
            if child.end > limit or child.tokens != tokens[node.end : child.end]:
                return
            node = child

    def begin_load(self, node: Node, tokens: list[int], limit: int, load: int) -> list[TierNode]:
        """Marks the absent nodes behind `node` as being loaded, so that they stay; ends at a load in progress."""
        limit -= limit % self.page_size
        path: list[TierNode] = []
        pos = node.end
        for child in self._walk_absent(node, tokens, limit):
            if child.load:
                break
            same = self._common(child.tokens, tokens, pos, limit)
            marked = child if same == len(child.tokens) else self._split_absent(child, same)
            marked.load = load
            path.append(marked)
            pos += same
            if marked is not child:
                break
        self._clock += 1
        for child in path:
            child.last_access = self._clock
        return path

    def fill(self, path: list[TierNode], slots: list[int]) -> None:
        """Gives slots to nodes that are being loaded, and locks their path."""
        begin = 0
        for node in path:
            node.slots = slots[begin : begin + len(node.tokens)]
            begin += len(node.tokens)
        self.num_evictable += begin
        self.lock(path[-1])

    def end_load(self, path: list[TierNode], after_step: int) -> None:
        """The slots of these nodes are readable now; unlocks their path."""
        for node in path:
            key, parent = self.child_key(node.tokens, 0), _parent(node)
            node.load, node.alive = 0, True
            parent.children[key] = parent.absent.pop(key)
            if self.events is not None:
                self.events.stored(node, self.namespace_of(node))
            self._offer_tier(node)
        self.unlock(path[-1], after_step)
        self.version += 1

    def cancel_load(self, path: list[TierNode], after_step: int) -> list[int]:
        """Takes the slots from nodes that are being loaded, if they have any, and unlocks their path. Returns the
        slots."""
        slots: list[int] = []
        for node in path:
            slots += node.slots
            node.slots, node.load = [], 0
        if slots:
            self.unlock(path[-1], after_step)
            self.num_evictable -= len(slots)
            self.version += 1
        for node in path:
            self._offer_tier(node)
        return slots

    def touch_absent(self, found: Match, tokens: list[int], limit: int) -> None:
        """Marks the absent nodes that continue a match as used."""
        if found.node is None or found.partial is not None:
            return
        self._clock += 1
        for child in self._walk_absent(found.node, tokens, limit - limit % self.page_size):
            child.last_access = self._clock

    def add_absent(
        self, tokens: list[int], start: int, pages: list[int], namespace: Hashable, *, from_storage: bool = False
    ) -> list[int]:
        """Adds pages with the KV of tokens[start:], which was not computed here. Returns the pages that are not used:
        the tree has their tokens, or lost the prefix before them."""
        found = RadixCache.peek(self, tokens, len(tokens), namespace)
        node, pos = found.node if found.node is not None else self.root(namespace), found.length
        if found.partial is not None:
            node = self._split(found.partial, pos - node.end) if pos < len(tokens) else found.partial
        assert isinstance(node, TierNode)
        size = self.page_size
        while pos < len(tokens):
            child = node.absent.get(self.child_key(tokens, pos))
            if child is None:
                break
            same = self._common(child.tokens, tokens, pos, len(tokens))
            pos += same
            if same < len(child.tokens):
                if pos == len(tokens) or child.load:
                    pos = len(tokens)  # nothing to add, or no place to add it
                    break
                child = self._split_absent(child, same)
            node = child
        if pos < start or pos >= len(tokens) or (node.parent is not None and not node.slots and node.places is None):
            self._offer(node)
            return pages
        used = pages[(pos - start) // size :]
        added = self._make(node, tokens[pos:])
        added.alive, added.from_storage = False, from_storage
        added.places = [place for page in used for place in range(page * size, page * size + size)]
        self._clock += 1
        added.last_access = self._clock
        node.absent[self.child_key(added.tokens, 0)] = added
        self.version += 1  # a match may begin at a new root
        self._offer_tier(added)
        return pages[: (pos - start) // size]

    # -- write-through

    def match(self, tokens: list[int], limit: int, extra_key: Hashable = None, start: Node | None = None) -> Node:
        node = super().match(tokens, limit, extra_key, start)
        if self.write_through == "reused":
            self._make_due(node)
        return node

    def _make_due(self, node: Node | None) -> None:
        """Marks a node and its path as due, up to a node that is due already."""
        while isinstance(node, TierNode) and node.parent is not None and not node.is_due:
            if node.places is None:
                node.is_due = True
                self.due.append(node)
            node = node.parent

    @property
    def has_due(self) -> bool:
        while self.due and not self._may_store(self.due[-1]):
            self.due.pop().is_due = False
        return bool(self.due)

    def _may_store(self, node: TierNode) -> bool:
        return node.alive and bool(node.slots) and node.places is None

    def store_due(self, num_tokens: int) -> None:
        """Stores nodes that are due, of about `num_tokens` tokens: the last one is split. More if many are due, so that
        they do not wait until they are evicted."""
        due, self.due = self.due, []
        num_tokens = max(num_tokens, sum(len(node.tokens) for node in due) // STEPS_DUE)
        for i, node in enumerate(due):
            if num_tokens < self.page_size:
                self.due = due[i:] + self.due
                return
            node.is_due = False
            if not self._may_store(node):
                continue
            part, head = node, num_tokens - num_tokens % self.page_size
            if len(node.tokens) > head:
                part = _tier_node(self._split(node, head))
                self.version += 1
            num_tokens -= len(part.tokens)
            if self._store_node(part):
                self._offer_tier(part)
                if part is not node:
                    node.is_due = True
                    self.due = [node, *due[i + 1 :], *self.due]
                    return

    def _store_node(self, node: TierNode) -> bool:
        node.places = self._store(node.slots)
        if node.places is not None and self.on_stored is not None:
            self.on_stored(node)
        return node.places is not None

    # -- eviction

    def evict(self, num_tokens: int) -> int:
        """As in `RadixCache`; a leaf that can be stored stays in the tree, absent."""
        freed = 0
        while freed < num_tokens and (node := self._next_leaf()) is not None:
            assert isinstance(node, TierNode)
            if keep := self._kept(node, num_tokens - freed):
                self._split(node, keep)
            slots = node.slots
            self._leave_device(node)
            freed += len(slots)
            self._free(slots, node.free_after)
        if freed:
            self.num_evictable -= freed
            self.version += 1
        return freed

    def _leave_device(self, node: TierNode) -> None:
        """Moves a leaf to `absent`, or removes it if it cannot be stored."""
        key, parent = self.child_key(node.tokens, 0), _parent(node)
        if node.places is None:
            self._store_node(node)
        parent.longest = max(parent.longest, node.longest)
        del parent.children[key]
        if self.events is not None:
            self.events.removed(node)
        node.slots, node.alive = [], False
        if node.places is None:
            self._drop_below(node)
        else:
            parent.absent[key] = node
            self._offer_tier(node)
        self._offer(parent)

    def drop_oldest(self, count: int) -> int:
        """Frees at least `count` places, in the order of eviction, if there are enough; returns the number freed."""
        freed = 0
        while freed < count and self._tier_heap:
            stamp, _, node = heapq.heappop(self._tier_heap)
            node.in_tier_heap = False
            if not self._may_drop(node):
                continue
            if self._stamp(node) != stamp:
                self._offer_tier(node)
                continue
            keep = self._kept(node, count - freed)
            if keep and not node.slots:
                self._split_absent(node, keep)
            freed += len(node.tokens)
            self._drop_places(node)
        return freed

    def forget_places(self, places: set[int]) -> None:
        """Removes the KV stored in any of these places. No node may be loading."""
        for node in list(self.stored_nodes()):
            if node.places is not None and not places.isdisjoint(node.places):
                self._drop_places(node)

    def stored_nodes(self) -> Iterator[TierNode]:
        """All nodes with places, parents first."""
        stack: list[Node] = list(self.roots.values())
        while stack:
            node = stack.pop()
            assert isinstance(node, TierNode)
            if node.places is not None:
                yield node
            stack += node.children.values()
            stack += node.absent.values()

    def _may_drop(self, node: TierNode) -> bool:
        return node.places is not None and not node.load and (bool(node.slots) or not node.absent)

    def _offer_tier(self, node: Node) -> None:
        """Adds a node whose places may be dropped to the heap."""
        assert isinstance(node, TierNode)
        if not node.in_tier_heap and self._may_drop(node):
            node.in_tier_heap = True
            heapq.heappush(self._tier_heap, (self._stamp(node), node.serial, node))

    def _drop_places(self, node: TierNode) -> None:
        """Frees the places of a node; without slots it leaves the tree."""
        assert node.places is not None
        if node.slots:
            self._release(node.places)
            node.places = None
            return
        parent = _parent(node)
        parent.longest = max(parent.longest, node.longest)
        del parent.absent[self.child_key(node.tokens, 0)]
        self._release(node.places)
        node.places = None
        self._drop_below(node)
        self._offer_tier(parent)
        if parent.parent is None:
            self._offer(parent)

    def _drop_below(self, node: TierNode) -> None:
        """Frees the places of all absent nodes below a node that leaves the tree."""
        stack = list(node.absent.values())
        node.absent = {}
        while stack:
            below = stack.pop()
            stack += below.absent.values()
            if below.places is not None:
                self._release(below.places)
                below.places = None

    # -- as in RadixCache, with absent nodes

    def below(self, node: Node) -> Iterable[Node]:
        assert isinstance(node, TierNode)
        return [*node.children.values(), *(child for child in node.absent.values() if child.slots)]

    def is_present(self, node: Node) -> bool:
        return node.alive or (isinstance(node, TierNode) and node.load > 0)

    def is_registered(self, node: Node) -> bool:
        if isinstance(node, TierNode) and node.load:
            return _parent(node).absent.get(self.child_key(node.tokens, 0)) is node
        return super().is_registered(node)

    def _offer(self, node: Node) -> None:
        if node.slots or node.parent is None:
            super()._offer(node)

    def _drop(self, node: Node, after_step: int) -> None:
        assert isinstance(node, TierNode)
        super()._drop(node, after_step)
        if node.places is not None:
            self._release(node.places)
            node.places = None
        self._drop_below(node)

    def _drop_root(self, root: Node) -> None:
        assert isinstance(root, TierNode)
        if not root.absent:
            super()._drop_root(root)

    def _add_leaf(self, parent: Node, tokens: list[int], slots: list[int], after_step: int) -> Node:
        """Inserts a leaf. Stops at a node that is being loaded, and leaves the rest of the slots to the caller."""
        while tokens:
            assert isinstance(parent, TierNode)
            key = self.child_key(tokens, 0)
            node = parent.absent.get(key)
            if node is None:
                added = super()._add_leaf(parent, tokens, slots, after_step)
                if self.write_through == "inserted":
                    self._make_due(added)
                return added
            if node.load:
                return parent
            same = self._common(node.tokens, tokens, 0, len(tokens))
            if same < len(node.tokens):
                node = self._split_absent(node, same)
            parent.children[key] = parent.absent.pop(key)
            node.slots, node.alive, node.free_after, node.from_storage = slots[:same], True, after_step, False
            self.num_evictable += same
            self.version += 1
            if self.events is not None:
                self.events.stored(node, self.namespace_of(node))
            self._offer_tier(node)
            self._offer(node)
            parent, tokens, slots = node, tokens[same:], slots[same:]
        return parent

    def _split(self, node: Node, count: int) -> Node:
        upper = super()._split(node, count)
        assert isinstance(node, TierNode) and isinstance(upper, TierNode)
        if node.places is not None:
            upper.places, node.places = node.places[:count], node.places[count:]
            self._offer_tier(upper)
        upper.from_storage = node.from_storage
        if node.is_due:
            upper.is_due = True
            self.due.append(upper)
        return upper

    def _split_absent(self, node: TierNode, count: int) -> TierNode:
        """`_split` of an absent node that is not being loaded."""
        assert node.places is not None and not node.load
        parent = _parent(node)
        upper = self._make(parent, node.tokens[:count])
        upper.alive, upper.from_storage = False, node.from_storage
        copy_use(node, upper)
        upper.places, node.places = node.places[:count], node.places[count:]
        parent.absent[self.child_key(node.tokens, 0)] = upper
        node.tokens = node.tokens[count:]
        node.parent = upper
        upper.absent[self.child_key(node.tokens, 0)] = node
        return upper

    def _make(self, parent: TierNode, tokens: list[int]) -> TierNode:
        """A node without slots."""
        self._serial += 1
        made = self.make_node(parent, tokens, [], self._serial)
        assert isinstance(made, TierNode)
        return made


def _tier_node(node: Node) -> TierNode:
    assert isinstance(node, TierNode)
    return node


def _parent(node: Node) -> TierNode:
    assert isinstance(node.parent, TierNode)
    return node.parent
