"""Rows of bytes that requests return for each position (hidden states, experts): collected from results, passed to
events.

Every position is reported once. A retracted request recomputes its tokens: rows of positions already reported are
dropped.
"""

from __future__ import annotations

from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.types import PositionRows, Request


def keep_rows(record: StepRecord, by_row: dict[int, PositionRows]) -> None:
    """Takes the rows of a step. Called before its tokens are appended."""
    for row, request in [*record.prefilled.items(), *zip(record.sampled_rows, record.sampled)]:
        found = by_row.get(row) if request.positions is not None and request.row == row else None
        if found is None or request.positions is None:
            continue
        start, num, data = found
        seen = max(0, request.num_positions - start)
        if seen < num:
            request.positions.append(data[len(data) // num * seen :])
            request.num_positions = start + num


def take_rows(request: Request) -> bytes | None:
    """The rows since the last call; None: none."""
    if not request.positions:
        return None
    rows, request.positions = b"".join(request.positions), []
    return rows
