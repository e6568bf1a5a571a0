"""Steps over a few sequences, the same for every engine of a test, on one or several ranks.

Sequences belong to attention groups. The script has prefill and decode alone and mixed, a prompt in chunks, groups
without tokens, and groups with fewer tokens than ranks.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace

import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.drafts.mtp import MTPLayers
from moe_engine.parallel.step_sizes import StepSizes
from tests.models.stepper import Chunk, Stepper

# a step, for each sequence: a number of prompt tokens, or None for one greedy token
Work = dict[int, int | None]
STEPS: list[Work] = [
    {0: 21, 1: 3},
    {0: None, 1: None, 2: 5},
    {1: None, 3: 1},
    {0: None, 2: None, 3: 12},
    {0: None, 1: None, 2: None, 3: None},
    {2: None},
    {0: None, 1: None, 2: None, 3: None},
]
SizesOf = Callable[[ForwardBatch], StepSizes | None]


def group_of(sequence: int, num_groups: int) -> int:
    """The four sequences, divided among one, two or four attention groups."""
    return sequence * num_groups // 4


@dataclass
class Trace:
    """Results of one group's sequences: their tokens, logits [T, V] of all of them (also MTP's), and what the model's
    taps read."""

    tokens: dict[int, list[int]]
    logits: dict[int, Tensor]
    drafts: dict[int, Tensor]
    states: dict[int, Tensor] = field(default_factory=dict)


def prompts(seed: int, vocab_size: int) -> dict[int, list[int]]:
    generator = torch.Generator().manual_seed(seed)
    return {s: torch.randint(0, vocab_size, (40,), generator=generator).tolist() for s in range(4)}


@torch.no_grad()
def run(
    stepper: Stepper,
    prompt_of: dict[int, list[int]],
    num_groups: int = 1,
    group: int = 0,
    sizes_of: SizesOf = lambda batch: None,
    mtp: MTPLayers | None = None,
) -> Trace:
    """Runs the script for the sequences of one group.

    Args:
        sizes_of: called in every step, like the ranks' exchange.
    """
    done: dict[int, int] = {}
    trace = Trace({}, {}, {})
    logits_of: dict[int, list[Tensor]] = {}
    drafts_of: dict[int, list[Tensor]] = {}
    states_of: dict[int, list[Tensor]] = {}
    for work in STEPS:
        chunks = []
        for sequence, count in work.items():
            if group_of(sequence, num_groups) != group:
                continue
            if count is None:
                token = int(logits_of[sequence][-1][-1].argmax())
                trace.tokens.setdefault(sequence, []).append(token)
                chunks.append(Chunk(sequence, [token], decode=True))
            else:
                start = done.get(sequence, 0)
                done[sequence] = start + count
                chunks.append(Chunk(sequence, prompt_of[sequence][start : start + count], decode=False))
        chunks.sort(key=lambda chunk: not chunk.decode)
        batch = stepper.batch(chunks)
        sizes = sizes_of(batch)
        if sizes is not None:
            batch = replace(batch, sizes=sizes)
        model = stepper.model
        taps = getattr(model, "taps", None)
        hidden = model.forward(batch) if taps is None else taps.during(model.forward, batch)
        tapped = None if taps is None else taps.take()
        assert hidden.shape[0] == batch.num_tokens
        logits = stepper.model.logits(hidden, sizes)
        _append(logits_of, chunks, logits)
        if tapped is not None and mtp is None:
            _append(states_of, chunks, tapped)
        if mtp is not None:
            next_ids = [token for chunk in chunks for token in (*chunk.tokens[1:], 7)]
            states = hidden if tapped is None else mtp.prepare(tapped)
            v = mtp.forward(0, torch.tensor(next_ids, dtype=torch.int64), states, batch)
            _append(drafts_of, chunks, mtp.logits(v, sizes))
    trace.logits = {sequence: torch.cat(parts) for sequence, parts in logits_of.items()}
    trace.drafts = {sequence: torch.cat(parts) for sequence, parts in drafts_of.items()}
    trace.states = {sequence: torch.cat(parts) for sequence, parts in states_of.items()}
    return trace


def _append(of: dict[int, list[Tensor]], chunks: list[Chunk], rows: Tensor) -> None:
    lengths = [len(chunk.tokens) for chunk in chunks]
    assert rows.shape[0] == sum(lengths)
    for chunk, part in zip(chunks, rows.split(lengths) if lengths else []):
        of.setdefault(chunk.sequence, []).append(part)


def check_traces(got: list[tuple[int, Trace]], want: Trace, num_groups: int, where: str, tolerance: float) -> None:
    """Every rank has the tokens of its group's sequences, and their logits to within a part of the largest one.

    Args:
        got: (attention group, trace) of every rank.
    """
    for rank, (group, trace) in enumerate(got):
        sequences = {s for s in want.logits if group_of(s, num_groups) == group}
        assert trace.logits.keys() == sequences, (where, rank)
        for s in sequences:
            assert trace.tokens.get(s) == want.tokens.get(s), (where, rank, s)
            for kind in ("states", "logits", "drafts"):
                ours, theirs = getattr(trace, kind).get(s), getattr(want, kind).get(s)
                if theirs is not None:
                    assert ours is not None
                    error = (ours - theirs).abs().max() / theirs.abs().max()
                    assert error < tolerance, (where, rank, s, kind, float(error))
