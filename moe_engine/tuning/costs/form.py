"""The distribution of a model over ranks, for the cost files."""

from __future__ import annotations

from dataclasses import dataclass

WEIGHT_BYTES = {"bf16": 2.0, "fp8": 1.0 + 4 / 128**2, "fp4": 0.5 + 1 / 16, "int4": 0.5 + 2 / 32}
"""Bytes of a weight with its share of the scales."""

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


@dataclass(frozen=True)
class Precision:
    """Dtypes: of the experts, the other projections and the KV cache."""

    experts: str
    other: str
    kv: str = "bf16"


def precision_of(stored: str, kv: str = "bf16") -> Precision:
    """The usual layout of a checkpoint: with 4-bit experts the other projections stay bf16."""
    return Precision(stored, "bf16" if stored in ("fp4", "int4") else stored, kv)
