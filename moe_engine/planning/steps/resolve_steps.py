"""Resolves the steps of one rank: kernel rows, limits, captured steps, and the KV cache that fits with them."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.memory import MemoryArgs
from moe_engine.kernels.backends import LaunchKernels
from moe_engine.models.config import ModelConfig
from moe_engine.models.config_sections.compressed import CompressedConfig
from moe_engine.models.sizes import weight_bytes
from moe_engine.models.widths import local_heads
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.planning.inputs.checkpoint import CheckpointFacts
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.sizing import Sizing, size_memory
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.states import with_room_for_kv, with_snapshots
from moe_engine.planning.memory.weight_offload import WeightOffload, resolve_offload
from moe_engine.planning.model.resolve_dtype import DTYPE_BYTES
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan, with_dispatch_dtype
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.speculation.resolve_speculation import DraftModel
from moe_engine.planning.step_limits import StepLimits
from moe_engine.planning.steps.resolve_compile import compiled_rows
from moe_engine.planning.steps.resolve_graphs import captures_trees, note_graphs, resolve_graphs, why_not_captured
from moe_engine.planning.steps.resolve_kernels import asked_backends, resolve_kernels
from moe_engine.planning.steps.resolve_limits import resolve_limits
from moe_engine.types import SpeculationConfig
from moe_engine.types.step_settings import GraphSettings, LoraSettings

WINDOWS_BESIDE_ENTRIES = 0.1
"""Default of --swa-full-tokens-ratio for models with compressed entries."""
TIER_RATIO = 2.0
"""Default size of the host-RAM tier, as a multiple of the KV cache."""


@dataclass(frozen=True)
class LaunchParts:
    """What is resolved before the steps; `draft` is the draft model or EAGLE head."""

    parallel: ParallelPlan
    experts: ExpertSettings
    lora: LoraSettings | None
    speculation: SpeculationConfig | None
    draft: DraftModel | None
    checkpoint: CheckpointFacts | None


@dataclass(frozen=True)
class ResolvedSteps:
    """`parallel` with the dispatch dtype that the kernels take, `graphs` bounded by the number of requests."""

    kernels: LaunchKernels
    parallel: ParallelPlan
    limits: StepLimits
    graphs: GraphSettings
    sizing: Sizing
    offloaded_layers: tuple[int, ...]


def resolve_steps(
    args: EngineArgs,
    model: ModelConfig,
    launch: LaunchParts,
    part: Machine,
    dtype: str,
    kv_dtype: str,
    context_len: int,
    record: Record,
) -> ResolvedSteps:
    """
    Args:
        part: one rank's share of the machine.

    Raises:
        ConfigError: a kernel row that cannot run, or too little memory (with flags that fit).
    """
    parallel, experts, speculation, draft = launch.parallel, launch.experts, launch.speculation, launch.draft
    asked = asked_backends(args) | compiled_rows(args, model, parallel, part.device.kind, record)
    local = local_heads(model, parallel.topology.attn_tp_size)
    why = why_not_captured(args, part, parallel, experts, model)
    local_draft = None if draft is None else draft.local(parallel.topology.attn_tp_size)
    topk, captured_trees = speculation.topk if speculation else 0, captures_trees(speculation, model)
    kernels = resolve_kernels(
        args, asked, part, local, local_draft, dtype, kv_dtype, why, parallel, record,
        chains=topk == 1 or captured_trees, trees=topk > 1,
    )  # fmt: skip
    parallel = with_dispatch_dtype(parallel, args, model, kernels, record)
    page, size = kernels.page_size, DTYPE_BYTES[dtype]
    limits = resolve_limits(args, model, part, parallel, speculation, context_len, page, size, record)
    kept = model.weight_format.held_by(kernels.model.multiplied)
    offload = resolve_offload(
        args, model, part, parallel.topology, experts, size, kept, parallel.ranks_per_node, record
    )  # fmt: skip
    weights = weight_bytes(model, size, False, parallel.topology, experts.num_redundant, kept) - offload.host_bytes
    limits = with_room_for_kv(limits, args, local, kernels.model.need.dtype, part, weights)
    limits = with_snapshots(limits, args, model, record)
    args = _with_window_ratio(args, model, record)
    graphs = resolve_graphs(args, part, parallel, speculation, limits, kernels.uncaptured, captured_trees, record)
    launch = dataclasses.replace(launch, parallel=parallel)
    sizing = _size(args, model, launch, part, kernels, limits, graphs, offload)
    captured = _note_sizes(args, sizing, graphs, part, limits, record)
    return ResolvedSteps(kernels, parallel, limits, captured, sizing, offload.layers)


def own_part(machine: Machine, parallel: ParallelPlan) -> Machine:
    """One rank's share of the machine. Each rank has its own GPU; ranks share a host's memory and cores."""
    ranks = parallel.ranks_per_node
    cores = max(1, machine.cores // ranks)
    if not machine.on_cpu or ranks == 1:
        return dataclasses.replace(machine, cores=cores)
    return dataclasses.replace(
        machine,
        total_bytes=machine.total_bytes // ranks,
        available_bytes=machine.available_bytes // ranks,
        cores=cores,
        source=f"{machine.source}, shared by {ranks} ranks",
    )


def cores_reason(parallel: ParallelPlan) -> str:
    ranks = parallel.ranks_per_node
    return "physical cores this process may use" + (f", shared by {ranks} ranks" if ranks > 1 else "")


def _size(
    args: EngineArgs,
    model: ModelConfig,
    launch: LaunchParts,
    machine: Machine,
    kernels: LaunchKernels,
    limits: StepLimits,
    graphs: GraphSettings,
    offload: WeightOffload,
) -> Sizing:
    memory, need, draft, speculation = args.memory, kernels.model.need, launch.draft, launch.speculation
    return size_memory(
        SizingInput(
            model=model,
            machine=machine,
            dtype=need.dtype,
            dtype_bytes=DTYPE_BYTES[need.dtype],
            kv_dtype=need.kv_dtype,
            kernels=kernels,
            limits=limits,
            mem_fraction=memory.mem_fraction_static,
            max_total_tokens=memory.max_total_tokens,
            running_is_auto=memory.max_running_requests is None,
            image_cache_bytes=args.multimodal.vlm_cache_size_mb << 20,
            divides_images=args.multimodal.mm_enable_dp_encoder,
            checkpoint=launch.checkpoint,
            uses_mtp=speculation is not None and speculation.uses_own_layers,
            draft=None if draft is None else draft.local(launch.parallel.topology.attn_tp_size),
            head=None if draft is None else draft.head,
            parallel=launch.parallel,
            experts=launch.experts,
            graphs=graphs,
            lora=launch.lora,
            offload=offload,
            tier_ratio=(memory.hicache_ratio or TIER_RATIO) if memory.enable_hierarchical_cache else 0.0,
            tier_fraction=memory.hicache_host_memory_fraction if _may_reduce_tier(memory) else None,
            transfers=args.disaggregation.disaggregation_mode != OFF,
            tier_bytes=memory.hicache_size * 10**9 if memory.enable_hierarchical_cache else 0,
            windows_in_tier=_keeps_windows(args),
            swa_ratio=0.0 if memory.disable_hybrid_swa_memory else memory.swa_full_tokens_ratio,
        )
    )


def _with_window_ratio(args: EngineArgs, model: ModelConfig, record: Record) -> EngineArgs:
    """The default of --swa-full-tokens-ratio: less for compressed entries, which take little memory."""
    if not isinstance(model.attention, CompressedConfig) or "swa_full_tokens_ratio" in args.given:
        return args
    record.note("swa_full_tokens_ratio", WINDOWS_BESIDE_ENTRIES, "entries take little memory compared with windows")
    memory = dataclasses.replace(args.memory, swa_full_tokens_ratio=WINDOWS_BESIDE_ENTRIES)
    return dataclasses.replace(args, memory=memory)


def _may_reduce_tier(memory: MemoryArgs) -> bool:
    return memory.hicache_ratio is None and not memory.hicache_size


def _keeps_windows(args: EngineArgs) -> bool:
    """Whether the host-RAM tier keeps windowed layers apart: the host connector, without storage or another server."""
    memory, mode = args.memory, args.disaggregation.disaggregation_mode
    return mode == OFF and memory.kv_connector == "host" and memory.hicache_storage_backend is None


def _note_sizes(
    args: EngineArgs, sizing: Sizing, graphs: GraphSettings, machine: Machine, limits: StepLimits, record: Record
) -> GraphSettings:
    """Logs the sizes that follow from memory. Returns the captured steps, bounded by the number of requests."""
    if args.memory.max_total_tokens is None:
        record.note("max_total_tokens", sizing.ledger.num_tokens, sizing.tokens_reason)
    asked = args.memory.max_running_requests
    if asked != sizing.max_running_requests:
        reason = sizing.running_reason if asked is None else f"{asked} shared by the attention groups"
        record.note("max_running_requests", sizing.max_running_requests, reason)
    if args.memory.hicache_ratio is None:
        record.note("hicache_ratio", sizing.tier_ratio or TIER_RATIO, sizing.tier_reason or "the default")
    if args.memory.mem_fraction_static is None:
        record.note("mem_fraction_static", sizing.mem_fraction_static, sizing.fraction_reason)
    captured = graphs.up_to(sizing.max_running_requests)
    note_graphs(args, captured, machine, limits, sizing.max_running_requests, record)
    return captured


def size_remarks(context_len: int, sizing: Sizing) -> list[str]:
    tokens = sizing.ledger.num_tokens
    remarks = [sizing.window_remark] if sizing.window_remark else []
    if tokens >= context_len:
        return remarks
    return [
        *remarks,
        f"the KV cache holds {tokens} tokens: requests are limited to that, below the context length {context_len}",
    ]
