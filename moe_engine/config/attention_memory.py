"""Scratch memory of the attention backend: which one will run on an accelerator, and what it says it takes."""

from __future__ import annotations

from moe_engine.config.ledger import TABLE_PADDING, LedgerRow
from moe_engine.config.machine import Machine
from moe_engine.errors import ConfigError
from moe_engine.kernels import tables
from moe_engine.kernels.attention.workspaces import AttentionLoad
from moe_engine.kernels.device import Need
from moe_engine.kernels.registry import Row, select
from moe_engine.models.config import ModelConfig
from moe_engine.models.needs import head_widths
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


def workspace_rows(
    row: Row | None,
    model: ModelConfig,
    graphs: GraphSettings,
    running: int,
    tokens_each: int,
    context_len: int,
    page_size: int,
) -> list[LedgerRow]:
    """What the backend takes beside activations, stated by itself.

    Args:
        model: with the heads of one rank.
        graphs: steps that are recorded; none is larger than `running`.
        running, tokens_each: requests of the largest step of decodes, and query tokens of each.
    """
    if row is None or row.workspace is None:
        return []
    drafted = 2 * tokens_each if tokens_each > 1 else 0
    load = AttentionLoad(
        requests=running,
        tokens_each=tokens_each,
        widths=head_widths(model),
        pages=-(-(context_len + TABLE_PADDING + drafted) // page_size),
        graphs=graphs.num_graphs,
        recorded=max(graphs.sizes, default=0),
    )
    detail = f"{row.name}: results of parts of long contexts"
    if load.graphs:
        detail += f", plans of {load.graphs} recorded steps"
    return [LedgerRow("attention workspace", row.workspace(load), detail)]
