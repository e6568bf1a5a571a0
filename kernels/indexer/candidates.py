"""Selection among candidates (DeepSeek V4.1): one indexer's scores put blocks of entries first, and later indexers
select among the entries of these blocks.

The candidates of a query token are the context of a request of its own: the blocks ascend and the last one is that of
the token's last entry, so that the entries that a token sees are the first ones in its row of a slot table.

Legend: T query tokens, B blocks, S entries of a block.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.indexer.protocol import BlockChoice
from moe_engine.kernels.queries import PagedQueries

MakePlan = Callable[[PagedQueries], Any]
"""`IndexerKernel.plan`, or its form in place."""


def num_candidates(visible: int, count: int, size: int) -> int:
    """Candidates of a token that sees `visible` entries, of at most `count` blocks of `size`."""
    return visible if visible <= count * size else (count - 1) * size + (visible - 1) % size + 1


class CandidateTable:
    """The candidates of some query tokens.

    Args:
        table, lens: memory of their slots [T, B S] and numbers [T], int32.
        bounds: of the numbers.
    """

    def __init__(self, table: Tensor, lens: Tensor, bounds: list[int], plan: MakePlan) -> None:
        numbers = torch.arange(len(table) + 1, dtype=torch.int32, device=table.device)
        self.queries = PagedQueries([1] * len(table), bounds, numbers[:-1], numbers, lens, table, 1)
        self.plan = plan(self.queries)

    def fill(self, queries: PagedQueries, blocks: BlockChoice, tokens: slice) -> None:
        """Sets the candidates of `tokens` of these queries, by their blocks."""
        own, size, rate = blocks.found[tokens], blocks.size, queries.rate
        places = own.clamp(min=0).unsqueeze(2) * size + torch.arange(size, dtype=torch.int32, device=own.device)
        places = places.flatten(1).clamp_(max=queries.slot_table.shape[1] // rate - 1).long()
        found = queries.slot_table[queries.rows[tokens].long().unsqueeze(1), places * rate if rate > 1 else places]
        self.queries.slot_table.copy_(found // rate if rate > 1 else found)
        in_last = (queries.context_lens_device[tokens] - 1) % size + 1
        self.queries.context_lens_device.copy_(((own >= 0).sum(1) - 1) * size + in_last)


class Candidates:
    """The candidates of a step.

    Args:
        queries: each query token as a request, whose context are the entries that it sees.
        blocks: chosen for these queries.
        plan: for tables that are made here.
        most: of the candidates in memory at once, unless one token has more.
        table: memory for all tokens of a captured step; None: it is made here.
    """

    def __init__(
        self, queries: PagedQueries, blocks: BlockChoice, plan: MakePlan, most: int, table: CandidateTable | None = None
    ) -> None:
        self._queries, self._blocks, self._plan, self._whole = queries, blocks, plan, table
        self._step = max(1, most // (blocks.found.shape[1] * blocks.size))
        if table is not None:
            table.fill(queries, blocks, slice(0, len(blocks.found)))
        elif len(blocks.found) <= self._step:
            self._whole = self._made(slice(0, len(blocks.found)))

    def parts(self) -> Iterator[tuple[slice, CandidateTable]]:
        """Query tokens, and their candidates."""
        tokens = len(self._blocks.found)
        if self._whole is not None:
            yield slice(0, tokens), self._whole
            return
        for start in range(0, tokens, self._step):
            part = slice(start, min(start + self._step, tokens))
            yield part, self._made(part)

    def _made(self, part: slice) -> CandidateTable:
        own, size = self._blocks.found[part], self._blocks.size
        count = own.shape[1]
        table = torch.empty((len(own), count * size), dtype=torch.int32, device=own.device)
        bounds = [num_candidates(visible, count, size) for visible in self._queries.context_lens[part]]
        found = CandidateTable(table, torch.empty_like(table[:, 0]), bounds, self._plan)
        found.fill(self._queries, self._blocks, part)
        return found
