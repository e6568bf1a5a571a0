"""Model wrapper that records the experts of each pass and calls EPLB between passes."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import TypeVar

import torch
from torch import Tensor

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.decoder import Decoder
from moe_engine.parallel.recording.recorder import ExpertRecorder
from moe_engine.worker.eplb.eplb_manager import EPLBManager

logger = logging.getLogger("moe_engine")

Result = TypeVar("Result")

# SGLang's numbers of forward modes, by (has prefill, has decode)
FORWARD_MODES = {(True, False): 1, (False, True): 2, (True, True): 3, (False, False): 4}


class ExpertRecordingModel:
    """Implements `Model`.

    Args:
        model: the wrapped model, which numbers its passes; its MTP layers are not observed.
        recorder: records every pass.
        balance: called between passes.
        log: log the balancedness of each pass, on the reporting rank.
    """

    def __init__(
        self,
        model: Decoder,
        recorder: ExpertRecorder,
        balance: EPLBManager | None = None,
        *,
        log: bool = False,
        is_reporting_rank: bool = True,
    ) -> None:
        self.logits = model.logits
        self.counts_in_layers = False
        """Whether all layers count their own experts, so that a fused pass is recorded too."""
        self.model = model
        self._recorder = recorder
        self._balance = balance
        self._log = log
        self.is_reporting_rank = is_reporting_rank

    @property
    def passes(self) -> int:
        """Passes begun so far: the number of the last one, the same on all ranks."""
        return self.model.passes

    @passes.setter
    def passes(self, passes: int) -> None:
        self.model.passes = passes

    @property
    def at_layer(self) -> int:
        return self.model.at_layer

    @property
    def is_watching(self) -> bool:
        """True if CUDA-graph replay must be disabled: a replayed pass cannot record expert choices or move experts."""
        return self._recorder.wanted or self._balance is not None

    def fused_pass(self, run: Callable[[], Result | None]) -> Result | None:
        """Runs a pass without `forward`. None, without a pass, if it could not be recorded or if `run` returns None."""
        if self._balance is not None or not self.counts_in_layers:
            return None
        recorder, counting = self._recorder, self._recorder.counting
        if counting:
            recorder.begin_pass(self.passes + 1)
        result = self.model.fused_pass(run)
        if result is not None:
            recorder.end_pass()
            if self._log:
                self._log_balancedness()
        elif counting:
            recorder.drop_pass()
        return result

    def forward(self, batch: ForwardBatch) -> Tensor:
        return self._recorded([batch], lambda: self.model.forward(batch))

    def forward_overlapped(self, batches: Sequence[ForwardBatch]) -> list[Tensor]:
        """As `Decoder.forward_overlapped`: both halves are one pass."""
        return self._recorded(batches, lambda: self.model.forward_overlapped(batches))

    def _recorded(self, batches: Sequence[ForwardBatch], run: Callable[[], Result]) -> Result:
        if self._balance is not None:
            self._balance.between_passes()
        if self._recorder.counting:
            self._recorder.begin_pass(self.model.passes + 1)
            if self._recorder.wants_batches:
                self._describe(batches)
        hidden = run()
        self._recorder.end_pass()
        if self._log:
            self._log_balancedness()
        return hidden

    def _describe(self, batches: Sequence[ForwardBatch]) -> None:
        first = batches[0]
        prefills = [batch.attention.prefill for batch in batches if batch.attention.prefill is not None]
        decodes = any(batch.attention.decode is not None for batch in batches)
        self._recorder.describe_pass(
            first.input_ids if len(batches) == 1 else torch.cat([batch.input_ids for batch in batches]),
            first.positions if len(batches) == 1 else torch.cat([batch.positions for batch in batches]),
            [length for prefill in prefills for length in prefill.query_lens] if prefills else None,
            FORWARD_MODES[bool(prefills), decodes],
        )

    def _log_balancedness(self) -> None:
        if self.is_reporting_rank:
            logger.info("%s", self._recorder.balance.log_line())
