"""Pools of adjacent tokens: their keys for an indexer, and the slots of their tokens.

    GLM-5.3-Flash: key of a pool = sum over its tokens of softmax over them (gate + position bias) * key
    Qwen3.8-Flash-Next: key of a pool = the norm of its tokens' mean, rotated as the first

A pool of P tokens begins at a position that is a multiple of P. A page has whole pools, so that the tokens of a pool
have adjacent slots. The number of a pool is the slot of its first token, divided by P. Its key takes the place of its
last token's: that token's own key and gate are needed only where the pool is completed.

Legend: T tokens, I channels of a key, N slots of the cache, P tokens of a pool, K pools that a token selects at most,
W slots that a token attends to at most.
Sources: transformers (glm5_next); vLLM (glm5next).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import NamedTuple, Protocol

import torch
from torch import Tensor

from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.ops.protocol import RotaryTable


class PoolRule(NamedTuple):
    """`size` is P, `most` is K."""

    size: int
    most: int


class PoolTurns(NamedTuple):
    """Rotations of the keys of the pools that tokens complete: those of the pools' first tokens."""

    places: Tensor  # [T] int64: of the tokens in their sequences
    rows: Tensor  # [T] int64: rows of the table; any row where no pool is completed
    table: RotaryTable
    size: int  # P


class PooledTokens(NamedTuple):
    """Query tokens that attend to whole pools, and to all tokens after the last whole pool that they see."""

    positions: Tensor  # [T] int64
    rows: Tensor  # [T] int32: row in `table` of each token's request
    table: Tensor  # [max_rows, max_context] int32: slot of each position of a request
    rule: PoolRule


class WritePools(Protocol):
    """Writes keys and gates of tokens, and the keys of the pools that they complete."""

    def __call__(
        self, keys: Tensor, norm: KeyNorm, gates: Tensor, bias: Tensor, positions: Tensor, slots: Tensor,
        cache: tuple[Tensor, Tensor],
    ) -> None:  # fmt: skip
        """keys [T, I], normed first, and gates [T, I] -> cache[slots], both [N, 1, I], which rounds gates to its dtype.
        bias [P, I] float32. Each step rounds to the dtype of the keys, and so do the shares of a pool.

        Tokens of a pool before those of the step are read from the cache. Tokens of a step that share a slot complete
        no pool.
        """


class WriteMeans(Protocol):
    """Writes keys of tokens, and the normed and rotated means of the pools that they complete."""

    def __call__(
        self, keys: Tensor, weight: Tensor, eps: float, turns: PoolTurns, slots: Tensor, cache: Tensor
    ) -> None:
        """keys [T, I] -> cache[slots], [N, 1, I]. weight [I]: of the norm. Mean, norm and rotation round to the cache's
        dtype each. As with `WritePools`, tokens of a pool before those of the step are read from the cache."""


CountPools = Callable[[PooledTokens, Tensor, Tensor], None]
"""Sets pools [T] int32 to the whole pools that each token sees, 1 if it sees none, and counts [T] int32 to the slots
that it attends to."""

PlacePools = Callable[[Tensor | None, PooledTokens, Tensor], None]
"""chosen [T, K] int32, numbers of the pools that each token selects -> out [T, W] int32: the slots of their tokens,
then those after the last whole pool, then -1. None: no token sees more than K pools, and each attends to all."""


@dataclass(frozen=True)
class PoolKernels:
    """The work on pools in addition to an indexer's selection."""

    write: WritePools
    count: CountPools
    place: PlacePools
    write_means: WriteMeans | None = None
    """None: by other operations (`models.layers.attention.pooled_gqa`)."""


def write(
    keys: Tensor, norm: KeyNorm, gates: Tensor, bias: Tensor, positions: Tensor, slots: Tensor,
    cache: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """`WritePools` in torch."""
    stored, weights = (part.squeeze(1) for part in cache)
    size = len(bias)
    own = norm.run(keys).to(stored.dtype)
    stored.index_copy_(0, slots, own)
    weights.index_copy_(0, slots, gates.to(weights.dtype))
    places = (slots[:, None] + torch.arange(1 - size, 1, device=slots.device)).clamp_(min=0)  # [T, P]
    shares = (weights[places].float() + bias).softmax(1).to(stored.dtype)
    pooled = (shares.float() * stored[places].float()).sum(1).to(stored.dtype)
    completes = (positions + 1) % size == 0
    stored.index_copy_(0, slots, torch.where(completes[:, None], pooled, own))


def count(tokens: PooledTokens, pools: Tensor, counts: Tensor) -> None:
    """`CountPools` in torch."""
    seen, (size, most) = tokens.positions + 1, tokens.rule
    whole = seen // size
    pools.copy_(whole.clamp(min=1))
    counts.copy_(whole.clamp(max=most) * size + seen % size)


def place(chosen: Tensor | None, tokens: PooledTokens, out: Tensor) -> None:
    """`PlacePools` in torch."""
    table, (size, most) = tokens.table, tokens.rule
    columns, seen = torch.arange(out.shape[1], device=out.device), (tokens.positions + 1).unsqueeze(1)  # [T, 1]
    pooled = (seen // size).clamp(max=most) * size
    at = columns + (seen // size * size - pooled)  # after the pools
    out.copy_(table[tokens.rows.long().unsqueeze(1), at.clamp_(max=table.shape[1] - 1)])
    out.masked_fill_(columns >= pooled + seen % size, -1)
    if chosen is not None:
        numbers = chosen[:, (columns // size).clamp(max=chosen.shape[1] - 1)]
        torch.where(columns < pooled, numbers * size + columns.int() % size, out, out=out)


TORCH = PoolKernels(write, count, place)
"""For any device."""
