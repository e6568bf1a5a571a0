"""Launched steps, whose results are fetched later."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Protocol

from moe_engine.types import FinishReason, PackedLogprobs, StepResult
from moe_engine.worker.device_stream import HostCopy, StepClock
from moe_engine.worker.hidden_states import PendingHidden
from moe_engine.worker.routed_experts import PendingExperts
from moe_engine.worker.sampling.logprobs import PendingLogprobs, PendingPrompt


class PendingResult(Protocol):
    """A launched step. `take` waits for its result; `ready`: whether `take` returns immediately."""

    @property
    def ready(self) -> bool: ...

    def take(self) -> StepResult: ...


@dataclass
class PendingStep:
    """A step without drafts, implements `PendingResult`."""

    number: int
    rows: list[int]
    tokens: HostCopy
    logprobs: list[PendingLogprobs] = field(default_factory=list)
    prompts: list[PendingPrompt] = field(default_factory=list)
    seconds: float = 0.0
    cuda_graph: bool = False
    errors: dict[int, FinishReason] | None = None
    positions: PendingHidden | PendingExperts | None = None
    clock: StepClock | None = None
    """Measures `seconds` on the device."""

    @property
    def ready(self) -> bool:
        return self.tokens.ready

    def take(self) -> StepResult:
        tokens = [[token] for token in self.tokens.wait()[0].tolist()]
        if self.clock is not None:
            self.seconds = sum(self.clock.seconds())
        logprobs: list[PackedLogprobs | None] | None = None
        if self.logprobs:
            logprobs = [None] * len(tokens)
            for piece in self.logprobs:
                for place, packed in zip(piece.places, piece.take()):
                    logprobs[place] = packed
        prompts = {pending.row: pending.take() for pending in self.prompts} or None
        return StepResult(
            self.number, self.rows, tokens, logprobs, prompts, self.seconds,
            cuda_graph=self.cuda_graph, errors=self.errors,
            positions=None if self.positions is None else self.positions.take(),
        )  # fmt: skip
