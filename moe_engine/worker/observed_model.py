"""A model whose passes are counted, and between whose passes experts may move."""

from __future__ import annotations

import logging
from collections.abc import Sequence
from typing import Any, Protocol

import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch, Model
from moe_engine.parallel.recording.recorder import ExpertRecorder

logger = logging.getLogger("moe_engine")

# SGLang's numbers of forward modes, by (has prefill, has decode)
FORWARD_MODES = {(True, False): 1, (False, True): 2, (True, True): 3, (False, False): 4}


class BetweenPasses(Protocol):
    """What is done before each pass, by all ranks alike."""

    def between_passes(self) -> None: ...


class ObservedModel:
    """Implements `Model`.

    Args:
        model: does the work; what else shares it (MTP layers) is not observed.
        recorder: told of every pass.
        balance: called between passes.
        log: write a line with the balancedness of each pass, on the rank that `speaks` for all.
    """

    def __init__(
        self,
        model: Model,
        recorder: ExpertRecorder,
        balance: BetweenPasses | None = None,
        *,
        log: bool = False,
        speaks: bool = True,
    ) -> None:
        self.logits = model.logits
        self._model = model
        self._recorder = recorder
        self._balance = balance
        self._log = log
        self.speaks = speaks
        self.passes = 0
        """Begun so far: the number of the last one, the same on all ranks."""

    @property
    def is_watching(self) -> bool:
        """Whether every pass must come by here: a replayed one tells nobody what was chosen, and lets nothing move."""
        return self._recorder.wanted or self._balance is not None

    @property
    def at_layer(self) -> int | None:
        """As of the model, where it tells."""
        return getattr(self._model, "at_layer", None)

    def forward(self, batch: ForwardBatch) -> Tensor:
        self._begin([batch])
        hidden = self._model.forward(batch)
        self._end()
        return hidden

    def forward_in_turns(self, batches: Sequence[ForwardBatch]) -> list[Tensor]:
        """As `TakesTurns`: the parts are one pass."""
        self._begin(batches)
        model: Any = self._model
        hidden = model.forward_in_turns(batches)
        self._end()
        return hidden

    def _begin(self, batches: Sequence[ForwardBatch]) -> None:
        if self._balance is not None:
            self._balance.between_passes()
        self.passes += 1
        if not self._recorder.counting:
            return
        first = batches[0]
        prefills = [batch.attention.prefill for batch in batches if batch.attention.prefill is not None]
        decodes = any(batch.attention.decode is not None for batch in batches)
        self._recorder.begin_pass(
            self.passes,
            first.input_ids if len(batches) == 1 else torch.cat([batch.input_ids for batch in batches]),
            first.positions if len(batches) == 1 else torch.cat([batch.positions for batch in batches]),
            [length for prefill in prefills for length in prefill.query_lens] if prefills else None,
            FORWARD_MODES[bool(prefills), decodes],
        )

    def _end(self) -> None:
        self._recorder.end_pass()
        if self._log and self.speaks:
            logger.info("%s", self._recorder.balance.log_line())
