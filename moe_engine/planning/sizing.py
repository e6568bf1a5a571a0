"""Sizes the KV cache and the running requests: fills the memory ledger, or refuses with the nearest flags that fit."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Iterator
from dataclasses import dataclass, field

from moe_engine.errors import ConfigError
from moe_engine.kernels.backends import LaunchKernels
from moe_engine.kernels.sampling.scratch import DEVICE_SCRATCH_BYTES, HOST_SCRATCH_BYTES
from moe_engine.models import sizes
from moe_engine.models.config import ModelConfig
from moe_engine.models.formats.protocol import WeightFormat
from moe_engine.models.formats.table import kept_format
from moe_engine.models.widths import local_heads
from moe_engine.parallel.expert_settings import ExpertSettings
from moe_engine.planning.attention_memory import draft_workspace_rows, workspace_rows
from moe_engine.planning.checkpoint import CheckpointFacts
from moe_engine.planning.dispatch_memory import exchange_rows
from moe_engine.planning.ledger import (
    DRAFT_WEIGHTS,
    GB,
    SLOT_TOKEN_BYTES,
    STATIC_ROWS,
    LedgerRow,
    MemoryLedger,
    gb,
    slot_table_bytes,
    tokens_that_fit,
)
from moe_engine.planning.machine import Machine
from moe_engine.planning.resolve_graphs import graph_row
from moe_engine.planning.resolve_limits import SMALL_DISPATCH, SMALLER_STEPS
from moe_engine.planning.resolve_lora import lora_rows
from moe_engine.planning.resolve_parallel import SINGLE_PROCESS, ParallelPlan
from moe_engine.planning.state_memory import state_rows
from moe_engine.planning.step_limits import StepLimits
from moe_engine.planning.tier_memory import tier_bytes_per_token, tier_reserve, tier_rows, tier_tokens
from moe_engine.planning.window_memory import INDEXED_WINDOWS, bound_windows, window_bytes_per_token, window_rows
from moe_engine.step_settings import GraphSettings, LoraSettings

CPU_SHARE = 0.8
"""Share of the available memory that an engine on a CPU uses by default; the rest is for other programs."""

CPU_KV_BYTES = 2 * GB
CPU_KV_SHARE = 0.1
"""The default KV cache on a CPU is at most the larger of these two (the share is of available memory), or one whole
context: prefixes stay cached until the pool is full, and a laptop needs its memory for other programs."""

GPU_RESERVE_BYTES = GB
GPU_RESERVE_SHARE = 0.04
PROCESS_BYTES = 768 << 20
"""Two Python processes with their libraries, one of them with torch."""

WORKSPACE_BYTES = 64 << 20
"""Scratch memory of kernels over all threads."""

MIN_USEFUL_TOKENS = 128

FRACTION_STEPS = 1_000_000
"""--mem-fraction-static is reported in these parts, rounded up: passed as a flag it gives the same KV cache."""


@dataclass(frozen=True)
class SizingInput:
    """Everything the ledger depends on; `mem_fraction` and `max_total_tokens` None mean auto.

    `uses_mtp`: the checkpoint's MTP layers draft; `draft`: the draft model. Either holds KV for the same slots.
    """

    model: ModelConfig
    machine: Machine
    dtype: str
    dtype_bytes: int
    kv_dtype: str
    kernels: LaunchKernels
    limits: StepLimits
    mem_fraction: float | None
    max_total_tokens: int | None
    running_is_auto: bool
    checkpoint: CheckpointFacts | None = None
    uses_mtp: bool = False
    draft: ModelConfig | None = None
    parallel: ParallelPlan = SINGLE_PROCESS
    experts: ExpertSettings = field(default_factory=ExpertSettings)
    graphs: GraphSettings = field(default_factory=GraphSettings)
    tier_ratio: float = 0.0
    """Tokens of the host-RAM tier over those of the KV cache, unless `tier_bytes` is its size; both 0: no tier."""
    tier_bytes: int = 0
    swa_ratio: float = 0.8
    """Slots of windowed layers over those of the others where memory is scarce; 0: no pool of their own."""
    num_window_slots: int = 0
    """Tokens of the pool of windowed layers; 0: they have none of their own."""
    lora: LoraSettings | None = None

    @property
    def page_size(self) -> int:
        return self.kernels.page_size

    @property
    def bytes_per_token(self) -> int:
        """KV bytes of a token on one rank, without those of windowed layers that have a pool of their own."""
        drafted = self.draft.kv_bytes_per_token(self.kv_dtype) if self.draft is not None else 0
        windowed = window_bytes_per_token(self) if self.num_window_slots else 0
        return self.local_model.kv_bytes_per_token(self.kv_dtype, self.uses_mtp) + drafted - windowed

    @property
    def weight_format(self) -> WeightFormat:
        """The format in which the device's kernels hold the weights."""
        return kept_format(self.model.weight_format, self.machine.device, self.kernels.model.codes)

    @property
    def local_model(self) -> ModelConfig:
        """The model with the attention heads of one rank."""
        return local_heads(self.model, self.parallel.topology.attn_tp_size)

    @property
    def uses_ngrams(self) -> bool:
        """Drafts come from neither MTP layers nor a draft model."""
        return self.drafts and not self.uses_mtp and self.draft is None

    @property
    def drafts(self) -> bool:
        return self.limits.drafts

    @property
    def logits_rows(self) -> int:
        """Max rows of logits at once."""
        return sizes.logits_rows(self.model.vocab_size, self.limits.num_logits)

    @property
    def min_tokens(self) -> int:
        """Least KV slots of a useful engine."""
        wanted = self.max_total_tokens or min(self.limits.context_len, MIN_USEFUL_TOKENS)
        return -(-wanted // self.page_size) * self.page_size


@dataclass(frozen=True)
class Sizing:
    ledger: MemoryLedger
    tokens_reason: str
    max_running_requests: int
    running_reason: str
    mem_fraction_static: float
    fraction_reason: str
    window_remark: str = ""
    """Why the KV of windowed layers is not bounded by their window."""


def size_memory(given: SizingInput) -> Sizing:
    """Fills the memory ledger. Raises ConfigError with the sum and the nearest flags that fit, if it does not fit."""
    given, remark = _with_bounded_windows(given)
    rows = fixed_rows(given)
    limit, limit_reason = memory_limit(given, rows)
    fits = _fitting_tokens(given, rows, limit)
    if fits < given.min_tokens:
        raise _refusal(given, rows, limit, limit_reason, fits)
    tokens, reason = _choose_tokens(given, fits)
    if given.mem_fraction is not None and tokens == fits:
        _check_fraction(given, given.mem_fraction, rows)
    page, ids = given.page_size, SLOT_TOKEN_BYTES * (tokens + given.page_size)
    rows = (*rows, LedgerRow("tokens of slots", ids, "ids beside the KV cache, for penalties"))
    limit, limit_reason = memory_limit(given, rows)
    tier = tier_tokens(given, tokens)
    rows = (*rows, *tier_rows(given, tier))
    ledger = MemoryLedger(
        rows, limit, limit_reason, given.bytes_per_token, tokens, page, given.logits_rows, given.num_window_slots, tier
    )
    running, running_reason = _choose_running(given, tokens)
    if given.mem_fraction is not None:
        return Sizing(ledger, reason, running, running_reason, given.mem_fraction, "asked for", remark)
    static = ledger.static_bytes / given.machine.total_bytes
    fraction = math.ceil(static * FRACTION_STEPS) / FRACTION_STEPS
    why = "weights and KV of the ledger / total memory"
    return Sizing(ledger, reason, running, running_reason, fraction, why, remark)


def fixed_rows(given: SizingInput) -> tuple[LedgerRow, ...]:
    """Ledger rows of one rank, without KV."""
    limits, model, topology, size = given.limits, given.model, given.parallel.topology, given.dtype_bytes
    redundant, kept, graphs = given.experts.num_redundant, given.weight_format, given.graphs
    weights = sizes.weight_bytes(model, size, topology=topology, redundant_experts=redundant, format=kept)
    detail = f"{_count(sizes.num_parameters(model))} parameters as {given.dtype}"
    if stored := model.weight_format.name:
        detail += f", {stored} " + ("as stored" if kept.name else "dequantised while loading")
    if topology.tp_size > 1:
        detail += f", one shard of {topology.tp_size}"
    if redundant:
        detail += f", with {redundant} redundant experts"
    if given.checkpoint is not None:
        extra = max(0, given.checkpoint.num_elements - sizes.num_parameters(model)) * given.dtype_bytes
        weights += extra // topology.tp_size
        files = "1 file" if given.checkpoint.num_files == 1 else f"{given.checkpoint.num_files} files"
        detail += f", {gb(given.checkpoint.stored_bytes)} in {files}"
    rows = [
        LedgerRow("weights", weights, detail),
        *_draft_rows(given),
        *lora_rows(given.lora, model, topology, size, given.machine.device),
        LedgerRow("activations", _step_bytes(given), f"a step of {limits.forward_tokens} tokens"),
        _logits_row(given),
        _table_row(given),
        *window_rows(given),
        *state_rows(given),
        LedgerRow("kernel workspace", WORKSPACE_BYTES, "scratch memory of all threads"),
        *_attention_rows(given),
        *_exchange_rows(given),
        *graph_row(
            graphs, given.local_model, size, topology.attn_dp_size, limits.running, given.logits_rows, given.uses_mtp
        ),
        *_expert_rows(given),
    ]
    if given.machine.device == "cpu":
        rows.append(LedgerRow("processes", PROCESS_BYTES, "front end and engine core with their libraries"))
    return tuple(rows)


def _logits_row(given: SizingInput) -> LedgerRow:
    """The row of logits. A step with more rows computes and samples them in several passes."""
    count, vocab, most = given.logits_rows, given.model.vocab_size, given.limits.num_logits
    scratch = HOST_SCRATCH_BYTES if given.machine.device == "cpu" else DEVICE_SCRATCH_BYTES
    detail = f"{count} rows of {vocab}" + (f" at once, of up to {most}" if most > count else "")
    num_bytes = sizes.sampling_bytes(vocab, count, scratch, given.limits.context_len)
    return LedgerRow("logits and sampling", num_bytes, detail)


def _attention_rows(given: SizingInput) -> list[LedgerRow]:
    """Workspace of the attention backend, if it is significant."""
    limits, graphs = given.limits, given.graphs.up_to(given.limits.running)
    sizes = limits.running, limits.tokens_each, limits.row_width, given.page_size
    kernels = given.kernels
    rows = workspace_rows(kernels.model.row("attention"), given.local_model, graphs, *sizes, given.kv_dtype)
    if given.draft is not None and kernels.draft is not None:
        rows += draft_workspace_rows(kernels.draft.row("attention"), given.draft, *sizes)
    return rows


def _expert_rows(given: SizingInput) -> list[LedgerRow]:
    """Device memory of expert recording and of EPLB's expert transfers."""
    settings, model = given.experts, given.model
    if model.moe is None:
        return []
    rows = []
    if settings.recorder_mode in ("stat", "stat_approx") and settings.buffer_size != -1:
        detail = f"{settings.buffer_size} passes x {model.num_layers} layers x {model.moe.num_experts} experts"
        counts = settings.buffer_size * model.num_layers * model.moe.num_experts
        rows.append(LedgerRow("recorded experts", 4 * counts, detail))
    if settings.recorder_mode is not None:  # each token's experts, their indices into the counts, and the increments
        tokens = given.limits.num_tokens * given.parallel.topology.attn_dp_size
        detail = f"{tokens} tokens x {model.num_layers} layers x {model.moe.top_k} experts"
        rows.append(LedgerRow("experts of a pass", 3 * 4 * tokens * model.num_layers * model.moe.top_k, detail))
    if settings.rebalance is not None:
        expert = 3 * model.hidden_size * model.moe.width // given.parallel.topology.moe_tp_size * given.dtype_bytes
        count = settings.rebalance.layers_at_once
        rows.append(LedgerRow("experts in transit", count * expert, f"{count} spare slot" + "s" * (count > 1)))
    return rows


def _table_row(given: SizingInput) -> LedgerRow:
    """The row of the slot table (block table): the KV slot of each position of each running request. With drafts also
    the token ids, and positions for drafts."""
    limits = given.limits
    detail = f"{limits.running} requests x {limits.context_len} positions"
    tables = ["slots"] + ["window slots"] * bool(given.num_window_slots) + ["tokens"] * given.drafts
    if len(tables) > 1:
        detail += f", {' and '.join(tables)}"
    return LedgerRow("slot tables", len(tables) * slot_table_bytes(limits.running, limits.row_width), detail)


def _exchange_rows(given: SizingInput) -> list[LedgerRow]:
    return exchange_rows(given.parallel, given.model, given.dtype_bytes, given.machine.device, given.limits)


def _draft_rows(given: SizingInput) -> list[LedgerRow]:
    """Memory of the drafter: weights, and the model's hidden states that the MTP layers start from. MTP layers share
    embedding and LM head with the model."""
    model, size, topology = given.model, given.dtype_bytes, given.parallel.topology
    if given.uses_mtp:
        layers = model.num_nextn_predict_layers
        extra = sizes.weight_bytes(model, size, True, topology, format=given.weight_format)
        extra -= sizes.weight_bytes(model, size, topology=topology, format=given.weight_format)
        count = _count(sizes.num_parameters(model, include_mtp=True) - sizes.num_parameters(model))
        detail = f"{layers} MTP layer{'s' * (layers > 1)}, {count} parameters; embedding and head are the model's"
        # of each row's last token; for several layers also of earlier tokens, and a copy of those during an update
        states = given.limits.running * (2 * layers - 1)
        kept = LedgerRow("draft states", states * model.hidden_size * size, f"{states} states of running requests")
        return [LedgerRow(DRAFT_WEIGHTS, extra, detail), kept]
    if given.uses_ngrams:
        if given.machine.device == "cpu":
            texts, width = given.limits.running, given.limits.context_len
            num_bytes = width * (texts * sizes.NGRAM_INDEX_BYTES + sizes.NGRAM_HOST_BYTES)
            return [LedgerRow("n-gram search", num_bytes, f"{texts} texts x {width} positions, sorted by token")]
        places = sizes.NGRAM_PLACES
        num_bytes = places * sizes.NGRAM_PLACE_BYTES
        return [LedgerRow("n-gram search", num_bytes, f"{places} positions of texts compared at once")]
    if given.draft is not None:
        detail = f"{_count(sizes.num_parameters(given.draft))} parameters of {given.draft.architecture}"
        return [LedgerRow(DRAFT_WEIGHTS, sizes.weight_bytes(given.draft, size), detail)]
    return []


def _step_bytes(given: SizingInput) -> int:
    """Activations of the largest step. A draft model runs when the model's activations are freed; its draft extend may
    cover the tokens of several steps. MTP layers read the model's hidden states."""
    limits, size = given.limits, given.dtype_bytes
    tokens = limits.forward_tokens * given.parallel.topology.attn_dp_size
    step = sizes.largest_step_activation_bytes(given.local_model, tokens, size)
    if given.draft is not None:
        unseen = min(sizes.DRAFT_CATCH_UP, limits.running * limits.context_len)
        step = max(step, sizes.largest_step_activation_bytes(given.draft, max(tokens, unseen), size))
    return step + given.uses_mtp * 3 * tokens * given.model.hidden_size * size  # hidden states, and eh_proj's input


def _check_fraction(given: SizingInput, fraction: float, rows: tuple[LedgerRow, ...]) -> None:
    """Refuses a share that exceeds the free memory, instead of silently using less."""
    total, available = given.machine.total_bytes, given.machine.available_bytes
    others = sum(row.num_bytes for row in rows if row.name not in STATIC_ROWS)
    static = int(fraction * total)
    if static + others > available:
        most = int((available - others) / total * 1000) / 1000
        raise ConfigError(
            f"--mem-fraction-static {fraction:g} asks for {gb(static)} of {gb(total)} for weights and KV, and steps "
            f"take {gb(others)} more, but only {gb(available)} are free; use at most {most:g}, or free memory"
        )


def _count(number: int) -> str:
    return f"{number / 1e9:.2f} B" if number >= 10**9 else f"{number / 1e6:.1f} M"


def memory_limit(given: SizingInput, rows: tuple[LedgerRow, ...]) -> tuple[int, str]:
    """Memory limit of the engine, and its reason."""
    machine = given.machine
    if given.mem_fraction is not None:
        static = int(given.mem_fraction * machine.total_bytes)
        others = sum(row.num_bytes for row in rows if row.name not in STATIC_ROWS)
        if static + others > machine.available_bytes:
            return machine.available_bytes, f"available memory, {machine.source}"
        share = f"--mem-fraction-static {given.mem_fraction:g} of {gb(machine.total_bytes)} for weights and KV"
        return static + others, share + ", plus the other rows"
    if machine.device == "cpu":
        available = gb(machine.available_bytes)
        return int(CPU_SHARE * machine.available_bytes), f"{CPU_SHARE:.0%} of {available} available, {machine.source}"
    reserve = max(GPU_RESERVE_BYTES, int(GPU_RESERVE_SHARE * machine.total_bytes))
    return machine.available_bytes - reserve, f"{gb(machine.available_bytes)} free, less a reserve of {gb(reserve)}"


def _with_bounded_windows(given: SizingInput) -> tuple[SizingInput, str]:
    """The launch with a pool of windowed layers, or the same launch with the reason if there are windows."""
    if not given.model.longest_window:
        return given, ""
    rows = fixed_rows(given)
    tokens, _ = _choose_tokens(given, _fitting_tokens(given, rows, memory_limit(given, rows)[0]))
    slots, remark = bound_windows(given, tokens)
    return dataclasses.replace(given, num_window_slots=slots), remark


def _fitting_tokens(given: SizingInput, rows: tuple[LedgerRow, ...], limit: int) -> int:
    """KV slots that fit. --mem-fraction-static counts weights and KV only; else the slots' token ids count too."""
    left = limit - sum(row.num_bytes for row in rows)
    ids = 0 if given.mem_fraction is not None else SLOT_TOKEN_BYTES
    stored, ratio = tier_reserve(given)
    each = given.bytes_per_token + ids + math.ceil(ratio * tier_bytes_per_token(given))
    return tokens_that_fit(left - stored, each, given.page_size)


def _choose_tokens(given: SizingInput, fits: int) -> tuple[int, str]:
    page = given.page_size
    if given.max_total_tokens is not None:
        asked = given.max_total_tokens - given.max_total_tokens % page
        return asked, "asked for" if asked == given.max_total_tokens else f"asked for, whole pages of {page}"
    useful = given.limits.context_len * given.limits.running
    useful += -useful % page
    if not given.bytes_per_token:
        most = INDEXED_WINDOWS * given.num_window_slots or useful
        return min(useful, most, fits), "all layers have windows or states: numbers without KV"
    modest = max(CPU_KV_BYTES, int(CPU_KV_SHARE * given.machine.available_bytes))
    if given.machine.device == "cpu" and useful <= fits and useful * given.bytes_per_token <= modest:
        return useful, f"{given.limits.running} requests of {given.limits.context_len} tokens cannot use more"
    if given.machine.device == "cpu" and given.mem_fraction is None:
        one_request = -(-given.limits.context_len // page) * page
        left = modest - sum(row.num_bytes for row in window_rows(given))
        enough = max(tokens_that_fit(left, given.bytes_per_token, page), one_request)
        if enough <= fits:
            return enough, f"{gb(modest)} of KV by default on a CPU; {fits} would fit (--max-total-tokens {fits})"
    return fits, "the rest of the memory ledger"


def _choose_running(given: SizingInput, tokens: int) -> tuple[int, str]:
    """SGLang's clamp(tokens / context * 512, 2048, 4096), at most tokens / 2, one per page, and the device's cap."""
    running = given.limits.running
    if not given.running_is_auto:
        return running, "asked for"
    each = max(2, given.page_size)
    if (most := max(1, tokens // each)) < running:
        return most, f"{tokens} KV tokens, at least {each} for each"
    if given.limits.running_reason:
        return running, given.limits.running_reason
    if given.machine.device == "cpu":
        reason = "SGLang's rule gives 2048 or more; on a CPU a step's time grows with every request"
    else:
        reason = "the minimum of SGLang's rule; more would take memory from the KV cache"
    if given.drafts:
        counted = given.limits.request_tokens
        reason += f"; SGLang's 48 with drafts is not needed: the ledger counts {counted} tokens each"
    return running, reason


def _refusal(given: SizingInput, rows: tuple[LedgerRow, ...], limit: int, limit_reason: str, fits: int) -> ConfigError:
    per_token = given.bytes_per_token
    rows = (*rows, *tier_rows(given, tier_tokens(given, given.min_tokens)))
    ledger = MemoryLedger(rows, limit, limit_reason, per_token, given.min_tokens, given.page_size)
    if fits > 0 and given.max_total_tokens is not None:
        return ConfigError(
            f"--max-total-tokens {given.max_total_tokens} needs {gb(ledger.kv_bytes)} of KV ({per_token} B a token): "
            f"at most {fits} fit, because {ledger.sum_text()} leave {gb(max(0, limit - ledger.fixed_bytes))} of "
            f"{gb(limit)} ({limit_reason}); use --max-total-tokens {fits}{_or(_fixes(given))}"
        )
    kv = f" + KV of {given.min_tokens} tokens {gb(ledger.kv_bytes)}"
    message = (
        f"{given.model.source}: {ledger.sum_text()}{kv} = {gb(ledger.total_bytes)}, but this machine offers "
        f"{gb(limit)} ({limit_reason}); "
    )
    if fixes := _fixes(given):
        return ConfigError(message + "it fits with " + " or with ".join(fixes))
    if given.machine.device == "cpu":
        least = int((ledger.weight_bytes + PROCESS_BYTES) / CPU_SHARE)
    else:
        least = int(ledger.weight_bytes * (1 + GPU_RESERVE_SHARE)) + GPU_RESERVE_BYTES
    return ConfigError(
        message + f"no flag changes that: the weights alone need a machine with more than {gb(least)} of free memory"
    )


def _or(fixes: list[str]) -> str:
    return "".join(f", or {fix}" for fix in fixes)


def _fixes(given: SizingInput) -> list[str]:
    """Flags with which the same launch fits, nearest first: a smaller step, or a larger share of the memory."""
    fixes = []
    for flags, limits in _smaller_steps(given):
        if _fits(dataclasses.replace(given, limits=limits)):
            fixes.append(" ".join(flags))
            break
    fraction = _sufficient_fraction(given)
    if fraction is not None:
        fixes.append(f"--mem-fraction-static {fraction:g}")
    if given.drafts and _fits(_without_drafts(given)):
        fixes.append("no --speculative-algorithm")
    return fixes


def _fits(given: SizingInput) -> bool:
    rows = fixed_rows(given)
    return _fitting_tokens(given, rows, memory_limit(given, rows)[0]) >= given.min_tokens


def _without_drafts(given: SizingInput) -> SizingInput:
    limits = dataclasses.replace(given.limits, request_tokens=1, drafting_tokens=1, draft_slots=0, choices=1)
    limits = dataclasses.replace(limits, followed_again=0)
    return dataclasses.replace(given, limits=limits, uses_mtp=False, draft=None)


def _smaller_steps(given: SizingInput) -> Iterator[tuple[list[str], StepLimits]]:
    """Smaller and smaller steps, each with its flags."""
    page = given.page_size
    for tokens in (SMALL_DISPATCH, SMALL_DISPATCH // 4):
        if given.limits.low_latency == "decode" and tokens < given.limits.low_latency_tokens:
            limits = dataclasses.replace(given.limits, dispatch_limit=tokens)
            yield [f"--max-dispatch-tokens-per-rank {tokens}"], limits
    for chunk, running, context in SMALLER_STEPS:
        limits, flags = given.limits, []
        chunk = max(page, chunk - chunk % page)
        if limits.chunk == -1 or chunk < limits.chunk:
            limits = dataclasses.replace(limits, chunk=chunk)
            flags.append(f"--chunked-prefill-size {chunk}")
        if running and running < limits.running:
            limits = dataclasses.replace(limits, running=running)
            flags.append(f"--max-running-requests {running}")
        if context and context < limits.context_len:
            limits = dataclasses.replace(limits, context_len=context)
            flags.append(f"--context-length {context}")
        if flags:
            yield flags, limits


def _sufficient_fraction(given: SizingInput) -> float | None:
    """The least --mem-fraction-static that fits the launch into 97% of the available memory, or None."""
    tier = tier_rows(given, tier_tokens(given, given.min_tokens))
    rows = (*fixed_rows(given), *tier)
    ledger = MemoryLedger(rows, 0, "", given.bytes_per_token, given.min_tokens, given.page_size)
    if ledger.total_bytes > 0.97 * given.machine.available_bytes:
        return None
    static = (ledger.static_bytes + sum(row.num_bytes for row in tier)) / given.machine.total_bytes
    fraction = int(static * 1000 + 1) / 1000
    return fraction if fraction < 1 and fraction != given.mem_fraction else None
