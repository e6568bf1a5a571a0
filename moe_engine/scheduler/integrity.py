"""Integrity check: recounts the owners of slots, rows and tree nodes, repairs leaks and returns the findings.

Never raises: a leak must not end a server. Live requests define which slots, rows and tree nodes are held; the tree
defines which slots are cached; pages pending on a step stay pending; all others are free.
"""

from __future__ import annotations

from collections.abc import Iterable

from moe_engine.scheduler.kv_cache.kv_cache_manager import KVCacheManager
from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.kv_cache.slot_allocator import DeferredFreePool
from moe_engine.types import Request


def check_integrity(kv_cache: KVCacheManager, live: Iterable[Request]) -> list[str]:
    """Checks and repairs tree, slots and rows. Returns the findings, empty if there are none."""
    running = [request for request in live if request.row >= 0]
    held = [r.tree_node for r in running if r.tree_node is not None]
    connector = kv_cache.connector
    if connector is not None:
        held += connector.held_nodes()
    findings = check_tree(kv_cache.tree, held)
    if connector is not None:
        findings += connector.check_integrity()
    page = kv_cache.page_size
    cached: set[int] = set()
    for node in walk(kv_cache.tree):
        cached.update(node.slots[::page])
    private: set[int] = set(connector.held_slots()[::page]) if connector is not None else set()
    rows: set[int] = set()
    for request in running:
        if request.tree_node is not None and request.num_in_tree != request.tree_node.end:
            findings.append(f"request {request.rid!r} counts {request.num_in_tree} shared slots, not its node's end")
            request.num_in_tree = request.tree_node.end
        own = request.slots[request.num_in_tree :: page]
        if private.intersection(own) or cached.intersection(own):
            findings.append(f"request {request.rid!r} holds slots that have another owner too")
        private.update(own)
        if request.row in rows:
            findings.append(f"row {request.row} is held twice")
        rows.add(request.row)
    findings += _check_pool("slot pages", kv_cache.slots.pages, cached | private)
    findings += _check_pool("rows", kv_cache.rows, rows)
    findings += kv_cache.check_windows(running, cached | private)
    findings += kv_cache.check_snapshots()
    windows = kv_cache.window_pool()
    if windows is not None:
        findings += _check_pool("window pages", *windows)
    return findings


def _check_pool(name: str, pool: DeferredFreePool, owned: set[int]) -> list[str]:
    free = pool.free_ids()
    pending = [i for ids in pool.pending_ids().values() for i in ids]
    everything = free + pending + list(owned)
    known = set(pool.all_ids())
    distinct = set(everything)
    findings = []
    if len(free) + len(pending) != len(set(free) | set(pending)):
        findings.append(f"{name}: some are in the free list twice")
    if owned.intersection(free) or owned.intersection(pending):
        findings.append(f"{name}: some are free and in use")
    if distinct - known:
        findings.append(f"{name}: {len(distinct - known)} that do not exist are in use")
    if known - distinct:
        findings.append(f"{name}: {len(known - distinct)} of {len(known)} were lost; they are free again")
    if findings or pool.num_pending != len(pending):
        pool.rebuild(owned)
    return findings


def walk(tree: RadixCache) -> list[Node]:
    """All nodes with slots, and the roots; parents first."""
    nodes = list(tree.roots.values())
    for node in nodes:  # grows while it runs
        nodes.extend(tree.below(node))
    return nodes


def check_tree(tree: RadixCache, held: list[Node]) -> list[str]:
    """Checks the tree's consistency and the locks of `held` nodes; repairs counts, locks and the eviction heap."""
    findings: list[str] = []
    locks: dict[Node, int] = {}
    for node in held:
        step: Node | None = node
        while step is not None:
            locks[step] = locks.get(step, 0) + 1
            step = step.parent
    nodes = walk(tree)
    known = set(nodes)
    if any(node not in known for node in held):
        findings.append("a request holds a node outside the tree")
    evictable = protected = 0
    seen: set[int] = set()
    heap_lost = False
    for node in nodes:
        findings += _check_node(tree, node, seen)
        wanted = locks.get(node, 0)
        if node.lock != wanted:
            findings.append(f"a node that ends at {node.end} has {node.lock} locks, {wanted} are held")
            node.lock = wanted
        if wanted:
            protected += len(node.tokens)
        else:
            evictable += len(node.tokens)
            heap_lost |= not node.children and node.parent is not None and not node.in_heap
    if (evictable, protected) != (tree.num_evictable, tree.num_protected):
        findings.append(
            f"the tree counted {tree.num_evictable} evictable and {tree.num_protected} protected tokens; "
            f"there are {evictable} and {protected}"
        )
        tree.num_evictable, tree.num_protected = evictable, protected
    entries = {node for _, _, node in tree.heap}
    if heap_lost or len(entries) != len(tree.heap) or any(n.in_heap != (n in entries) for n in nodes):
        findings.append("the eviction heap did not match the tree")
    if findings:
        tree.rebuild_heap(nodes)
    return findings


def _check_node(tree: RadixCache, node: Node, seen: set[int]) -> list[str]:
    findings = []
    page = tree.page_size
    if not tree.is_present(node):
        findings.append("a dead node is in the tree")
        node.alive = True
    if len(node.tokens) != len(node.slots) or len(node.tokens) % page:
        findings.append(f"a node has {len(node.tokens)} tokens and {len(node.slots)} slots with pages of {page}")
    if not seen.isdisjoint(node.slots):
        findings.append("a slot is in the tree twice")
    seen.update(node.slots)
    if node.parent is None:
        return findings
    if node.end != node.parent.end + len(node.tokens) or not node.tokens:
        findings.append(f"a node's end is {node.end}, {node.parent.end} + {len(node.tokens)} was expected")
        node.end = node.parent.end + len(node.tokens)
    if not tree.is_registered(node):
        findings.append("a node has the wrong key in its parent")
    return findings
