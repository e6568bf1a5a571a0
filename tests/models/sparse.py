"""transformers' sparse attention as an oracle: its selections, and their distance from another selection.

The order of equal scores in torch's topk is unspecified, and rounding decides between nearly equal scores. The oracle
takes the lowest position of equal scores, as the engine does; prompts with a selection decided by less than `MARGIN` of
the scores' magnitude are replaced.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any, TypeVar

import pytest
import torch
from torch import Tensor

from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import Chunk, Stepper

MARGIN = 2e-5
PROMPT_LENGTH = 90
MIXED_STEPS = (
    ((0, 3, False), (1, 40, False), (2, 7, False), (3, 2, False)),
    ((0, 1, True), (1, 3, True), (2, 5, False), (3, 4, False), (4, 60, False)),
    ((0, 1, True), (3, 1, True), (1, 47, False), (2, 9, False), (4, 5, False)),
    ((3, 1, True), (0, 3, False)),
)
"""Steps of `Stepper.run`: sequences below and beyond a selection in one step, decodes and prompts."""


def in_parts(model: Stepper, tokens: list[int]) -> Tensor:
    """The logits of a prompt in chunks below and beyond a selection, decodes, several tokens of a decode."""
    ends = [(5, False), (37, False), (60, False), *((end, True) for end in range(61, 81)), (84, True)]
    got, start = [], 0
    for end, decode in [*ends, (len(tokens), False)]:
        got += model.step([Chunk(0, tokens[start:end], decode)])
        start = end
    return torch.cat(got)


@contextmanager
def observed(margins: list[Tensor], length: int) -> Iterator[None]:
    """Selections of the indexers for a text of `length` tokens in this context. Appends for each call the distance [T]
    between the last selected and the first rejected score, relative to the largest one. Equal scores have no distance,
    because the rule decides."""
    original = torch.Tensor.topk

    def topk(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if scores.shape != (1, length, length):  # topk of a router
            return original(scores, k, *args, **kwargs)
        values, indices = scores.sort(dim=-1, descending=True, stable=True)
        if k < scores.shape[-1]:
            last, first = values[0, :, k - 1], values[0, :, k]
            gap = (last - first) / values[0, :, 0].abs().clamp(min=1e-6)
            margins.append(gap.masked_fill((first < -1e30) | (last == first), 1.0))
        return torch.return_types.topk((values[..., :k], indices[..., :k]))

    torch.Tensor.topk = topk  # type: ignore[method-assign, assignment]
    try:
        yield
    finally:
        torch.Tensor.topk = original  # type: ignore[method-assign]


Drawn = TypeVar("Drawn")


def clear_draw(draw: Callable[[], Drawn], margin: float = MARGIN, needed: bool = True) -> Drawn:
    """The first result of `draw` for which no `topk`, of routers or indexers, is decided by less than `margin` of the
    largest score. Two implementations may take different experts at such a distance: each rounds by about 1e-6.
    `needed`: as in `with_margin`."""
    for _ in range(50):
        drawn, found = with_margin(draw, needed)
        if found > margin:
            return drawn
    raise AssertionError("no clear selections in 50 draws")


def with_margin(draw: Callable[[], Drawn], needed: bool = True) -> tuple[Drawn, float]:
    """The result of `draw`, and the least distance that decides a `topk` in it, relative to the largest score.
    `needed`: there is a `topk`; else the distance may be infinite."""
    margins: list[float] = []
    with pytest.MonkeyPatch.context() as patch:
        for holder in (torch, torch.Tensor):
            patch.setattr(holder, "topk", _recording(holder.topk, margins))
        drawn = draw()
    assert margins or not needed, "no selection was seen"
    return drawn, min(margins, default=math.inf)


def _recording(topk: Any, margins: list[float]) -> Any:
    def recorded(scores: Tensor, k: int, *args: Any, **kwargs: Any) -> Any:
        if k < scores.shape[-1]:
            best = scores.sort(dim=-1, descending=True).values
            largest = best.masked_fill(best.isposinf(), -math.inf).amax(-1)  # infinite: blocks that are always chosen
            gap = (best[..., k - 1] - best[..., k]) / largest.abs().clamp(min=1e-6)
            gap = gap.masked_fill(best[..., k] < -1e30, 1.0)  # masked scores, which may be the least number
            margins.append(float(gap.min()))
        return topk(scores, k, *args, **kwargs)

    return recorded


def load(path: Path, dtype: torch.dtype = torch.float32) -> Any:
    import transformers

    transformers.utils.logging.disable_progress_bar()
    eager = {"attn_implementation": "eager", "experts_implementation": "eager"}
    return transformers.AutoModelForCausalLM.from_pretrained(path, dtype=dtype, **eager)


Made = tuple[Path, list[int], Tensor]
"""A checkpoint, a prompt with clear selections over pools, and transformers' logits for it."""


def maker(kind: str, folders: pytest.TempPathFactory, draw: Callable[[], Tensor]) -> Callable[..., Made]:
    """Makes a checkpoint of a kind by fields of config.json, each once.

    Args:
        draw: a random prompt.
    """

    @cache
    def make(fields: str) -> Made:
        path = make_checkpoint(kind, folders.mktemp("pools"), 3, tokenizer=False, **json.loads(fields))
        model = load(path)

        def logits() -> tuple[list[int], Tensor]:
            tokens = draw()
            return tokens.tolist(), model(tokens.unsqueeze(0)).logits[0]

        with torch.no_grad():
            return path, *clear_draw(logits, 5e-6)  # prompts with larger distances are rare: many pools are scored

    return lambda **fields: make(json.dumps(fields))


def logits_of(model: Any, tokens: list[int]) -> tuple[Tensor, int]:
    """Logits [T, V] of all positions, and the number of first tokens with clear selections in all layers."""
    margins = [torch.ones(len(tokens))]
    with observed(margins, len(tokens)), torch.no_grad():
        logits = model(torch.tensor([tokens])).logits[0]
    return logits, int((torch.stack(margins).amin(0) > MARGIN).cumprod(0).sum())


def reference_logits(path: Path, seed: int, length: int = PROMPT_LENGTH) -> tuple[list[int], Tensor]:
    """A random prompt with clear selections, and transformers' logits for it."""
    model, generator = load(path), torch.Generator().manual_seed(seed + 7)
    for _ in range(50):
        tokens = torch.randint(0, 256, (length,), generator=generator).tolist()
        logits, clear = logits_of(model, tokens)
        if clear == length:
            return tokens, logits
    raise AssertionError("no prompt with clear selections in 50 draws")
