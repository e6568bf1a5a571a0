"""Log-probabilities of sampled tokens and of prompt tokens: natural log of the softmax of the raw logits.

Raw means before temperature, penalties, logit_bias and min_new_tokens: they describe the model, independent of the
sampling parameters.

Legend: S rows, V vocabulary, K top tokens, J requested token ids.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import LogprobSpec, PackedLogprobs
from moe_engine.worker.device_stream import DeviceStream, HostCopy

_MIN_TOP = 32


@dataclass
class PromptLogprobs:
    """Progress of a request with prompt log-probabilities."""

    prompt: list[int]
    spec: LogprobSpec
    num_cached: int


@dataclass(frozen=True)
class LogprobTensors:
    """On the device: log-probabilities of S tokens and of the top tokens. `top` has the same width for all requests of
    a step."""

    tokens: Tensor  # [S] int64
    chosen: Tensor  # [S] float32
    top: Tensor  # [S, K] float32
    top_ids: Tensor  # [S, K] int64
    asked: Tensor  # [S, J] float32
    drafts: tuple[Tensor, Tensor] | None = None  # ids [S, N] int64, and their log-probabilities [S, N] float32


def token_logprobs(
    logits: Tensor, tokens: Tensor, specs: Sequence[LogprobSpec], stream: DeviceStream, drafts: Tensor | None = None
) -> LogprobTensors:
    """logits [S, V] float32, the token [S] of each row (invalid tokens count as 0), the spec of each row; also of
    drafts [S, N] int64, negative ones as 0."""
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
    """Log-probabilities being downloaded; `specs` are the requested parts of each row, `places` the rows' indices in
    the step."""

    specs: Sequence[LogprobSpec]
    copy: HostCopy
    places: Sequence[int] = ()

    @classmethod
    def start(
        cls, tensors: LogprobTensors, specs: Sequence[LogprobSpec], stream: DeviceStream, places: Sequence[int] = ()
    ) -> PendingLogprobs:
        values = [tensors.tokens, tensors.chosen, tensors.top, tensors.top_ids, tensors.asked]
        return cls(specs, stream.download([*values, *(tensors.drafts or ())]), places)

    def take(self) -> list[PackedLogprobs]:
        """Log-probabilities of the token sampled at each row."""
        arrays, _ = self._arrays()
        return [_pack(arrays, i, i + 1, spec) for i, spec in enumerate(self.specs)]

    def take_as_one(self) -> PackedLogprobs:
        """Log-probabilities of all rows together, which share one spec."""
        return _pack(self._arrays()[0], 0, len(self.specs), self.specs[0])

    def take_some(self, accepted: Mapping[int, int]) -> dict[int, PackedLogprobs]:
        """Log-probabilities by row of the step, of the tokens accepted[row]: the sampled token, or a draft below the
        row."""
        arrays, drafts = self._arrays()
        tokens = arrays[0]
        chosen = arrays[1] = arrays[1].copy()
        found = {}
        for i, place in enumerate(self.places):
            if place not in accepted:
                continue
            if accepted[place] != tokens[i]:
                ids, values = drafts
                tokens[i], chosen[i] = accepted[place], values[i][ids[i].tolist().index(accepted[place])]
            found[place] = _pack(arrays, i, i + 1, self.specs[i])
        return found

    def _arrays(self) -> tuple[list[np.ndarray], list[np.ndarray]]:
        """Arrays of `LogprobTensors`, those of drafts separately."""
        tokens, chosen, top, top_ids, asked, *drafts = (np.asarray(tensor) for tensor in self.copy.wait())
        return [tokens.astype(np.int32), chosen, top_ids.astype(np.int32), top, asked], drafts


def _pack(arrays: list[np.ndarray], start: int, stop: int, spec: LogprobSpec) -> PackedLogprobs:
    """The rows [start, stop) of tokens [S], chosen [S], top_ids [S, K], top [S, K] and asked [S, J]."""
    tokens, chosen, top_ids, top, asked = (array[start:stop] for array in arrays)
    best, num_asked = spec.top, len(spec.token_ids)
    return PackedLogprobs(
        tokens.tobytes(),
        chosen.tobytes(),
        top_ids[:, :best].tobytes(),
        top[:, :best].tobytes(),
        asked[:, :num_asked].tobytes(),
    )


def _nothing_computed(tokens: list[int], spec: LogprobSpec, vocab_size: int) -> PackedLogprobs:
    best = len(tokens) * min(spec.top, vocab_size)
    return PackedLogprobs(
        np.array(tokens, dtype=np.int32).tobytes(),
        np.full(len(tokens), np.nan, dtype=np.float32).tobytes(),
        np.zeros(best, dtype=np.int32).tobytes(),
        np.full(best, np.nan, dtype=np.float32).tobytes(),
        np.full(len(tokens) * len(spec.token_ids), np.nan, dtype=np.float32).tobytes(),
    )


@dataclass
class PendingPrompt:
    """The part of a prompt's log-probabilities from one step: `begin`, then `pieces`."""

    row: int
    begin: list[PackedLogprobs]
    """Entry of prompt tokens without computed logits: the first token of a prompt, or the first after a cached
    prefix."""
    pieces: list[PendingLogprobs] = field(default_factory=list)

    def take(self) -> PackedLogprobs:
        return PackedLogprobs.join([*self.begin, *(piece.take_as_one() for piece in self.pieces)])


def prompt_logprobs(
    row: int,
    wanted: PromptLogprobs,
    start: int,
    hidden: Tensor,
    logits_of: Callable[[Tensor], Tensor],
    rows_at_once: int,
    vocab_size: int,
    stream: DeviceStream,
) -> PendingPrompt | None:
    """Log-probabilities from the computed positions [start, start + len(hidden)), each of the token one further.

    Args:
        hidden: [n, D] of this request's tokens in the step.
        logits_of: hidden [m, D] -> [m, V] float32.
        rows_at_once: max rows of logits at once.
    """
    spec = wanted.spec
    assert spec.start is not None
    unknown: list[PackedLogprobs] = []
    if start == wanted.num_cached and spec.start <= start and wanted.prompt[spec.start : start + 1]:
        unknown = [_nothing_computed(wanted.prompt[spec.start : start + 1], spec, vocab_size)]
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
