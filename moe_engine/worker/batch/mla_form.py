"""Which form of multi-head latent attention a chunk of query tokens takes.

Legend: q query tokens, s tokens before them, C kv_lora_rank, P rotary width, N qk_nope, V v_head. Costs in
multiply-adds a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.models.config import GQAConfig, MLAConfig


@dataclass(frozen=True)
class MLAFormPolicy:
    """Absorbed (queries against the latent) or expanded (keys and values rebuilt from it), by cost.

    Absorbed: q * C(N+V) to absorb, 2C + P a query and context token. Expanded: (s + q) * C(N+V) to rebuild keys and
    values, N + P + V a query and context token. With on average s + q/2 tokens seen by a query, absorbed is cheaper
    when q * (s + q/2) < break_even * s, where break_even = C(N+V) / ((2C+P) - (N+P+V)): 171 query tokens against a long
    context with DeepSeek's widths.

    Tokens that several requests of a step begin with need to be rebuilt once (where the backend `shares`): for each
    of n requests, rebuilding costs as if all but 1/n of them were no part of its s.

    Otherwise the answer depends on the request's own numbers only. With `deterministic`, everything is absorbed, so
    that a token is computed the same way whether it came in a chunk or alone.
    """

    break_even: float = 170.0
    deterministic: bool = False
    shares: bool = False

    @classmethod
    def from_widths(
        cls,
        kv_lora_rank: int,
        rotary: int,
        qk_nope: int,
        v_head: int,
        *,
        deterministic: bool = False,
        shares: bool = False,
    ) -> MLAFormPolicy:
        saved = (2 * kv_lora_rank + rotary) - (qk_nope + rotary + v_head)
        if saved <= 0:  # the latent is no wider than the heads: absorbed is never dearer
            return cls(float("inf"), deterministic)
        return cls(kv_lora_rank * (qk_nope + v_head) / saved, deterministic, shares)

    def absorbed(self, start: int, count: int, spared: float = 0.0) -> bool:
        """Whether `count` query tokens that follow `start` tokens are computed in the absorbed form; `spared` of those
        would be rebuilt for other requests anyway."""
        return self.deterministic or count * (start + count / 2) < self.break_even * (start - spared)


def form_policy(
    attention: MLAConfig | GQAConfig,
    *,
    deterministic: bool = False,
    break_even: float | None = None,
    shares: bool = False,
) -> MLAFormPolicy:
    """The policy of a model; `break_even` where it was measured, `shares` as the backend does."""
    if isinstance(attention, GQAConfig):
        return MLAFormPolicy(break_even=0.0)  # one contract for both groups: chunks need not be told apart
    if break_even is not None:
        return MLAFormPolicy(break_even, deterministic, shares)
    a = attention
    widths = (a.kv_lora_rank, a.qk_rope_head_dim, a.qk_nope_head_dim, a.v_head_dim)
    return MLAFormPolicy.from_widths(*widths, deterministic=deterministic, shares=shares)
