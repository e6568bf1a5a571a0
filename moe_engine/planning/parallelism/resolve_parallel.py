"""Resolves the parallelism flags and the cluster launch to a `ParallelPlan`: size of each axis, node, dispatcher."""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.parallel import ParallelArgs
from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import LaunchKernels
from moe_engine.kernels.weight_forms import FP8_BLOCKS, FP8_ROWS
from moe_engine.models.config import GQAConfig, ModelConfig
from moe_engine.models.expert_format import expert_form, width_group
from moe_engine.models.widths import widths_of
from moe_engine.parallel.all_reduce import choice as all_reduce
from moe_engine.parallel.all_reduce.choice import AllReduceChoice
from moe_engine.parallel.dispatch.tables import DispatchChoice
from moe_engine.parallel.share import Share
from moe_engine.parallel.topology import Topology
from moe_engine.planning.inputs.cluster_env import ClusterPlace
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.parallelism.resolve_dispatch import FP8_BLOCK, dispatch_backend, resolve_dispatch
from moe_engine.planning.parallelism.resolve_elastic import Coverage, resolve_elastic
from moe_engine.planning.parallelism.resolve_nodes import check_nodes, resolve_place
from moe_engine.planning.resolution_log import Record
from moe_engine.processes.dist_secret import DistSecret

UNEVEN = 1.1
"""The largest part of an expert over an equal one for which ranks count as even."""
ONE_RANK = Topology()
START_SECONDS = 1200.0


@dataclass(frozen=True)
class ParallelPlan:
    """The ranks of a launch. `topology` is that of one replica; replicas are equal and share one machine.

    Attributes:
        leader_address: HOST:PORT of node 0; None on one node.
        dispatch: dispatch backend and its modes; None if all ranks process all tokens.
        dispatch_fp8: tokens are dispatched in FP8.
        all_reduce: of GPU ranks; the same on all of them.
        coverage: losses of ranks that the replica survives; None: a lost rank ends the replica.
    """

    topology: Topology = ONE_RANK
    num_replicas: int = 1
    node_rank: int = 0
    leader_address: str | None = None
    dispatch: DispatchChoice | None = None
    dispatch_fp8: bool = False
    all_reduce: AllReduceChoice = all_reduce.NONE
    coverage: Coverage | None = None
    start_seconds: float = START_SECONDS
    local_rank: int = 0
    """Above 0 in a launch with several processes a node: the first process starts all ranks, the others exit."""
    secret: DistSecret | None = None
    """Secret of the sockets between nodes."""

    @property
    def num_nodes(self) -> int:
        return self.topology.num_nodes

    @property
    def ranks_per_node(self) -> int:
        """Ranks of all replicas on this node."""
        return self.num_ranks // self.num_nodes

    @property
    def num_groups(self) -> int:
        """Number of schedulers: attention groups of all replicas."""
        return self.topology.attn_dp_size * self.num_replicas

    @property
    def num_ranks(self) -> int:
        return self.topology.tp_size * self.num_replicas


SINGLE_PROCESS = ParallelPlan()


def resolve_parallel(
    args: EngineArgs,
    model: ModelConfig,
    machine: Machine,
    place: ClusterPlace | None,
    record: Record,
) -> ParallelPlan:
    """Pure, as `resolve`.

    Args:
        place: of this process in a SLURM or torchrun launch, for values that the flags leave open.

    Raises:
        ConfigError: sizes that do not fit each other or the model, with sizes that fit.
    """
    flags, device = args.parallel, machine.device.kind
    attn_dp, replicas = data_parallel(args, record)
    num_nodes, node_rank, leader = resolve_place(args, place, record)
    backend = dispatch_backend(args)
    if backend != "none" and not model.is_moe:
        raise ConfigError(f"--moe-a2a-backend {backend}: {model.architecture} has no experts; leave it out")
    ep_size = expert_parallel(args, backend, record, model, device)
    _check_replicas(replicas, num_nodes)
    _check_enough_ranks(
        flags, attn_dp, ep_size, num_nodes, "" if "nnodes" in args.given or place is None else place.origin
    )
    topology = _topology(args, model, attn_dp, ep_size, backend, num_nodes)
    check_nodes(num_nodes, node_rank, leader)
    dispatch = resolve_dispatch(flags, topology, model, machine, record)
    plan = ParallelPlan(
        topology=topology,
        num_replicas=replicas,
        node_rank=node_rank,
        leader_address=leader if num_nodes > 1 else None,
        dispatch=dispatch,
        dispatch_fp8=flags.moe_dispatch_dtype == "fp8",  # auto: `with_dispatch_dtype`
        coverage=resolve_elastic(args, model, topology, dispatch, device, record),
        start_seconds=float(flags.dist_timeout or START_SECONDS),
        local_rank=place.local_rank if place is not None else 0,
        all_reduce=_all_reduce(flags, topology, machine, model, record),
    )
    _check_devices(flags, plan, machine.num_devices)
    _remark_all_reduce(flags, plan, device, record)
    return plan


def with_dispatch_dtype(
    plan: ParallelPlan, args: EngineArgs, model: ModelConfig, kernels: LaunchKernels, record: Record
) -> ParallelPlan:
    """The plan with the data type of dispatched tokens that `--moe-dispatch-dtype auto` selects: FP8 if the experts
    read FP8: they would otherwise quantize the same numbers after the dispatch."""
    if plan.dispatch is None or args.parallel.moe_dispatch_dtype != "auto":
        return plan
    experts, moe = kernels.model.row("experts"), model.moe
    reads = experts.reads_fp8 is not None and experts.reads_fp8(kernels.model.device)
    stored = expert_form(model) in experts.multiplies & {FP8_BLOCKS, FP8_ROWS}
    whole = moe is not None and not model.routed_size % FP8_BLOCK and not moe.width % FP8_BLOCK
    if not (reads and stored and whole):
        return plan
    record.note("moe_dispatch_dtype", "fp8", f"{experts.name} experts read FP8")
    return replace(plan, dispatch_fp8=True)


def _topology(args: EngineArgs, model: ModelConfig, attn_dp: int, ep_size: int, backend: str, nodes: int) -> Topology:
    """The topology, checked against the model. Errors name the flag of attention groups as it was given."""
    flags = args.parallel
    try:
        topology = Topology(
            tp_size=flags.tp_size,
            attn_dp_size=attn_dp,
            ep_size=ep_size,
            moe_dense_tp_size=flags.moe_dense_tp_size,
            enable_dp_lm_head=flags.enable_dp_lm_head,
            moe_a2a_backend=backend if flags.tp_size > 1 else "none",
            num_nodes=nodes,
        )
        topology.check(widths_of(model, args.experts.ep_num_redundant_experts))
        if args.disaggregation.disaggregation_mode != OFF:
            _check_transfers(model, topology.attn_tp_size)
    except ConfigError as error:
        if flags.enable_dp_attention:
            raise ConfigError(str(error).replace("--attn-dp-size", "--dp-size")) from None
        raise
    return topology


def _check_transfers(model: ModelConfig, ranks: int) -> None:
    """Raises ConfigError: the ranks of a group have different shares of layers with different numbers of KV heads."""
    counts = {kind.num_kv_heads for kind in model.attentions if isinstance(kind, GQAConfig)}
    if len(counts) > 1 and ranks > min(counts):
        raise ConfigError(
            f"--disaggregation-mode: layers with {min(counts)} and with {max(counts)} KV heads are divided differently "
            f"over {ranks} ranks; use at most {min(counts)} ranks (--tp-size / --attn-dp-size)"
        )


def _check_enough_ranks(flags: ParallelArgs, attn_dp: int, ep_size: int, nodes: int, origin: str) -> None:
    """Checks that --tp-size, which many commands leave at 1, has enough ranks for attention groups, experts and nodes.

    Args:
        nodes: of a replica.
        origin: of the number of nodes, if no flag gave it.

    Raises:
        ConfigError: there are fewer ranks.
    """
    groups = f"--enable-dp-attention --dp-size {attn_dp}" if flags.enable_dp_attention else f"--attn-dp-size {attn_dp}"
    hosts = f"{nodes} nodes ({origin})" if origin else f"--nnodes {flags.nnodes}"
    for asked, size, users in (
        (groups, attn_dp, "attention groups"),
        (f"--ep-size {ep_size}", ep_size, "expert-parallel groups"),
        (hosts, nodes, "nodes"),
    ):
        if size > flags.tp_size >= 1:
            verb = "add" if flags.tp_size == 1 else "use"
            raise ConfigError(
                f"{asked} with --tp-size {flags.tp_size}: {size} {users} need at least one rank of --tp-size each; "
                f"{verb} --tp-size {size}"
            )


def _all_reduce(
    flags: ParallelArgs, topology: Topology, machine: Machine, model: ModelConfig, record: Record
) -> AllReduceChoice:
    """The all-reduce of GPU ranks."""
    disabled = flags.disable_custom_all_reduce
    choice = all_reduce.choose(machine.device, topology, model.hidden_size, machine.unlinked, disabled)
    if not machine.on_cpu and topology.tp_size > 1 and not disabled:
        record.note("disable_custom_all_reduce", not choice.is_custom, choice.reason)
    return choice


def _remark_all_reduce(flags: ParallelArgs, plan: ParallelPlan, device: str, record: Record) -> None:
    """Remarks on --disable-custom-all-reduce where no custom all-reduce would run."""
    if not flags.disable_custom_all_reduce:
        return
    why = None
    if plan.topology.tp_size == 1:
        why = "a model on one rank has no all-reduce"
    elif device != "cpu":
        why = None if plan.all_reduce.disabled else f"GPUs use NCCL: {plan.all_reduce.reason}"
    elif plan.coverage is not None:
        why = "ranks of --elastic-ep communicate only in dispatch and combine"
    if why is not None:
        record.remark(f"--disable-custom-all-reduce: no effect ({why})")


def _check_devices(flags: ParallelArgs, plan: ParallelPlan, num_devices: int | None) -> None:
    """Checks that every rank of this node has its own GPU.

    Raises:
        ConfigError: there are too few GPUs.
    """
    if num_devices is None:
        return
    last = flags.base_gpu_id + flags.gpu_id_step * (plan.ranks_per_node - 1)
    if last >= num_devices:
        raise ConfigError(
            f"this node needs the GPUs {flags.base_gpu_id} to {last} (--tp-size and --dp-size ask for "
            f"{plan.ranks_per_node} here, --base-gpu-id {flags.base_gpu_id}, --gpu-id-step {flags.gpu_id_step}), and "
            f"this machine has {num_devices}, numbered from 0"
        )


def data_parallel(args: EngineArgs, record: Record) -> tuple[int, int]:
    """(attention groups, replicas) from either spelling of the flags."""
    flags = args.parallel
    if not flags.enable_dp_attention:
        return flags.attn_dp_size, flags.dp_size
    if "attn_dp_size" in args.given and flags.attn_dp_size != flags.dp_size:
        raise ConfigError(
            f"--enable-dp-attention uses --dp-size {flags.dp_size} as the number of attention groups, which "
            f"contradicts --attn-dp-size {flags.attn_dp_size}; give one of the two (replicas: --dp-size without "
            "--enable-dp-attention)"
        )
    return record.note("attn_dp_size", flags.dp_size, "--dp-size with --enable-dp-attention"), 1


def expert_parallel(
    args: EngineArgs, backend: str, record: Record, model: ModelConfig | None = None, device: str = "cuda"
) -> int:
    """--ep-size; if left out, all ranks with a dispatcher, which spans all ranks, else `even_groups` of the model."""
    flags = args.parallel
    if "ep_size" in args.given and flags.ep_size != flags.tp_size and flags.enable_ep_moe:
        raise ConfigError(
            "--enable-ep-moe distributes experts over all --tp-size ranks, which contradicts "
            f"--ep-size {flags.ep_size}; drop one"
        )
    if "ep_size" in args.given or flags.tp_size == 1:
        return flags.ep_size
    if flags.enable_ep_moe:
        return record.note("ep_size", flags.tp_size, "--enable-ep-moe: all ranks")
    if backend != "none":
        return record.note("ep_size", flags.tp_size, f"--moe-a2a-backend {backend} spans all ranks")
    if model is None or device != "cuda":
        return flags.ep_size
    groups = even_groups(model, flags.tp_size)
    if groups == flags.ep_size or args.experts.ep_num_redundant_experts:
        return flags.ep_size
    return record.note(
        "ep_size",
        groups,
        f"{flags.tp_size} ranks hold uneven parts of an expert's scale blocks, {groups} groups even ones",
    )


def even_groups(model: ModelConfig, tp_size: int) -> int:
    """The fewest groups of ranks with different experts whose ranks hold nearly equal parts of them on a GPU.

    A part has whole scale blocks: 12 blocks on 8 ranks are two on some ranks and one on others, and a step takes as
    long as two; in two groups of four ranks each has three blocks of half the experts. Fewer blocks than ranks are
    split and dequantized at load.
    """
    moe = model.moe
    if not model.is_moe or moe is None:
        return 1
    group = width_group(model, keeps_blocks=True)
    for ep in range(1, tp_size):
        ranks = tp_size // ep
        if tp_size % ep or moe.num_experts % ep or moe.width % ranks:
            continue
        cut = Share(0, ranks).cut_in_groups(moe.width, group)
        part = moe.width if cut is None else cut.stop
        if part % group == 0 and part * ranks <= UNEVEN * moe.width:
            return ep
    return 1


def _check_replicas(replicas: int, nodes: int) -> None:
    if replicas < 1:
        raise ConfigError(f"--dp-size {replicas}: must be at least one replica")
    if replicas > 1 and nodes > 1:
        raise ConfigError(
            f"--dp-size {replicas} and --nnodes {nodes}: replicas share one machine; start one server per replica "
            "behind a router, or give --enable-dp-attention for attention groups over the nodes"
        )
