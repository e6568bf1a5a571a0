"""Steps of equal requests at a fixed context, as plans for a worker: no prompt is computed, its slots are given.

No command. Legend: B requests of this rank, C context tokens of each before the step.
"""

from __future__ import annotations

import random
from typing import Any

from moe_engine.types import NewRow, RowWrite, SamplingParams, Speculation, StepFacts, StepPlan

GREEDY = SamplingParams(temperature=0.0, ignore_eos=True)


class Steps:
    """Runs steps of one batch on a worker with free rows.

    Args:
        spare: KV slots of a request beyond its context.
        groups: attention groups, which all run the same step.
    """

    def __init__(self, worker: Any, batch: int, context: int, page_size: int, spare: int, groups: int) -> None:
        self._worker, self._batch, self._context, self._groups = worker, batch, context, groups
        self._span = -(-(context + spare) // page_size) * page_size
        self._first = [page_size + row * self._span for row in range(batch)]
        self._number = 0
        self._done = context

    def enter(self, *, drafts: bool = False) -> None:
        """Computes the requests' last prompt tokens, after a cached prefix: each request gets a first token."""
        rows, last = list(range(self._batch)), self._context - 1
        prompt = random.Random(0).choices(range(1000), k=self._context)
        new = [
            NewRow(row, f"r{row}", prompt, len(prompt), [first + i for i in range(last)], GREEDY, 0, frozenset())
            for row, first in enumerate(self._first)
        ]
        self._run(
            rows=rows, starts=[last] * len(rows), counts=[1] * len(rows), samples=[True] * len(rows),
            slots=[first + last for first in self._first], input_ids=[prompt[-1]] * len(rows), new_rows=new,
            speculation=Speculation(follow=True) if drafts else None,
        )  # fmt: skip

    def decode(self) -> None:
        """A token for each request."""
        self._run(
            rows=list(range(self._batch)), starts=[self._done] * self._batch, counts=[1] * self._batch,
            samples=[True] * self._batch, slots=[first + self._done for first in self._first],
            num_decodes=self._batch,
        )  # fmt: skip
        self._done += 1

    def decode_drafted(self, depth: int, count: int, *, follow: bool = True) -> None:
        """A step that drafts chains or trees of this depth, and verifies them with each request's last token: `count`
        tokens."""
        reserved = [
            RowWrite(row, self._context, [first + self._context + i for i in range(2 * count)])
            for row, first in enumerate(self._first)
        ]
        self._run(
            rows=list(range(self._batch)), starts=[self._context] * self._batch, counts=[count] * self._batch,
            samples=[True] * self._batch, num_decodes=self._batch,
            speculation=Speculation(depth, follow=follow, reserved=reserved),
        )  # fmt: skip

    def prefill(self, tokens: int) -> None:
        """A prompt of `tokens` tokens, whole, in row 0."""
        prompt = random.Random(0).choices(range(1000), k=tokens)
        first = self._first[0]
        self._run(
            rows=[0], starts=[0], counts=[tokens], samples=[True], slots=[first + i for i in range(tokens)],
            input_ids=prompt, new_rows=[NewRow(0, "prompt", prompt, tokens, [], GREEDY, 0, frozenset())],
        )  # fmt: skip

    def leave(self) -> None:
        self._run(finished_rows=list(range(self._batch)))

    def _run(self, **fields: Any) -> None:
        self._number += 1
        plan = StepPlan(number=self._number, **fields)
        if self._groups > 1:
            facts = (StepFacts.of(plan),) * self._groups
            plan = StepPlan(number=self._number, dp_facts=facts, **fields)
        self._worker.execute(plan).result()
