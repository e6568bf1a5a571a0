"""Schedule policies: the order in which waiting requests are admitted (`--schedule-policy`).

fcfs, lof and priority are static: the queue stays sorted. The other policies sort the queue for each prefill batch,
behind the front region (see waiting_queue.py): lpm by cached prefix, random at random, dfs-weight along the tree.
"""

from __future__ import annotations

import random
from collections.abc import Iterable, Iterator
from itertools import chain

from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.run_settings import RunSettings
from moe_engine.scheduler.waiting_queue import Waiting, WaitingQueue


class Policy:
    """Orders the queue by the configured policy."""

    def __init__(self, settings: RunSettings) -> None:
        self._settings, self._config = settings, settings.config
        config = settings.config
        self._random = random.Random(config.random_seed)

    def order(self, queue: WaitingQueue, tree: RadixCache) -> Iterable[Waiting]:
        """The entries of the queue, in order of admission. Do not change the queue while consuming it."""
        queue.promote_aged()
        name = self._config.effective_order(self._settings.schedule_policy)
        if name in ("fcfs", "lof") or len(queue) < 2:
            return queue.entries
        if name == "lpm" and len(queue) > self._config.lpm_fallback_queue:
            return queue.entries  # by arrival: matching that many prompts would cost more than it saves
        front, rest = queue.regions()
        if name == "random":
            return chain(front, self._shuffled(rest))
        if name == "lpm":
            return front + self._by_prefix(rest, tree)
        return front + by_subtree_weight(rest, tree)

    def _shuffled(self, entries: list[Waiting]) -> Iterator[Waiting]:
        """A random order, drawn lazily."""
        for i in range(len(entries)):
            j = self._random.randrange(i, len(entries))
            entries[i], entries[j] = entries[j], entries[i]
            yield entries[i]

    def _by_prefix(self, entries: list[Waiting], tree: RadixCache) -> list[Waiting]:
        later = self._sharing_in_batch(entries, tree)
        return sorted(entries, key=lambda e: (e in later, -e.matched(tree).length))

    def _sharing_in_batch(self, entries: list[Waiting], tree: RadixCache) -> set[Waiting]:
        """Entries whose prefix is not cached yet, but will be by an entry ahead of them; they should wait.

        Two prompts share a prefix if their first 32 tokens (in whole pages) are equal, which equals a match of at least
        32 tokens in a tree of the waiting prompts.
        """
        config = self._config
        if config.in_batch_check_threshold < 0:
            return set()
        head = config.ceil_page(max(config.in_batch_deprioritize_threshold, 1))
        seen: set[tuple[object, tuple[int, ...]]] = set()
        later: set[Waiting] = set()
        for entry in entries:
            if entry.limit < head or entry.matched(tree).length > config.in_batch_check_threshold:
                continue
            key = (entry.request.namespace, tuple(entry.tokens[:head]))
            if key in seen:
                later.add(entry)
            else:
                seen.add(key)
        return later


def by_subtree_weight(entries: list[Waiting], tree: RadixCache) -> list[Waiting]:
    """Depth-first through the prefix tree, children with more waiting requests below them first, each request after
    the subtrees of the node where its match ends. Requests without a match come last, by arrival."""
    at_node: dict[Node, list[Waiting]] = {}
    unmatched: list[Waiting] = []
    weight: dict[Node, int] = {}
    for entry in entries:
        match = entry.matched(tree)
        node = match.partial or match.node
        if node is None or match.length == 0:
            unmatched.append(entry)
            continue
        at_node.setdefault(node, []).append(entry)
        walk: Node | None = node
        while walk is not None:
            weight[walk] = weight.get(walk, 0) + 1
            walk = walk.parent
    children: dict[Node | None, list[Node]] = {}
    for node in weight:
        children.setdefault(node.parent, []).append(node)
    out: list[Waiting] = []
    stack: list[tuple[Node, bool]] = _heaviest_on_top(children.get(None, []), weight)
    while stack:
        node, entered = stack.pop()
        if entered:
            out += at_node.get(node, [])
        else:
            stack.append((node, True))
            stack += _heaviest_on_top(children.get(node, []), weight)
    return out + unmatched


def _heaviest_on_top(nodes: list[Node], weight: dict[Node, int]) -> list[tuple[Node, bool]]:
    return [(node, False) for node in sorted(nodes, key=lambda n: (weight[n], -n.serial))]
