"""Final hidden states that requests return: collected from results, passed to events.

Every position is reported once. A retracted request recomputes its tokens: states of positions already reported are
dropped.
"""

from __future__ import annotations

from moe_engine.scheduler.plan_draft import StepRecord
from moe_engine.types import Request


def keep_hidden(record: StepRecord, by_row: dict[int, bytes]) -> None:
    """Takes the states of a step. Called before its tokens are appended."""
    for row, request in [*record.prefilled.items(), *zip(record.sampled_rows, record.sampled)]:
        states = by_row.get(row) if request.hidden is not None and request.row == row else None
        if states is None or request.hidden is None:
            continue
        last = request.num_tokens - 1  # the token that a decode computes
        start, end = record.prompt_spans.get(row, (last, last + 1))
        seen = max(0, request.num_hidden - start)
        if seen < end - start:
            request.hidden.append(states[len(states) // (end - start) * seen :])
            request.num_hidden = end


def take_hidden(request: Request) -> bytes | None:
    """The states since the last call; None: none."""
    if not request.hidden:
        return None
    states, request.hidden = b"".join(request.hidden), []
    return states
