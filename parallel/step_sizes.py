"""Token counts of every rank in a step, exchanged once before the step.

Legend: T tokens of an attention group, S rows of its logits, A ranks of an attention group.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import TYPE_CHECKING

import torch

from moe_engine.parallel.collectives import Group

if TYPE_CHECKING:
    from moe_engine.parallel.context import ParallelContext
    from moe_engine.parallel.dispatch.protocol import Phase


@dataclass(frozen=True)
class StepSizes:
    """The sizes of a step, the same on every rank, and this rank's shares.

    Attributes:
        tokens: T of every attention group. All 0: every rank is idle, and the model is not called.
        logits: S of every attention group.
        phase: ``decode`` if no rank prefills and all shares fit the dispatcher's decode mode.
        prefills: a rank's step has tokens of prompts.
    """

    tokens: tuple[int, ...]
    logits: tuple[int, ...]
    phase: Phase
    attn_tp_size: int
    world_rank: int
    prefills: bool

    @classmethod
    def exchange(
        cls, parallel: ParallelContext, group: Group, num_tokens: int, num_logits: int, prefills: bool
    ) -> StepSizes:
        """Collective, once per step, also for an idle rank (0, 0, False).

        Args:
            group: all ranks of the model; its tensors should be on the host, since the host waits for them.
            prefills: True if this rank's step has a prefill group.
        """
        own_sizes = torch.tensor([num_tokens, num_logits, int(prefills)], dtype=torch.int64, device=group.device)
        rows = group.all_gather(own_sizes)[:: parallel.attn_tp_size].tolist()
        return cls.known(parallel, [row[0] for row in rows], [row[1] for row in rows], any(row[2] for row in rows))

    @classmethod
    def known(
        cls, parallel: ParallelContext, tokens: Sequence[int], logits: Sequence[int], prefills: bool
    ) -> StepSizes:
        """The sizes without an exchange: all ranks made the same plan. `prefills`: on any rank."""
        largest_share = -(-max(tokens) // parallel.attn_tp_size)
        phase: Phase = "prefill" if prefills or largest_share > parallel.decode_tokens else "decode"
        return cls(tuple(tokens), tuple(logits), phase, parallel.attn_tp_size, parallel.world_rank, prefills)

    @property
    def is_idle(self) -> bool:
        return not any(self.tokens)

    @cached_property
    def shares(self) -> list[int]:
        """Tokens of every rank, with a group's tokens divided among its ranks."""
        return self._shares_of(self.tokens)

    @cached_property
    def logit_shares(self) -> list[int]:
        """The same for rows of logits."""
        return self._shares_of(self.logits)

    @cached_property
    def group_shares(self) -> list[int]:
        """The `shares` of this rank's attention group."""
        first = self.world_rank // self.attn_tp_size * self.attn_tp_size
        return self.shares[first : first + self.attn_tp_size]

    @cached_property
    def own_tokens(self) -> slice:
        """This rank's share among the tokens of its group."""
        return self._own(self.shares)

    @cached_property
    def own_of_all(self) -> slice:
        """This rank's share among the tokens of all groups."""
        first = sum(self.shares[: self.world_rank])
        return slice(first, first + self.shares[self.world_rank])

    @cached_property
    def own_logits(self) -> slice:
        """This rank's share among the rows of its group's logits."""
        return self._own(self.logit_shares)

    def _shares_of(self, totals: Sequence[int]) -> list[int]:
        size = self.attn_tp_size
        return [total // size + (rank < total % size) for total in totals for rank in range(size)]

    def _own(self, shares: list[int]) -> slice:
        first = self.world_rank // self.attn_tp_size * self.attn_tp_size
        start = sum(shares[first : self.world_rank])
        return slice(start, start + shares[self.world_rank])
