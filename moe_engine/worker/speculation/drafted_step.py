"""Speculative step whose drafts, verification and draft extend are captured as CUDA graphs.

The accepted lengths of the step before are not read: the graphs read them on the device. Two cases read values, and
wait for them: logits processors, which need the lengths of their rows, and token masks, which need the drafts.

Legend: D decodes, K = depth + 1 verified tokens of each.
"""

from __future__ import annotations

import numpy as np
from torch import Tensor

from moe_engine.types import StepPlan
from moe_engine.worker.batch.request_rows import RequestRows
from moe_engine.worker.device_stream import DeviceStream, StepClock
from moe_engine.worker.sampling.sampler import SampledRows
from moe_engine.worker.speculation.draft_graphs import DraftGraphs
from moe_engine.worker.speculation.pending import ChainsCopy
from moe_engine.worker.speculation.step import SpeculativeStep
from moe_engine.worker.speculation.verification import Decodes
from moe_engine.worker.step_sampling import Drawn
from moe_engine.worker.step_shape import StepShape


class DraftedStep:
    """The parts of a captured step around its sampling."""

    def __init__(self, step: SpeculativeStep, graphs: DraftGraphs, rows: RequestRows, stream: DeviceStream) -> None:
        self.graphs = graphs
        self._step = step
        self._rows = rows
        self._stream = stream
        self._decodes: Decodes | None = None
        self._repeated: tuple[np.ndarray, Tensor] | None = None  # rows of the decodes, K times each

    def takes(self, plan: StepPlan) -> bool:
        """False for trees of rows with logits processors or token masks, which need the trees on the host."""
        if self._step.config.topk == 1 or plan.speculation is None or not plan.speculation.depth:
            return True
        return not (plan.masked or self._rows.edits.applies_to(self._step.verifications.decodes_of(plan).rows))

    def verify(
        self, plan: StepPlan, shape: StepShape, clock: StepClock | None = None
    ) -> tuple[SampledRows, Tensor, Tensor | None]:
        """Drafts and verifies: the rows to sample, hidden states [D * K, *] and logits, as `DraftGraphs.verify`.
        `clock` gets a mark between both."""
        decodes = self._step.verifications.decodes_of(plan)
        count, edited = shape.count, self._rows.edits.applies_to(decodes.rows)
        starts = self._step.read_lengths(decodes.rows) if edited else np.array(plan.starts, dtype=np.int64)
        rows, rows_device = self._repeat(decodes, count)
        self.graphs.catch_up(shape, decodes.rows, plan.starts)
        chain = self.graphs.draft(shape, decodes.rows, self._bounds(plan, count))
        num = len(decodes.rows)
        if clock is not None:
            clock.mark()
        if plan.masked:
            self._step.report(plan, decodes.rows, decodes.counts, chain.ids[:num])
        self._rows.note_tokens(chain.slots[:num].flatten(), chain.ids[:num].flatten())
        lengths = (starts[:, None] + 1 + np.arange(count)).ravel()
        sampled = SampledRows(rows, lengths, rows_device, chain.uniform[:num].flatten())
        return sampled, *self.graphs.verify(shape, num)

    def drafts_below(self, shape: StepShape) -> Tensor | None:
        """`SpeculativeStep.drafts_below` of the last verified chains; None without thresholds."""
        if not self._step.config.has_thresholds:
            return None
        assert self._decodes is not None
        ids = self.graphs.ids_of(shape)[: len(self._decodes.rows)]
        below = ids.roll(-1, 1)
        below[:, -1] = -1
        return below.view(-1, 1)

    def follow(self, shape: StepShape, drawn: Drawn) -> tuple[ChainsCopy, np.ndarray]:
        """Accepts, and runs the draft extend: the results on their way to the host, and the row of logits of each
        verified token [D, K]."""
        results = self.graphs.follow(shape, drawn.tokens, drawn.chances)
        assert self._decodes is not None
        return ChainsCopy(self._stream.download(results), bool(drawn.logprobs)), self._decodes.host_nodes

    def _bounds(self, plan: StepPlan, count: int) -> list[int]:
        """Upper bounds of the context tokens: the plan's starts are lower bounds, and the step in flight accepts at
        most as many tokens as the longest chain."""
        more, width = self._step.config.num_nodes(self._step.config.num_steps) + count, self._rows.width
        return [min(start + more, width) for start in plan.starts]

    def _repeat(self, decodes: Decodes, count: int) -> tuple[np.ndarray, Tensor]:
        if self._decodes is not decodes or self._repeated is None:
            many = count > 1
            device = decodes.rows_device.repeat_interleave(count) if many else decodes.rows_device
            self._decodes, self._repeated = decodes, (decodes.rows.repeat(count) if many else decodes.rows, device)
        return self._repeated
