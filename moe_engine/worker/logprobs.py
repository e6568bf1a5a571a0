"""Log-probabilities of sampled tokens and of prompt tokens: natural log of the softmax of the raw logits.

Raw means before temperature, penalties, logit_bias and min_new_tokens, so that they describe the model and do not
change with how a request is sampled.

Legend: S rows, V vocabulary, K rivals looked at, J token ids asked for.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor

from moe_engine.types import LogprobSpec, TokenLogprob
from moe_engine.worker.device_stream import DeviceStream, HostCopy
from moe_engine.worker.rows import PromptLogprobs

_MIN_TOP = 32


@dataclass(frozen=True)
class LogprobTensors:
    """On the device: log-probabilities of S tokens and their rivals. `top` has one width whoever shares the step."""

    tokens: Tensor  # [S] int64
    chosen: Tensor  # [S] float32
    top: Tensor  # [S, K] float32
    top_ids: Tensor  # [S, K] int64
    asked: Tensor  # [S, J] float32
    drafts: tuple[Tensor, Tensor] | None = None  # ids [S, N] int64, and their log-probabilities [S, N] float32


def token_logprobs(
    logits: Tensor,
    tokens: Tensor,
    specs: Sequence[LogprobSpec],
    stream: DeviceStream,
    drafts: Tensor | None = None,
) -> LogprobTensors:
    """logits [S, V] float32, the token [S] of each row (invalid ones count as 0), what each row wants; drafts [S, N]
    int64 are looked up as well, negative ones as 0."""
    logprobs = logits.log_softmax(-1)
    chosen = logprobs.gather(1, tokens.clamp_min(0)[:, None])[:, 0]
    most = max(spec.top for spec in specs)
    width = min(max(most, _MIN_TOP), logits.shape[-1]) if most else 0
    top, top_ids = logprobs.topk(width)
    longest = max(len(spec.token_ids) for spec in specs)
    ids = [list(spec.token_ids) + [0] * (longest - len(spec.token_ids)) for spec in specs]
    columns = stream.from_list(ids, torch.int64).view(len(specs), longest)
    found = None if drafts is None else (drafts, logprobs.gather(1, drafts.clamp_min(0)))
    return LogprobTensors(tokens, chosen, top, top_ids, logprobs.gather(1, columns), found)


@dataclass(frozen=True)
class PendingLogprobs:
    """Log-probabilities on their way to the host; `specs` says which part of each row was asked for, `places` which
    rows of the step these are."""

    specs: Sequence[LogprobSpec]
    copy: HostCopy
    places: Sequence[int] = ()

    @classmethod
    def start(
        cls, tensors: LogprobTensors, specs: Sequence[LogprobSpec], stream: DeviceStream, places: Sequence[int] = ()
    ) -> PendingLogprobs:
        values = [tensors.tokens, tensors.chosen, tensors.top, tensors.top_ids, tensors.asked]
        return cls(specs, stream.download([*values, *(tensors.drafts or ())]), places)

    def take(self) -> list[TokenLogprob]:
        """Of the tokens that were drawn."""
        return self._entries(list(range(len(self.specs))), None)

    def take_some(self, accepted: Mapping[int, int]) -> dict[int, TokenLogprob]:
        """By row of the step, of the tokens accepted[row]: the one drawn there, or a draft below it."""
        at = [i for i, place in enumerate(self.places) if place in accepted]
        places = [self.places[i] for i in at]
        return dict(zip(places, self._entries(at, [accepted[place] for place in places])))

    def _entries(self, at: list[int], accepted: list[int] | None) -> list[TokenLogprob]:
        values = self.copy.wait()
        if accepted is not None:
            values = [tensor[at] for tensor in values]
        tokens, chosen, top, top_ids, asked, *drafts = (tensor.tolist() for tensor in values)
        for i, token in enumerate(accepted or ()):
            if token != tokens[i]:
                tokens[i], chosen[i] = token, drafts[1][i][drafts[0][i].index(token)]
        return [
            TokenLogprob(
                token_id=tokens[i],
                logprob=chosen[i],
                top=tuple(zip(top_ids[i][: spec.top], top[i][: spec.top])),
                token_ids=tuple(zip(spec.token_ids, asked[i])),
            )
            for i, spec in enumerate(self.specs[place] for place in at)
        ]


@dataclass
class PendingPrompt:
    """The part of a prompt's log-probabilities that one step brings: entries without a value, then `pieces`."""

    row: int
    unknown: list[int]
    """Prompt tokens whose logits were not computed: the first of a prompt, or one at the end of a cached prefix."""
    pieces: list[PendingLogprobs] = field(default_factory=list)

    def take(self) -> list[TokenLogprob]:
        entries = [TokenLogprob(token, None) for token in self.unknown]
        return entries + [entry for piece in self.pieces for entry in piece.take()]


def prompt_logprobs(
    row: int,
    wanted: PromptLogprobs,
    start: int,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    rows_at_once: int,
    stream: DeviceStream,
) -> PendingPrompt | None:
    """Log-probabilities that the computed positions [start, start + len(hidden)) give: of the tokens one further.

    Args:
        hidden: [n, D] of this request's tokens in the step.
        logits_of: hidden [m, D] -> [m, V] float32.
        rows_at_once: most rows of logits that there may be at once.
    """
    spec = wanted.spec
    assert spec.start is not None
    unknown: list[int] = []
    if start == wanted.num_cached and spec.start <= start:
        unknown = wanted.prompt[spec.start : start + 1]
    first = max(start, spec.start - 1)
    end = min(start + hidden.shape[0], len(wanted.prompt) - 1)
    if first >= end:
        return PendingPrompt(row, unknown) if unknown else None
    pending = PendingPrompt(row, unknown)
    for begin in range(first, end, rows_at_once):
        stop = min(begin + rows_at_once, end)
        specs = [spec] * (stop - begin)
        tokens = stream.from_list(wanted.prompt[begin + 1 : stop + 1], torch.int64)
        found = token_logprobs(logits_of(hidden[begin - start : stop - start]), tokens, specs, stream)
        pending.pieces.append(PendingLogprobs.start(found, specs, stream))
    return pending
