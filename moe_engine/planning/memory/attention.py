"""Ledger rows of the attention backend's workspace, as computed by the backend."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.kernels.kv_format.formats import E4M3
from moe_engine.kernels.registry import Row
from moe_engine.kernels.workspaces import AttentionLoad
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.needs import head_widths
from moe_engine.models.step_memory import DRAFT_CATCH_UP, DRAFT_FEW, MAX_EXPANDED_TOKENS
from moe_engine.planning.memory.ledger import LedgerRow
from moe_engine.types.step_settings import GraphSettings


def workspace_rows(
    row: Row,
    model: ModelConfig,
    graphs: GraphSettings,
    running: int,
    tokens_each: int,
    row_width: int,
    page_size: int,
    kv_dtype: str = "auto",
) -> list[LedgerRow]:
    """The ledger row of the backend's workspace, which the backend itself computes.

    Args:
        model: with the heads of one rank.
        graphs: captured steps; none is larger than `running`.
        running, tokens_each: requests of the largest decode step, and query tokens of each.
        row_width: columns of the slot table.
    """
    if row.workspace is None:
        return []
    load = AttentionLoad(
        requests=running,
        tokens_each=tokens_each,
        widths=head_widths(model),
        pages=-(-row_width // page_size),
        graphs=graphs.num_graphs,
        recorded=max(graphs.sizes, default=0),
        record_page=page_size if kv_dtype == E4M3 else 0,
        expanded=_expanded(model),
    )
    detail = f"{row.name}: partial results of long contexts"
    if row.workspace(load) > row.workspace(replace(load, expanded=0)):
        detail += ", a copy of expanded keys in its kernels' layout"
    if load.graphs:
        detail += f", plans of {load.graphs} captured steps"
    return [LedgerRow("attention workspace", row.workspace(load), detail)]


def draft_workspace_rows(
    row: Row, draft: ModelConfig, running: int, depth: int, row_width: int, page_size: int
) -> list[LedgerRow]:
    """The same for a draft model, which has its own backend instance. Its steps are not captured.

    Args:
        depth: query tokens of a request in its largest draft step (of a tree, or of a chain).
        row_width: columns of the slot table.
    """
    if row.workspace is None:
        return []
    most = max(depth, DRAFT_FEW)  # tokens of a draft extend over several steps
    pages = -(-row_width // page_size)
    loads = (
        AttentionLoad(requests, tokens, head_widths(draft), pages, expanded=_expanded(draft))
        for requests, tokens in ((running, depth), (min(running, DRAFT_CATCH_UP // most), most))
    )
    detail = f"{row.name}, for {draft.architecture}"
    return [LedgerRow("draft attention workspace", max(map(row.workspace, loads)), detail)]


def _expanded(model: ModelConfig) -> int:
    """Context tokens whose expanded keys and values are in memory at once."""
    return MAX_EXPANDED_TOKENS if isinstance(model.attention, MLAConfig) else 0
