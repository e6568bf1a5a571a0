"""Simulates rank 0 without the other ranks: groups whose operations return uninitialized tensors of the right shape."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation_choice import permutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.models.config import ModelConfig
from moe_engine.models.sharding import dispatch_shape
from moe_engine.parallel.collectives import Group, SingleRank
from moe_engine.parallel.context import ParallelContext, with_dispatcher
from moe_engine.parallel.dispatch.all_to_all import VariableAllToAll, VariableHandle
from moe_engine.parallel.dispatch.build import PhasedDispatcher
from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher
from moe_engine.parallel.dispatch.layouts import GroupedLayout
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Mode, Phase, Tokens
from moe_engine.parallel.dispatch.symm_mem.memory import SharedBytes
from moe_engine.parallel.dispatch.tables import DispatchChoice
from moe_engine.parallel.topology import RankLists, Topology


class AbsentRanks(SingleRank):
    """A `Group` of which only rank 0 exists; every rank is assumed to send the same as rank 0."""

    def __init__(self, size: int, device: torch.device) -> None:
        super().__init__(device)
        self.size = size

    def all_to_all(
        self, out: Tensor, x: Tensor, out_rows: Sequence[int] | None = None, x_rows: Sequence[int] | None = None
    ) -> None:
        """Leaves `out` unchanged."""

    def all_gather(self, x: Tensor) -> Tensor:
        return x.new_empty(self.size, *x.shape)

    def reduce_scatter(self, x: Tensor) -> Tensor:
        return torch.empty_like(x[0], memory_format=torch.contiguous_format)


class AbsentSymmetricMemory:
    """A `SymmetricMemory` of ranks that do not exist."""

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


UNLIMITED = 1 << 20
"""Tokens of a dispatch."""


class _EvenAllToAll(VariableAllToAll):
    """The number of received rows is unknown without tensor values, so it equals the number of sent rows."""

    def deliver(self, tokens: Tokens, slot: int) -> tuple[Tokens, VariableHandle]:
        self._num_tokens = len(tokens.ids)
        return super().deliver(tokens, slot)

    def _exchange_sizes(self, num_sent: Tensor) -> tuple[list[int], list[int]]:
        sizes = [self._num_tokens] + [0] * (len(num_sent) - 1)
        return sizes, sizes


class _EvenLayout(GroupedLayout):
    """A layout in which every choice selects an expert of this rank."""

    def _count(self, tokens: Tokens, offsets: Tensor, alignment: int) -> int:
        return -(-tokens.ids.numel() // alignment) * alignment


def even_routes(group: Group, shape: DispatchShape) -> Dispatcher:
    """A normal-mode `Dispatcher` of ranks that do not exist, with the kernels of all_to_all.

    Unlimited: exercised steps mix decodes and prompts beyond the budget of a step.
    """
    shape = replace(shape, max_tokens=UNLIMITED)
    rows = permutation(shape.dtype, "cuda")
    return ExchangedDispatcher(
        shape, _EvenAllToAll(group, shape, rows), _EvenLayout(shape, rows, group.device), checks=None
    )


class _Phase(Dispatcher):
    """One phase of a `PhasedDispatcher`, as a `Dispatcher`."""

    def __init__(self, whole: PhasedDispatcher, phase: Phase) -> None:
        self._whole, self._phase, self.takes_rows = whole, phase, whole.takes_rows()[phase]

    def dispatch(
        self, x: Activation, topk_ids: Tensor, topk_weights: Tensor, format: ActivationFormat = UNQUANTIZED
    ) -> tuple[ExpertBatch, Any]:
        return self._whole.dispatch(x, topk_ids, topk_weights, self._phase, format)

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: Any) -> Tensor:
        return self._whole.combine(rows, topk_weights, handle)


def with_exchange(
    parallel: ParallelContext,
    model: ModelConfig,
    choice: DispatchChoice,
    dtype: torch.dtype,
    max_tokens: int,
    decode_tokens: int,
) -> ParallelContext:
    """The context with the chosen dispatcher; normal mode launches the kernels of all_to_all. Propagates errors of
    libraries that need a real GPU."""
    shape = dispatch_shape(model, parallel, dtype, max_tokens)
    fixed: dict[Phase, Mode] = {phase: mode for phase, mode in choice.modes.items() if mode == "low_latency"}
    by_phase: dict[Phase, Dispatcher] = {phase: even_routes(parallel.ep, shape) for phase in choice.modes}
    if fixed:
        made = with_dispatcher(parallel, replace(choice, modes=fixed), shape, decode_tokens, AbsentSymmetricMemory())
        assert made.dispatcher is not None
        by_phase |= {phase: _Phase(made.dispatcher, phase) for phase in fixed}
    return replace(parallel, dispatcher=PhasedDispatcher(lambda: by_phase), decode_tokens=decode_tokens)
