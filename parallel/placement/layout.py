"""Numbers of experts, slots, ranks and nodes, and their divisibility.

Legend: E logical experts, P slots, G ranks.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.errors import ConfigError


@dataclass(frozen=True)
class ExpertLayout:
    """The sizes of a placement.

    Args:
        num_experts: logical experts of a layer (E).
        num_ranks: expert-parallel ranks (G), numbered node by node.
        num_redundant: slots beyond one per expert (``--ep-num-redundant-experts``).
        num_nodes: nodes; ranks are evenly distributed.
        num_groups: expert groups of the router; 1 if it has none.

    Raises:
        ConfigError: the sizes do not divide; the message has the nearest valid sizes.
    """

    num_experts: int
    num_ranks: int = 1
    num_redundant: int = 0
    num_nodes: int = 1
    num_groups: int = 1

    def __post_init__(self) -> None:
        if min(self.num_experts, self.num_ranks, self.num_nodes, self.num_groups) < 1 or self.num_redundant < 0:
            raise ConfigError(f"{self}: sizes are at least 1, redundant experts at least 0")
        over = self.num_physical % self.num_ranks
        if over:
            fitting = self.num_redundant + self.num_ranks - over
            raise ConfigError(
                f"--ep-num-redundant-experts {self.num_redundant}: {self.num_experts} experts plus these are "
                f"{self.num_physical} slots, not a multiple of --ep-size {self.num_ranks}; {fitting} are valid"
            )
        if self.num_ranks % self.num_nodes:
            raise ConfigError(f"--ep-size {self.num_ranks} is not a multiple of the {self.num_nodes} nodes (--nnodes)")
        if self.num_experts % self.num_groups:
            raise ConfigError(f"{self.num_experts} experts cannot form {self.num_groups} equal groups")

    @property
    def num_physical(self) -> int:
        return self.num_experts + self.num_redundant

    @property
    def slots_per_rank(self) -> int:
        return self.num_physical // self.num_ranks

    @property
    def ranks_per_node(self) -> int:
        return self.num_ranks // self.num_nodes

    @property
    def groups_fit_nodes(self) -> bool:
        """True if nodes can hold whole expert groups, so that a token is sent only to its groups' nodes."""
        return self.num_groups > 1 and self.num_groups % self.num_nodes == 0
