"""Radix cache (prefix cache): a prefix tree from token ids to KV slots.

A node holds a run of tokens and their slots; a path from the root is a prefix whose KV is in the pool. Requests lock
the node where their prefix ends, and thereby the whole path; unlocked leaves are evicted least recently used first, or
in the order of a policy (`eviction_policy`).
Runs are compared by slices, so a match costs a memory scan, not a loop. Only whole pages are cached.

A node keeps its identity when it is split (the new node is the upper part) and never grows. A fully matched node can
therefore be stored, and a later match can start from it instead of from the root.
"""

from __future__ import annotations

import heapq
import math
from collections.abc import Callable, Hashable, Iterable
from typing import Any, NamedTuple

from moe_engine.scheduler.kv_cache.eviction_policy import EvictionPolicy
from moe_engine.scheduler.kv_cache.kv_events import KVEventLog

ChildKey = int | tuple[int, ...]


class Node:
    """A run of tokens. `end` is the length of the prefix up to the end of the run."""

    __slots__ = (
        "alive",
        "children",
        "end",
        "free_after",
        "in_heap",
        "last_access",
        "lock",
        "longest",
        "num_uses",
        "parent",
        "serial",
        "slots",
        "tokens",
        "urgency",
    )

    def __init__(self, parent: Node | None, tokens: list[int], slots: list[int], serial: int) -> None:
        self.parent = parent
        self.tokens = tokens
        self.slots = slots
        self.children: dict[ChildKey, Node] = {}
        self.end: int = (parent.end if parent else 0) + len(tokens)
        self.lock = 0
        self.last_access = 0
        self.free_after = 0
        """The last step that may read these slots; valid only while unlocked."""
        self.serial = serial
        self.in_heap = False
        self.alive = True
        self.num_uses = 0
        """Requests that ended with it in their prefix."""
        self.urgency = -math.inf
        """Urgency of the most urgent of these requests."""
        self.longest = self.end
        """Length of the longest prefix through it, evicted ones included."""


class Match(NamedTuple):
    """`node` is the last fully matched node; `length` also counts the matched head of `partial`."""

    node: Node | None
    length: int
    partial: Node | None = None


class Inserted(NamedTuple):
    """`node` ends the inserted run; `present` are the tree's slots of the leading tokens that were already cached."""

    node: Node
    present: list[int]


class RadixCache:
    """The tree. It owns its slots and passes evicted ones to `free(slots, after_step)`.

    `num_evictable` and `num_protected` count tokens in unlocked and locked nodes. `version` changes whenever the result
    of a match may change.
    """

    enabled = True
    make_node = Node
    events: KVEventLog | None = None
    """Listener of insertions and evictions, or None."""
    policy: EvictionPolicy | None = None
    """None: least recently used first."""

    def __init__(self, page_size: int, free: Callable[[list[int], int], None]) -> None:
        self.page_size = page_size
        self._free = free
        self._clock = 0
        self._serial = 0
        self.version = 0
        self._clear()

    def _clear(self) -> None:
        self.roots: dict[Hashable, Node] = {}
        self._root_keys: dict[int, Hashable] = {}
        self.heap: list[tuple[Any, int, Node]] = []
        """(`_stamp` when it was added, serial, leaf)"""
        self.num_evictable = 0
        self.num_protected = 0
        self.version += 1

    # -- matching

    def peek(self, tokens: list[int], limit: int, extra_key: Hashable = None, start: Node | None = None) -> Match:
        """The longest prefix of tokens[:limit] in the tree, in whole pages. Does not change the tree.

        `start` is a node that an earlier peek of the same tokens returned; the walk starts from it if it still exists.
        """
        limit -= limit % self.page_size
        node = start
        while node is not None and (not node.alive or node.end > limit):
            node = node.parent
        if node is None:
            node = self.roots.get(extra_key)
            if node is None:
                return Match(None, 0)
        pos = node.end
        while pos < limit:
            child = node.children.get(self.child_key(tokens, pos))
            if child is None:
                break
            same = self._common(child.tokens, tokens, pos, limit)
            pos += same
            if same < len(child.tokens):
                return Match(node, pos, child)
            node = child
        return Match(node, pos)

    def match(self, tokens: list[int], limit: int, extra_key: Hashable = None, start: Node | None = None) -> Node:
        """Like `peek`, but splits the node in which the match ends, marks the path as used, returns its last node."""
        found = self.peek(tokens, limit, extra_key, start)
        node = found.node if found.node is not None else self.root(extra_key)
        if found.partial is not None:
            node = self._split(found.partial, found.length - node.end)
        self.touch(node)
        return node

    def touch(self, node: Node) -> None:
        """Marks the path to `node` as used."""
        self._clock += 1
        walk: Node | None = node
        while walk is not None:
            walk.last_access = self._clock
            walk = walk.parent

    def count_use(self, node: Node, urgency: float) -> None:
        """Counts a request that ended with this prefix, if the policy may depend on it."""
        if self.policy is None:
            return
        walk: Node | None = node
        while walk is not None:
            walk.num_uses += 1
            walk.urgency = max(walk.urgency, urgency)
            walk = walk.parent

    def prefix_slots(self, node: Node) -> list[int]:
        """The slots of the whole prefix that ends with `node`."""
        runs = []
        walk: Node | None = node
        while walk is not None:
            runs.append(walk.slots)
            walk = walk.parent
        out: list[int] = []
        for run in reversed(runs):
            out += run
        return out

    # -- inserting

    def insert(self, node: Node, tokens: list[int], slots: list[int], after_step: int) -> Inserted:
        """Adds a run below `node`, truncated to whole pages. Takes ownership of both lists, and of the slots of tokens
        not yet cached.

        `after_step` is the last step that may use the slots. The slots of tokens that were already cached stay the
        caller's.
        """
        count = len(tokens) - len(tokens) % self.page_size
        present: list[int] = []
        pos = 0
        while pos < count:
            child = node.children.get(self.child_key(tokens, pos))
            if child is None:
                if pos or count < len(tokens):
                    tokens, slots = tokens[pos:count], slots[pos:count]
                node = self._add_leaf(node, tokens, slots, after_step)
                break
            same = self._common(child.tokens, tokens, pos, count)
            if same < len(child.tokens):
                child = self._split(child, same)
            present += child.slots
            pos += same
            node = child
        self.touch(node)
        return Inserted(node, present)

    def root(self, extra_key: Hashable = None) -> Node:
        """The root of a namespace (`extra_key`); lock it to keep it."""
        root = self.roots.get(extra_key)
        if root is None:
            self._serial += 1
            root = self.roots[extra_key] = self.make_node(None, [], [], self._serial)
            self._root_keys[root.serial] = extra_key
        return root

    def forget(self, tokens: list[int], start: int, extra_key: Hashable = None) -> None:
        """Frees the cached part of tokens[start:] and everything below it. No request may hold a lock there."""
        start -= start % self.page_size
        found = RadixCache.peek(self, tokens, len(tokens), extra_key)
        node = found.partial if found.partial is not None else found.node
        while node is not None and node.parent is not None and node.parent.end > start:
            node = node.parent
        if node is None or node.parent is None or node.end <= start:
            return
        if node.parent.end < start:
            self._split(node, start - node.parent.end)
        parent = node.parent
        del parent.children[self.child_key(node.tokens, 0)]
        stack = [node]
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            self.num_evictable -= len(node.tokens)
            self._drop(node, node.free_after)
        self.version += 1
        self._offer(parent)

    # -- locks

    def lock(self, node: Node) -> None:
        """Protects the path to `node` from eviction until `unlock`."""
        walk: Node | None = node
        while walk is not None:
            if walk.lock == 0:
                size = len(walk.tokens)
                self.num_evictable -= size
                self.num_protected += size
            walk.lock += 1
            walk = walk.parent

    def unlock(self, node: Node, after_step: int) -> None:
        """Releases a lock. `after_step` is the last step in which the holder may read the path."""
        walk: Node | None = node
        while walk is not None:
            walk.lock -= 1
            if walk.lock == 0:
                size = len(walk.tokens)
                self.num_evictable += size
                self.num_protected -= size
                walk.free_after = max(walk.free_after, after_step)
                self._offer(walk)
            walk = walk.parent

    # -- eviction

    def evict(self, num_tokens: int) -> int:
        """Frees at least `num_tokens` tokens of unlocked leaves if there are enough; returns the number freed.

        A leaf longer than needed loses only its tail. Freed slots are allocatable immediately unless a step in flight
        may read them.
        """
        freed = 0
        while freed < num_tokens and (node := self._next_leaf()) is not None:
            keep = self._kept(node, num_tokens - freed)
            tail = node.slots[keep:]
            if self.events is not None:
                self.events.removed(node, keep)
            if keep:
                del node.slots[keep:]
                del node.tokens[keep:]
                node.end -= len(tail)
                self._shortened(node)
                self._offer(node)
            else:
                self._remove_leaf(node)
            freed += len(tail)
            self._free(tail, node.free_after)
        if freed:
            self.num_evictable -= freed
            self.version += 1
        return freed

    def _kept(self, node: Node, count: int) -> int:
        """Number of the node's leading tokens that stay if about `count` tokens are evicted."""
        keep = len(node.tokens) - count
        if self.policy is not None:
            keep = max(keep, self.policy.keep(node) - node.end + len(node.tokens))
        return max(0, keep - keep % self.page_size)

    def namespace_of(self, node: Node) -> Hashable:
        """The namespace of a node."""
        while node.parent is not None:
            node = node.parent
        return self._root_keys[node.serial]

    def _next_leaf(self) -> Node | None:
        """Takes the unlocked leaf that leaves first from the heap."""
        while self.heap:
            stamp, _, node = heapq.heappop(self.heap)
            node.in_heap = False
            if not node.alive or node.lock or node.children:
                continue  # added again when it becomes an unlocked leaf
            if self._stamp(node) == stamp:
                return node
            self._offer(node)
        return None

    def flush(self, after_step: int = 0) -> None:
        """Clears the tree and frees all slots. No request may hold a lock."""
        for root in self.roots.values():
            stack = [root]
            while stack:
                node = stack.pop()
                stack.extend(node.children.values())
                self._drop(node, max(node.free_after, after_step))
        self._clear()
        if self.events is not None:
            self.events.cleared()

    def discard(self) -> None:
        """Drops all tokens and slots, and frees no slot: the cache is not used any more. A garbage collection would
        visit each of them several times."""
        stack, nothing = list(self.roots.values()), list[int]()
        while stack:
            node = stack.pop()
            stack.extend(node.children.values())
            node.alive = False
            node.tokens = node.slots = nothing
            node.children = {}
        self._clear()

    def rebuild_heap(self, nodes: list[Node]) -> None:
        """Rebuilds the eviction heap; `nodes` are all nodes of the tree, parents first."""
        self.heap = []
        for node in nodes:
            node.in_heap = False
            if node.parent is not None and not node.children and not node.lock:
                self._offer(node)
        self.version += 1

    # -- views for the integrity check

    def below(self, node: Node) -> Iterable[Node]:
        """The nodes with slots directly below `node`."""
        return node.children.values()

    def is_present(self, node: Node) -> bool:
        """Whether `node` may be in the tree."""
        return node.alive

    def is_registered(self, node: Node) -> bool:
        """Whether the parent of `node` finds it by its key."""
        return node.parent is not None and node.parent.children.get(self.child_key(node.tokens, 0)) is node

    # -- internals

    def child_key(self, tokens: list[int], pos: int) -> ChildKey:
        return tokens[pos] if self.page_size == 1 else tuple(tokens[pos : pos + self.page_size])

    def _common(self, run: list[int], tokens: list[int], pos: int, limit: int) -> int:
        """Number of leading tokens of `run` that equal tokens[pos:limit], in whole pages."""
        high = min(len(run), limit - pos)
        if tokens[pos : pos + high] == (run if high == len(run) else run[:high]):
            return high
        low = 0
        while high - low > 1:  # tokens before `low` are equal, those before `high` are not all equal
            mid = (low + high) // 2
            if tokens[pos + low : pos + mid] == run[low:mid]:
                low = mid
            else:
                high = mid
        return low - low % self.page_size

    def _offer(self, node: Node) -> None:
        """Adds an unlocked leaf to the eviction heap; drops an empty, unlocked namespace."""
        if node.children or node.lock:
            return
        if node.parent is None:
            self._drop_root(node)
        elif not node.in_heap:
            node.in_heap = True
            heapq.heappush(self.heap, (self._stamp(node), node.serial, node))

    def _stamp(self, node: Node) -> Any:
        """The node's place in the order of eviction."""
        return node.last_access if self.policy is None else (self.policy.rank(node), node.last_access)

    def _shortened(self, node: Node) -> None:
        """The run of a node lost its end."""

    def _drop(self, node: Node, after_step: int) -> None:
        """Frees the slots of a node that leaves the tree with its children."""
        node.alive = False
        if self.events is not None:
            self.events.removed(node)
        if node.slots:
            self._free(node.slots, after_step)

    def _drop_root(self, root: Node) -> None:
        root.alive = False
        del self.roots[self._root_keys.pop(root.serial)]

    def _add_leaf(self, parent: Node, tokens: list[int], slots: list[int], after_step: int) -> Node:
        self._serial += 1
        node = self.make_node(parent, tokens, slots, self._serial)
        node.free_after = after_step
        parent.children[self.child_key(tokens, 0)] = node
        self.num_evictable += len(tokens)
        self.version += 1
        self._clock += 1
        node.last_access = self._clock
        if self.events is not None:
            self.events.stored(node, self.namespace_of(node))
        self._offer(node)
        return node

    def _remove_leaf(self, node: Node) -> None:
        node.alive = False
        parent = node.parent
        assert parent is not None
        parent.longest = max(parent.longest, node.longest)
        del parent.children[self.child_key(node.tokens, 0)]
        self._offer(parent)

    def _split(self, node: Node, count: int) -> Node:
        """Moves the first `count` tokens of `node` to a new parent, which is returned."""
        self._serial += 1
        parent = node.parent
        assert parent is not None
        upper = self.make_node(parent, node.tokens[:count], node.slots[:count], self._serial)
        upper.lock = node.lock
        upper.free_after = node.free_after
        copy_use(node, upper)
        parent.children[self.child_key(node.tokens, 0)] = upper
        node.tokens = node.tokens[count:]
        node.slots = node.slots[count:]
        node.parent = upper
        upper.children[self.child_key(node.tokens, 0)] = node
        if self.events is not None:
            self.events.split(node, upper)
        return upper


def copy_use(node: Node, upper: Node) -> None:
    """Copies everything that decides on the order of eviction to a node above, which was part of `node`."""
    upper.last_access, upper.num_uses, upper.urgency = node.last_access, node.num_uses, node.urgency
    upper.longest = node.longest


class DisabledCache(RadixCache):
    """No prefix sharing: matches and caches nothing; requests own all their slots and free them when they end."""

    enabled = False

    def peek(self, tokens: list[int], limit: int, extra_key: Hashable = None, start: Node | None = None) -> Match:
        return Match(None, 0)

    def insert(self, node: Node, tokens: list[int], slots: list[int], after_step: int) -> Inserted:
        return Inserted(node, [])

    def root(self, extra_key: Hashable = None) -> Node:
        return super().root(None)
