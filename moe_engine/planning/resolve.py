"""Resolves the server arguments to a frozen `ResolvedConfig`, in one pure function that logs its reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator, Sequence
from pathlib import Path

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.planning.flags import validate
from moe_engine.planning.flags.resolve_loading import with_loader_threads
from moe_engine.planning.flags.resolve_names import resolve_served_name, with_demo_parsers
from moe_engine.planning.flags.resolve_storage import with_storage_page
from moe_engine.planning.inputs.checkpoint import CheckpointFacts
from moe_engine.planning.inputs.cluster_env import ClusterPlace
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.states import with_states
from moe_engine.planning.model.resolve_dtype import (
    resolve_dtype,
    resolve_kv_dtype,
    with_latent_scales,
    with_stated_kv_dtype,
)
from moe_engine.planning.model.resolve_lora import NamedAdapter, resolve_lora
from moe_engine.planning.model.resolve_pooling import resolve_pooling
from moe_engine.planning.model.sparse_attention import with_index_keys
from moe_engine.planning.parallelism.resolve_experts import resolve_experts
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan, resolve_parallel
from moe_engine.planning.remarks import flags_without_effect
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.resolved_config import ResolvedConfig
from moe_engine.planning.speculation.resolve_drafts import resolve_drafts, with_draft_scales
from moe_engine.planning.speculation.resolve_speculation import DraftModel
from moe_engine.planning.steps.resolve_compile import compile_settings
from moe_engine.planning.steps.resolve_kernels import fits_sizes
from moe_engine.planning.steps.resolve_steps import LaunchParts, cores_reason, own_part, resolve_steps, size_remarks

DP_CONSERVATIVENESS = 0.3
"""Factor with DP attention, as in SGLang: a group's batch is small, and an idle group waits for the others."""


def resolve(
    args: EngineArgs,
    model: ModelConfig,
    machine: Machine,
    *,
    model_path: str = "",
    checkpoint: CheckpointFacts | None = None,
    draft: DraftModel | None = None,
    adapters: Sequence[NamedAdapter] = (),
    drawn_seed: int = 0,
    place: ClusterPlace | None = None,
    dump_directory: Path = Path(),
) -> ResolvedConfig:
    """Resolves every value. Pure: the same arguments give the same configuration.

    Args:
        model_path: local folder of the checkpoint; `args.model.model_path` when empty.
        checkpoint: sums over the weight files, if there are any.
        draft: the model of --speculative-draft-model-path.
        adapters: of --lora-paths.
        drawn_seed: the seed without --random-seed.
        place: of this process in a SLURM or torchrun launch.
        dump_directory: folder of expert distribution dumps.

    Raises:
        ConfigError: a value out of range, contradicting flags (both named), or too little memory (with flags that fit).
    """
    validate.check(args)
    args = with_stated_kv_dtype(with_loader_threads(args, record := Record()), model, record)
    args = with_storage_page(resolve_pooling(_with_transfers(args), model, record), fits_sizes, record)
    path, kind = model_path or args.model.model_path or "", machine.device.kind
    device = kind if args.model.device else record.note("device", kind, machine.device_reason)
    parallel = resolve_parallel(args, model, machine, place, record)
    args = with_states(args, model, None if draft is None else draft.config, record)
    experts = resolve_experts(args, model, record, parallel.topology, dump_directory)
    dtype = resolve_dtype(args, model, machine, record)
    kv_dtype = resolve_kv_dtype(args, dtype, record)
    lora = resolve_lora(args, model, machine, parallel.topology, dtype, adapters, record)
    context_len = _context_len(args, model, record)
    model = with_index_keys(args, model, device, dtype, record).within(context_len)
    speculation, drafts = resolve_drafts(args, model, draft, context_len, parallel, device, record)
    part = own_part(machine, parallel)
    launch = LaunchParts(parallel, experts, lora, speculation, drafts, checkpoint)
    steps = resolve_steps(args, model, launch, part, dtype, kv_dtype, context_len, record)
    sizing, kv_dtype = steps.sizing, steps.kernels.model.need.kv_dtype
    model = with_latent_scales(args, model, kv_dtype, checkpoint.latent_scales if checkpoint else {}, record)
    drafts = None if drafts is None else with_draft_scales(args, drafts, kv_dtype, record)
    return ResolvedConfig(
        args=with_demo_parsers(args, path, record),
        parallel=steps.parallel,
        model=model,
        machine=machine,
        model_path=path,
        tokenizer_path=args.model.tokenizer_path or record.note("tokenizer_path", path, "the model's own"),
        served_model_name=args.model.served_model_name or resolve_served_name(args, path, record),
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        context_len=context_len,
        kernels=steps.kernels,
        chunked_prefill_size=steps.limits.chunk,
        max_prefill_tokens=args.memory.max_prefill_tokens,
        max_running_requests=sizing.max_running_requests,
        schedule_conservativeness=_conservativeness(args, parallel, record),
        mem_fraction_static=sizing.mem_fraction_static,
        random_seed=_seed(args, drawn_seed, record),
        cpu_threads=_cpu_threads(args, part.cores, cores_reason(parallel), device, record),
        ledger=sizing.ledger,
        limits=steps.limits,
        decisions=tuple(record.decisions),
        notes=(*_idle_flags(args, device, parallel), *_eos(model), *record.remarks, *size_remarks(context_len, sizing)),
        speculation=speculation,
        draft_model=None if drafts is None else drafts.config,
        draft_head=None if drafts is None else drafts.head,
        experts=experts,
        graphs=steps.graphs,
        compiled=compile_settings(args, speculation, steps.limits.running),
        lora=lora,
        offloaded_layers=steps.offloaded_layers,
    )


def _eos(model: ModelConfig) -> Iterator[str]:
    """Remarks on the tokens that end answers."""
    if outside := [token for token in model.eos_token_ids if not 0 <= token < model.vocab_size]:
        found = ", ".join(map(str, outside))
        yield f"eos_token_id {found}: no token of the vocabulary of {model.vocab_size}, so that it ends no answer"


def _cpu_threads(args: EngineArgs, cores: int, reason: str, device: str, record: Record) -> int:
    asked = args.backends.cpu_threads
    if asked and asked > cores and device == "cpu":
        record.remark(f"--cpu-threads {asked}: {cores} {reason}; threads that share a core are slower")
    return asked or record.note("cpu_threads", cores, reason)


def _seed(args: EngineArgs, drawn: int, record: Record) -> int:
    asked = args.model.random_seed
    return record.note("random_seed", drawn, "drawn at start") if asked is None else asked


def _conservativeness(args: EngineArgs, parallel: ParallelPlan, record: Record) -> float:
    asked = args.scheduling.schedule_conservativeness
    if parallel.topology.attn_dp_size == 1:
        return asked
    reason = f"{asked:g} x {DP_CONSERVATIVENESS:g}, as SGLang does with DP attention"
    return record.note("schedule_conservativeness", round(asked * DP_CONSERVATIVENESS, 6), reason)


def _idle_flags(args: EngineArgs, device: str, parallel: ParallelPlan) -> tuple[str, ...]:
    return (*args.notes, *flags_without_effect(args, device, parallel))


def _with_transfers(args: EngineArgs) -> EngineArgs:
    """KV that moves between servers passes through the host tier."""
    if args.disaggregation.disaggregation_mode == OFF:
        return args
    return dataclasses.replace(args, memory=dataclasses.replace(args.memory, enable_hierarchical_cache=True))


def _context_len(args: EngineArgs, model: ModelConfig, record: Record) -> int:
    asked, longest = args.model.context_length, model.longest_context
    if asked is None:
        more = f"; its rope scaling reaches {longest}, see --context-length" if longest > model.context_length else ""
        return record.note("context_length", model.context_length, f"config.json{more}")
    if asked > longest:
        raise ConfigError(
            f"--context-length {asked}: the model's context length is {longest} tokens (config.json); use at most "
            f"{longest}, or override it with --json-model-override-args '{{\"max_position_embeddings\": {asked}}}'"
        )
    return asked
