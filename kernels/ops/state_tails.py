"""Numbers of earlier tokens of a sequence, whose last ones a request's state keeps.

Legend: T tokens, R runs, L tokens that a state keeps, C numbers of a token.
"""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.delta.protocol import StateRuns


class Tails:
    """The tokens of a step after those that the state of each run keeps: `before` reads, `store` keeps the last ones.

    No host wait, and no loop over runs: a step of runs of one length can be captured.

    Args:
        x: [T, C] of the step's tokens. kept: [rows, L, C], a part of the states of a layer.
    """

    def __init__(self, x: Tensor, kept: Tensor, runs: StateRuns) -> None:
        self._kept, self._runs, self._count = kept, runs, kept.shape[1]
        device, num_runs = x.device, len(runs.lens)
        first = torch.arange(self._count, device=device)
        run_of = torch.arange(len(x), device=device) if runs.is_decode else runs.run_of
        self._places = torch.arange(len(x), device=device) + (run_of + 1) * self._count
        starts = runs.starts[:num_runs].long() + torch.arange(num_runs, device=device) * self._count
        self._text = x.new_empty((len(x) + num_runs * self._count, x.shape[1]))
        self._text[self._places] = x
        self._text[(starts.unsqueeze(1) + first).flatten()] = kept.index_select(0, runs.reads).flatten(0, 1).to(x.dtype)
        self._first = first

    def before(self, count: int) -> Tensor:
        """[T, C] of the tokens `count` before each, at most L; zeros before the first token of a sequence."""
        return self._text[self._places - count]

    def store(self) -> None:
        """Keeps the last L tokens of each state that the step stores."""
        runs = self._runs
        tokens = self._places if runs.is_decode else self._places[runs.stored_tokens[0].long()]
        rows = runs.rows if runs.is_decode else runs.rows[runs.stored_tokens[0].long()]
        last = self._text[tokens.unsqueeze(1) + (self._first + 1 - self._count)]
        self._kept.index_copy_(0, rows, last.to(self._kept.dtype))
