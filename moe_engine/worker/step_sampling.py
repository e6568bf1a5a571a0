"""Sampling of a step: logits processors, sampled tokens and log-probabilities, pass by pass.

Legend: S sampled rows, V vocabulary, J draft tokens below a node.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_engine.types import FinishReason
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.logits_passes import Work
from moe_engine.worker.sampling.logprobs import PendingLogprobs, token_logprobs
from moe_engine.worker.sampling.penalties import TreeText
from moe_engine.worker.sampling.sampler import SampledRows, Sampler

Passes = Callable[[Work["Drawn"]], list["Drawn"]]
"""Calls a `Work` with the logits of each pass: `LogitsPasses.over` without its last argument."""


@dataclass(frozen=True)
class Drawn:
    """tokens [S] int64, `INVALID_TOKEN` for invalid logits (NaN); requested log-probabilities."""

    tokens: Tensor
    logprobs: list[PendingLogprobs] = field(default_factory=list)
    chances: Tensor | None = None  # [S, J] float32: probabilities of the drafts below each row, if given
    errors: dict[int, FinishReason] | None = None  # by row of the worker: reasons why tokens are invalid


class StepSampling:
    """Samples the rows of a step."""

    def __init__(self, rows: RequestRows, sampler: Sampler, stream: DeviceStream) -> None:
        self._rows = rows
        self._sampler = sampler
        self._stream = stream

    def run(
        self, passes: Passes, sampled: SampledRows, trees: TreeText | None = None, below: Tensor | None = None
    ) -> Drawn:
        """Samples all rows of a step. May change the logits in place.

        Args:
            trees: context of the first rows, if these are nodes of draft trees.
            below: [S, J] int64, draft tokens that may be accepted although another token is sampled; negative: none.
        """

        def work(part: slice, logits: Tensor) -> Drawn:
            own = trees if trees is None else trees.part(part.start, part.stop)
            return self._draw(logits, sampled.part(part), part.start, own, below if below is None else below[part])

        drawn = passes(work)
        if len(drawn) == 1:
            return drawn[0]
        chances = [some.chances for some in drawn if some.chances is not None]
        return Drawn(
            torch.cat([some.tokens for some in drawn]),
            [piece for some in drawn for piece in some.logprobs],
            torch.cat(chances) if chances else None,
            {row: why for some in drawn for row, why in (some.errors or {}).items()} or None,
        )

    def _draw(
        self, logits: Tensor, sampled: SampledRows, first: int, trees: TreeText | None, below: Tensor | None
    ) -> Drawn:
        """One pass, whose first row is row `first` of the step."""
        specs, edits = self._rows.logprobs, self._rows.edits
        wanting = [i for i, row in enumerate(sampled.rows.tolist()) if row in specs] if specs else []
        edited = edits.applies_to(sampled.rows)
        errors = None
        if edited or below is not None:  # edits may need all bits
            logits = logits.float()
        raw = logits
        if wanting and (edited or len(wanting) < len(logits)):
            raw = self._stream.rows_of(logits, wanting)
        if edited:
            assert self._rows.slot_tokens is not None
            edits.apply(logits, sampled.rows, sampled.lengths, self._rows.slot_tokens, trees)
            errors = edits.take_errors()
        tokens = self._sampler.sample(logits, sampled)  # [S]
        chances = None if below is None else self._sampler.probabilities(logits, sampled, below)
        if not wanting:
            return Drawn(tokens, chances=chances, errors=errors)
        own = [specs[int(sampled.rows[i])] for i in wanting]
        drafts = None if below is None else self._stream.rows_of(below, wanting)
        found = token_logprobs(raw.float(), self._stream.rows_of(tokens, wanting), own, self._stream, drafts)
        places = [first + i for i in wanting]
        return Drawn(tokens, [PendingLogprobs.start(found, own, self._stream, places)], chances, errors)
