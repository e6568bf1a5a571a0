"""Expert load of a simulation: the cost of straggler ranks, and the gain of EPLB and redundant experts.

Placement, EPLB and the order of moves are those of the engine (`moe_engine.parallel.placement`); the traffic has the
same share of tokens for an expert in every pass. Ranks of a layer wait for the busiest one, so a pass is slower by the
mean over the layers of (busiest rank / mean rank).

Legend: L layers, E experts, G ranks, P slots.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
from numpy.typing import NDArray

from moe_engine.errors import ConfigError
from moe_engine.parallel.expert_settings import ExpertSettings, RebalanceSettings
from moe_engine.parallel.placement.balance import balancedness, rank_loads
from moe_engine.parallel.placement.layout import ExpertLayout
from moe_engine.parallel.placement.moves import Chunk, plan_moves
from moe_engine.parallel.placement.placement import ExpertPlacement
from moe_engine.parallel.placement.policies import MIN_GAIN, plan_placement
from moe_engine.parallel.placement.sources import from_any

SCALE = 1 << 40
"""Tokens of a layer in drawn counts, which the placement needs as whole numbers."""


def zipf_counts(exponent: float, moe_layers: Sequence[bool], num_experts: int, seed: int) -> NDArray[np.int64]:
    """Counts [L, E]: the expert at place i of a layer gets a share of 1 / i**exponent; the order is drawn per layer.

    Args:
        moe_layers: whether a layer has experts; other layers have no counts.
    """
    rng = np.random.default_rng(seed)
    weights = np.arange(1, num_experts + 1, dtype=np.float64) ** -exponent
    counts = np.zeros((len(moe_layers), num_experts), np.int64)
    for layer in np.flatnonzero(moe_layers):
        counts[layer] = rng.permutation(np.rint(weights / weights.sum() * SCALE).astype(np.int64))
    return counts


@dataclass(frozen=True)
class ExpertLoad:
    """Traffic of a model, and a launch's placement of its experts.

    Args:
        counts: tokens of each logical expert, [L, E]; layers without experts have none.
        layout: sizes of the placement.
        settings: `--init-expert-location`, `--eplb-algorithm`, `--enable-eplb` and its intervals.

    Raises:
        ConfigError: the counts or the location are of another model.
    """

    counts: NDArray[np.int64]
    layout: ExpertLayout
    settings: ExpertSettings

    def first_placement(self) -> ExpertPlacement:
        return from_any(self.settings.location, self.layout, len(self.counts), self.settings.policy)

    def planned(self, layout: ExpertLayout | None = None) -> ExpertPlacement:
        """EPLB's placement for this traffic."""
        return plan_placement(self.counts, layout or self.layout, self.settings.policy)

    def factors(self, placement: ExpertPlacement) -> NDArray[np.float64]:
        """[layers with tokens]: busiest rank over the mean."""
        loads = rank_loads(placement, self.counts)  # [L, G]
        used = loads[loads.any(axis=1)]
        busiest: NDArray[np.float64] = used.max(axis=1) / used.mean(axis=1)
        return busiest

    def straggler(self, placement: ExpertPlacement) -> tuple[int, float]:
        """The rank with the most tokens over all layers, and its tokens over the mean."""
        tokens = rank_loads(placement, self.counts).sum(axis=0)
        return int(tokens.argmax()), float(tokens.max() / tokens.mean())

    def gains(self) -> dict[str, float]:
        """Busiest rank over the mean (mean of the layers): without EPLB, with it, and with one more redundant
        expert a rank."""
        layout = self.layout
        more = replace(layout, num_redundant=layout.num_redundant + layout.num_ranks)
        options = {
            "trivial": ExpertPlacement.trivial(layout, len(self.counts)),
            "eplb": self.planned(),
            f"eplb, {more.num_redundant} redundant experts": self.planned(more),
        }
        return {name: float(self.factors(placement).mean()) for name, placement in options.items()}


def check_counts(counts: NDArray[np.int64], num_layers: int, num_experts: int, source: str) -> NDArray[np.int64]:
    """Counts [L, E] of this model. Raises ConfigError: they are of another model, or empty."""
    if counts.shape != (num_layers, num_experts):
        raise ConfigError(
            f"{source}: has {counts.shape[0]} layers x {counts.shape[1]} experts, the model of --model-path has "
            f"{num_layers} x {num_experts}; record it with this model"
        )
    if counts.min() < 0 or not counts.any():
        raise ConfigError(f"{source}: holds no tokens or negative counts; record it again while requests run")
    return counts


class Balancer:
    """Skew of a replica's experts over its passes; rebalances as `EPLBManager` does, with transfers behind the passes.

    Attributes:
        skew: busiest rank over the mean, mean of the layers.
        rebalances: completed ones.
        left: passes in which `skew` is unchanged.
    """

    def __init__(self, load: ExpertLoad) -> None:
        self._load = load
        self.placement = load.first_placement()
        self._factors = load.factors(self.placement)
        self._places = np.cumsum(load.counts.any(axis=1)) - 1  # layer -> index into factors
        self.first_skew = self.skew = float(self._factors.mean())
        self.rebalances = 0
        self._settings: RebalanceSettings | None = load.settings.rebalance
        self._moves: Iterator[list[Chunk]] = iter(())
        self._planned: ExpertPlacement | None = None
        self.left = 1 << 62 if self._settings is None else self._settings.interval + 1

    def passed(self, passes: int) -> None:
        """Counts passes, at most `left`."""
        self.left -= passes
        if self.left or self._settings is None:
            return
        chunks = next(self._moves, None)
        if chunks is None:
            self._between(self._settings)
            return
        for chunk in chunks:
            self._apply(chunk)
        self.skew = float(self._factors.mean())
        self.left = 1

    def _between(self, settings: RebalanceSettings) -> None:
        """Handles the end of moves, or of an interval."""
        if self._planned is not None:
            self.placement, self._planned = self._planned, None
            self.rebalances += 1
            self._settings = None  # the same traffic in the next interval: nothing more to move
            self.left = 1 << 62
            return
        load = self._load
        self.left = settings.interval + 1
        if balancedness(self.placement, load.counts) > settings.enough:
            return
        planned = plan_placement(load.counts, load.layout, load.settings.policy, self.placement, MIN_GAIN)
        by_layer: dict[int, deque[Chunk]] = {}
        for chunk in plan_moves(self.placement, planned, num_nodes=load.layout.num_nodes):
            by_layer.setdefault(chunk.layer, deque()).append(chunk)
        if by_layer:
            self._planned, self.left = planned, 1
            self._moves = _by_pass(deque(by_layer.values()), settings.layers_at_once)

    def _apply(self, chunk: Chunk) -> None:
        load = self._load
        moved = ExpertPlacement(np.array([chunk.table]), load.layout.num_experts, load.layout.num_ranks)
        tokens = rank_loads(moved, load.counts[chunk.layer : chunk.layer + 1])[0]
        if tokens.any():
            self._factors[self._places[chunk.layer]] = tokens.max() / tokens.mean()


def _by_pass(pending: deque[deque[Chunk]], layers_at_once: int) -> Iterator[list[Chunk]]:
    """One chunk of each of the first layers in a pass."""
    while pending:
        active = [pending.popleft() for _ in range(min(layers_at_once, len(pending)))]
        yield [chunks.popleft() for chunks in active]
        pending.extendleft(chunks for chunks in reversed(active) if chunks)


def figures(load: ExpertLoad, balancers: list[Balancer]) -> dict[str, Any]:
    """Figures of the result: first and last skew, rebalances, the straggler rank, and the skew of other placements."""
    last = balancers[0]
    rank, share = load.straggler(last.placement)
    return {
        "skew_first": last.first_skew,
        "skew_last": last.skew,
        "rebalances": sum(balancer.rebalances for balancer in balancers),
        "straggler_rank": rank,
        "straggler_load": share,
        "skew_of_placements": load.gains(),
    }
