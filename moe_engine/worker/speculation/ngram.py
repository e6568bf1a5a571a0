"""N-gram drafter (prompt lookup): drafts the tokens that followed the same n-gram earlier. Needs no weights and no KV.

For each row it searches the longest match of the last tokens (between `min_match` and `max_match` of them) earlier in
the row's own tokens; the latest of equally long matches is used, and the tokens after it are the drafts. The search is
in `ngram_match`: on the host if the tokens are on the host, else on the device, so that the host never waits.

Legend: D rows with drafts.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import NewRow
from moe_engine.worker.batch.token_buffer import TokenBuffer
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.speculation.drafter import Drafter
from moe_engine.worker.speculation.drafts import Drafts, DraftTask
from moe_engine.worker.speculation.ngram_match import TextIndex, find_on_device


class NgramDrafter(Drafter):
    """The drafter of the module docstring; implements `Drafter`. On the host it keeps an index of each row's text."""

    def __init__(self, history: TokenBuffer, min_match: int, max_match: int, stream: DeviceStream) -> None:
        self._history = history
        self.min_match = min_match
        self.max_match = max_match
        self._stream = stream
        self._texts = stream.host_view(history.tokens)
        self._indexes: dict[int, TextIndex] = {}

    def enter(self, new: NewRow) -> None:
        self._indexes[new.row] = TextIndex()

    def propose(self, task: DraftTask) -> Drafts:
        drafts = self._on_device(task) if self._texts is None else self._on_host(self._texts, task)  # [D, depth]
        return Drafts(torch.cat((task.roots[:, None], drafts), 1))

    def _on_host(self, texts: np.ndarray, task: DraftTask) -> Tensor:
        drafts = np.full((len(task.rows), task.depth), -1)
        for own, row, length in zip(drafts, task.rows.tolist(), task.lengths.tolist()):
            text = texts[row, : length + 1]
            found = self._indexes[row].find(text, self.min_match, self.max_match)
            following = text[found : found + task.depth]
            own[: len(following)] = following
        return torch.from_numpy(drafts)

    def _on_device(self, task: DraftTask) -> Tensor:
        tokens, width = self._history.tokens, self._history.width
        found = find_on_device(tokens, task.rows, task.lengths, self.min_match, self.max_match, self._stream)
        places = found[:, None] + torch.arange(task.depth, device=tokens.device)
        last = self._stream.from_array(task.lengths)[:, None]
        drafts = self._history.at((task.rows_device * width)[:, None] + places.clamp_max(width - 1))
        return torch.where(places <= last, drafts, -1)
