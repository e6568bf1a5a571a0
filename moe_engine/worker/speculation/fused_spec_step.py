"""A step of decodes alone, a chain of drafts for each, in one call of a kernel where there is one.

A short step is mostly books: what is asked of torch between drafting and following takes as long as the model does, and
each call offers the interpreter lock to the scheduler's thread, which keeps it until its own work is done. Here nothing
is asked of torch, and the one call is the time in which the scheduler works.

Legend: D decodes, N = depth + 1 tokens of each that are verified.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_engine.kernels.decoder.drafting import RowTables, StepDraws, VerifiedChains
from moe_engine.models.mtp import WholeStepCall
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.sampling.sampler import Sampler
from moe_engine.worker.speculation.mtp import MAX_FUSED_ROWS, MTPDrafter

MAX_FUSED_TOKENS = 64
"""Tokens up to which one call gains anything over a call for each part."""


class WholeStep:
    """Runs steps of `drafter`'s chains that the model is to judge without thresholds.

    Args:
        kv: the caches of the model and its MTP layers.
    """

    def __init__(self, drafter: MTPDrafter, rows: RequestRows, sampler: Sampler, kv: Sequence[Any]) -> None:
        assert rows.history is not None
        self._drafter = drafter
        self._rows = rows
        self._history = rows.history
        self._sampler = sampler
        self._kv = kv
        self._call: WholeStepCall | None = None
        self._is_asked = False
        self._repeated: tuple[np.ndarray, np.ndarray] | None = None

    def takes(self, plan_rows: list[int], rows: np.ndarray, num_tokens: int) -> bool:
        """Whether a step of these decodes, with so many tokens in all, can be run whole: not where tokens are told with
        log-probabilities, or logits are edited between drawing and judging."""
        if num_tokens > MAX_FUSED_TOKENS or len(rows) > MAX_FUSED_ROWS or not self._is_there():
            return False
        logprobs, edits = self._rows.logprobs, self._rows.edits
        if logprobs and not logprobs.keys().isdisjoint(plan_rows):
            return False
        return not (edits.active and edits.wanted[rows].any())

    def run(self, rows: np.ndarray, depth: int) -> VerifiedChains:
        """Drafts, verifies, accepts and follows for rows [D] int64; all that the worker knows of them moves on. The
        result holds until the next call.

        Raises:
            ValueError: a row has no room for its drafts.
        """
        assert self._call is not None
        judged = self._call(rows, depth, self._draws(rows, depth))
        self._history.ends.note(rows, judged.starts + 1, np.maximum(judged.tokens, 0), judged.counts)
        return judged

    def _is_there(self) -> bool:
        """Looked up once the drafter has followed a first step: before that it has no states, and nothing to draft."""
        states, rows, history = self._drafter.states, self._rows, self._history
        if states is not None and not self._is_asked:
            self._is_asked = True
            tables = RowTables(rows.slot_table, history.tokens, history.lengths, rows.last_token, states)
            self._call = self._drafter.layers.whole_step(tables, self._kv)
        return self._call is not None

    def _draws(self, rows: np.ndarray, depth: int) -> StepDraws | None:
        of_rows = self._sampler.parameters(rows)
        if of_rows is None:
            return None
        if self._repeated is None or self._repeated[0] is not rows or len(self._repeated[1]) != len(rows) * (depth + 1):
            self._repeated = rows, rows.repeat(depth + 1)
        of_tokens = self._sampler.parameters(self._repeated[1])
        assert of_tokens is not None
        places = self._history.read_lengths(rows) + 1 + np.arange(depth + 1)[:, None]  # [N, D]
        return StepDraws(of_rows, of_tokens, self._sampler.numbers(rows, places))
