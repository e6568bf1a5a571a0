"""Creates a rank's sharded worker from the resolved configuration (`RankGroupOptions.make_worker` of the engine)."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import fields, is_dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING

from moe_engine.errors import ConfigError
from moe_engine.executor.make_worker import make_worker
from moe_engine.executor.options import DetectorLimits, RankGroupOptions, RankPlace
from moe_engine.executor.progress import Progress
from moe_engine.models import sizes
from moe_engine.planning.inputs.code_identity import code_identity
from moe_engine.planning.output.weights_identity import weights_identity
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.processes.zmq_sockets import job_keys

if TYPE_CHECKING:
    from moe_engine.parallel.context import ParallelContext
    from moe_engine.parallel.overlap import Overlap
    from moe_engine.worker.worker import Worker

COLLECTIVE_SECONDS = 300.0


def rank_group_options(config: ResolvedConfig, replica: int = 0) -> RankGroupOptions | None:
    """Rank group options of one replica; None for a single process."""
    plan, flags = config.parallel, config.args.parallel
    topology = plan.topology
    if topology.tp_size == 1 and plan.num_replicas == 1:
        return None
    groups = topology.attn_dp_size
    first_local = replica * topology.tp_size % plan.ranks_per_node
    return RankGroupOptions(
        topology.tp_size,
        sharded_worker,
        num_nodes=plan.num_nodes,
        node_rank=plan.node_rank,
        leader_address=plan.leader_address,
        num_groups=groups,
        first_group=replica * groups if plan.num_groups > 1 else None,
        backend="gloo" if config.device == "cpu" else "cpu:gloo,cuda:nccl",
        limits=DetectorLimits(start=plan.start_seconds),
        collective_timeout=COLLECTIVE_SECONDS,
        fingerprint=fingerprint(config),
        checkpoint=weights_identity(config) if plan.num_nodes > 1 else "",
        keys=job_keys(plan.secret),
        device=config.device,
        base_device=flags.base_gpu_id + flags.gpu_id_step * first_local,
        device_step=flags.gpu_id_step,
    )


def fingerprint(config: ResolvedConfig) -> dict[str, str]:
    """Equal on nodes whose ranks compute the same: the values, by name, that determine shapes, plans and tokens, with
    several nodes the code too."""
    plan = config.parallel
    shared = {
        "topology": plan.topology,
        "dp_size": plan.num_replicas,
        "moe_a2a_backend": (plan.dispatch.row.name, plan.dispatch.deepep_version) if plan.dispatch is not None else "",
        "architecture": config.model.architecture,
        "parameters": sizes.num_parameters(config.model),
        "json_model_override_args": config.args.model.json_model_override_args,
        "dtype": config.dtype,
        "kv_cache_dtype": config.kv_cache_dtype,
        "page_size": config.page_size,
        "host_tier_tokens": config.host_tier_tokens,
        "host_snapshots": config.host_snapshots,
        "host_window_slots": config.host_window_slots,
        "limits": config.limits,
        "speculation": config.speculation,
        "experts": replace(config.experts, directory=Path()),
    }
    found = dict(code_identity()) if plan.num_nodes > 1 else {}
    for name, value in shared.items():
        if is_dataclass(value):
            found |= {f"{name}.{field.name}": str(getattr(value, field.name)) for field in fields(value)}
        else:
            found[name] = str(value)
    return found


def join_groups(config: ResolvedConfig, place: RankPlace, progress: Progress) -> ParallelContext:
    """The groups of this rank; collective over the ranks."""
    from moe_engine.parallel.context import join

    return join(
        config.parallel.topology,
        place.rank,
        COLLECTIVE_SECONDS,
        place.device,
        observe=progress.observe,
        share_memory=not config.args.parallel.disable_custom_all_reduce,
    )


def sharded_worker(
    config: ResolvedConfig,
    place: RankPlace,
    progress: Progress,
    join: Callable[[ResolvedConfig, RankPlace, Progress], ParallelContext] = join_groups,
) -> Worker:
    """This rank's shard of the model; collective over the ranks.

    Args:
        join: creates the rank's groups.
    """
    import torch

    from moe_engine.parallel.context import SINGLE
    from moe_engine.worker.device_stream import DeviceStream
    from moe_engine.worker.startup.expert_setup import with_experts

    torch.manual_seed(config.random_seed)
    progress.phase = lambda: "loading"
    parallel = SINGLE
    DeviceStream(place.device).bind_thread()  # a thread begins on GPU 0; libraries use the current one
    if place.size > 1:
        _load_dispatch_library(config)
        parallel = join(config, place, progress)
        parallel = with_experts(parallel, config.model, config.experts, place.device)
        parallel = _with_dispatcher(config, _with_all_reduce(config, parallel))
    worker = make_worker(config, device=place.device, parallel=parallel, progress=place.rank == 0)
    progress.phase = lambda: worker.runner.phase
    return worker


def _load_dispatch_library(config: ResolvedConfig) -> None:
    """Loads DeepEP's library first: it fails to load once NCCL has a communicator."""
    plan = config.parallel
    if plan.dispatch is None or plan.dispatch.row.name != "deepep":
        return
    from moe_engine.parallel.dispatch.deepep import startup

    try:
        startup.load(plan.num_nodes)
    except ValueError as error:
        raise ConfigError(str(error)) from error


def _with_all_reduce(config: ResolvedConfig, parallel: ParallelContext) -> ParallelContext:
    import torch

    from moe_engine.parallel.context import with_all_reduce

    if not config.parallel.all_reduce.is_custom:
        return parallel
    return with_all_reduce(parallel, config.model.hidden_size, getattr(torch, config.dtype))


def _with_dispatcher(config: ResolvedConfig, parallel: ParallelContext) -> ParallelContext:
    import torch

    from moe_engine.models.sharding import dispatch_shape, draft_dispatch_shape
    from moe_engine.parallel.context import with_dispatcher

    plan = config.parallel
    if plan.dispatch is None:
        return parallel
    limits = config.limits
    shape = dispatch_shape(config.model, parallel, getattr(torch, config.dtype), limits.forward_tokens)
    shape = replace(shape, fp8=plan.dispatch_fp8)
    speculation = config.speculation
    uses_drafts = speculation is not None and speculation.uses_own_layers
    drafts = draft_dispatch_shape(config.model, shape) if uses_drafts else None
    parallel = with_dispatcher(parallel, plan.dispatch, shape, limits.low_latency_tokens, drafts=drafts)
    return replace(parallel, overlap=_overlap(config, parallel))


def _overlap(config: ResolvedConfig, parallel: ParallelContext) -> Overlap | None:
    from moe_engine.parallel.overlap import Overlap
    from moe_engine.worker.device_stream import make_comm_stream

    flags = config.args.parallel
    shared_expert = flags.enable_single_batch_overlap or _overlaps_by_default(config)
    if not flags.enable_two_batch_overlap and not shared_expert:
        return None
    return Overlap(
        make_comm_stream(parallel.ep.device),
        two_batches=flags.enable_two_batch_overlap,
        threshold=flags.tbo_token_distribution_threshold,
        shared_expert=shared_expert,
    )


def _overlaps_by_default(config: ResolvedConfig) -> bool:
    """Whether the backend overlaps by default. Such backends run on GPUs only and occupy few multiprocessors while they
    wait; a second stream of a captured step costs no launch."""
    dispatch, moe = config.parallel.dispatch, config.model.moe
    if config.args.parallel.disable_shared_expert_overlap or dispatch is None or moe is None:
        return False
    return dispatch.row.name in ("deepep", "symm_mem") and bool(moe.shared_width)
