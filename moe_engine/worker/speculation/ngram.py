"""Prompt lookup as drafter: what followed the last time the same tokens stood here. Needs no weights and no KV.

For a row, the longest match of its last tokens (between `min_match` and `max_match` of them) earlier in its own text is
looked for, the latest of equally long ones wins, and the tokens behind it are the drafts.

Legend: D rows with drafts, N nodes, W tokens looked at.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.types import NewRow
from moe_engine.worker.history import History
from moe_engine.worker.speculation.drafter import Computed
from moe_engine.worker.speculation.drafts import Drafts, DraftTask


class NgramDrafter:
    """See the module; implements `Drafter`. It keeps nothing: the rows' history is all it reads."""

    def __init__(self, history: History, min_match: int, max_match: int) -> None:
        self._history = history
        self._min_match = min_match
        self._max_match = max_match

    def enter(self, new: NewRow) -> None:
        return None

    def join(self, sizes: Sequence[StepSizes]) -> None:
        return None

    def follow(self, computed: Computed) -> None:
        return None

    def propose(self, task: DraftTask) -> Drafts:
        width = int(task.lengths.max()) + 1
        text = self._history.tokens[:, :width].index_select(0, task.rows_device)  # [D, W]
        lengths = self._history.lengths.index_select(0, task.rows_device)  # [D]: the last token's position
        found = self._match(text, lengths)  # [D]: position of the first draft, or past the text
        places = found[:, None] + torch.arange(task.depth, device=found.device)  # [D, depth]
        known = places <= lengths[:, None]
        drafts = text.gather(1, places.clamp_max(width - 1)).long()
        return Drafts(torch.cat((task.roots[:, None], torch.where(known, drafts, -1)), 1))

    def _match(self, text: Tensor, lengths: Tensor) -> Tensor:
        """Where the text behind the best match begins. Compares all places at once, one token back at a time."""
        width = text.shape[1]
        places = torch.arange(width, device=text.device)  # a match that ends at p
        alive = places < lengths[:, None]
        run = torch.zeros_like(text)  # how many tokens up to p equal the text's last ones
        for back in range(min(self._max_match, width)):
            wanted = text.gather(1, (lengths - back).clamp_min(0)[:, None])  # [D, 1]
            shifted = torch.full_like(text, -1)
            shifted[:, back:] = text[:, : width - back]
            alive = alive & (shifted == wanted)
            run = run + alive
        run = torch.where(run >= self._min_match, run, 0)
        best = (run.long() * width + places).argmax(1)  # the longest, of these the latest
        some = run.gather(1, best[:, None])[:, 0] > 0
        return torch.where(some, best + 1, width)
