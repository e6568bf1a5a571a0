"""Fused speculative step: a decode-only step with a chain of drafts per request, in one kernel call if available.

Short steps are dominated by host overhead: the torch calls between draft and draft extend cost as much as the model,
and each releases the interpreter lock to the scheduler's thread, which keeps it until its own work is done. The fused
step makes no torch calls; the scheduler runs during the single kernel call.

Legend: D decodes, N = depth + 1 verified tokens of each.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from moe_engine.kernels.decoder.drafting import RowTables, StepDraws, VerifiedChains
from moe_engine.kernels.decoder.layers import most_tokens
from moe_engine.models.drafts.mtp import FusedStepCall, MTPLayers
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.sampling.sampler import Sampler
from moe_engine.worker.speculation.mtp import MTPDrafter


class FusedStep:
    """Runs steps with chains of `drafter`, verified without thresholds.

    Args:
        kv: the KV caches of the model and its MTP layers.
    """

    def __init__(self, drafter: MTPDrafter, rows: RequestRows, sampler: Sampler, kv: Sequence[Any]) -> None:
        assert rows.history is not None
        self._drafter = drafter
        self._rows = rows
        self._history = rows.history
        self._sampler = sampler
        self._most = most_tokens(rows.vocab_size)
        self._kv = kv
        self._call: FusedStepCall | None = None
        self._is_looked_up = False
        self._repeated: tuple[np.ndarray, np.ndarray] | None = None

    def takes(self, plan_rows: list[int], rows: np.ndarray, num_tokens: int) -> bool:
        """Whether a step of these decodes, with `num_tokens` tokens in total, can be fused: not with log-probabilities,
        logits processors or adapters."""
        if num_tokens > self._most or not self._is_available():
            return False
        return self._rows.only_sample(plan_rows, rows)

    def run(self, rows: np.ndarray, depth: int) -> VerifiedChains:
        """Draft, verify, accept and draft extend for rows [D] int64; updates the worker's state of these rows. The
        result is valid until the next call.

        Raises:
            ValueError: a row has no space for its drafts.
        """
        assert self._call is not None
        verified = self._call(rows, depth, self._draws(rows, depth))
        self._history.ends.note(rows, verified.starts + 1, np.maximum(verified.tokens, 0), verified.counts)
        return verified

    def _is_available(self) -> bool:
        """Looked up once, after the first draft extend: before it the drafter has no hidden states to draft from."""
        states, rows, history = self._drafter.states, self._rows, self._history
        if states is not None and not self._is_looked_up:
            self._is_looked_up = True
            slots = rows.slot_table
            tables = RowTables(slots, history.tokens, history.lengths, rows.last_token, states, slots[:0], slots[:0])
            layers = self._drafter.layers
            assert isinstance(layers, MTPLayers)
            self._call = layers.fused_step(tables, self._kv)
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
