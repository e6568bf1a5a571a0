"""Chains of drafts whose lengths are known on the device only: the inputs and outputs of a captured step besides the
model's.

The accepted tokens of a step are not read by the host before the next step is launched. Positions, slots and lengths
of a step are therefore computed on the device, from the tables that the previous step has updated.

Legend: R requests of a captured step, the last of them padding; S drafts of each, K = S + 1 verified tokens; W entries
of a row in the tables of all rows; D hidden.
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
class ChainBuffers:
    """Memory of one captured size at fixed addresses, contiguous. The host writes the first three, and `sampled`."""

    rows: Tensor  # [R] int64; negative: padding, behind all requests
    query_rows: Tensor  # [R] int32: rows, 0 for padding
    seeds: Tensor  # [R] int64: bits of the mixed seeds
    starts: Tensor  # [R] int64: position of the last token, which is verified first
    # drafting: step s reads the token at position starts - 1 + s, of an MTP layer
    draft_ids: Tensor  # [K, R] int64: the last tokens, then the drafts, which the drafter writes
    draft_positions: Tensor  # [S, R] int64
    draft_slots: Tensor  # [S, R] int64
    draft_lens: Tensor  # [S, R] int32: context tokens
    draft_real: Tensor  # [R] int32: 0 for padding
    draft_uniform: Tensor  # [S, R] float32
    # verification
    ids: Tensor  # [R, K] int64: the last tokens; the drafts are copied there
    positions: Tensor  # [R, K] int64
    slots: Tensor  # [R, K] int64
    lens: Tensor  # [R] int32: context tokens
    real: Tensor  # [R, K] int32
    uniform: Tensor  # [R, K] float32
    # acceptance
    sampled: Tensor  # [R, K] int64: the target's token at each position; negative: invalid logits
    result: Tensor  # [R, K + 1] int64: the new tokens, the last one repeated; then their number
    next_ids: Tensor  # [R, K] int64: the token behind each position, for the draft extend
    last: Tensor  # [R] int64: index of the last accepted position among all R * K

    @property
    def num_drafts(self) -> int:
        """S."""
        return self.draft_positions.shape[0]


class ChainKernels(Protocol):
    """Padding reads slot 0 at position 0, and writes nothing to the tables."""

    name: str

    def inputs(self, tables: RowTables, chain: ChainBuffers) -> None:
        """Writes everything down to `uniform` except the drafts, from the rows' lengths and last tokens."""

    def draw(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        """As `SamplingKernel.sample`, for greedy and sampled rows alike (`draws` is not read): drafts [R] int64."""

    def accept(self, tables: RowTables, chain: ChainBuffers, simulated: SimulatedAcceptance | None) -> None:
        """Accepts the drafts that equal the token sampled before them, writes everything behind `sampled`, and appends
        the new tokens to the tables."""

    def keep_states(self, states: Tensor, hidden: Tensor, chain: ChainBuffers) -> None:
        """states [max_rows, D] of each row = hidden [R * K, D] at its last accepted position."""
