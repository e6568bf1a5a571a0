"""`--radix-eviction-policy`: which leaves leave the prefix cache and the host-RAM tier first."""

from __future__ import annotations

import json
import random
from collections import Counter
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.scheduler.integrity import check_tree
from moe_engine.scheduler.kv_cache.eviction_policy import POLICIES, eviction_policy
from moe_engine.scheduler.kv_cache.radix_cache import Node, RadixCache
from moe_engine.scheduler.tiers.tiered_cache import TieredCache
from tests.examples import examples

TLRU = {"threshold": 6, "next_prompt_estimate": 2}


class Uses:
    """Uses, urgency and greatest length of each prefix, kept apart from the tree."""

    def __init__(self) -> None:
        self.uses: Counter[tuple[int, ...]] = Counter()
        self.urgency: dict[tuple[int, ...], float] = {}
        self.longest: dict[tuple[int, ...], int] = {}

    def count(self, tokens: list[int], urgency: float) -> None:
        for end in range(1, len(tokens) + 1):
            prefix = tuple(tokens[:end])
            self.uses[prefix] += 1
            self.urgency[prefix] = max(urgency, self.urgency.get(prefix, urgency))
            self.longest[prefix] = max(len(tokens), self.longest.get(prefix, 0))

    def forget(self, prefix: tuple[int, ...]) -> None:
        for each in (self.uses, self.urgency, self.longest):
            each.pop(prefix, None)

    def rank(self, policy: str, prefix: tuple[int, ...]) -> float:
        if policy == "lfu":
            return self.uses[prefix]
        if policy == "slru":
            return min(self.uses[prefix], 3) // 3
        if policy == "priority":
            return self.urgency[prefix]
        if policy == "tlru":  # without this run the next turn is still in time
            return 0 if len(prefix) <= max(0, self.longest[prefix] + 2 - 6) else -1
        return 0


def prefix_of(node: Node) -> tuple[int, ...]:
    return (*prefix_of(node.parent), *node.tokens) if node.parent is not None else ()


def leaves(tree: RadixCache) -> list[Node]:
    stack, found = list(tree.roots.values()), []
    while stack:
        node = stack.pop()
        stack += node.children.values()
        if not node.children and node.parent is not None and not node.lock:
            found.append(node)
    return found


@settings(max_examples=examples(20))
@given(policy=st.sampled_from(list(POLICIES)), tiered=st.booleans(), seed=st.integers(0, 1 << 30))
def test_the_leaf_of_least_rank_leaves_first(policy: str, tiered: bool, seed: int) -> None:
    rng, uses, freed = random.Random(seed), Uses(), list[int]()
    parameters = {"slru": {"protected_threshold": 3}, "tlru": TLRU}.get(policy, {})
    free: Any = lambda slots, after: freed.extend(slots)  # noqa: E731
    places = iter(range(1 << 30))
    tree: RadixCache = RadixCache(1, free)
    if tiered:
        tree = TieredCache(1, free, lambda slots: [next(places) for _ in slots], lambda gone: None)
    tree.policy = eviction_policy(policy, json.dumps(parameters))
    slots, locked = iter(range(1 << 30)), list[Node]()
    for turn in range(150):
        if rng.random() < 0.6:
            tokens = [rng.randrange(3) for _ in range(rng.randint(1, 10))]
            urgency = rng.choice([float("-inf"), 0.0, 1.0, 2.0])
            node = tree.match(tokens, len(tokens))
            run = tokens[node.end :]
            node = tree.insert(node, run, [next(slots) for _ in run], turn).node
            tree.lock(node)
            uses.count(tokens, urgency)
            tree.count_use(node, urgency)
            if rng.random() < 0.3:
                locked.append(node)
            else:
                tree.unlock(node, turn)
        elif locked and rng.random() < 0.3:
            tree.unlock(locked.pop(rng.randrange(len(locked))), turn)
        elif candidates := leaves(tree):
            order = {node: (uses.rank(policy, prefix_of(node)), node.last_access) for node in candidates}
            first = min(candidates, key=lambda node: order[node])
            gone, last_slot = prefix_of(first), first.slots[-1]
            freed.clear()
            tree.evict(1)
            assert freed == [last_slot]
            if not tiered:  # else its uses count on when it is computed again
                uses.forget(gone)
    assert check_tree(tree, locked) == []


def test_a_host_tier_drops_kv_in_the_same_order() -> None:
    released: list[int] = []
    tree = TieredCache(1, lambda slots, after: None, lambda slots: list(slots), released.extend)
    tree.policy = eviction_policy("lfu", "{}")
    for tokens, count in (([1, 2], 3), ([3, 4], 1), ([5, 6], 2)):
        node = tree.insert(tree.root(), tokens, [10 * tokens[0], 10 * tokens[0] + 1], 0).node
        for _ in range(count):
            tree.count_use(node, 0.0)
    tree.evict(6)
    assert tree.num_evictable == 0 and not released
    assert [tree.drop_oldest(2) for _ in range(3)] == [2, 2, 2]
    assert [place // 10 for place in released[::2]] == [3, 5, 1]


def test_tlru_cuts_long_conversations_down_to_what_the_next_turn_needs() -> None:
    tree = RadixCache(1, lambda slots, after: None)
    tree.policy = eviction_policy("tlru", json.dumps(TLRU))
    node = tree.insert(tree.root(), [1, 2], [1, 2], 0).node
    for end in (4, 6, 8, 10):  # turns of two tokens
        node = tree.insert(node, [end - 1, end], [end - 1, end], 0).node
    tree.match([1, 2], 2)
    tree.insert(tree.root(), [20, 21], [20, 21], 0)  # of a short conversation: needs nothing, leaves early too
    tree.match(list(range(1, 11)), 10)  # the long one was used last
    assert tree.evict(2) == 2 and tree.peek([20, 21], 2).length == 0
    assert tree.evict(4) == 4 and tree.peek(list(range(1, 11)), 10).length == 6  # 10 + 2 - 6
    other = list(range(30, 40))
    tree.insert(tree.root(), list(other), list(other), 0)
    assert tree.evict(4) == 4 and tree.peek(other, 10).length == 6 == tree.peek(list(range(1, 11)), 10).length
    assert tree.evict(2) == 2 and tree.peek(list(range(1, 11)), 10).length == 4  # no tail is left: used longest ago


@pytest.mark.parametrize(
    ("policy", "parameters", "message"),
    [
        ("lfu", {"threshold": 1}, "--radix-eviction-policy-config: threshold: unknown; lfu has no parameters"),
        ("slru", {"limit": 1}, "limit: unknown; slru has protected_threshold"),
        ("slru", {"protected_threshold": -1}, "protected_threshold -1: must be a whole number, at least 0"),
        ("tlru", {}, "tlru: threshold 0 must be above next_prompt_estimate 0"),
    ],
)
def test_wrong_parameters_are_refused(policy: str, parameters: dict[str, int], message: str) -> None:
    with pytest.raises(ConfigError, match=message):
        eviction_policy(policy, json.dumps(parameters))
