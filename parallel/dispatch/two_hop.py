"""Two-hop (hierarchical) dispatch: a token is sent to another node once, and forwarded inside it.

First hop: to the rank with the same local rank in every node with an expert of the token. Second hop: inside the node
to the experts' ranks. The sums return by the same hops: one row per token and node over the network. Ranks are numbered
node by node: rank = node * ranks per node + local rank.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.parallel.dispatch.protocol import Exchange, Tokens


class TwoHop:
    """Two exchanges in a row.

    Args:
        between_nodes: over the ranks with this local rank, one per node, in node order.
        inside_node: over the ranks of this node; its input tokens are the tokens received in the first hop, so it must
            support their max number, and its experts are the node's.
    """

    def __init__(self, between_nodes: Exchange, inside_node: Exchange) -> None:
        self._between = between_nodes
        self._inside = inside_node

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, Any]:
        in_node, between_handle = self._between.deliver(tokens, slot)
        arrived, inside_handle = self._inside.deliver(in_node, slot)
        return arrived, (between_handle, inside_handle)

    def collect(self, partial: Tensor, handle: Any) -> Tensor:
        between_handle, inside_handle = handle
        return self._between.collect(self._inside.collect(partial, inside_handle), between_handle)
