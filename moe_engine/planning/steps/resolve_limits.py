"""Resolves the largest step from flags: values left open are reduced to fit, contradicting flags are refused.

A low-latency dispatch has a fixed capacity in tokens of a rank. If it serves decodes only, a larger decode step uses
normal mode. If it serves every step (``--deepep-mode low_latency``), no step may be larger.
"""

from __future__ import annotations

from dataclasses import dataclass, replace

from moe_engine.config.args import EngineArgs
from moe_engine.errors import ConfigError
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.dispatch.tables import DispatchRow, FixedSizes
from moe_engine.planning.inputs.machine import Machine
from moe_engine.planning.memory.dispatch import SMALL_DISPATCH, dispatch_bytes
from moe_engine.planning.memory.ledger import gb, slot_table_bytes, slot_tables
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.resolution_log import Record
from moe_engine.planning.step_limits import LowLatency, StepLimits
from moe_engine.planning.steps.resolve_graphs import largest_size
from moe_engine.types import SpeculationConfig

CPU_MAX_RUNNING = 256
GPU_MAX_RUNNING = 2048
SLOT_TABLE_SHARE = 0.02
"""Share of a GPU's memory for the slot tables by default: 2048 rows of 1 M positions would take 8 GiB a table."""
CPU_CHUNK = 2048
# GPU memory in GiB (below) -> tokens of a prefill chunk: SGLang's steps
GPU_CHUNKS = ((20, 2048), (60, 4096), (160, 8192))

DISPATCH_SHARE = 1 / 32
"""Share of the memory for low-latency dispatch buffers by default."""
UNBOUNDED = 1 << 40
FIXES = "raise --max-dispatch-tokens-per-rank, or use --deepep-mode auto"


@dataclass(frozen=True)
class _Size:
    """A value and its reason; `asked`: given by a flag."""

    value: int
    reason: str = ""
    asked: bool = False


@dataclass(frozen=True)
class _Launch:
    """The launch that limits are resolved for. `machine` is one rank's share."""

    args: EngineArgs
    model: ModelConfig
    machine: Machine
    parallel: ParallelPlan
    page_size: int
    dtype_bytes: int

    @property
    def asked_capacity(self) -> int | None:
        return self.args.parallel.max_dispatch_tokens_per_rank

    @property
    def row(self) -> DispatchRow:
        assert self.parallel.dispatch is not None
        return self.parallel.dispatch.row

    @property
    def fixed_sizes(self) -> FixedSizes:
        assert self.parallel.dispatch is not None
        return self.parallel.dispatch.sizes

    def buffers(self, limits: StepLimits) -> int:
        """Bytes of the dispatch buffers."""
        return dispatch_bytes(self.parallel, self.model, self.dtype_bytes, self.machine.device.kind, limits)


def resolve_limits(
    args: EngineArgs,
    model: ModelConfig,
    machine: Machine,
    parallel: ParallelPlan,
    speculation: SpeculationConfig | None,
    context_len: int,
    page_size: int,
    dtype_bytes: int,
    record: Record,
) -> StepLimits:
    """Pure.

    Args:
        machine: one rank's share.

    Raises:
        ConfigError: flags set steps that do not fit the dispatcher's buffers.
    """
    launch = _Launch(args, model, machine, parallel, page_size, dtype_bytes)
    groups = parallel.topology.attn_dp_size
    chunk = _chunk(args, machine, page_size, groups)
    limits = StepLimits(
        chunk.value,
        args.memory.max_prefill_tokens,
        1,
        context_len,
        **StepLimits.of_speculation(speculation, model),
        ranks=parallel.topology.attn_tp_size,
        low_latency=_low_latency(parallel),
    )
    running = _running(launch, limits, groups)
    limits = replace(limits, running=running.value, running_reason=running.reason)
    if limits.low_latency != "never":
        limits = _with_capacity(launch, limits, chunk, running)
        if limits.low_latency == "always":
            running = _fitting_requests(launch, limits, running)
            chunk = _fitting_chunk(launch, replace(limits, running=running.value), chunk)
            limits = replace(limits, chunk=chunk.value, running=running.value, running_reason=running.reason)
        _note_capacity(launch, limits, record)
    if chunk.reason:
        record.note("chunked_prefill_size", chunk.value, chunk.reason)
    return limits


def _low_latency(parallel: ParallelPlan) -> LowLatency:
    modes = set(parallel.dispatch.modes.values()) if parallel.dispatch is not None else set()
    if "low_latency" not in modes:
        return "never"
    return "always" if modes == {"low_latency"} else "decode"


def _running(launch: _Launch, limits: StepLimits, groups: int) -> _Size:
    """Max requests of a step of one attention group, before the size of the KV cache is known. limits: of one."""
    memory, machine, page_size = launch.args.memory, launch.machine, launch.page_size
    if memory.max_running_requests:
        return _Size(max(1, memory.max_running_requests // groups), asked=True)
    cap, reason = max(1, (CPU_MAX_RUNNING if machine.on_cpu else GPU_MAX_RUNNING) // groups), ""
    if not machine.on_cpu:
        windows = bool(launch.model.windowed_layers) and not memory.disable_hybrid_swa_memory
        row = len(slot_tables(windows, limits.drafts)) * slot_table_bytes(1, limits.row_width)
        if (most := max(1, int(SLOT_TABLE_SHARE * machine.total_bytes) // row)) < cap:
            cap = most
            reason = f"slot tables of {limits.context_len} positions take {SLOT_TABLE_SHARE:.0%} of the memory"
    if memory.max_total_tokens is not None and (most := max(1, memory.max_total_tokens // max(2, page_size))) < cap:
        cap, reason = most, ""
    return _Size(cap, reason)


def _chunk(args: EngineArgs, machine: Machine, page_size: int, groups: int) -> _Size:
    """Chunk of one attention group: with DP attention the groups share --chunked-prefill-size."""
    asked = args.memory.chunked_prefill_size
    if asked == -1 or (asked is not None and groups == 1):
        return _Size(asked, asked=True)
    if asked is not None:
        size, reason = asked // groups, f"{asked} shared by {groups} attention groups"
        return _Size(max(page_size, size - size % page_size), reason, asked=True)
    if machine.on_cpu:
        size, reason = CPU_CHUNK, "the default on a CPU"
    else:
        total_gib = machine.total_bytes / (1 << 30)
        size = next((tokens for below, tokens in GPU_CHUNKS if total_gib < below), 16384)
        reason = f"SGLang's step for {total_gib:.0f} GB of GPU memory"
    if groups > 1:
        size, reason = size // groups, f"{reason}, shared by {groups} attention groups"
    rounded = max(page_size, size - size % page_size)
    if rounded != size:
        reason += f", in whole pages of {page_size}"
    return _Size(rounded, reason)


# -- dispatches of fixed capacity


def _with_capacity(launch: _Launch, limits: StepLimits, chunk: _Size, running: _Size) -> StepLimits:
    """The limits with the buffers' capacity: as given, else the tokens of the steps as far as memory allows.

    Raises:
        ConfigError: the backend takes no such size.
    """
    sizes = launch.fixed_sizes
    if launch.asked_capacity is not None:
        _check_capacity(launch, launch.asked_capacity)
        return replace(limits, dispatch_limit=launch.asked_capacity, dispatch_multiple=sizes.multiple)
    wide = replace(limits, dispatch_limit=UNBOUNDED, dispatch_multiple=sizes.multiple)
    least = SMALL_DISPATCH
    if limits.low_latency == "always":
        if not chunk.asked:  # a chunk as large as the decodes, or a small one, costs no further memory
            little = max(launch.page_size, SMALL_DISPATCH * limits.ranks, limits.running * limits.tokens_each)
            wide = replace(wide, chunk=min(limits.chunk, little))
        flags_alone = replace(
            wide, chunk=wide.chunk if chunk.asked else launch.page_size, running=wide.running if running.asked else 1
        )
        least = max(least, flags_alone.low_latency_tokens)
    found = _useful_capacity(launch, wide)
    nothing = launch.buffers(replace(wide, dispatch_limit=1))
    while found > least and launch.buffers(replace(wide, dispatch_limit=found)) - nothing > _affordable(launch):
        found = max(least, found // 2)
    found = min(found, sizes.most or found)
    return replace(
        limits, dispatch_limit=max(1, found // sizes.multiple) * sizes.multiple, dispatch_multiple=sizes.multiple
    )


def _useful_capacity(launch: _Launch, limits: StepLimits) -> int:
    """Tokens of a rank of the largest step that is faster in low-latency mode. Devices send and compute whole buffers,
    used or not: there these are the steps that can be captured as CUDA graphs."""
    if limits.low_latency == "always" or launch.machine.on_cpu:
        return limits.low_latency_tokens
    captured = largest_size(launch.args, launch.machine, launch.parallel)
    return replace(limits, running=min(limits.running, captured)).low_latency_tokens


def _affordable(launch: _Launch) -> int:
    """Max bytes of low-latency buffers by default."""
    return int(DISPATCH_SHARE * launch.machine.total_bytes)


def _check_capacity(launch: _Launch, asked: int) -> None:
    sizes, name = launch.fixed_sizes, launch.row.name
    flag = f"--max-dispatch-tokens-per-rank {asked}: --moe-a2a-backend {name}"
    if sizes.most is not None and asked > sizes.most:
        raise ConfigError(f"{flag} takes {sizes.most} at most here ({sizes.reason})")
    if asked % sizes.multiple:
        below = asked - asked % sizes.multiple
        nearest = " or ".join(str(size) for size in (below, below + sizes.multiple) if size)
        raise ConfigError(f"{flag} takes multiples of {sizes.multiple} here ({sizes.reason}); use {nearest}")


def _capacity_text(launch: _Launch, limits: StepLimits) -> str:
    """Capacity of a dispatch, for messages."""
    ranks = f" x {limits.ranks} ranks of a group" if limits.ranks > 1 else ""
    asked = launch.asked_capacity
    by_flag = f" (--max-dispatch-tokens-per-rank {asked})" if asked is not None else ""
    return f"--deepep-mode low_latency holds {limits.dispatch_limit} tokens a rank{ranks} in a step{by_flag}"


def _fitting_requests(launch: _Launch, limits: StepLimits, running: _Size) -> _Size:
    """Running requests whose decodes fit a dispatch.

    Raises:
        ConfigError: a flag sets more, or not even one fits.
    """
    most, each = limits.dispatch_limit * limits.ranks // limits.tokens_each, limits.tokens_each
    if running.value <= most:
        return running
    if running.asked or not most:
        drafts = f" of up to {each} tokens (drafts)" if each > 1 else ""
        raise ConfigError(
            f"--max-running-requests: {running.value} requests{drafts} in a step of an attention group, and "
            f"{_capacity_text(launch, limits)}; {f'run at most {most} of them, ' if most else ''}{FIXES}"
        )
    return _Size(most, f"capacity of a low-latency dispatch of {limits.dispatch_limit} tokens a rank")


def _fitting_chunk(launch: _Launch, limits: StepLimits, chunk: _Size) -> _Size:
    """A chunk that fits a dispatch, with the tokens of running requests that the MTP layers recompute.

    Raises:
        ConfigError: a flag sets more, or not even a page fits.
    """
    page = launch.page_size
    room = limits.dispatch_limit * limits.ranks - limits.followed_again * limits.running
    if limits.prompt_tokens <= room:
        return chunk
    most = max(0, room - room % page)
    if chunk.asked:
        whole = " (whole prompts, as long as --context-length or --max-prefill-tokens)" if chunk.value == -1 else ""
        raise ConfigError(
            f"--chunked-prefill-size {launch.args.memory.chunked_prefill_size}{whole}: steps of {limits.prompt_tokens} "
            f"tokens in an attention group, and {_capacity_text(launch, limits)}; "
            f"{f'use chunks of {most}, ' if most else ''}{FIXES}"
        )
    if not most:
        raise ConfigError(
            f"--page-size {page}: no chunk could fill a page, as {_capacity_text(launch, limits)}; {FIXES}"
        )
    reason = f"capacity of a low-latency dispatch of {limits.dispatch_limit} tokens a rank"
    return _Size(most, reason + (f", in whole pages of {page}" if most != room else ""))


def _note_capacity(launch: _Launch, limits: StepLimits, record: Record) -> None:
    """Logs the chosen capacity, with a remark if larger decode steps use normal mode."""
    found, each = limits.low_latency_tokens, limits.tokens_each
    requests = limits.running
    if limits.low_latency == "decode" and not launch.machine.on_cpu:
        requests = min(requests, largest_size(launch.args, launch.machine, launch.parallel))
    decodes = limits.of_a_rank(requests * each)
    if launch.asked_capacity is None:
        shared = f" shared by {limits.ranks} ranks" if limits.ranks > 1 else ""
        reason = f"{requests} requests of {each} tokens{shared}"
        if requests < limits.running:
            reason = f"the largest step that is captured, {reason}"
        if limits.low_latency == "always" and found > decodes:
            reason = f"steps of {limits.forward_tokens} tokens{shared}"
        most = launch.fixed_sizes.most
        if found < decodes and most is not None and found > most - launch.fixed_sizes.multiple:
            reason += f" would need {decodes}; {launch.row.name} takes {most} at most here"
        elif found < decodes:
            reason += f" would need {decodes}; buffers take at most {gb(_affordable(launch))} by default"
        record.note("max_dispatch_tokens_per_rank", found, reason)
    if limits.low_latency == "decode" and found < decodes and not launch.machine.on_cpu:
        record.remark(
            f"decode steps of more than {found * limits.ranks} tokens in an attention group use the normal mode of "
            f"{launch.row.name}, where the host waits and no CUDA graph is replayed (--max-dispatch-tokens-per-rank "
            f"{found}); {requests} requests have {requests * each}"
        )
