"""Pending result of a speculative step: tokens, counts and log-probabilities being downloaded.

Legend: D decodes, P prompts that sample, K max new tokens of a decode, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple, Protocol

import numpy as np
import torch

from moe_engine.kernels.decoder.drafting import VerifiedChains
from moe_engine.types import FinishReason, PackedLogprobs, StepPlan, StepResult
from moe_engine.worker.device_stream import HostCopy, StepClock
from moe_engine.worker.sampling.logprobs import PendingLogprobs, PendingPrompt


class CopiedSteps(Protocol):
    """The arrays of `PendingSpeculation.copy`, being downloaded."""

    @property
    def ready(self) -> bool: ...

    def wait(self) -> Sequence[Any]: ...


class ChainsCopy:
    """Results of chains [D, K + 1] (`ChainBuffers.result`) being downloaded, or of trees with their paths [D, K];
    implements `CopiedSteps`."""

    def __init__(self, copy: HostCopy, with_nodes: bool) -> None:
        self._copy = copy
        self._with_nodes = with_nodes

    @property
    def ready(self) -> bool:
        return self._copy.ready

    def wait(self) -> Sequence[np.ndarray]:
        result, *paths = (array.numpy() for array in self._copy.wait())
        tokens, counts = result[:, :-1], result[:, -1]
        nodes = paths or [np.minimum(np.arange(tokens.shape[1]), counts[:, None] - 1)]
        nodes = nodes if self._with_nodes else []
        return [tokens, counts, _NOTHING, *nodes]


_NOTHING = np.zeros(0, dtype=np.int64)


class StepSeconds(NamedTuple):
    """Seconds of a step; all 0 if they would mislead the cost model."""

    total: float = 0.0
    draft: float = 0.0
    follow: float = 0.0
    model: float = 0.0


@dataclass
class PendingSpeculation:
    """The pending result of a speculative step."""

    number: int
    rows: list[int]
    copy: CopiedSteps
    """New tokens [D, K] of the decodes, their counts [D], and the tokens [P] of the prompts; with log-probabilities
    also the node [D, K] where each decode token was sampled."""
    seconds: StepSeconds
    logprobs: list[PendingLogprobs] = field(default_factory=list)
    """By row of logits: the nodes, then the prompts."""
    nodes: np.ndarray = field(default_factory=lambda: _NOTHING.reshape(0, 0))
    """[D, N]: the row of logits of each node."""
    prompts: list[PendingPrompt] = field(default_factory=list)
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """(index among the plan's sampled rows, row) of requests that had ended: their result is empty."""
    cuda_graph: bool = False
    errors: dict[int, FinishReason] | None = None
    clock: StepClock | None = None
    """Measures `seconds` on the device: marks before and after drafts, after sampling, at the end."""

    @classmethod
    def empty(cls, number: int, left_out: list[tuple[int, int]]) -> PendingSpeculation:
        """Result of a step whose requests had all ended."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(number, [], HostCopy([nothing.view(0, 0), nothing, nothing]), StepSeconds(), left_out=left_out)

    @classmethod
    def verified(
        cls, plan: StepPlan, verified: VerifiedChains, seconds: StepSeconds, left_out: list[tuple[int, int]]
    ) -> PendingSpeculation:
        """Result of a fused step; to be taken before the next step runs."""
        copy = HostCopy([verified.tokens, verified.counts, _NOTHING])
        return cls(plan.number, plan.rows, copy, seconds if not left_out else StepSeconds(), left_out=left_out)

    @property
    def ready(self) -> bool:
        return self.copy.ready

    def take(self) -> StepResult:
        decodes, counts, prompts, *paths = (tensor.tolist() for tensor in self.copy.wait())
        tokens = [row[:count] for row, count in zip(decodes, counts)] + [[token] for token in prompts]
        logprobs = self._logprobs(tokens, paths[0]) if self.logprobs else None
        rows = list(self.rows)
        for place, row in self.left_out:
            rows.insert(place, row)
            tokens.insert(place, [])
            if logprobs is not None:
                logprobs.insert(place, None)
        if self.clock is not None:
            draft, model, follow = self.clock.seconds()
            self.seconds = StepSeconds(draft + model + follow, draft, follow, model)
        prompt_logprobs = {pending.row: pending.take() for pending in self.prompts} or None
        return StepResult(
            self.number, rows, tokens, logprobs, prompt_logprobs, *self.seconds,
            cuda_graph=self.cuda_graph, errors=self.errors,
        )  # fmt: skip

    def _logprobs(self, tokens: list[list[int]], paths: list[list[int]]) -> list[PackedLogprobs | None]:
        """Log-probabilities of the new tokens of each request that requested them."""
        num, first_prompt = len(paths), int(self.nodes.max(initial=-1)) + 1
        places = [[int(self.nodes[d, node]) for node in path[: len(tokens[d])]] for d, path in enumerate(paths)]
        places += [[first_prompt + p] for p in range(len(tokens) - num)]
        accepted = {place: token for some, own in zip(places, tokens) for place, token in zip(some, own)}
        found: dict[int, PackedLogprobs] = {}
        for piece in self.logprobs:
            found |= piece.take_some(accepted)
        parts = ([found[place] for place in some if place in found] for some in places)
        return [PackedLogprobs.join(some) if some else None for some in parts]
