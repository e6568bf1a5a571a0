"""Memory of the buffers of dispatch and of the custom all-reduce, of one rank."""

from __future__ import annotations

from moe_engine.kernels.symm_mem.all_reduce_layout import Arenas
from moe_engine.kernels.vendors.limits import MEGA_TOKENS
from moe_engine.models.config import ModelConfig
from moe_engine.parallel.dispatch.host_memory import OF_BACKEND, ROOM_TOKENS, HostLoad
from moe_engine.planning.memory.ledger import LedgerRow
from moe_engine.planning.parallelism.resolve_dispatch import FP8_BLOCK
from moe_engine.planning.parallelism.resolve_parallel import ParallelPlan
from moe_engine.planning.step_limits import StepLimits

CHOICE_BYTES = 8
"""Bytes of an expert id and its weight."""
POSITION_BYTES = 4
"""Bytes of a choice's row at its expert."""
SMALL_DISPATCH = 128
"""Tokens of a rank that low-latency buffers hold in any case: DeepEP's usual size."""


def dispatch_rows(
    plan: ParallelPlan, model: ModelConfig, dtype_bytes: int, device: str, limits: StepLimits
) -> list[LedgerRow]:
    """Ledger rows of one rank."""
    if plan.dispatch is None or model.moe is None:
        return []
    per_rank, decoded = limits.dispatch_tokens, limits.low_latency_tokens
    if plan.dispatch.row.fused:
        return [_fused(plan, model, max(per_rank, decoded))]
    if device == "cpu":
        return [_on_host(plan, model, dtype_bytes, per_rank, decoded)]
    return [_on_device(plan, model, dtype_bytes, per_rank, decoded)]


def dispatch_bytes(plan: ParallelPlan, model: ModelConfig, dtype_bytes: int, device: str, limits: StepLimits) -> int:
    """Bytes of one rank."""
    return sum(row.num_bytes for row in dispatch_rows(plan, model, dtype_bytes, device, limits))


def exchange_rows(
    plan: ParallelPlan, model: ModelConfig, dtype_bytes: int, device: str, limits: StepLimits
) -> list[LedgerRow]:
    """Ledger rows of one rank for all its exchanges: dispatch, and the custom all-reduce if it runs."""
    rows = dispatch_rows(plan, model, dtype_bytes, device, limits)
    if plan.all_reduce.is_custom:
        ranks = plan.topology.tp_size
        arenas = Arenas(ranks, model.hidden_size, dtype_bytes)
        rows.append(LedgerRow("all-reduce buffers", arenas.num_bytes, f"rows of {ranks} ranks"))
    return rows


def _on_device(plan: ParallelPlan, model: ModelConfig, dtype_bytes: int, per_rank: int, decoded: int) -> LedgerRow:
    """Low-latency buffers hold every rank's tokens at every expert, twice; FP8 tokens are stored as received
    and widened. `symm_mem` has two more rows per token, for dispatch and for combine, and stores FP8 rows of experts in
    one form: either size is at most that of a row."""
    assert plan.dispatch is not None and model.moe is not None
    topology, rows, choices = plan.topology, 0, 0
    if "low_latency" in plan.dispatch.modes.values():
        arriving = 2 * topology.tp_size * decoded
        rows = arriving * (model.moe.num_experts // topology.ep_size)
        if plan.dispatch.row.name == "symm_mem":
            rows += 2 * arriving
            choices = arriving * model.moe.top_k
        elif plan.dispatch_fp8:
            rows += rows // dtype_bytes
    rows += 2 * topology.tp_size * per_rank
    num_bytes = rows * model.routed_size * dtype_bytes + choices * (CHOICE_BYTES + POSITION_BYTES)
    return LedgerRow("dispatch buffers", num_bytes, f"{rows} rows, {plan.dispatch.row.name}")


def _fused(plan: ParallelPlan, model: ModelConfig, tokens: int) -> LedgerRow:
    """MegaMoE's symmetric buffer, at most: tokens and results of a rank, and a pool of the rows of its experts with
    scales of 4 bytes (per 128 channels of a token, 64 of an expert) and indices. The library may keep a smaller pool.
    Source: deep_gemm/include/deep_gemm/layout/sm90_mega_moe.cuh, sgl-deep-gemm 0.2.5."""
    assert plan.dispatch is not None and model.moe is not None
    topology, moe, hidden = plan.topology, model.moe, model.routed_size
    held, ranks = moe.num_experts // topology.ep_size, topology.tp_size
    capacity = -(-tokens // MEGA_TOKENS) * MEGA_TOKENS
    pool = ranks * capacity * min(moe.top_k, held) + held * MEGA_TOKENS
    own = capacity * (hidden + hidden // 32 + 12 * moe.top_k + 2 * hidden * moe.top_k)
    rows = pool * (hidden + hidden // 32 + moe.width + moe.width // 16 + 20)
    return LedgerRow("dispatch buffers", own + rows + 4 * held * ranks * ranks * capacity, f"{pool} rows, megamoe")


def _on_host(plan: ParallelPlan, model: ModelConfig, dtype_bytes: int, per_rank: int, decoded: int) -> LedgerRow:
    """Messages have exact sizes in either mode. A step's activations include the experts' rows of the larger mode; the
    rows of the other mode are added here."""
    assert plan.dispatch is not None and model.moe is not None
    topology, moe, hidden = plan.topology, model.moe, model.routed_size
    row = hidden * dtype_bytes
    data = hidden + 4 * (hidden // FP8_BLOCK) if plan.dispatch_fp8 else row
    record = -(-(data + CHOICE_BYTES * moe.top_k) // 16) * 16
    buffers = OF_BACKEND[plan.dispatch.row.name]
    modes = {"normal": (per_rank, ROOM_TOKENS), "low_latency": (decoded, decoded)}
    taken = [modes[mode] for mode in sorted(set(plan.dispatch.modes.values()))]
    num_bytes = 0
    for tokens, room in taken:
        load = HostLoad(topology.tp_size, topology.num_nodes, tokens, room, record, row)
        num_bytes += buffers(load)
    copies = min(moe.top_k, moe.num_experts // topology.ep_size)
    smaller = sorted(tokens for tokens, _ in taken)[:-1]
    num_bytes += sum(topology.tp_size * tokens * copies * row for tokens in smaller)
    if plan.dispatch_fp8:  # received tokens are widened to float32, then to the activations' dtype
        num_bytes += topology.tp_size * max(tokens for tokens, _ in taken) * (4 * hidden + row)
    tokens_text = " and ".join(str(tokens) for tokens, _ in taken)
    return LedgerRow("dispatch buffers", num_bytes, f"{tokens_text} tokens a rank, {plan.dispatch.row.name}")
