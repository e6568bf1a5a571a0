"""Chains of drafts whose lengths are known on the device only: the inputs and outputs of a captured step besides the
model's.

The accepted tokens of a step are not read by the host before the next step is launched. Positions, slots and lengths
of a step are therefore computed on the device, from the tables that the previous step has updated.

Legend: R requests of a captured step, the last of them padding; S drafts of each, K = S + 1 verified tokens; W entries
of a row in the tables of all rows; D hidden; N tokens of a request in a run, B of them before the step's start; J token
ids of each.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Protocol

from torch import Tensor

from moe_engine.kernels.decoder.drafting import RowTables
from moe_engine.kernels.sampling.protocol import SamplingParameters

GOLDEN = 0x9E3779B97F4A7C15
MIX_1, MIX_2 = 0xBF58476D1CE4E5B9, 0x94D049BB133111EB
"""Constants of splitmix64, see `sampling_state.uniforms`."""


def signed64(value: int) -> int:
    """The int64 with the bits of an unsigned 64-bit number."""
    return value - (1 << 64) if value >> 63 else value


@dataclass(frozen=True)
class SimulatedAcceptance:
    """Chains accepted at random, `length` tokens of each on average (benchmarks). `salt`: that of the random numbers,
    mixed (`sampling_state.mix64`)."""

    length: float
    salt: int


@dataclass(frozen=True)
class Thresholds:
    """A draft whose target probability p reaches `single` is accepted, and any other with a total probability of
    p / `acc` (`acceptance.force`). `salt`: draft n of a chain has the random numbers of salt + n."""

    single: float
    acc: float
    salt: int


@dataclass(frozen=True)
class ChainBuffers:
    """Memory of one captured size at fixed addresses, contiguous. The host writes the first three, `sampled`, and
    `chances` if there are `Thresholds`."""

    rows: Tensor  # [R] int64; negative: padding, after all requests
    query_rows: Tensor  # [R] int32: rows, 0 for padding
    seeds: Tensor  # [R] int64: bits of the mixed seeds
    starts: Tensor  # [R] int64: position of the last token, which is verified first
    # drafting: the token of step s is at position starts + first_draft + max(s - lookback, 0)
    draft_ids: Tensor  # [K, R] int64: the last tokens, then the drafts, which the drafter writes
    draft_positions: Tensor  # [S, R] int64
    draft_slots: Tensor  # [S, R] int64
    draft_window_slots: Tensor  # [S, R] int64, of `RowTables.windows`; [S, 0] without
    draft_lens: Tensor  # [S, R] int32: context tokens
    draft_real: Tensor  # [R] int32: 0 for padding
    draft_uniform: Tensor  # [S, R] float32
    # verification
    ids: Tensor  # [R, K] int64: the last tokens; the drafts are copied there
    positions: Tensor  # [R, K] int64
    slots: Tensor  # [R, K] int64
    window_slots: Tensor  # [R, K] int64, of `RowTables.windows`; [R, 0] without
    lens: Tensor  # [R] int32: context tokens
    real: Tensor  # [R, K] int32
    uniform: Tensor  # [R, K] float32
    # acceptance
    sampled: Tensor  # [R, K] int64: the target's token at each position; negative: invalid logits
    chances: Tensor  # [R, K] float32: the target's probability of the draft after each position
    result: Tensor  # [R, K + 1] int64: the new tokens, the last one repeated; then their number
    next_ids: Tensor  # [R, K] int64: the token after each position, for the draft extend
    last: Tensor  # [R] int64: index of the last accepted position among all R * K
    # positions of texts with images, from `RowTables.image_ends`; otherwise positions are places
    shifts: Tensor  # [R] int64: position minus place; 0 without images
    places: Tensor  # [R, K] int64, of verification; [R, 0] without pools
    pool_axes: Tensor  # [R, K, 3] int64: position of the first token of each token's pool; [R, 0, 3] without pools
    draft_places: Tensor  # [S, R] int64, of drafting; [S, 0] without pools
    draft_axes: Tensor  # [S, R, 3] int64, as `pool_axes`; [S, 0, 3] without pools
    first_draft: int = -1  # of MTP layers, which read the hidden state before the last token; 0: of a draft model
    lookback: int = 0  # first steps at the same position, each in a layer of its own
    pool: int = 1  # tokens of a pool whose key is rotated by the position of its first token; 1: there are no pools

    @property
    def num_drafts(self) -> int:
        """S."""
        return self.draft_positions.shape[0]


@dataclass(frozen=True)
class RunBuffers:
    """Tokens around the start of a step that a drafter computes again or for the first time: N tokens of each request
    from position first = max(starts - B, 0) on, at fixed addresses, contiguous.

    A run is as long as any request may need: tokens before `cached` (whose hidden states nothing has kept) and from
    position starts + N - B on (where B exceeds `starts`) are not real, and write to slot 0.
    """

    back: int  # B
    shift: int  # the j-th id of a token is that of position p + shift + j
    cached: Tensor  # [R] int64: leading tokens of each row that are not computed; written by the host
    positions: Tensor  # [R, N] int64
    slots: Tensor  # [R, N] int64
    window_slots: Tensor  # [R, N] int64, of `RowTables.windows`; [R, 0] without
    lens: Tensor  # [R] int32: context tokens, first + N
    real: Tensor  # [R, N] int32
    ids: Tensor  # [J, R, N] int64
    sources: Tensor  # [R, N] int64: of the hidden state: k among those of verified tokens [R * K], or -1 - k among the
    # states [max_rows * B] that the steps before have kept
    kept: Tensor  # [R, B] int64: the same, of the last B computed tokens once the step is accepted


class ChainKernels(Protocol):
    """Padding reads slot 0 at position 0, and writes nothing to the tables."""

    name: str

    def inputs(self, tables: RowTables, chain: ChainBuffers) -> None:
        """Writes everything down to `uniform` except the drafts, from the rows' lengths and last tokens."""

    def draw(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        """As `SamplingKernel.sample`, for greedy and sampled rows alike (`draws` is not read): drafts [R] int64."""

    def accept(self, tables: RowTables, chain: ChainBuffers, rule: SimulatedAcceptance | Thresholds | None) -> None:
        """Accepts the drafts that equal the token sampled before them, or as `rule` says; writes everything after
        `chances`, and appends the new tokens to the tables."""

    def keep_states(self, states: Tensor, hidden: Tensor, rows: Tensor, sources: Tensor) -> None:
        """states[rows[r]] = hidden[sources[r]]; states [max_rows, D], hidden [*, D], rows and sources [R] int64."""

    def runs(self, tables: RowTables, chain: ChainBuffers, runs: RunBuffers) -> None:
        """Writes everything of `runs` after `cached`. After `accept`, unless a run has B + 1 tokens: up to the root.
        `starts` are the step's."""

    def gather_states(self, kept: Tensor, hidden: Tensor, sources: Tensor) -> Tensor:
        """[M, D]: hidden states of `sources` [M]; kept [max_rows * B, D], hidden [R * K, D]."""

    def find_ngrams(self, tables: RowTables, chain: ChainBuffers, least: int, most: int) -> None:
        """Writes drafts of prompt lookup to `ids`: the tokens after the latest of the longest earlier matches of
        `least` to `most` last tokens, 0 where there are none. Between `inputs` and the model's forward."""
