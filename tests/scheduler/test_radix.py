"""The radix cache against a dictionary of prefixes."""

from __future__ import annotations

import random

import pytest

from moe_engine.scheduler.integrity import check_tree, walk
from moe_engine.scheduler.kv_cache.radix_cache import DisabledCache, Node, RadixCache
from tests.lines_run import lines_run


class Oracle:
    """Every cached whole-page prefix -> the slots of its last page."""

    def __init__(self, page: int) -> None:
        self.page = page
        self.pages: dict[tuple[object, tuple[int, ...]], list[int]] = {}
        self.where: dict[int, tuple[object, tuple[int, ...]]] = {}

    def length(self, key: object, tokens: list[int], limit: int) -> int:
        n = 0
        while n + self.page <= limit and (key, tuple(tokens[: n + self.page])) in self.pages:
            n += self.page
        return n

    def store(self, key: object, prefix: list[int], slots: list[int]) -> None:
        self.pages[key, tuple(prefix)] = slots
        self.where[slots[0]] = (key, tuple(prefix))

    def forget(self, first_slot: int) -> None:
        del self.pages[self.where.pop(first_slot)]

    def slots(self, key: object, tokens: list[int], length: int) -> list[int]:
        return [s for n in range(self.page, length + 1, self.page) for s in self.pages[key, tuple(tokens[:n])]]


@pytest.mark.parametrize("page", [1, 4])
def test_tree_agrees_with_a_dictionary(page: int) -> None:
    rng = random.Random(page)
    freed: list[int] = []
    tree = RadixCache(page, lambda slots, after: freed.extend(slots))
    oracle = Oracle(page)
    next_slot = 0
    locked: list[tuple[Node, str | None, list[int], int]] = []
    remembered: list[tuple[str | None, list[int], Node | None]] = []
    for turn in range(50_000):
        action = rng.random()
        key = rng.choice([None, None, "x"])
        tokens = [t for _ in range(rng.randint(1, 6)) for t in [rng.randrange(3)] * page]
        if page > 1:  # pages that differ inside, and an incomplete last page
            tokens = [t if rng.random() < 0.99 else 9 for t in tokens][: len(tokens) - rng.randint(0, page - 1)]
        if action < 0.5:  # a request: match, then insert the rest, keep or release the lock
            limit = rng.randint(0, len(tokens))
            found = tree.peek(tokens, limit, key)
            want = oracle.length(key, tokens, limit)
            assert found.length == want
            remembered.append((key, tokens, found.node))
            node = tree.match(tokens, limit, key)
            assert node.end == want and tree.prefix_slots(node) == oracle.slots(key, tokens, want)
            tree.lock(node)
            run = tokens[want:]
            mine = list(range(next_slot, next_slot + len(run)))
            next_slot += len(run)
            whole = len(tokens) - len(tokens) % page
            had = oracle.length(key, tokens, whole)
            inserted = tree.insert(node, run, mine, turn)
            assert inserted.present == oracle.slots(key, tokens, had)[want:]
            for n in range(had + page, whole + 1, page):
                oracle.store(key, tokens[:n], mine[n - page - want : n - want])
            tree.lock(inserted.node)
            tree.unlock(node, turn)
            assert inserted.node.end == max(whole, want)
            locked.append((inserted.node, key, tokens, inserted.node.end))
        elif action < 0.75 and locked and (len(locked) > 5 or turn > 49_900):
            node, key, tokens, length = locked.pop(rng.randrange(len(locked)))
            assert tree.prefix_slots(node) == oracle.slots(key, tokens, length)
            tree.unlock(node, turn)
        elif action < 0.9:
            freed.clear()
            want = rng.randint(1, 20) if len(oracle.pages) < 300 else tree.num_evictable // 2
            could = tree.num_evictable
            got = tree.evict(want)
            assert got == len(freed) and got >= min(want, could)
            for slot in freed[::page]:
                oracle.forget(slot)
        elif remembered:  # a match from a stored node equals a match from the root
            key, tokens, start = remembered.pop(rng.randrange(len(remembered)))
            assert tree.peek(tokens, len(tokens), key, start).length == oracle.length(key, tokens, len(tokens))
            remembered = remembered[-20:]
        assert tree.num_evictable + tree.num_protected == len(oracle.pages) * page
        if turn % 1000 == 0:
            assert check_tree(tree, [node for node, *_ in locked]) == []
    for node, *_ in locked:
        tree.unlock(node, 0)
    tree.evict(1 << 30)
    assert not oracle.length(None, [0], 1) or tree.num_evictable == 0
    assert tree.num_evictable == tree.num_protected == 0 and not tree.roots


def test_least_recently_used_leaves_go_first_and_only_as_much_as_needed() -> None:
    freed: list[int] = []
    tree = RadixCache(1, lambda slots, after: freed.extend(slots))
    root = tree.root()
    tree.insert(root, [1, 2, 3], [10, 11, 12], 0)
    tree.insert(root, [4, 5, 6], [20, 21, 22], 0)
    tree.match([1, 2, 3], 3)
    assert tree.evict(2) == 2 and freed == [21, 22]
    assert tree.peek([4, 5, 6], 3).length == 1
    assert tree.evict(2) == 2 and freed == [21, 22, 20, 12]


def test_locked_prefixes_stay() -> None:
    tree = RadixCache(1, lambda slots, after: None)
    tree.insert(tree.root(), [1, 2, 3, 4], [1, 2, 3, 4], 0)
    node = tree.match([1, 2, 9], 3)
    tree.lock(node)
    assert (tree.num_protected, tree.num_evictable) == (2, 2)
    assert tree.evict(100) == 2 and tree.peek([1, 2, 3], 3).length == 2


def test_slots_read_by_a_step_in_flight_are_freed_after_it() -> None:
    frees: list[tuple[list[int], int]] = []
    tree = RadixCache(1, lambda slots, after: frees.append((list(slots), after)))
    leaf = tree.insert(tree.root(), [1, 2, 3], [5, 6, 7], 0).node
    tree.lock(leaf)
    tree.unlock(leaf, after_step=9)
    upper = tree.match([1, 8], 2)  # splits: both parts keep the step
    assert upper.free_after == leaf.free_after == 9
    tree.evict(3)
    assert frees == [([6, 7], 9), ([5], 9)]


def test_namespaces_are_separate() -> None:
    tree = RadixCache(1, lambda slots, after: None)
    tree.insert(tree.root("a"), [1, 2], [1, 2], 0)
    assert tree.peek([1, 2], 2, "a").length == 2
    assert tree.peek([1, 2], 2, "b").length == tree.peek([1, 2], 2).length == 0


def lines_of_a_match(length: int, same: int) -> int:
    """Number of lines run to match the first `same` tokens of a prompt with a cached one."""
    tokens = [random.randrange(100_000) for _ in range(length)]
    tree = RadixCache(1, lambda slots, after: None)
    tree.insert(tree.root(), tokens, list(range(length)), 0)
    asked = tokens[:same] + [100_000] * (length - same)
    found = []
    lines = lines_run(lambda: found.append(tree.peek(asked, length).length))
    assert found == [same]
    return lines


def test_a_match_runs_no_line_for_each_token() -> None:
    assert lines_of_a_match(1 << 14, 1 << 14) == lines_of_a_match(1 << 7, 1 << 7)
    halving = lines_of_a_match(1 << 8, 150) - lines_of_a_match(1 << 7, 75)
    assert lines_of_a_match(1 << 14, 9600) == lines_of_a_match(1 << 7, 75) + 7 * halving, "a search by halves"


def test_integrity_check_finds_and_repairs() -> None:
    tree = RadixCache(2, lambda slots, after: None)
    leaf = tree.insert(tree.root(), [1, 2, 3, 4], [2, 3, 4, 5], 0).node
    tree.insert(tree.root(), [1, 2, 7, 8], [0, 0, 8, 9], 0)
    tree.lock(leaf)
    assert check_tree(tree, [leaf]) == []
    leaf.lock += 1
    tree.num_evictable += 6
    tree.heap.clear()
    findings = check_tree(tree, [leaf])
    assert len(findings) == 3
    assert check_tree(tree, [leaf]) == [] and tree.num_evictable == 2 and len(walk(tree)) == 4
    assert tree.evict(10) == 2


def test_disabled_cache_shares_nothing() -> None:
    tree = DisabledCache(1, lambda slots, after: None)
    node = tree.match([1, 2, 3], 3, "key")
    assert tree.insert(node, [1, 2, 3], [1, 2, 3], 0).node is node and node.end == 0
    assert tree.peek([1, 2, 3], 3).length == 0
