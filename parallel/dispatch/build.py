"""Builds a rank's dispatchers from a choice: one per mode in use, and the dispatcher that selects by phase."""

from __future__ import annotations

import logging
from collections.abc import Callable
from dataclasses import dataclass, replace
from types import ModuleType
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertBatch
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.permutation_choice import permutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, Activation, ActivationFormat
from moe_engine.kernels.vendors.probe import MEGA_MOE
from moe_engine.parallel.collectives import Group
from moe_engine.parallel.dispatch.all_to_all import StaticAllToAll, VariableAllToAll
from moe_engine.parallel.dispatch.allgather import AllGather
from moe_engine.parallel.dispatch.deepep import generation, legacy, startup
from moe_engine.parallel.dispatch.deepep.expanded import ElasticDispatcher, make_memory
from moe_engine.parallel.dispatch.exchanged import ExchangedDispatcher, LocalExchange
from moe_engine.parallel.dispatch.host_all_to_all import HostAllToAll
from moe_engine.parallel.dispatch.host_memory import ROOM_TOKENS
from moe_engine.parallel.dispatch.layouts import GroupedLayout, PaddedLayout
from moe_engine.parallel.dispatch.mega_moe import MegaDispatcher, make_buffer
from moe_engine.parallel.dispatch.protocol import Dispatcher, DispatchShape, Exchange, Layout, Mode, NormedSum, Phase
from moe_engine.parallel.dispatch.shared_memory import SharedMemory
from moe_engine.parallel.dispatch.tables import DispatchChoice
from moe_engine.parallel.dispatch.two_hop import TwoHop

if TYPE_CHECKING:
    from moe_engine.parallel.dispatch.symm_mem.memory import SymmetricMemory
    from moe_engine.parallel.dispatch.symm_mem.nvshmem import Shuffles
    from moe_engine.parallel.dispatch.symm_mem.nvshmem4py import Nvshmem


logger = logging.getLogger(__name__)


@dataclass(frozen=True)
class Groups:
    """The ranks that share a layer's experts.

    Attributes:
        experts: all ranks, in the order of their experts.
        node: ranks of this host; rails: ranks with this local rank, one per host. Needed by two_hop.
        process_group: torch's process group of `experts`; needed by deepep, symm_mem and nvshmem.
        deep_ep: the library; None imports it. deepep_version: see `deepep.generation.VERSIONS`.
        symm_mem: symmetric memory provider of symm_mem; None: torch's.
        nvshmem, shuffles: NVSHMEM's operations; None: those of its Python package, or of torch.
        on_host: True if the host permutes rows itself and may wait in every mode; None: as for the group of `experts`.
        permutation: permute/unpermute kernels; None: this machine's best.
        deep_gemm: the library of megamoe; None imports it.
    """

    experts: Group
    node: Group | None = None
    rails: Group | None = None
    process_group: Any = None
    deep_ep: ModuleType | None = None
    deepep_version: str = "auto"
    symm_mem: SymmetricMemory | None = None
    nvshmem: Nvshmem | None = None
    shuffles: Shuffles | None = None
    on_host: bool | None = None
    permutation: Permutation | None = None
    deep_gemm: ModuleType | None = None

    @property
    def num_nodes(self) -> int:
        return 1 if self.rails is None else self.rails.size

    @property
    def host_arranges(self) -> bool:
        return self.experts.on_host if self.on_host is None else self.on_host

    def permutation_of(self, shape: DispatchShape) -> Permutation:
        return self.permutation or permutation(shape.dtype, self.experts.device.type)


def build(choice: DispatchChoice, shape: DispatchShape, decode_tokens: int, groups: Groups) -> PhasedDispatcher:
    """Collective over `groups.experts`.

    Args:
        shape: `max_tokens` is a rank's max tokens in any phase.
        decode_tokens: max tokens in low latency: its buffers, and on a device its messages, always have this size.
    """
    decode_shape = replace(shape, max_tokens=decode_tokens)
    sizes: dict[Mode, DispatchShape] = {"normal": shape, "low_latency": decode_shape}
    wanted = list(dict.fromkeys(choice.modes.values()))

    def by_phase() -> dict[Phase, Dispatcher]:
        made = dict(zip(wanted, _make(choice, groups, {mode: sizes[mode] for mode in wanted})))
        return {phase: made[mode] for phase, mode in choice.modes.items()}

    return PhasedDispatcher(by_phase)


def _make(choice: DispatchChoice, groups: Groups, shapes: Shapes) -> list[Dispatcher]:
    """The dispatchers of these modes, by the row or the one instead of it; all ranks raise the same errors."""
    row = choice.row
    try:
        return _MAKERS[row.name](groups, shapes)
    except ValueError as error:
        if choice.named or row.instead is None:
            raise
        logger.warning("dispatch: using %s instead of %s: %s", row.instead, row.name, error)
        return _MAKERS[row.instead](groups, shapes)


class PhasedDispatcher:
    """The dispatcher of each phase. All ranks of the group must use the same phase, given by the step's plan.

    Args:
        make: constructs them; collective over the group.
    """

    def __init__(self, make: Callable[[], dict[Phase, Dispatcher]]) -> None:
        self._make = make
        self._by_phase = make()

    def renew(self) -> None:
        """Rebuilds all dispatchers for the group's live ranks; pending dispatches are dropped. Collective."""
        self._by_phase = self._make()

    def takes_rows(self) -> dict[Phase, bool]:
        """See `Dispatcher.takes_rows`."""
        return {phase: dispatcher.takes_rows for phase, dispatcher in self._by_phase.items()}

    def reads_int64(self, phase: Phase) -> bool:
        """See `Dispatcher.reads_int64`."""
        return self._by_phase[phase].reads_int64 if phase in self._by_phase else False

    def dispatch(
        self,
        x: Activation,
        topk_ids: Tensor,
        topk_weights: Tensor,
        phase: Phase,
        format: ActivationFormat = UNQUANTIZED,
    ) -> tuple[ExpertBatch, tuple[Dispatcher, Any]]:
        """See `Dispatcher.dispatch`; in the phase's mode."""
        dispatcher = self._by_phase[phase]
        batch, handle = dispatcher.dispatch(x, topk_ids, topk_weights, format)
        return batch, (dispatcher, handle)

    def combine(self, rows: Tensor, topk_weights: Tensor, handle: tuple[Dispatcher, Any]) -> Tensor:
        """See `Dispatcher.combine`; with the dispatcher of the handle."""
        dispatcher, inner = handle
        return dispatcher.combine(rows, topk_weights, inner)

    def start_dispatch(
        self,
        x: Activation,
        topk_ids: Tensor,
        topk_weights: Tensor,
        phase: Phase,
        format: ActivationFormat = UNQUANTIZED,
    ) -> Callable[[], tuple[ExpertBatch, tuple[Dispatcher, Any]]]:
        """See `Dispatcher.start_dispatch`; in the phase's mode."""
        dispatcher = self._by_phase[phase]
        receive = dispatcher.start_dispatch(x, topk_ids, topk_weights, format)

        def finish() -> tuple[ExpertBatch, tuple[Dispatcher, Any]]:
            batch, handle = receive()
            return batch, (dispatcher, handle)

        return finish

    def start_combine(self, rows: Tensor, topk_weights: Tensor, handle: tuple[Dispatcher, Any]) -> Callable[[], Tensor]:
        """See `Dispatcher.start_combine`; with the dispatcher of the handle."""
        dispatcher, inner = handle
        return dispatcher.start_combine(rows, topk_weights, inner)

    def norms_sums(self, phase: Phase) -> bool:
        """See `Dispatcher.norms_sums`."""
        return self._by_phase[phase].norms_sums

    def start_combine_norm(self, rows: Tensor, topk_weights: Tensor, handle: tuple[Dispatcher, Any]) -> NormedSum:
        """See `Dispatcher.start_combine_norm`; with the dispatcher of the handle."""
        dispatcher, inner = handle
        return dispatcher.start_combine_norm(rows, topk_weights, inner)

    def check_peers(self) -> None:
        """See `Dispatcher.check_peers`; for all phases, at the end of a step when its results are available."""
        for dispatcher in self._by_phase.values():
            dispatcher.check_peers()


Shapes = dict[Mode, DispatchShape]
Maker = Callable[[Groups, Shapes], list[Dispatcher]]


def _exchanged(make_exchange: Callable[[Groups, DispatchShape, bool], Exchange]) -> Maker:
    """Dispatchers of own exchanges: grouped rows in normal mode, padded rows in low latency; on the host grouped
    rows in both."""

    def make(groups: Groups, shapes: Shapes) -> list[Dispatcher]:
        made: list[Dispatcher] = []
        for mode, shape in shapes.items():
            static = mode == "low_latency"
            made.append(_with_layout(groups, shape, make_exchange(groups, shape, static), static))
        return made

    return make


def _with_layout(groups: Groups, shape: DispatchShape, exchange: Exchange, static: bool) -> ExchangedDispatcher:
    """With the batch layout of the experts; on the host and in normal mode with a check of the router's choices. On a
    device the check would wait for each layer, and routers there give valid ids by construction."""
    rows, device = groups.permutation_of(shape), groups.experts.device
    padded = static and not groups.host_arranges
    layout: Layout = PaddedLayout(shape, rows, device) if padded else GroupedLayout(shape, rows, device)
    return ExchangedDispatcher(shape, exchange, layout, checks=rows if groups.host_arranges and not static else None)


def _all_to_all(groups: Groups, group: Group, shape: DispatchShape, static: bool) -> Exchange:
    if groups.host_arranges:
        return HostAllToAll(group, shape, shape.max_tokens if static else ROOM_TOKENS, groups.permutation_of(shape))
    return StaticAllToAll(group, shape) if static else VariableAllToAll(group, shape, groups.permutation_of(shape))


def _shared_memory(groups: Groups, shape: DispatchShape) -> Exchange:
    return SharedMemory(groups.experts, shape, groups.permutation_of(shape))


def _two_hop(groups: Groups, shape: DispatchShape, static: bool) -> Exchange:
    if groups.node is None or groups.rails is None:
        raise ValueError("two_hop needs the groups of the node and of the rails")
    num_nodes = groups.rails.size
    between = replace(shape, num_ranks=num_nodes)
    inside = replace(
        shape,
        num_ranks=groups.node.size,
        num_experts=shape.num_experts // num_nodes,
        max_tokens=shape.max_tokens * num_nodes,
    )
    return TwoHop(_all_to_all(groups, groups.rails, between, static), _all_to_all(groups, groups.node, inside, static))


def _deepep(groups: Groups, shapes: Shapes) -> list[Dispatcher]:
    """The generation given by the flag, or the newest in the library; one buffer for both modes."""
    library = groups.deep_ep or startup.load(groups.num_nodes)
    found = generation.generation_of(library, groups.deepep_version)
    _agree_on(found, groups.experts)
    startup.connect(groups.process_group, groups.experts.device)
    if found == "Buffer":
        return _legacy(library, groups, shapes)
    largest = max(shapes.values(), key=lambda shape: shape.max_tokens)
    memory = make_memory(library, groups.process_group, groups.experts, largest)
    return [
        ElasticDispatcher(library, memory, shape, mode == "low_latency", groups.permutation_of(shape))
        for mode, shape in shapes.items()
    ]


def _agree_on(found: generation.Generation, group: Group) -> None:
    """Raises ValueError if the ranks have different libraries, which would wait for each other forever."""
    names = list(generation.OF_VERSION.values())
    of_ranks = group.all_gather(torch.tensor([names.index(found)], device=group.device)).flatten().tolist()
    if len(set(of_ranks)) > 1:
        listed = ", ".join(f"rank {rank}: {names[index]}" for rank, index in enumerate(of_ranks))
        raise ValueError(f"the ranks have different DeepEP libraries ({listed}); give --deepep-version")


def _legacy(library: ModuleType, groups: Groups, shapes: Shapes) -> list[Dispatcher]:
    """Normal mode across nodes cleans the buffer after use."""
    low_latency = legacy.rounded(shapes["low_latency"]) if "low_latency" in shapes else None
    buffer = legacy.make_buffer(library, groups.process_group, low_latency or shapes["normal"], low_latency is not None)
    made: list[Dispatcher] = []
    for mode, shape in shapes.items():
        if mode == "low_latency":
            made.append(legacy.LegacyLowLatency(library, buffer, legacy.rounded(shape)))
            continue
        exchange = legacy.LegacyExchange(library, buffer, shape, cleans=low_latency)
        made.append(_with_layout(groups, shape, exchange, static=False))
    return made


def _symm_mem(groups: Groups, shapes: Shapes) -> list[Dispatcher]:
    """Low latency through symmetric memory; prefill, which waits for sizes anyway, by torch's all_to_all."""
    from moe_engine.parallel.dispatch.symm_mem.dispatcher import SymmMemDispatcher
    from moe_engine.parallel.dispatch.symm_mem.memory import TorchSymmetricMemory  # these two import Triton

    memory = groups.symm_mem or TorchSymmetricMemory(groups.process_group)
    return _with_low_latency(
        groups, shapes, "all_to_all", lambda shape: SymmMemDispatcher(groups.experts, shape, memory)
    )


def _megamoe(groups: Groups, shapes: Shapes) -> list[Dispatcher]:
    """One symmetric buffer for both modes."""
    library = groups.deep_gemm or MEGA_MOE.load()
    largest = max(shapes.values(), key=lambda shape: shape.max_tokens)
    buffer = make_buffer(library, groups.process_group, largest)
    return [MegaDispatcher(library, buffer, shape) for shape in shapes.values()]


def _nvshmem(groups: Groups, shapes: Shapes) -> list[Dispatcher]:
    """Low latency by NVSHMEM: its Python package if all ranks have it, else torch's shuffles. Prefill by the backend
    with the least traffic between nodes."""
    from moe_engine.parallel.dispatch.symm_mem import nvshmem4py
    from moe_engine.parallel.dispatch.symm_mem.nvshmem import NvshmemDispatcher, Shuffles

    memory = groups.nvshmem or (nvshmem4py.load(groups.experts) if groups.shuffles is None else None)
    nodes = groups.node is not None and groups.node.size > 1 and groups.rails is not None and groups.rails.size > 1
    prefill = "two_hop" if nodes else "all_to_all"
    if memory is not None:
        return _with_low_latency(
            groups, shapes, prefill,
            lambda shape: _with_layout(
                groups, shape, nvshmem4py.NvshmemAllToAll(groups.experts, shape, memory), static=True
            ),
        )  # fmt: skip
    shuffles = groups.shuffles or Shuffles(groups.process_group)
    return _with_low_latency(
        groups, shapes, prefill,
        lambda shape: NvshmemDispatcher(groups.experts, shape, shuffles, groups.permutation_of(shape)),
    )  # fmt: skip


def _with_low_latency(
    groups: Groups, shapes: Shapes, prefill: str, make: Callable[[DispatchShape], Dispatcher]
) -> list[Dispatcher]:
    """`make`'s dispatcher in low latency, another backend's in normal mode."""
    return [
        make(shape) if mode == "low_latency" else _MAKERS[prefill](groups, {mode: shape})[0]
        for mode, shape in shapes.items()
    ]


_MAKERS: dict[str, Maker] = {
    "local": _exchanged(lambda groups, shape, static: LocalExchange()),
    "deepep": _deepep,
    "all_to_all": _exchanged(lambda groups, shape, static: _all_to_all(groups, groups.experts, shape, static)),
    "allgather": _exchanged(lambda groups, shape, static: AllGather(groups.experts, shape, static)),
    "shared_memory": _exchanged(lambda groups, shape, static: _shared_memory(groups, shape)),
    "symm_mem": _symm_mem,
    "nvshmem": _nvshmem,
    "megamoe": _megamoe,
    "two_hop": _exchanged(_two_hop),
}
