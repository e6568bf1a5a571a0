"""Order of eviction from the prefix cache and the host-RAM tier (`--radix-eviction-policy`).

Leaves are evicted by (rank, last use), smallest first. Without a policy (`lru`) all ranks are equal. Each request that
ends with a node in its prefix is one use of the node (`RadixCache.count_use`). Names and parameters are SGLang's.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, fields
from typing import Any, Protocol

from moe_engine.errors import ConfigError

FLAG = "--radix-eviction-policy"


class Leaf(Protocol):
    """The part of a node (`radix_cache.Node`) that a policy reads."""

    end: int
    num_uses: int
    urgency: float
    longest: int


class EvictionPolicy:
    """Order of eviction. A rank may fall only when a part of the node is evicted or its parent changes."""

    def rank(self, node: Leaf) -> float:
        raise NotImplementedError

    def keep(self, node: Leaf) -> int:
        """Length of the prefix that this rank keeps; the rest of the node is evicted with another rank."""
        return 0


@dataclass(frozen=True)
class LeastFrequentlyUsed(EvictionPolicy):
    def rank(self, node: Leaf) -> float:
        return node.num_uses


@dataclass(frozen=True)
class Segmented(EvictionPolicy):
    """Nodes used at least `protected_threshold` times leave after all others."""

    protected_threshold: int = 2

    def rank(self, node: Leaf) -> float:
        return node.num_uses >= self.protected_threshold


@dataclass(frozen=True)
class ByPriority(EvictionPolicy):
    """Nodes of the least urgent requests first; a node has the priority of its most urgent request."""

    def rank(self, node: Leaf) -> float:
        return node.urgency


@dataclass(frozen=True)
class TailOptimized(EvictionPolicy):
    """Tail-optimized LRU (arXiv:2510.15152): a conversation of L tokens whose next prompt has about
    `next_prompt_estimate` new ones is computed in time if L + next_prompt_estimate - threshold tokens are cached. KV
    beyond them leaves first. All values are tokens."""

    threshold: int = 0
    next_prompt_estimate: int = 0

    def rank(self, node: Leaf) -> float:
        return -1 if node.end > self._needed(node) else 0

    def keep(self, node: Leaf) -> int:
        needed = self._needed(node)
        return needed if node.end > needed else 0

    def _needed(self, node: Leaf) -> int:
        return max(0, node.longest + self.next_prompt_estimate - self.threshold)


POLICIES: dict[str, type[EvictionPolicy] | None] = {
    "lru": None,
    "lfu": LeastFrequentlyUsed,
    "slru": Segmented,
    "priority": ByPriority,
    "tlru": TailOptimized,
}


def eviction_policy(policy: str, settings: str) -> EvictionPolicy | None:
    """A policy by name; None for `lru`.

    Args:
        settings: JSON object with the policy's parameters (`--radix-eviction-policy-config`).

    Raises:
        ConfigError: naming the flag.
    """
    made = POLICIES[policy]
    given: dict[str, Any] = json.loads(settings)
    known = [] if made is None else [field.name for field in fields(made)]  # type: ignore[arg-type]
    for name, value in given.items():
        if name not in known:
            has = f"has {', '.join(known)}" if known else "has no parameters"
            raise ConfigError(f"{FLAG}-config: {name}: unknown; {policy} {has}")
        if not isinstance(value, int) or isinstance(value, bool) or value < 0:
            raise ConfigError(f"{FLAG}-config: {name} {value!r:.40}: must be a whole number, at least 0")
    found = None if made is None else made(**given)
    if isinstance(found, TailOptimized) and found.threshold <= found.next_prompt_estimate:
        raise ConfigError(
            f"{FLAG} tlru: threshold {found.threshold} must be above next_prompt_estimate {found.next_prompt_estimate} "
            f"({FLAG}-config), or no KV may leave early"
        )
    return found
