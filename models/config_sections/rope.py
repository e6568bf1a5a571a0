"""Rotary position embeddings of a model, from config.json. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass, replace

_STILL = 4
"""Channels of a head that layers without positions rotate, by an angle of 0."""


@dataclass(frozen=True)
class RopeConfig:
    """Rotary embedding. `width` channels of a head are rotated, as pairs (2j, 2j+1) if `interleaved`, else (j, j+R/2).

    kind: ``default``, ``linear`` (positions divided by factor), ``yarn``, ``llama3``, ``longrope``, ``zero``: angles
    are 0 at all positions; ``proportional`` (Gemma 4): see `turned`; or ``none``: nothing is rotated, and the table has
    one row, for a model that gives all tokens position 0. `attention_factor` multiplies cosines and sines;
    `softmax_factor` multiplies the softmax scale (DeepSeek's mscale_all_dim, squared; LongCat-Flash's scale of queries;
    Granite's and Gemma's of scores).
    """

    theta: float
    width: int
    interleaved: bool
    kind: str = "default"
    factor: float = 1.0
    original_max_position: int = 0
    max_position: int = 0
    """Number of positions that `linear` and `yarn` scale to; 0: not scaled, or not known."""
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    attention_factor: float = 1.0
    softmax_factor: float = 1.0
    query_beta: float = 0.0
    """Queries at position p are multiplied by 1 + query_beta * ln(1 + floor((p + query_start) /
    original_max_position))."""
    axes: tuple[int, ...] = ()
    """The axis of a token's position that rotates each pair (0: frame, 1: row, 2: column); (): one axis."""

    pair_factors: tuple[float, ...] = ()
    """``longrope``: the frequency of each pair is divided by its factor."""
    short_factors: tuple[float, ...] = ()
    """The factors for contexts within `original_max_position`, see `within`."""

    stored_factors: bool = False
    """Frequencies are multiplied by exp(alpha) of a tensor [R/2] of the checkpoint (Mistral Large 4)."""

    query_start: int = 0
    """See `query_beta`; Llama 4 counts positions from 1."""

    short_attention: float = 0.0
    """`attention_factor` with `short_factors`; 0: the same as with the others."""

    turned: int = 0
    """``proportional``: pairs that are rotated, with the frequencies of pairs of the whole width; others are not."""

    def within(self, context_len: int) -> RopeConfig:
        """For requests of at most `context_len` tokens. ``longrope`` has one list of factors for all positions, so that
        cached keys stay valid: the short one if no request can exceed `original_max_position`."""
        if not self.short_factors or context_len > self.original_max_position:
            return self
        factor = self.short_attention or self.attention_factor
        return replace(self, pair_factors=self.short_factors, short_factors=(), attention_factor=factor)

    def still(self, head_dim: int) -> RopeConfig:
        """For layers without positions of a model that rotates heads of other layers."""
        return RopeConfig(self.theta, min(_STILL, head_dim), self.interleaved, "zero")

    def num_rows(self, positions: int) -> int:
        """Rows of the table for this many positions."""
        return 1 if self.kind == "none" else positions
