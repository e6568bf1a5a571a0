"""Numbers of earlier tokens after those of a state, against a loop over tokens."""

from __future__ import annotations

import random

import torch

from moe_engine.kernels.delta.protocol import StateRuns
from moe_engine.kernels.ops.state_tails import Tails


def compare(x: torch.Tensor, kept: torch.Tensor, runs: StateRuns) -> None:
    count, states = kept.shape[1], kept.clone()
    tails, begin = Tails(x, kept, runs), 0
    found = [tails.before(back) for back in range(count + 1)]
    tails.store()
    for number, length in enumerate(runs.lens):
        text = [*states[runs.reads[number]].clone(), *x[begin : begin + length]]
        for place in range(length):
            token = begin + place
            for back in range(count + 1):
                assert torch.equal(found[back][token], text[count + place - back])
            if place + 1 in runs.stored[number]:
                states[runs.rows[token]] = torch.stack(text[place + 1 : place + 1 + count])
        begin += length
    assert torch.equal(kept, states)


def test_prompts_drafts_and_decodes_in_one_step() -> None:
    """Runs shorter and longer than what a state keeps, with states after tokens before the last."""
    lens, stored = [1, 2, 9, 4], [(1,), (), (3, 9), (1, 2, 3, 4)]
    rows = torch.full((sum(lens),), -1)
    free, begin = iter(random.sample(range(4, 12), 8)), 0
    for length, own in zip(lens, stored):
        for place in own:
            rows[begin + place - 1] = next(free)
        begin += length
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    runs = StateRuns(lens, starts, torch.tensor([2, 0, 3, 1]), stored, rows)
    compare(torch.randn(sum(lens), 5), torch.randn(12, 3, 5), runs)


def test_decodes() -> None:
    """Each reads and stores its own state."""
    rows = torch.tensor(random.sample(range(6), 4))
    compare(torch.randn(4, 3), torch.randn(6, 2, 3), StateRuns.plain([1] * 4, rows))
