"""One rank of many without the others: groups whose operations give tensors of the right shape and nothing in them."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.models.config import ModelConfig
from moe_engine.models.sharding import dispatch_shape
from moe_engine.parallel.collectives import Group, SingleRank
from moe_engine.parallel.context import ParallelContext, with_dispatcher
from moe_engine.parallel.dispatch.symm_mem.memory import SharedBytes
from moe_engine.parallel.dispatch.tables import DispatchChoice
from moe_engine.parallel.topology import RankLists, Topology


class AbsentRanks:
    """A `Group` of which only rank 0 exists; every rank is taken to send what this one does."""

    rank = 0
    timeout_s = 0.0
    alive: Tensor | None = None

    def __init__(self, size: int, device: torch.device) -> None:
        self.size = size
        self.device = device

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        """Nothing arrives in `out`."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.empty_like(x[0], memory_format=torch.contiguous_format)

    def all_reduce(self, x: Tensor) -> Tensor:
        return x

    def broadcast(self, x: Tensor, source: int) -> Tensor:
        return x

    def exchange_ints(self, values: Sequence[int]) -> list[int]:
        return list(values)

    def barrier(self) -> None:
        """Nobody to wait for."""

    def check(self) -> None:
        """Nobody can be lost."""


class AbsentPeerMemory:
    """A `PeerMemory` of ranks that do not exist."""

    def allocate(self, group: Group, num_bytes: int) -> SharedBytes:
        return SharedBytes(torch.empty(num_bytes, dtype=torch.uint8, device=group.device), [0] * group.size)

    def words_for_host(self, count: int) -> Tensor:
        return torch.zeros(count, dtype=torch.int32)


def first_rank(topology: Topology, device: torch.device) -> ParallelContext:
    """Rank 0's context, without a dispatcher."""

    def group(lists: RankLists) -> Group:
        size = len(next(ranks for ranks in lists if 0 in ranks))
        return SingleRank(device) if size == 1 else AbsentRanks(size, device)

    return ParallelContext(
        topology=topology,
        world=group([list(range(topology.tp_size))]),
        attn_tp=group(topology.attn_tp_groups()),
        moe_tp=group(topology.moe_tp_groups()),
        ep=group(topology.ep_groups()),
        node=group(topology.node_groups()),
        rails=group(topology.rail_groups()),
    )


def with_exchange(
    parallel: ParallelContext,
    model: ModelConfig,
    choice: DispatchChoice,
    dtype: torch.dtype,
    max_tokens: int,
    decode_tokens: int,
) -> ParallelContext:
    """The context with the dispatcher of that choice. Raises what a library raises that needs its GPU to exist."""
    shape = dispatch_shape(model, parallel, dtype, max_tokens)
    return with_dispatcher(parallel, choice, shape, decode_tokens, AbsentPeerMemory())
