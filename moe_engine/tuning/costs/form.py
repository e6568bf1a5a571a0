"""The distribution of a model over ranks, for the cost files."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True)
class Weights:
    """Bytes of a weight with its share of the scales, and the dtype of the GPU's units that multiply it."""

    num_bytes: float
    units: str


WEIGHTS = {
    "bf16": Weights(2.0, "bf16"),
    "fp8": Weights(1.0 + 4 / 128**2, "fp8"),
    "fp4": Weights(0.5 + 1 / 16, "fp4"),
    "int4": Weights(0.5 + 2 / 32, "bf16"),
}
"""By the dtype of a checkpoint, for engines whose kernels are not known."""

KV_BYTES = {"bf16": 2.0, "fp8": 1.0}


@dataclass(frozen=True)
class Form:
    """The ranks of one replica.

    Attributes:
        ranks: ranks of the replica. attn_dp: attention groups. ep: ranks with different experts.
        travels: tokens are dispatched to their experts' ranks; else every rank processes all tokens.
        redundant: copies of experts besides the routed ones.
        overlap: two batches overlap products and messages (two-batch overlap).
        dense_whole: dense layers and shared experts are whole on every rank.
        host_bytes: weights of a rank that every step copies from host memory (--cpu-offload-gb).
    """

    ranks: int
    attn_dp: int = 1
    ep: int = 1
    travels: bool = False
    redundant: int = 0
    overlap: bool = False
    dense_whole: bool = False
    host_bytes: int = 0

    @property
    def attn_tp(self) -> int:
        return self.ranks // self.attn_dp

    @property
    def moe_tp(self) -> int:
        return self.ranks // self.ep


DISPATCH_BYTES = {"fp8": 1.03, "bf16": 2.0}
"""Bytes of a channel of a dispatched token, with its share of the scales."""


@dataclass(frozen=True)
class Held:
    """The kernels of a launch: routed experts and other projections in their memory, the dtype of dispatched tokens,
    and whether shared experts are slots of the routed ones."""

    experts: Weights
    other: Weights
    dispatch: str
    shared_slots: bool = False


@dataclass(frozen=True)
class Precision:
    """Dtypes: of the experts, the other projections and the KV cache. `held`: as a launch has them, if known.
    `expert_rows`: those to which grouped products pad the rows of every expert."""

    experts: str
    other: str
    kv: str = "bf16"
    held: Held | None = None
    expert_rows: int = 0

    @property
    def expert_weights(self) -> Weights:
        return WEIGHTS[self.experts] if self.held is None else self.held.experts

    @property
    def other_weights(self) -> Weights:
        return WEIGHTS[self.other] if self.held is None else self.held.other

    @property
    def dispatch_bytes(self) -> float:
        """Bytes of a channel of a dispatched token."""
        return DISPATCH_BYTES["fp8" if self.held is None else self.held.dispatch]


def precision_of(stored: str, kv: str = "bf16", dense: bool = False) -> Precision:
    """The usual layout of a checkpoint: with 4-bit experts the other projections stay bf16; without experts (`dense`)
    they have 4 bits."""
    return Precision(stored, "bf16" if stored in ("fp4", "int4") and not dense else stored, kv)
