"""Scratch memory of the attention backend: which one will run on an accelerator, and what it says it takes."""

from __future__ import annotations

from dataclasses import replace

from moe_engine.errors import ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.attention.kv_format import E4M3
from moe_engine.kernels.attention.workspaces import AttentionLoad
from moe_engine.kernels.device import Need
from moe_engine.kernels.registry import Row, select
from moe_engine.models.config import MLAConfig, ModelConfig
from moe_engine.models.needs import head_widths
from moe_engine.models.sizes import DRAFT_CATCH_UP, DRAFT_FEW, MAX_EXPANDED_TOKENS
from moe_engine.planning.ledger import LedgerRow
from moe_engine.planning.machine import Machine
from moe_engine.types import GraphSettings


def attention_row(machine: Machine, need: Need, asked: str) -> Row | None:
    """The row of `kernels.tables` that will run; None on a CPU, where none takes memory of note. Looks which libraries
    are installed.

    Args:
        asked: --attention-backend.

    Raises:
        ConfigError: the one asked for cannot run there.
    """
    if machine.device == "cpu":
        return None
    rows = tables.MLA if need.attention == "mla" else tables.GQA
    try:
        return select("attention", rows, asked, machine.kernel_device, need).row
    except ValueError as error:
        raise ConfigError(f"--attention-backend {asked}: {error}") from None


def experts_row(machine: Machine, need: Need, asked: str) -> Row:
    """The row of experts that will run.

    Args:
        asked: --moe-runner-backend.

    Raises:
        ConfigError: the one asked for cannot run there.
    """
    try:
        return select("experts", tables.EXPERTS, asked, machine.kernel_device, need).row
    except ValueError as error:
        raise ConfigError(f"--moe-runner-backend {asked}: {error}") from None


def unrecorded(machine: Machine, row: Row | None, need: Need) -> str | None:
    """Why steps with that row cannot be recorded, or None."""
    if row is None or row.why_not_recorded is None:
        return None
    return row.why_not_recorded(machine.kernel_device, need)


def workspace_rows(
    row: Row | None,
    model: ModelConfig,
    graphs: GraphSettings,
    running: int,
    tokens_each: int,
    row_width: int,
    page_size: int,
    kv_dtype: str = "auto",
) -> list[LedgerRow]:
    """What the backend takes beside activations, stated by itself.

    Args:
        model: with the heads of one rank.
        graphs: steps that are recorded; none is larger than `running`.
        running, tokens_each: requests of the largest step of decodes, and query tokens of each.
        row_width: columns of the slot table.
    """
    if row is None or row.workspace is None:
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
    detail = f"{row.name}: results of parts of long contexts"
    if row.workspace(load) > row.workspace(replace(load, expanded=0)):
        detail += ", expanded keys once more as its kernels read them"
    if load.graphs:
        detail += f", plans of {load.graphs} recorded steps"
    return [LedgerRow("attention workspace", row.workspace(load), detail)]


def draft_workspace_rows(
    row: Row | None, draft: ModelConfig, running: int, depth: int, row_width: int, page_size: int
) -> list[LedgerRow]:
    """The same of a draft model, whose backend is another instance. Its steps are not recorded.

    Args:
        depth: query tokens of a request in its largest step of drafting (a tree's, or one behind the other).
        row_width: columns of the slot table.
    """
    if row is None or row.workspace is None:
        return []
    most = max(depth, DRAFT_FEW)  # when it catches up with what requests have got meanwhile
    pages = -(-row_width // page_size)
    loads = (
        AttentionLoad(requests, tokens, head_widths(draft), pages, expanded=_expanded(draft))
        for requests, tokens in ((running, depth), (min(running, DRAFT_CATCH_UP // most), most))
    )
    detail = f"{row.name}, for {draft.architecture}"
    return [LedgerRow("draft attention workspace", max(map(row.workspace, loads)), detail)]


def _expanded(model: ModelConfig) -> int:
    """Context tokens whose keys and values are held at once."""
    return MAX_EXPANDED_TOKENS if isinstance(model.attention, MLAConfig) else 0
