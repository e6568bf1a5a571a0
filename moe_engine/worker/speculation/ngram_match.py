"""N-gram search of prompt lookup: earlier occurrences of a text's last tokens, on the host and on an accelerator.

A match of size n that ends at position p: the n tokens up to p equal the last n tokens of the text, and p is before the
last token. The longest match is used, the latest among equally long ones; sizes are bounded on both sides.

On the host each text has an index: its positions, sorted by token. A search reads the occurrences of the last token
and the `UNSORTED` newest tokens, not the text; the index is sorted again after every `UNSORTED` new tokens. An
index of all n-grams would be many times as large as the text. An accelerator keeps no index: it compares all positions
of all texts in one call, and the host would have to wait for the new tokens.

Legend: D texts, W width of the token table, B tokens of a block, N blocks, M largest size.
"""

from __future__ import annotations

import numpy as np
import torch
from torch import Tensor

from moe_engine.models.step_memory import NGRAM_PLACES
from moe_engine.worker.device_stream import DeviceStream

BLOCK = 2048
"""Positions of a text that an accelerator compares together."""

UNSORTED = 4096
"""Newest tokens of a text that the host compares one by one."""


class TextIndex:
    """Positions of one growing text, sorted by token; 8 bytes per position."""

    def __init__(self) -> None:
        self._positions = np.empty(0, dtype=np.int32)
        self._sorted = np.empty(0, dtype=np.int32)
        """Tokens at `_positions`."""

    def find(self, text: np.ndarray, least: int, most: int) -> int:
        """The position after the best match in a text [n] int32, n if there is none. The text must begin with the text
        of the previous call."""
        last = len(text) - 1
        if last - len(self._sorted) > UNSORTED:
            self._positions = _sort_by_token(text[:last])
            self._sorted = text[self._positions]
        places, size = self._occurrences(text), 1
        while size < most and len(places):
            longer = places[places >= size]
            longer = longer[text[longer - size] == text[last - size]]
            if not len(longer):
                break
            places, size = longer, size + 1
        return int(places[-1]) + 1 if len(places) and size >= least else len(text)

    def _occurrences(self, text: np.ndarray) -> np.ndarray:
        """Earlier positions of the last token, ascending."""
        token, known = text[-1], len(self._sorted)
        begin, end = self._sorted.searchsorted(token), self._sorted.searchsorted(token, "right")
        newest = np.flatnonzero(text[known:-1] == token)
        return np.concatenate((self._positions[begin:end], newest + known)) if end > begin else newest + known


def _sort_by_token(text: np.ndarray) -> np.ndarray:
    """Stable argsort of tokens [n] int32: a radix sort, which numpy has for 16 bits."""
    halves = text.astype("<i4", copy=False).view(np.uint16).reshape(-1, 2)
    order = np.argsort(halves[:, 0], kind="stable")
    return order[np.argsort(halves[order, 1], kind="stable")].astype(np.int32)


def find_on_device(
    tokens: Tensor, rows: np.ndarray, lengths: np.ndarray, least: int, most: int, stream: DeviceStream
) -> Tensor:
    """Positions after the best matches in rows [D] of a table tokens [max_rows, W], whose last tokens are at `lengths`
    [D]: [D] int64, W if there is none. Does not synchronize; scratch memory is bounded for any lengths."""
    count, width = len(rows), tokens.shape[1]
    blocks = lengths // BLOCK + 1
    owner = np.repeat(np.arange(count), blocks)  # [N]
    begins = (np.arange(len(owner)) - np.repeat(np.cumsum(blocks) - blocks, blocks)) * BLOCK
    which, begin, base, last = stream.upload(
        torch.from_numpy(np.stack((owner, begins, rows[owner] * width, lengths[owner])))
    )
    best = torch.zeros(count, dtype=torch.int64, device=tokens.device)
    at_once = NGRAM_PLACES // BLOCK
    for first in range(0, len(owner), at_once):
        part = slice(first, first + at_once)
        found = _best_of_blocks(tokens.view(-1), begin[part], base[part], last[part], least, most, width)
        best.scatter_reduce_(0, which[part], found, "amax")
    return torch.where(best > 0, best % width, width)


def _best_of_blocks(
    flat: Tensor, begin: Tensor, base: Tensor, last: Tensor, least: int, most: int, width: int
) -> Tensor:
    """[N]: size * W + position after the best match that ends in each block, 0 if there is none."""
    columns = torch.arange(BLOCK, device=flat.device)
    window = begin[:, None] + torch.arange(1 - most, BLOCK, device=flat.device)  # [N, M - 1 + B]
    window = flat.index_select(0, (base[:, None] + window.clamp_(0, width - 1)).flatten()).view(len(begin), -1)
    places = begin[:, None] + columns  # [N, B]
    alive = places < last[:, None]
    size = torch.zeros_like(places, dtype=torch.uint8)
    for back in range(most):
        wanted = flat.index_select(0, base + (last - back).clamp_min(0))[:, None]
        end = window.shape[1] - back
        alive &= (window[:, end - BLOCK : end] == wanted) & (places >= back)
        size += alive
    return torch.where(size >= least, size.long() * width + places + 1, 0).amax(1)
