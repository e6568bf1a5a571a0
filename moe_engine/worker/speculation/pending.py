"""A speculative step on its way to the host: tokens, how many of them, and their log-probabilities.

Legend: D decodes, P prompts that sample, K most tokens that a decode can bring, V vocabulary.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, NamedTuple

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention.drafting import JudgedChains
from moe_engine.types import LogprobSpec, PackedLogprobs, StepPlan, StepResult
from moe_engine.worker.device_stream import DeviceStream, HostCopy
from moe_engine.worker.logprobs import PendingLogprobs, PendingPrompt, token_logprobs

if TYPE_CHECKING:
    from moe_engine.worker.speculation.acceptance import Accepted
    from moe_engine.worker.speculation.step import Verification

_NOTHING = np.zeros(0, dtype=np.int64)


class StepSeconds(NamedTuple):
    """Of a step; all 0 where its time would mislead."""

    total: float = 0.0
    draft: float = 0.0
    follow: float = 0.0
    model: float = 0.0


@dataclass
class PendingSpeculation:
    """A speculative step on its way to the host."""

    number: int
    rows: list[int]
    copy: HostCopy
    """New tokens [D, K] of the decodes, how many of them [D], and those of the prompts [P]."""
    seconds: StepSeconds
    logprobs: PendingLogprobs | None = None
    logprob_places: list[tuple[int, int]] = field(default_factory=list)
    """Request among `rows` and index among its tokens of each entry of `logprobs`."""
    prompts: list[PendingPrompt] = field(default_factory=list)
    left_out: list[tuple[int, int]] = field(default_factory=list)
    """Place among the plan's sampled rows, and row, of requests that had ended: their result is empty."""
    cuda_graph: bool = False

    @classmethod
    def empty(cls, number: int, left_out: list[tuple[int, int]]) -> PendingSpeculation:
        """Of a step all of whose requests had ended."""
        nothing = torch.zeros(0, dtype=torch.int64)
        return cls(number, [], HostCopy([nothing.view(0, 0), nothing, nothing]), StepSeconds(), left_out=left_out)

    @classmethod
    def judged(
        cls, plan: StepPlan, judged: JudgedChains, seconds: StepSeconds, left_out: list[tuple[int, int]]
    ) -> PendingSpeculation:
        """Of a step of decodes alone that was run whole; to be taken before the next one runs."""
        copy = HostCopy([judged.tokens, judged.counts, _NOTHING])
        return cls(plan.number, plan.rows, copy, seconds if not left_out else StepSeconds(), left_out=left_out)

    @property
    def ready(self) -> bool:
        return self.copy.ready

    def take(self) -> StepResult:
        decodes, counts, prompts = (tensor.tolist() for tensor in self.copy.wait())
        tokens = [row[:count] for row, count in zip(decodes, counts)] + [[token] for token in prompts]
        logprobs: list[PackedLogprobs | None] | None = None
        if self.logprobs is not None:
            of_request: dict[int, list[PackedLogprobs]] = {}
            for (request, index), packed in zip(self.logprob_places, self.logprobs.take()):
                if index < len(tokens[request]):
                    of_request.setdefault(request, []).append(packed)
            joined = {request: PackedLogprobs.join(parts) for request, parts in of_request.items()}
            logprobs = [joined.get(request) for request in range(len(tokens))]
        rows = list(self.rows)
        for place, row in self.left_out:
            rows.insert(place, row)
            tokens.insert(place, [])
            if logprobs is not None:
                logprobs.insert(place, None)
        told = {pending.row: pending.take() for pending in self.prompts} or None
        return StepResult(self.number, rows, tokens, logprobs, told, *self.seconds, cuda_graph=self.cuda_graph)


def add_logprobs(
    pending: PendingSpeculation,
    wanted: Mapping[int, LogprobSpec],
    stream: DeviceStream,
    raw: Tensor,
    wanting: list[int],
    verification: Verification,
    accepted: Accepted,
    prompts: Tensor,
) -> None:
    """Log-probabilities of the new tokens, from the logits raw [W, V] of the sampled rows `wanting`."""
    place = {index: i for i, index in enumerate(wanting)}
    path = verification.nodes.gather(1, accepted.path)  # [D, K]
    read = stream.read(torch.cat((path.flatten(), accepted.tokens.flatten(), prompts)))  # one wait, not three
    nodes, tokens = read[: 2 * path.numel()].reshape(2, *path.shape)
    num, first_prompt = len(verification.rows), int(verification.counts.sum())
    entries: list[tuple[int, int, int]] = []  # row of raw, request, index among its tokens
    chosen: list[int] = []
    for d in range(num):
        for k, node in enumerate(nodes[d].tolist()):
            if node in place:
                entries.append((place[node], d, k))
                chosen.append(int(tokens[d, k]))
    for p, token in enumerate(read[2 * path.numel() :].tolist()):
        if first_prompt + p in place:
            entries.append((place[first_prompt + p], num + p, 0))
            chosen.append(token)
    specs = [wanted[pending.rows[request]] for _, request, _ in entries]
    picked = stream.rows_of(raw, [entry[0] for entry in entries])
    tensors = token_logprobs(picked, stream.from_list(chosen, torch.int64), specs, stream)
    pending.logprobs = PendingLogprobs.start(tensors, specs, stream)
    pending.logprob_places = [(request, k) for _, request, k in entries]
