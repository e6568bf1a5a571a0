"""The exchange that knows nodes: a token crosses to another node once, and is handed on inside it.

First hop: to the rank with the same place in every node that holds any of the token's experts. Second hop: inside the
node to the ranks that hold them. The sums go back the same handle: one row a token and node returns over the network.
Ranks are numbered node by node: rank = node * ranks per node + place.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.parallel.dispatch.protocol import Exchange, Tokens


class TwoHop:
    """Two exchanges in a row.

    Args:
        between_nodes: over the ranks with this rank's place, one of each node, in the order of the nodes.
        inside_node: over the ranks of this node; what arrives from the first hop is its tokens, so it must take
            as many as can arrive, and its experts are those of the node.
    """

    def __init__(self, between_nodes: Exchange, inside_node: Exchange) -> None:
        self._between = between_nodes
        self._inside = inside_node

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Any]:
        in_node, way_between = self._between.deliver(tokens, slot)
        arrived, way_inside = self._inside.deliver(in_node, slot)
        return arrived, (way_between, way_inside)

    def collect(self, partial: Tensor, handle: Any) -> Tensor:
        way_between, way_inside = handle
        return self._between.collect(self._inside.collect(partial, way_inside), way_between)
