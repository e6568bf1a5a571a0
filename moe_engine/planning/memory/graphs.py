"""Ledger row of CUDA graphs."""

from __future__ import annotations

from moe_engine.models import step_memory
from moe_engine.models.config import ModelConfig
from moe_engine.planning.memory.ledger import GRAPHS_ROW, LedgerRow
from moe_engine.types.step_settings import GraphSettings

GRAPH_BYTES = 8 << 20
"""Allowance for the driver's memory of one graph with all layers of the model."""
SMALL_GRAPH_BYTES = 2 << 20
"""The same for the few layers of drafts: a page of device memory."""


def graph_row(
    graphs: GraphSettings, model: ModelConfig, dtype_bytes: int, groups: int, running: int, logits_rows: int,
    again: int = 0,
) -> list[LedgerRow]:  # fmt: skip
    """Memory of CUDA graphs: activations and logits of the largest one, its static results, and the driver's memory.

    Args:
        groups: attention groups; each expert gets the tokens of all groups.
        running: max requests of a step, which may be less than the largest graph.
        logits_rows: max rows of logits at once; larger steps are captured without the LM head.
        again: tokens of a request that several MTP layers recompute.

    Steps with drafts count as captured whole. Where `draft_setup.why_drafts_are_not_captured` has a reason against it,
    fewer graphs are recorded.
    """
    if not graphs.sizes:
        return []
    chains = max(graphs.counts) > 1
    tokens = min(graphs.max_tokens, running * max(graphs.counts))
    heads = min(tokens, logits_rows)
    layers = (tokens + again * min(running, max(graphs.sizes))) * groups  # tokens of the largest forward of a layer
    step = step_memory.largest_step_activation_bytes(model, layers, dtype_bytes, num_logits=heads, expanded_tokens=0)
    results = tokens * model.hidden_size * dtype_bytes + heads * model.vocab_size * (4 + dtype_bytes)
    detail = f"{graphs.num_graphs} captured steps of up to {tokens} tokens, in one pool"
    whole, small = recorded(graphs, chains)
    if small:
        detail += f": {whole} graphs of the model, {small} of drafts"
    driver = whole * GRAPH_BYTES + small * SMALL_GRAPH_BYTES
    return [LedgerRow(GRAPHS_ROW, step + results + driver, detail)]


def recorded(graphs: GraphSettings, chains: bool) -> tuple[int, int]:
    """(graphs of all layers, graphs of few layers) of the captured steps.

    Args:
        chains: steps with drafts are captured whole (`draft_graphs`): each step is the graphs draft, verify and
            follow; a step without drafts is captured alone as well, for steps that the drafter does not follow.
    """
    if not chains:
        return graphs.num_graphs, 0
    return graphs.num_graphs + len(graphs.sizes) * graphs.counts.count(1), 2 * graphs.num_graphs
