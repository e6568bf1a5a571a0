"""Resolves the server arguments to a frozen `ResolvedConfig`, in one pure function that logs its reasons."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, TypeVar

from moe_engine.config.args import EngineArgs
from moe_engine.config.disaggregation import OFF
from moe_engine.config.logging import LoggingArgs
from moe_engine.config.scheduling import SchedulingArgs
from moe_engine.config.server import ServerArgs
from moe_engine.demo import CHECKPOINT_DIR
from moe_engine.errors import ConfigError
from moe_engine.kernels.attention.kv_format import E4M3, E5M2, is_fp8
from moe_engine.kernels.backends import LaunchKernels
from moe_engine.models.config import ModelConfig, activation_dtype
from moe_engine.models.widths import local_heads
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.planning import validate as contradictions
from moe_engine.planning.checkpoint import CheckpointFacts
from moe_engine.planning.cluster_env import ClusterPlace
from moe_engine.planning.ledger import MemoryLedger
from moe_engine.planning.machine import Machine
from moe_engine.planning.remarks import flags_without_effect
from moe_engine.planning.resolution_log import Decision, Record
from moe_engine.planning.resolve_compile import compile_settings, compiled_rows
from moe_engine.planning.resolve_experts import resolve_experts
from moe_engine.planning.resolve_graphs import note_graphs, resolve_graphs, why_not_captured
from moe_engine.planning.resolve_kernels import asked_backends, resolve_kernels
from moe_engine.planning.resolve_limits import resolve_limits
from moe_engine.planning.resolve_lora import NamedAdapter, resolve_lora
from moe_engine.planning.resolve_parallel import ParallelPlan, resolve_parallel, with_dispatch_dtype
from moe_engine.planning.resolve_pooling import resolve_pooling
from moe_engine.planning.resolve_speculation import DraftModel, resolve_speculation, speculative_values
from moe_engine.planning.resolve_storage import resolve_write_policy, with_storage_page
from moe_engine.planning.sizing import Sizing, SizingInput, size_memory
from moe_engine.planning.sparse_attention import check_sparse
from moe_engine.planning.state_memory import with_states
from moe_engine.planning.step_limits import StepLimits
from moe_engine.step_settings import CompileSettings, GraphSettings, LoraSettings, StorageSettings
from moe_engine.types import SpeculationConfig

T = TypeVar("T")
DTYPE_BYTES = {"bfloat16": 2, "float16": 2, "float32": 4}
INPUT_MARGIN = 5
"""Tokens that a prompt must leave free (SGLang's margin)."""

DP_CONSERVATIVENESS = 0.3
"""Factor with DP attention, as in SGLang: a group's batch is small, and an idle group waits for the others."""

DEMO_NAME = "demo"
DEMO_PARSERS = {"reasoning_parser": "deepseek-v3", "tool_call_parser": "deepseekv31"}
SECRETS = ("api_key", "admin_api_key")


@dataclass(frozen=True)
class ResolvedConfig:
    """The resolved, frozen configuration of one engine; it is pickled to the engine's processes.

    `args` are the flags as given; their `scheduling`, `logging` and `server` parts need no resolution and are used
    directly. `chunked_prefill_size` -1 means no chunking. Sizes are tokens. With several ranks, memory sizes and the
    ledger are per rank, and counts of requests per attention group.
    """

    args: EngineArgs
    parallel: ParallelPlan
    model: ModelConfig
    machine: Machine
    model_path: str
    tokenizer_path: str
    served_model_name: str
    device: str
    dtype: str
    kv_cache_dtype: str
    context_len: int
    kernels: LaunchKernels
    chunked_prefill_size: int
    max_prefill_tokens: int
    max_running_requests: int
    schedule_conservativeness: float
    mem_fraction_static: float
    random_seed: int
    cpu_threads: int
    ledger: MemoryLedger
    limits: StepLimits
    """The largest step: bounds the scheduler's plans; dispatcher, CUDA graphs and ledger are sized for it."""
    decisions: tuple[Decision, ...]
    notes: tuple[str, ...]
    speculation: SpeculationConfig | None = None
    """None: no speculative decoding."""
    draft_model: ModelConfig | None = None
    """Of the folder `speculation.draft_model_path`, if there is one."""
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    """Placement, EPLB and expert distribution recording."""
    graphs: GraphSettings = field(default_factory=GraphSettings)
    """Steps that are captured as CUDA graphs."""
    compiled: CompileSettings = field(default_factory=CompileSettings)
    """Steps that torch.compile compiles."""
    lora: LoraSettings | None = None
    """LoRA adapters; None: not enabled."""
    storage: StorageSettings | None = None
    """Storage below the host-RAM tier; None: not enabled."""

    @property
    def page_size(self) -> int:
        return self.kernels.page_size

    @property
    def max_total_num_tokens(self) -> int:
        """KV slots for requests; the pool's dummy page is not counted."""
        return self.ledger.num_tokens

    @property
    def num_window_slots(self) -> int:
        """Tokens of the pool of windowed layers; 0: their KV is not bounded by their window."""
        return self.ledger.num_window_slots

    @property
    def window(self) -> int:
        """The window that bounds the KV of windowed layers; 0: none does."""
        return self.model.longest_window if self.num_window_slots else 0

    @property
    def lora_slots(self) -> int:
        """Different LoRA adapters of a batch; 0: not enabled."""
        return 0 if self.lora is None else self.lora.num_slots

    @property
    def host_tier_tokens(self) -> int:
        """Tokens of the host-RAM tier of the KV cache; 0: none."""
        return self.ledger.host_tier_tokens

    @property
    def kv_connector(self) -> str:
        """Name or path of the tier's class."""
        mode = self.args.disaggregation.disaggregation_mode
        return self.args.memory.kv_connector if mode == OFF else mode

    @property
    def hicache_write_policy(self) -> str:
        return resolve_write_policy(self.args)

    @property
    def max_req_len(self) -> int:
        """Max length of prompt plus answer."""
        return min(self.context_len - 1, self.max_total_num_tokens - 1)

    @property
    def max_req_input_len(self) -> int:
        return self.max_req_len - INPUT_MARGIN

    @property
    def scheduling(self) -> SchedulingArgs:
        return self.args.scheduling

    @property
    def logging(self) -> LoggingArgs:
        return self.args.logging

    @property
    def server(self) -> ServerArgs:
        return self.args.server

    def flat(self) -> dict[str, Any]:
        """All flags by name with their resolved values, as SGLang's /server_info shows them. Keys are hidden."""
        values = self.args.flat()
        values.update({decision.name: decision.value for decision in self.decisions})
        values.update(max_total_tokens=self.max_total_num_tokens, model_path=self.model_path)
        if self.speculation is not None:
            values.update(speculative_values(self.speculation))
        for name in SECRETS:
            values[name] = contradictions.HIDDEN if values[name] else None
        return values

    def select(self, options: type[T], **own: Any) -> T:
        """An instance of a dataclass, filled by name: from `own`, else this configuration, else the flags as given.

        A flag reaches a component when the component's options class has a field of its name.
        """
        names = [item.name for item in dataclasses.fields(options)]  # type: ignore[arg-type]
        resolved = {name: getattr(self, name) for name in names if hasattr(self, name)}
        values = self.args.flat() | resolved
        return options(**{name: values[name] for name in names if name in values} | own)


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
    contradictions.check(args)
    args = with_storage_page(resolve_pooling(_with_transfers(args), model, record := Record()), record)
    path = model_path or args.model.model_path or ""
    device = record.note("device", machine.device, machine.device_reason or "asked for")
    parallel = resolve_parallel(args, model, device, place, record, machine.unlinked, machine.num_devices)
    args = with_states(args, model, None if draft is None else draft.config, parallel.topology, record)
    experts = resolve_experts(args, model, record, parallel.topology, dump_directory)
    kv_dtype = _kv_dtype(args, dtype := _dtype(args, model, machine, record), record)
    lora = resolve_lora(args, model, machine, parallel.topology, dtype, adapters, record)
    model = model.within(context_len := _context_len(args, model, record))
    speculation, drafts = _drafts(args, model, draft, context_len, parallel, device, record)
    part = _own_part(machine, parallel)
    asked = asked_backends(args) | compiled_rows(args, model, parallel, device, record)
    local = local_heads(model, parallel.topology.attn_tp_size)
    why = why_not_captured(args, part, parallel, experts, model)
    kernels = resolve_kernels(args, asked, part, local, drafts, dtype, kv_dtype, why, record)
    parallel = with_dispatch_dtype(parallel, args, model, kernels, record)
    page, size = kernels.page_size, DTYPE_BYTES[dtype]
    limits = resolve_limits(args, model, part, parallel, speculation, context_len, page, size, record)
    graphs = resolve_graphs(args, part, parallel, speculation, limits, kernels.uncaptured, record)
    sizing = _size(args, model, part, kernels, limits, checkpoint, speculation, drafts, parallel, experts, graphs, lora)
    graphs = _note_sizes(args, sizing, graphs, part, limits, record)
    return ResolvedConfig(
        args=_with_demo_parsers(args, path, record),
        parallel=parallel,
        model=model,
        machine=machine,
        model_path=path,
        tokenizer_path=args.model.tokenizer_path or record.note("tokenizer_path", path, "the model's own"),
        served_model_name=args.model.served_model_name or _served_name(args, path, record),
        device=device,
        dtype=dtype,
        kv_cache_dtype=kv_dtype,
        context_len=context_len,
        kernels=kernels,
        chunked_prefill_size=limits.chunk,
        max_prefill_tokens=args.memory.max_prefill_tokens,
        max_running_requests=sizing.max_running_requests,
        schedule_conservativeness=_conservativeness(args, parallel, record),
        mem_fraction_static=sizing.mem_fraction_static,
        random_seed=_seed(args, drawn_seed, record),
        cpu_threads=args.backends.cpu_threads or record.note("cpu_threads", part.cores, _cores_reason(parallel)),
        ledger=sizing.ledger,
        limits=limits,
        decisions=tuple(record.decisions),
        notes=(*_idle_flags(args, device, parallel), *record.remarks, *_size_remarks(context_len, sizing)),
        speculation=speculation,
        draft_model=drafts,
        experts=experts,
        graphs=graphs,
        compiled=compile_settings(args, speculation, limits.running),
        lora=lora,
    )


def _seed(args: EngineArgs, drawn: int, record: Record) -> int:
    asked = args.model.random_seed
    return record.note("random_seed", drawn, "drawn at start") if asked is None else asked


def _drafts(
    args: EngineArgs,
    model: ModelConfig,
    draft: DraftModel | None,
    context_len: int,
    parallel: ParallelPlan,
    device: str,
    record: Record,
) -> tuple[SpeculationConfig | None, ModelConfig | None]:
    """The drafter, and its draft model if it has one."""
    speculation = resolve_speculation(args, model, draft, context_len, record)
    _check_shared_drafts(args, speculation, model, parallel)
    configs = [model] if draft is None else [model, draft.config]
    check_sparse(args, configs, device, 1 if speculation is None else speculation.topk)
    if draft is None or draft.is_nextn or speculation is None or speculation.draft_model_path is None:
        return speculation, None
    return speculation, draft.config.within(context_len)


def _check_shared_drafts(
    args: EngineArgs, speculation: SpeculationConfig | None, model: ModelConfig, parallel: ParallelPlan
) -> None:
    """With DP attention all groups run every draft forward together, so its sizes must be known beforehand."""
    groups = parallel.topology.attn_dp_size
    if speculation is None or speculation.method != "nextn" or groups == 1:
        return
    asked = f"--speculative-algorithm {args.speculative.speculative_algorithm}"
    if speculation.topk > 1:
        raise ConfigError(
            f"--speculative-eagle-topk {speculation.topk} with --attn-dp-size {groups}: draft trees of MTP layers need "
            "a single attention group; use --speculative-eagle-topk 1, or NGRAM"
        )
    if model.num_nextn_predict_layers > 1:
        raise ConfigError(
            f"{asked} with --attn-dp-size {groups}: {model.source} has "
            f"{model.num_nextn_predict_layers} MTP layers, and more than one needs a single attention group; use "
            "NGRAM, or no DP attention"
        )


def _own_part(machine: Machine, parallel: ParallelPlan) -> Machine:
    """One rank's share of the machine. Each rank has its own GPU; ranks share a host's memory and cores."""
    ranks = parallel.ranks_per_node
    cores = max(1, machine.cores // ranks)
    if machine.device != "cpu" or ranks == 1:
        return dataclasses.replace(machine, cores=cores)
    return dataclasses.replace(
        machine,
        total_bytes=machine.total_bytes // ranks,
        available_bytes=machine.available_bytes // ranks,
        cores=cores,
        source=f"{machine.source}, shared by {ranks} ranks",
    )


def _cores_reason(parallel: ParallelPlan) -> str:
    ranks = parallel.ranks_per_node
    return "physical cores this process may use" + (f", shared by {ranks} ranks" if ranks > 1 else "")


def _conservativeness(args: EngineArgs, parallel: ParallelPlan, record: Record) -> float:
    asked = args.scheduling.schedule_conservativeness
    if parallel.topology.attn_dp_size == 1:
        return asked
    reason = f"{asked:g} x {DP_CONSERVATIVENESS:g}, as SGLang does with DP attention"
    return record.note("schedule_conservativeness", round(asked * DP_CONSERVATIVENESS, 6), reason)


def _is_demo(args: EngineArgs, path: str) -> bool:
    return args.model.model_path is None or Path(path) == CHECKPOINT_DIR


def _with_demo_parsers(args: EngineArgs, path: str, record: Record) -> EngineArgs:
    """Sets the parsers of the embedded model, whose reasoning and tool-call formats are known."""
    if not _is_demo(args, path) or args.model.skip_tokenizer_init:
        return args
    chosen: dict[str, Any] = {n: parser for n, parser in DEMO_PARSERS.items() if getattr(args.server, n) is None}
    for name, parser in chosen.items():
        record.note(name, parser, "the embedded model's format")
    return dataclasses.replace(args, server=dataclasses.replace(args.server, **chosen))


def _served_name(args: EngineArgs, path: str, record: Record) -> str:
    if _is_demo(args, path):
        return record.note("served_model_name", DEMO_NAME, "the embedded model")
    return record.note("served_model_name", args.model.model_path or path, "the model path")


def _idle_flags(args: EngineArgs, device: str, parallel: ParallelPlan) -> tuple[str, ...]:
    return (*args.notes, *flags_without_effect(args, device, parallel))


def _size_remarks(context_len: int, sizing: Sizing) -> list[str]:
    tokens = sizing.ledger.num_tokens
    remarks = [sizing.window_remark] if sizing.window_remark else []
    if tokens >= context_len:
        return remarks
    return [
        *remarks,
        f"the KV cache holds {tokens} tokens: requests are limited to that, below the context length {context_len}",
    ]


def _dtype(args: EngineArgs, model: ModelConfig, machine: Machine, record: Record) -> str:
    _check_quantization(args, model, record)
    asked = args.model.dtype
    dtype = activation_dtype(model, asked, machine.device)
    if asked != "auto":
        return dtype
    if dtype == "float16" and machine.device == "cpu":
        return record.note("dtype", "bfloat16", "the checkpoint is float16, and CPU kernels compute in bfloat16")
    if stored := model.weight_format.name:
        return record.note("dtype", dtype, f"compute type of {stored} weights")
    return record.note("dtype", dtype, f"the checkpoint is {model.checkpoint_dtype}")


def _kv_dtype(args: EngineArgs, dtype: str, record: Record) -> str:
    asked = args.memory.kv_cache_dtype
    if asked == "auto":
        return record.note("kv_cache_dtype", dtype, "that of the activations")
    if is_fp8(asked):
        if asked == E5M2:
            record.remark(f"--kv-cache-dtype {asked} has two mantissa bits; {E4M3} has three")
        return asked
    if asked != dtype:
        raise ConfigError(
            f"--kv-cache-dtype {asked} with activations in {dtype} (--dtype {args.model.dtype}): attention needs the "
            f"same type for both; drop --kv-cache-dtype, or use --dtype {asked}"
        )
    return asked


def _check_quantization(args: EngineArgs, model: ModelConfig, record: Record) -> None:
    asked, found = args.model.quantization or args.model.torchao_config, model.weight_format.name
    if not asked and found:
        record.note("quantization", found, "from config.json")


def _with_transfers(args: EngineArgs) -> EngineArgs:
    """KV that moves between servers passes through the host tier."""
    if args.disaggregation.disaggregation_mode == OFF:
        return args
    return dataclasses.replace(args, memory=dataclasses.replace(args.memory, enable_hierarchical_cache=True))


def _context_len(args: EngineArgs, model: ModelConfig, record: Record) -> int:
    asked, longest = args.model.context_length, model.context_length
    if asked is None:
        return record.note("context_length", longest, "config.json")
    if asked > longest:
        raise ConfigError(
            f"--context-length {asked}: the model's context length is {longest} tokens (config.json); use at most "
            f"{longest}, or override it with --json-model-override-args '{{\"max_position_embeddings\": {asked}}}'"
        )
    return asked


def _size(
    args: EngineArgs,
    model: ModelConfig,
    machine: Machine,
    kernels: LaunchKernels,
    limits: StepLimits,
    checkpoint: CheckpointFacts | None,
    speculation: SpeculationConfig | None,
    draft: ModelConfig | None,
    parallel: ParallelPlan,
    experts: ExpertSettings,
    graphs: GraphSettings,
    lora: LoraSettings | None,
) -> Sizing:
    memory, need = args.memory, kernels.model.need
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
            checkpoint=checkpoint,
            uses_mtp=speculation is not None and speculation.method == "nextn",
            draft=draft,
            parallel=parallel,
            experts=experts,
            graphs=graphs,
            lora=lora,
            tier_ratio=memory.hicache_ratio if memory.enable_hierarchical_cache else 0.0,
            tier_bytes=memory.hicache_size * 10**9 if memory.enable_hierarchical_cache else 0,
            swa_ratio=0.0 if memory.disable_hybrid_swa_memory else memory.swa_full_tokens_ratio,
        )
    )


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
    if args.memory.mem_fraction_static is None:
        record.note("mem_fraction_static", sizing.mem_fraction_static, sizing.fraction_reason)
    captured = graphs.up_to(sizing.max_running_requests)
    note_graphs(args, captured, machine, limits, sizing.max_running_requests, record)
    return captured
