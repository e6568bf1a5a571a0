"""EPLB policies: a balanced placement from the tokens of each expert.

`deepseek` ignores nodes. `deepseek_hierarchical` first assigns whole expert groups to nodes, so that a router which
limits a token to some groups limits it to some nodes, then replicates and packs inside each node.
Source: the description of DeepSeek's EPLB (github.com/deepseek-ai/EPLB); the code is this project's.

Legend: L layers, E experts, P slots, S passes.
"""

from __future__ import annotations

from dataclasses import replace

import numpy as np
from numpy.typing import ArrayLike

from moe_engine.errors import ConfigError
from moe_engine.parallel.placement.balance import layer_balancedness, rank_loads
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.nearness import maximize_overlap
from moe_engine.parallel.placement.packing import FloatArray, IdArray, exchange, pack, replicate
from moe_engine.parallel.placement.placement import EMPTY, ExpertPlacement

POLICIES = ("auto", "deepseek", "deepseek_hierarchical", "trivial")
MIN_GAIN = 0.01
"""Rebalancing: gain of balancedness of a layer below which no further experts are moved."""


def resolve_policy(policy: str, layout: ExpertLayout) -> str:
    """Resolves ``auto`` (``--eplb-algorithm``): hierarchical if groups fit the nodes, else deepseek.

    Raises:
        ConfigError: the name is unknown, or groups do not divide evenly over these nodes.
    """
    if policy not in POLICIES:
        raise ConfigError(f"--eplb-algorithm {policy}: unknown; there are {', '.join(POLICIES)}")
    if policy == "deepseek_hierarchical" and layout.num_groups % layout.num_nodes:
        raise ConfigError(
            f"--eplb-algorithm {policy}: {layout.num_groups} expert groups do not divide evenly over "
            f"{layout.num_nodes} nodes; use deepseek"
        )
    if policy != "auto":
        return policy
    return "deepseek_hierarchical" if layout.groups_fit_nodes else "deepseek"


def plan_placement(
    counts: ArrayLike,
    layout: ExpertLayout,
    policy: str = "auto",
    previous: ExpertPlacement | None = None,
    min_gain: float = 0.0,
) -> ExpertPlacement:
    """The placement for given counts. Deterministic, so the same on every rank.

    Args:
        counts: tokens of each logical expert, [L, E], or [S, L, E] to be summed.
        policy: one of `POLICIES`.
        previous: the current placement, of the same sizes. Each layer then uses the option with the fewest moves: none,
            some exchanges, or a new plan with ranks renamed so that as many experts as possible stay.
        min_gain: balancedness (0 to 1) that a layer sacrifices to move fewer experts.

    Raises:
        ConfigError: the shape or the policy does not fit the layout.
    """
    tokens = summed_counts(counts, layout.num_experts)
    policy = resolve_policy(policy, layout)
    trivial = ExpertPlacement.trivial(layout, len(tokens))
    if policy == "trivial":
        return trivial
    if policy == "deepseek":
        layout = replace(layout, num_groups=1, num_nodes=1)
    plan = _hierarchical(tokens, layout)
    if layout.num_nodes == 1 or not layout.num_redundant:  # else trivial copies would be on other nodes
        plan = _better_layers(trivial, plan, tokens)
    if previous is None:
        return plan
    plan = maximize_overlap(plan, previous, layout)
    if not (previous.physical_to_logical == EMPTY).any():
        plan = _better_layers(_exchanged(previous, tokens, layout), plan, tokens, min_gain)
    return _better_layers(previous, plan, tokens, min_gain)


def summed_counts(counts: ArrayLike, num_experts: int) -> FloatArray:
    """[L, E] or [S, L, E] -> float64 [L, E]. Raises ConfigError for another shape or invalid counts."""
    tokens = np.asarray(counts, dtype=np.float64)
    if tokens.ndim == 3:
        tokens = tokens.sum(axis=0)
    if tokens.ndim != 2 or tokens.shape[1] != num_experts:
        shape = list(np.shape(counts))
        raise ConfigError(
            f"logical_count has shape {shape}; this model needs [layers, {num_experts}], or passes in front"
        )
    if not np.isfinite(tokens).all() or tokens.min(initial=0) < 0:
        raise ConfigError("logical_count holds negative or infinite counts")
    return tokens


def _hierarchical(tokens: FloatArray, layout: ExpertLayout) -> ExpertPlacement:
    """Groups to nodes, copies inside a node, copies to the node's ranks. With one node this is the global policy."""
    num_layers, num_nodes = len(tokens), layout.num_nodes
    experts = _experts_by_node(tokens, layout)  # [L * nodes, E / nodes]
    node_tokens = np.take_along_axis(np.repeat(tokens, num_nodes, axis=0), experts, axis=1)
    slots = replicate(node_tokens, layout.num_physical // num_nodes, layout.ranks_per_node)  # indices into `experts`
    copies = _copies(slots, experts.shape[1])
    share = np.take_along_axis(node_tokens / copies, slots, axis=1)
    items = pack(share, slots, layout.ranks_per_node)
    physical = np.take_along_axis(experts, np.take_along_axis(slots, items, axis=1), axis=1)
    table = physical.reshape(num_layers, layout.num_physical).astype(np.int32)
    return ExpertPlacement(table, layout.num_experts, layout.num_ranks)


def _experts_by_node(tokens: FloatArray, layout: ExpertLayout) -> IdArray:
    """[L * nodes, E / nodes]: the experts of each node, whole groups."""
    num_layers, num_groups = len(tokens), layout.num_groups
    if layout.num_nodes == 1:
        return np.tile(np.arange(layout.num_experts), (num_layers, 1))
    load = tokens.reshape(num_layers, num_groups, -1).sum(axis=2)
    groups = pack(load, np.tile(np.arange(num_groups), (num_layers, 1)), layout.num_nodes)  # [L, groups]
    size = layout.num_experts // num_groups
    members = groups[:, :, None] * size + np.arange(size)
    return members.reshape(num_layers * layout.num_nodes, layout.num_experts // layout.num_nodes)


def _copies(slots: IdArray, num_experts: int) -> IdArray:
    """[N, M] slots -> [N, E] copies of each expert."""
    rows = np.arange(len(slots))[:, None]
    return np.bincount((slots + rows * num_experts).ravel(), minlength=len(slots) * num_experts).reshape(len(slots), -1)


def _exchanged(previous: ExpertPlacement, tokens: FloatArray, layout: ExpertLayout) -> ExpertPlacement:
    """`previous` after balancing exchanges between ranks (of a node); experts keep their numbers of copies."""
    table = previous.physical_to_logical.astype(np.int64)
    owners = table.reshape(len(tokens) * layout.num_nodes, -1)
    share = np.take_along_axis(tokens / np.maximum(previous.num_valid, 1), table, axis=1).reshape(owners.shape)
    unchanged = np.tile(np.arange(owners.shape[1]), (len(owners), 1))
    items = exchange(unchanged, share, owners, layout.ranks_per_node)
    exchanged = np.take_along_axis(owners, items, axis=1).reshape(table.shape).astype(np.int32)
    return ExpertPlacement(exchanged, layout.num_experts, layout.num_ranks)


def _better_layers(
    kept: ExpertPlacement, plan: ExpertPlacement, tokens: FloatArray, min_gain: float = 0.0
) -> ExpertPlacement:
    """`plan`, but `kept` in each layer where the plan does not improve by more than `min_gain`."""
    gain = layer_balancedness(rank_loads(plan, tokens)) - layer_balancedness(rank_loads(kept, tokens))  # [L]
    worth = gain > max(min_gain, 1e-9)
    worth |= (kept.num_valid == 0).any(axis=1)  # an incomplete layer cannot stay
    table = np.where(worth[:, None], plan.physical_to_logical, kept.physical_to_logical)
    return ExpertPlacement(table, plan.num_experts, plan.num_ranks)
