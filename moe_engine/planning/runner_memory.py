"""The ledger row of the experts backend's scratch memory, for backends that state it."""

from __future__ import annotations

from moe_engine.planning.ledger import LedgerRow
from moe_engine.planning.sizing_input import SizingInput


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
