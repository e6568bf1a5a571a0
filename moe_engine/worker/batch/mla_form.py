"""Chooses the form of multi-head latent attention (MLA), absorbed or expanded, for a chunk of query tokens.

Legend: q query tokens, s tokens before them, C kv_lora_rank, P rotary width, N qk_nope, V v_head. Costs in
multiply-adds a head.
"""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.models.config import GQAConfig, MLAConfig
from moe_engine.models.config_sections.compressed import CompressedConfig


@dataclass(frozen=True)
class MLAFormPolicy:
    """Absorbed (queries against the latent) or expanded (keys and values expanded from it), by cost.

    Absorbed: q * C(N+V) to absorb, 2C + P per query and context token. Expanded: (s + q) * C(N+V) to expand keys and
    values, N + P + V per query and context token. A query attends to s + q/2 tokens on average, so absorbed is cheaper
    if q * (s + q/2) < break_even * s, where break_even = C(N+V) / ((2C+P) - (N+P+V)): 171 query tokens against a long
    context with DeepSeek's widths.

    A prefix shared by several requests of a step is expanded once (if the backend `shares`): for each of n requests,
    only 1/n of the shared tokens count in s for the cost of expanding.

    Otherwise the choice depends on the request's own numbers only. With `deterministic`, everything is absorbed, so
    that a token is computed the same way in a chunk and alone.
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
        if saved <= 0:  # the latent is no wider than the heads: absorbed is never more expensive
            return cls(float("inf"), deterministic)
        return cls(kv_lora_rank * (qk_nope + v_head) / saved, deterministic, shares)

    def absorbed(self, start: int, count: int, spared: float = 0.0) -> bool:
        """Whether `count` query tokens after `start` context tokens use the absorbed form; other requests expand
        `spared` of the context tokens anyway."""
        return self.deterministic or count * (start + count / 2) < self.break_even * (start - spared)


def form_policy(
    attention: MLAConfig | GQAConfig | CompressedConfig,
    *,
    deterministic: bool,
    break_even: float | None = None,
    shares: bool = False,
) -> MLAFormPolicy:
    """The policy of a model; `break_even` if it was measured, `shares`: the backend expands shared prefixes once."""
    if not isinstance(attention, MLAConfig):
        return MLAFormPolicy(break_even=0.0)  # a single form for both groups
    if break_even is not None:
        return MLAFormPolicy(break_even, deterministic, shares)
    a = attention
    widths = (a.kv_lora_rank, a.qk_rope_head_dim, a.qk_nope_head_dim, a.v_head_dim)
    return MLAFormPolicy.from_widths(*widths, deterministic=deterministic, shares=shares)
