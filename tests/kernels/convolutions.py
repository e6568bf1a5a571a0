"""Runs of tokens that store states, drawn, and the gated convolution of them in float64, token after token."""

from __future__ import annotations

import random

import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns

NUM_ROWS = 14


def prompts() -> StateRuns:
    """Runs shorter and longer than what a state keeps, with states stored within them; each also stores the row that it
    reads, last, or none."""
    lens = [1, 2, random.randint(17, 30), 4, 7]
    stored = [(1,), (), (3, 9, lens[2]), (1, 2, 3, 4), (7,)]
    reads = random.sample(range(5), 5)
    rows, begin, free = torch.full((sum(lens),), -1), 0, iter(random.sample(range(5, NUM_ROWS), 9))
    for length, own, read in zip(lens, stored, reads):
        for place in own:
            rows[begin + place - 1] = read if place == length and len(own) != 4 else next(free)
        begin += length
    starts = torch.tensor([0, *lens], dtype=torch.int32).cumsum(0, dtype=torch.int32)
    return StateRuns(lens, starts, torch.tensor(reads), stored, rows)


def drafts() -> StateRuns:
    """Each token's state in a row of its own."""
    rows = torch.tensor(random.sample(range(4, NUM_ROWS), 9))
    starts = torch.tensor([0, 3, 6, 9], dtype=torch.int32)
    return StateRuns([3] * 3, starts, torch.tensor(random.sample(range(4), 3)), [(1, 2, 3)] * 3, rows)


def decodes() -> StateRuns:
    return StateRuns.plain([1] * 5, torch.tensor(random.sample(range(NUM_ROWS), 5)))


def convolved(projected: Tensor, taps: Tensor, kept: Tensor, runs: StateRuns) -> tuple[Tensor, Tensor]:
    """The result [T, W] and the states after the step, float64."""
    first, second, values = projected.double().chunk(3, 1)
    out, states, begin = [], kept.double().clone(), 0
    for length, read in zip(runs.lens, runs.reads.tolist()):
        text = torch.cat((kept[read].double(), first[begin : begin + length] * values[begin : begin + length]))
        for place in range(length):
            out.append(second[begin + place] * (text[place : place + len(taps)] * taps.double()).sum(0))
            if (row := int(runs.rows[begin + place])) >= 0:
                states[row] = text[place + 1 : place + len(taps)]
        begin += length
    return torch.stack(out), states
