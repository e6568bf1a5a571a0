"""A rank's coordinates in the parallel topology, and its groups. Passed to constructors; there is no global getter."""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import timedelta
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist

from moe_engine.parallel.collectives import DistributedGroup, Group, Observer, SingleRank
from moe_engine.parallel.expert_transfer import Link, PeerLink
from moe_engine.parallel.host_group import through_shared_memory
from moe_engine.parallel.topology import RankLists, Topology

if TYPE_CHECKING:
    from moe_engine.parallel.all_reduce.custom import CustomAllReduce
    from moe_engine.parallel.dispatch.build import PhasedDispatcher
    from moe_engine.parallel.dispatch.protocol import DispatchShape
    from moe_engine.parallel.dispatch.symm_mem.memory import SymmetricMemory
    from moe_engine.parallel.dispatch.tables import DispatchChoice
    from moe_engine.parallel.expert_tables import ExpertTables
    from moe_engine.parallel.overlap import Overlap

ONE_RANK = Topology()
ALONE: Group = SingleRank()


@dataclass(frozen=True)
class ParallelContext:
    """A rank's coordinates and groups; a single process has size 1 on every axis.

    Attributes:
        world: all ranks of the model. attn_tp: ranks of this rank's attention group. moe_tp: ranks that shard the same
            experts. ep: ranks with the other experts. node: ranks of this host; rails: ranks with the same local rank.
        dispatcher: dispatches tokens to their experts' ranks; set if `topology.travels`, see `with_dispatcher`.
        draft_dispatcher: the same of draft layers with another number of experts than the model's layers.
        decode_tokens: max tokens of a rank in its decode mode.
        experts: the expert in each slot; None: rank r of G holds experts r * E/G and on, once each.
    """

    topology: Topology = ONE_RANK
    world_rank: int = 0
    world: Group = ALONE
    attn_tp: Group = ALONE
    moe_tp: Group = ALONE
    ep: Group = ALONE
    node: Group = ALONE
    rails: Group = ALONE
    dispatcher: PhasedDispatcher | None = None
    draft_dispatcher: PhasedDispatcher | None = None
    decode_tokens: int = 0
    experts: ExpertTables | None = None
    overlap: Overlap | None = None
    """Computation that overlaps dispatch and combine; None: no overlap."""
    process_group: Any = None
    """torch's process group of the world, for libraries."""
    all_reduce: CustomAllReduce | None = None
    """Sums rows over the ranks of `world` with kernels of its own, fused with norms; None: the group's all-reduce."""

    def check_peers(self) -> None:
        """Raises `PeerLost` if a kernel timed out on a peer during a finished step (see `Dispatcher.check_peers`)."""
        for dispatcher in (self.dispatcher, self.draft_dispatcher):
            if dispatcher is not None:
                dispatcher.check_peers()
        if self.all_reduce is not None:
            self.all_reduce.check_peers()

    def expert_link(self) -> Link:
        """A new link that moves experts between the ranks of `ep`. Collective."""
        return PeerLink(self.topology.ep_groups(), self.world_rank, self.world.timeout_s, self.world.device)

    @property
    def world_size(self) -> int:
        return self.topology.tp_size

    @property
    def attn_tp_size(self) -> int:
        return self.topology.attn_tp_size

    @property
    def attn_tp_rank(self) -> int:
        return self.topology.attn_tp_rank(self.world_rank)

    @property
    def attn_dp_size(self) -> int:
        return self.topology.attn_dp_size

    @property
    def attn_dp_rank(self) -> int:
        return self.topology.attn_dp_rank(self.world_rank)

    @property
    def ep_size(self) -> int:
        return self.topology.ep_size

    @property
    def ep_rank(self) -> int:
        return self.topology.ep_rank(self.world_rank)

    @property
    def of_drafts(self) -> ParallelContext:
        """The context of draft layers with another number of experts, which stay where they are."""
        return replace(self, dispatcher=self.draft_dispatcher, experts=None)

    @property
    def redundant_experts(self) -> int:
        """Slots beyond one per expert."""
        return 0 if self.experts is None else self.experts.num_redundant


SINGLE = ParallelContext()


def join(
    topology: Topology,
    rank: int,
    timeout_s: float,
    device: torch.device | str = "cpu",
    backend: str | None = None,
    observe: Observer | None = None,
    share_memory: bool = True,
) -> ParallelContext:
    """The context of this rank. Collective over torch's default process group, whose size is `topology.tp_size`.

    Args:
        timeout_s: timeout after which a collective raises `PeerLost`.
        device: device of the communicated tensors.
        backend: backend of the process groups; None: the default group's.
        observe: called for every operation, see `DistributedGroup`.
        share_memory: CPU ranks of one host use shared-memory collectives where possible.
    """
    if topology.tp_size == 1:
        return ParallelContext(topology)
    if dist.get_world_size() != topology.tp_size:
        raise ValueError(f"torch.distributed has {dist.get_world_size()} ranks, --tp-size is {topology.tp_size}")
    made: dict[tuple[str, tuple[int, ...]], Any] = {}

    def process_group(lists: RankLists, use: str = "") -> Any:
        """This rank's one of these groups; all ranks create all groups in the same order, equal groups once per use."""
        for ranks in lists:
            if len(ranks) > 1 and (use, tuple(ranks)) not in made:
                group = dist.new_group(ranks, timeout=timedelta(seconds=timeout_s), backend=backend)
                made[use, tuple(ranks)] = group
        return next(made.get((use, tuple(ranks))) for ranks in lists if rank in ranks)

    groups: dict[tuple[str, tuple[int, ...]], Group] = {}

    def group(lists: RankLists, observe: Observer | None = observe, use: str = "") -> Group:
        found, key = process_group(lists, use), (use, tuple(next(ranks for ranks in lists if rank in ranks)))
        if found is None:
            return SingleRank(device)
        if key not in groups:
            plain = DistributedGroup(found, timeout_s, device, observe)
            shares = share_memory and plain.on_host and not use and on_one_host(lists)
            groups[key] = through_shared_memory(plain) if shares else plain
        return groups[key]

    def on_one_host(lists: RankLists) -> bool:
        per_host = topology.tp_size // topology.num_nodes
        return all(len({member // per_host for member in ranks}) == 1 for ranks in lists)

    all_ranks = [list(range(topology.tp_size))]
    return ParallelContext(
        topology=topology,
        world_rank=rank,
        world=group(all_ranks),
        # attention groups run different numbers of these operations, so the observed sequences are not comparable
        attn_tp=group(topology.attn_tp_groups(), observe if topology.attn_dp_size == 1 else None),
        moe_tp=group(topology.moe_tp_groups()),
        # dispatch may overlap other collectives: its groups are used for nothing else
        ep=group(topology.ep_groups(), use="experts"),
        node=group(topology.node_groups(), use="experts"),
        rails=group(topology.rail_groups(), use="experts"),
        process_group=process_group(all_ranks, "experts"),
    )


def with_dispatcher(
    parallel: ParallelContext,
    choice: DispatchChoice,
    shape: DispatchShape,
    decode_tokens: int,
    symm_mem: SymmetricMemory | None = None,
    drafts: DispatchShape | None = None,
) -> ParallelContext:
    """The context with the dispatcher shared by all layers. Collective over the model's ranks.

    Args:
        shape: `max_tokens` is a rank's max tokens: its share of its attention group's tokens.
        drafts: shape of `draft_dispatcher`; None: there is none.
        decode_tokens: the same in decode mode, used for decode-only steps up to this size.
        symm_mem: see `Groups`.
    """
    from moe_engine.parallel.dispatch.build import Groups, build

    groups = Groups(
        parallel.ep,
        parallel.node,
        parallel.rails,
        parallel.process_group,
        deepep_version=choice.deepep_version,
        symm_mem=symm_mem,
    )
    dispatcher = build(choice, shape, decode_tokens, groups)
    of_drafts = None if drafts is None else build(choice, drafts, decode_tokens, groups)
    return replace(parallel, dispatcher=dispatcher, draft_dispatcher=of_drafts, decode_tokens=decode_tokens)


def with_all_reduce(
    parallel: ParallelContext, width: int, dtype: torch.dtype, symm_mem: SymmetricMemory | None = None
) -> ParallelContext:
    """The context with the custom all-reduce of rows [T, width], or unchanged if the ranks cannot access each other's
    memory. Collective over the model's ranks.

    Args:
        symm_mem: as in `with_dispatcher`.
    """
    from moe_engine.parallel.all_reduce.custom import connect
    from moe_engine.parallel.dispatch.symm_mem.memory import TorchSymmetricMemory

    memory = symm_mem or TorchSymmetricMemory(parallel.process_group)
    return replace(parallel, all_reduce=connect(parallel.world, width, dtype, memory))
