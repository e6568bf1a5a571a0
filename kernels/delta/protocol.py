"""Gated delta net without its projections: causal convolution, gated delta rule, gated norm.

For a value head with its key head's q and k (after convolution and SiLU, each divided by its length), in float32:

    S <- exp(g) S;   S <- S + k (beta (v - k S));   o = q S / sqrt(Dk)
    g = -exp(a_log) softplus(a + dt_bias)   or   bound sigmoid(exp(a_log) (a + dt_bias));   beta = sigmoid(b)
    out = weight * (o / rms(o)) * silu(z)   or   * sigmoid(z)

g is one number, or one for each channel of the key, which scales that row of S (Kimi Delta Attention).

An additive state is not corrected by what it holds (Mamba2: q is C, k is B, v is x, and a the step width; a key head is
a group). The convolution may have a bias, q and k keep their lengths, and the norm is over the value heads of a key
head, after the gate:

    d = softplus(a + dt_bias), within bounds;   S <- exp(-exp(a_log) d) S + k (d v);   o = q S + skip v
    out = weight * y / rms(y),   y = o * silu(z)

Step widths bounded to 1 make the decay of a head constant. Without taps (lightning attention, MiniMax-Text-01) the
inputs are q, k and v themselves, and the result is o: convolution, SiLU and norm are left out.

Legend: T tokens, R runs, Hk key heads, r value heads of a key head, Hv = Hk r, Dk, Dv head widths, W decays of a value
head (1 or Dk), C = 2 Dk + r Dv channels that the convolution reads for a key head, K taps.
Sources: Gated DeltaNet, arXiv 2412.06464; Kimi Linear, arXiv 2510.26692; Mamba2, arXiv 2405.21060.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import cached_property
from itertools import accumulate
from typing import NamedTuple, Protocol

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.uploads import upload

UNBOUNDED = 3e38
"""A step width that no value exceeds."""


@dataclass(frozen=True)
class DeltaShape:
    """Heads of one rank, and the form of their gates.

    `decays`: W. `bound`: of the log decay, whose form is then the sigmoid's; 0: softplus. `sigmoid`: the output gate is
    a sigmoid, and the norm is rounded after it only. `additive`: no delta rule; then W is 1, b is not read, `shortest`
    and `longest` bound the step widths, and the other forms of gates are not those of this state. `taps` 0, of an
    additive state only: there is no convolution and no norm; then z, the tail and the weights of both are not read.
    """

    key_heads: int
    value_heads: int
    key: int
    value: int
    taps: int
    decays: int = 1
    bound: float = 0.0
    sigmoid: bool = False
    additive: bool = False
    shortest: float = 0.0
    longest: float = UNBOUNDED

    @property
    def shared(self) -> int:
        """Value heads of a key head: r."""
        return self.value_heads // self.key_heads

    @property
    def skips(self) -> bool:
        """Whether compiled cases of this shape have a skip: Mamba2."""
        return self.additive and self.taps > 0

    @property
    def normed(self) -> int:
        """Channels that are normed together."""
        return self.shared * self.value if self.additive else self.value

    @property
    def mixed(self) -> int:
        """Channels of a key head that the convolution reads: C."""
        return 2 * self.key + self.shared * self.value


class DeltaInputs(NamedTuple):
    """A step's projections by key head: views of products, with any strides of tokens and heads."""

    mixed: Tensor  # [T, Hk, C]: q [Dk], k [Dk] and v [r Dv]
    z: Tensor  # [T, Hk, r Dv]
    b: Tensor  # [T, Hk, r]
    a: Tensor  # [T, Hk, r W]

    @classmethod
    def adjacent(cls, qkvz: Tensor, ba: Tensor, shape: DeltaShape) -> DeltaInputs:
        """The inputs in products where mixed and z of a key head are adjacent, and so are b and a: qkvz
        [T, Hk (C + r Dv)], ba [T, Hk (r + r W)]."""
        wide, narrow = (x.unflatten(1, (shape.key_heads, -1)) for x in (qkvz, ba))
        return cls(
            wide[..., : shape.mixed], wide[..., shape.mixed :], narrow[..., : shape.shared], narrow[..., shape.shared :]
        )


@dataclass(frozen=True)
class DeltaWeights:
    """All float32."""

    conv: Tensor  # [Hk, K, C]
    a_log: Tensor  # [Hv]
    dt_bias: Tensor  # [Hv W]
    norm: Tensor  # [Dv]; of an additive state [Hv Dv]
    eps: float
    conv_bias: Tensor | None = None  # [Hk, C]
    skip: Tensor | None = None  # [Hv], of an additive state


class DeltaStates(NamedTuple):
    """State tensors of a layer; a row is the state of a request, a snapshot or a draft position."""

    tail: Tensor  # [rows, Hk, K - 1, C], the last inputs of the convolution, in the activation dtype; without taps any
    memory: Tensor  # [rows, Hv, Dk, Dv] float32


class Chunks(NamedTuple):
    """Long runs of a step in chunks, run after run; a state is stored after the last token of a chunk only."""

    num: int
    bounds: Tensor  # [num, 2] int32: first token of a chunk, and the token after its last one
    firsts: Tensor  # [R + 1] int32: first chunk of each run, then num


@dataclass(frozen=True)
class StateRuns:
    """The runs of adjacent tokens of a step, in order: the row from which each reads its state, and the rows in which
    states are stored.

    `stored[i]` are the counts of tokens of run i after which its state is stored, ascending. A row that a run reads may
    be stored by the same run only. All runs of decodes have one token.
    """

    lens: Sequence[int]
    starts: Tensor  # [R + 1] int32: first token of each run, then T
    reads: Tensor  # [R] int64: rows
    stored: Sequence[Sequence[int]]
    rows: Tensor  # [T] int64: the row in which the state after a token is stored, -1: in none
    _chunks: dict[tuple[int, int], Chunks] = field(default_factory=dict, init=False, repr=False, compare=False)

    @property
    def num_tokens(self) -> int:
        return self.rows.shape[0]

    @cached_property
    def is_decode(self) -> bool:
        """Whether each run has one token, whose state is stored."""
        return self.num_tokens == len(self.lens) and all(self.stored)

    @cached_property
    def longest(self) -> int:
        """Max tokens of a run; 0 without runs."""
        return max(self.lens, default=0)

    @cached_property
    def shortest(self) -> int:
        """Min tokens of a run; 0 without runs."""
        return min(self.lens, default=0)

    def chunks(self, shortest: int, size: int) -> Chunks:
        """The runs of at least `shortest` tokens in chunks of at most `size`, cut where states are stored."""
        if (shortest, size) not in self._chunks:
            bounds: list[int] = []
            firsts, begin = [0], 0
            for count, stored in zip(self.lens, self.stored):
                if count >= shortest:
                    first = begin
                    for last in dict.fromkeys((*stored, count)):
                        for place in range(first, begin + last, size):
                            bounds += (place, min(place + size, begin + last))
                        first = begin + last
                firsts.append(len(bounds) // 2)
                begin += count
            table, ends = _upload_both(self.starts.device, bounds, firsts)
            self._chunks[shortest, size] = Chunks(firsts[-1], table.view(-1, 2), ends)
        return self._chunks[shortest, size]

    @cached_property
    def run_of(self) -> Tensor:
        """[T] int32: the run of each token."""
        device = self.starts.device
        counts = _upload(device, list(self.lens))
        return torch.arange(len(self.lens), dtype=torch.int32, device=device).repeat_interleave(
            counts, output_size=self.num_tokens
        )

    @cached_property
    def stored_tokens(self) -> tuple[Tensor, Tensor]:
        """[S] int32: the tokens whose state is stored, run after run; [R + 1] int32: the first of each run."""
        tokens, firsts, begin = [], [0], 0
        for count, stored in zip(self.lens, self.stored):
            tokens += [begin + place - 1 for place in stored]
            firsts.append(len(tokens))
            begin += count
        return _upload_both(self.starts.device, tokens, firsts)

    @classmethod
    def plain(cls, lens: Sequence[int], rows: Tensor) -> StateRuns:
        """Each run reads the state in its row, and stores the state after its last token there."""
        device = rows.device
        if all(count == 1 for count in lens):
            starts = torch.arange(len(lens) + 1, dtype=torch.int32, device=device)
            return cls(lens, starts, rows, [(1,)] * len(lens), rows)
        starts = _upload(device, [0, *accumulate(lens)])
        at = torch.full((sum(lens),), -1, dtype=torch.int64, device=device)
        at[starts[1:].long() - 1] = rows
        return cls(lens, starts, rows, [(count,) for count in lens], at)


def _upload(device: torch.device, values: list[int]) -> Tensor:
    """As int32."""
    return upload(np.array(values, dtype=np.int32), device)


def _upload_both(device: torch.device, first: list[int], second: list[int]) -> tuple[Tensor, Tensor]:
    """Two lists in one copy, both aligned to 16 bytes, as compiled kernels expect."""
    begin = -(-len(first) // 4) * 4
    both = _upload(device, first + [0] * (begin - len(first)) + second)
    return both[: len(first)], both[begin:]


class DeltaKernel(Protocol):
    """A kernel of the family."""

    name: str

    def run(
        self, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape
    ) -> Tensor:
        """[T, Hv Dv], in the activation dtype; stores states in `states`. The result of a run does not depend on the
        other runs of the step."""
