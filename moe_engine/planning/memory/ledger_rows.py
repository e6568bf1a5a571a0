"""Ledger rows of one rank without KV: weights, activations, logits, tables, workspaces, exchange, drafts, experts."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.kernels.sampling.scratch import DEVICE_SCRATCH_BYTES, HOST_SCRATCH_BYTES
from moe_engine.models import registry, sizes, step_memory
from moe_engine.planning.memory.attention import draft_workspace_rows, workspace_rows
from moe_engine.planning.memory.dispatch import dispatch_rows, exchange_rows
from moe_engine.planning.memory.drafts import count, draft_rows, step_bytes
from moe_engine.planning.memory.graphs import graph_row
from moe_engine.planning.memory.images import image_rows
from moe_engine.planning.memory.ledger import LedgerRow, gb, slot_table_bytes, slot_tables
from moe_engine.planning.memory.lora import lora_rows
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.states import state_rows
from moe_engine.planning.memory.windows import window_rows

PROCESS_BYTES = 768 << 20
"""Two Python processes with their libraries, one of them with torch."""

WORKSPACE_BYTES = 64 << 20
"""Scratch memory of kernels over all threads."""


def fixed_rows(given: SizingInput) -> tuple[LedgerRow, ...]:
    """Ledger rows of one rank, without KV."""
    limits, model, topology, size = given.limits, given.model, given.parallel.topology, given.dtype_bytes
    redundant, kept, graphs = given.experts.num_redundant, given.weight_format, given.graphs
    weights = sizes.weight_bytes(model, size, topology=topology, redundant_experts=redundant, format=kept)
    weights += given.tied_head_bytes - 2 * given.bf16_gates()
    detail = f"{count(sizes.num_parameters(model))} parameters as {given.dtype}"
    if stored := model.weight_format.name:
        detail += f", {stored} " + ("as stored" if kept.name else "dequantized while loading")
    if topology.tp_size > 1:
        detail += f", one shard of {topology.tp_size}"
    if redundant:
        detail += f", with {redundant} redundant experts"
    if given.checkpoint is not None:
        if not registry.is_built_in(model.architecture):  # other tensors of a built-in one are not loaded
            extra = max(0, given.checkpoint.num_elements - sizes.num_parameters(model)) * given.dtype_bytes
            weights += extra // topology.tp_size
        files = "1 file" if given.checkpoint.num_files == 1 else f"{given.checkpoint.num_files} files"
        detail += f", {gb(given.checkpoint.stored_bytes)} in {files}"
    if given.offload.layers:
        weights -= given.offload.host_bytes
        detail += f", {len(given.offload.layers)} layers of them in host memory"
    rows = [
        LedgerRow("weights", weights, detail),
        *given.offload.rows,
        *draft_rows(given),
        *lora_rows(given.lora, model, topology, size, given.machine.device.kind),
        LedgerRow("activations", step_bytes(given), f"a step of {limits.forward_tokens} tokens"),
        _logits_row(given),
        _table_row(given),
        *window_rows(given),
        *state_rows(given),
        *image_rows(given),
        LedgerRow("kernel workspace", WORKSPACE_BYTES, "scratch memory of all threads"),
        *_attention_rows(given),
        *_prefix_rows(given),
        *runner_rows(given),
        *_exchange_rows(given),
        *graph_row(
            graphs,
            given.local_model,
            size,
            topology.attn_dp_size,
            limits.running,
            given.logits_rows,
            limits.followed_again,
        ),
        *_expert_rows(given),
    ]
    if given.machine.on_cpu:
        rows.append(LedgerRow("processes", PROCESS_BYTES, "frontend and engine core with their libraries"))
    return tuple(rows)


def _logits_row(given: SizingInput) -> LedgerRow:
    """The row of logits. A step with more rows computes and samples them in several passes."""
    count, vocab, most = given.logits_rows, given.model.vocab_size, given.limits.num_logits
    scratch = HOST_SCRATCH_BYTES if given.machine.on_cpu else DEVICE_SCRATCH_BYTES
    detail = f"{count} rows of {vocab}" + (f" at once, of up to {most}" if most > count else "")
    num_bytes = step_memory.sampling_bytes(vocab, count, scratch, given.limits.context_len)
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


def _prefix_rows(given: SizingInput) -> list[LedgerRow]:
    """The expanded prefix of decodes on a CPU, at its largest."""
    kernels = given.kernels.model
    several = given.parallel.topology != sizes.ONE_RANK  # whole decode steps are one call on a single rank only
    if several or kernels.need.deterministic or not given.machine.on_cpu or kernels.row("attention").name != "cpu":
        return []
    tokens, each = step_memory.expanded_prefix(given.local_model, given.dtype_bytes)
    step = step_memory.EXPANDED_PREFIX_STEP
    tokens = min(tokens, given.limits.context_len // step * step)
    detail = f"keys and values of {tokens} tokens that decodes share"
    return [LedgerRow("expanded prefix", tokens * each, detail)] if tokens else []


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
    if settings.returned:
        detail = f"of {given.limits.num_tokens} tokens of a step"
        rows.append(LedgerRow("returned experts", 2 * given.limits.num_tokens * given.returned_numbers, detail))
    if settings.rebalance is not None:
        expert = 3 * model.routed_size * model.moe.width // given.parallel.topology.moe_tp_size * given.dtype_bytes
        count = settings.rebalance.layers_at_once
        rows.append(LedgerRow("experts in transit", count * expert, f"{count} spare slot" + "s" * (count > 1)))
    return rows


def _table_row(given: SizingInput) -> LedgerRow:
    """The row of the slot table (block table): the KV slot of each position of each running request. With drafts also
    the token ids, and positions for drafts."""
    limits = given.limits
    detail = f"{limits.running} requests x {limits.context_len} positions"
    tables = slot_tables(bool(given.num_window_slots), given.drafts)
    if len(tables) > 1:
        detail += f", {' and '.join(tables)}"
    return LedgerRow("slot tables", len(tables) * slot_table_bytes(limits.running, limits.row_width), detail)


def _exchange_rows(given: SizingInput) -> list[LedgerRow]:
    """Draft layers with another number of experts have a dispatcher of their own."""
    model, more = given.model, (given.dtype_bytes, given.machine.device.kind, given.limits)
    rows, own = exchange_rows(given.parallel, model, *more), model.moe_of(model.num_layers)
    if given.uses_mtp and own != model.moe:
        drafts = dispatch_rows(given.parallel, replace(model, moe=own), *more)
        rows += [replace(row, name=f"draft {row.name}") for row in drafts]
    return rows


def runner_rows(given: SizingInput) -> list[LedgerRow]:
    """Scratch memory of the largest step, whose tokens are those of all attention groups; the backend counts it."""
    plan, moe = given.kernels.model, given.model.moe
    scratch, widths = plan.row("experts").experts_workspace, plan.need.experts
    if scratch is None or widths is None or moe is None:
        return []
    topology = given.parallel.topology
    tokens = given.limits.forward_tokens * topology.attn_dp_size
    count = moe.num_experts // topology.ep_size + moe.shared_width // moe.width
    detail = f"{plan.row('experts').name}: {tokens} tokens x {widths.top_k} of {count} experts, in whole tiles"
    return [LedgerRow("experts workspace", scratch(widths, count, tokens), detail)]
