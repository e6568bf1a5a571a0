"""Sampling kernels: logits to tokens.

Semantics of a row: divide by the temperature; keep the top_k best; of these, renormalized, the smallest set of best
tokens whose probability reaches top_p; of these, those with at least min_p times the probability of the best; draw by
inverse CDF, in vocabulary order, with one uniform number. Of equal logits the lower token id is the better.

A row with NaN or +inf among its logits, or without candidates, yields `INVALID_TOKEN`; other rows are not
affected. A row's token depends only on that row's logits, parameters and random number.

Legend: S sampled rows, V vocabulary, J queried tokens.
"""

from __future__ import annotations

from dataclasses import dataclass
from enum import IntEnum
from typing import Protocol

import numpy as np
from torch import Tensor

INVALID_TOKEN = -1
"""The scheduler fails a request with this token with status 500."""

SMALL_TOP_K = 64
LARGE_TOP_K = 1024


class Draw(IntEnum):
    """Sampling class of a row; depends on the row's own parameters only."""

    GREEDY = 0
    WHOLE = 1
    """Temperature and min_p only."""
    SMALL_TOP = 2
    """top_k <= 64."""
    LARGE_TOP = 3
    """top_k <= 1024."""
    NUCLEUS = 4
    """top_p without a small top_k."""

    @classmethod
    def of(cls, greedy: bool, top_k: int, top_p: float, vocab_size: int) -> Draw:
        """top_k is `vocab_size` if unlimited."""
        if greedy:
            return cls.GREEDY
        if top_k < vocab_size and top_k <= LARGE_TOP_K:
            return cls.SMALL_TOP if top_k <= SMALL_TOP_K else cls.LARGE_TOP
        return cls.NUCLEUS if top_k < vocab_size or top_p < 1.0 else cls.WHOLE


@dataclass(frozen=True)
class SamplingParameters:
    """Parameters of rows, as contiguous columns on the logits' device; `draws` is on the host.

    A greedy row has temperature 0. `asynchronous`: the device runs asynchronously, so reading a value stalls it.
    """

    draws: np.ndarray  # [S] uint8: Draw
    temperature: Tensor  # [S] float32
    top_p: Tensor  # [S] float32, in (0, 1]
    min_p: Tensor  # [S] float32, in [0, 1]
    top_k: Tensor  # [S] int64, from 1; V or more: unlimited
    asynchronous: bool = False

    def part(self, rows: slice) -> SamplingParameters:
        """Parameters of some of the rows."""
        columns = self.temperature[rows], self.top_p[rows], self.min_p[rows], self.top_k[rows]
        return SamplingParameters(self.draws[rows], *columns, self.asynchronous)


class SamplingKernel(Protocol):
    """Draws tokens. logits are [S, V] float32 and are not changed."""

    name: str
    reads_half: bool
    """`greedy` and `sample` take logits in 16 bits too."""

    def greedy(self, logits: Tensor) -> Tensor:
        """The best token of each row, [S] int64."""

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        """uniform [S] float32 in [0, 1), multiples of 2^-24 -> tokens [S] int64."""

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        """tokens [S, J] int64 -> [S, J] float32: the probability that `sample` draws tokens[s, j] in row s.

        0 for negative ids and in rows that yield `INVALID_TOKEN`; ids of V or more are undefined behavior.
        """
