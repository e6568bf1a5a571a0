"""Token buffer: the worker's own copy of its rows' tokens and computed lengths, for speculation.

The number of accepted drafts is not known on the host when the next step is planned, so the lengths are kept here.

Legend: T tokens, D decodes, K max new tokens of a decode.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import NewRow
from moe_engine.worker.batch.finish_tracker import FinishTracker
from moe_engine.worker.device_int_table import DeviceIntTable
from moe_engine.worker.device_stream import DeviceStream


class TokenBuffer:
    """`tokens[row, p]` is the token at position p, for p <= lengths[row]: the last of them is not computed yet.

    Later entries are rejected drafts or zeros; always ids of the vocabulary.
    """

    def __init__(self, max_rows: int, width: int, stream: DeviceStream) -> None:
        self._stream = stream
        self.width = width
        self.tokens: Tensor = stream.lazy_zeros((max_rows, width), torch.int32)  # [max_rows, width]
        self.lengths: Tensor = torch.zeros(max_rows, dtype=torch.int64, device=stream.device)  # [max_rows]
        self._tokens, self._lengths = DeviceIntTable(self.tokens, stream), DeviceIntTable(self.lengths, stream)
        self._places: Any = None  # 0, 1, ... up to the max new tokens of a row so far
        self.ends = FinishTracker(max_rows)

    def enter(self, new: NewRow) -> None:
        ids = self._stream.from_array(np.array(new.token_ids, dtype=np.int32))
        self.tokens[new.row, : len(ids)].copy_(ids)
        self.set_lengths([new.row], [len(new.slots)])
        self.ends.enter(new)

    def set_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Sets the computed lengths of rows. Setting an item of a tensor would synchronize with an accelerator."""
        if rows:
            self._lengths.put_from_host(np.array(rows), np.array(lengths))

    def read_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Computed tokens of rows [D], on the host: the start of a decode. Synchronizes with an accelerator."""
        return self._lengths.read(rows)

    def at(self, flat: Tensor) -> Tensor:
        """tokens.flat[flat[t]], flat [T] int64 -> [T] int64."""
        return self._tokens.take(flat)

    def advance(self, rows: Any, begins: Any, lengths: Any, tokens: Any) -> None:
        """Sets the computed `lengths` [D] of rows [D] and stores tokens [D, K] after their old lengths `begins` [D];
        the last new token is at position `lengths`, further entries of `tokens` have no meaning. All four as tensors or
        as `DeviceStream.arrays`."""
        if self._places is None or len(self._places) < tokens.shape[1]:
            (self._places,) = self._stream.arrays(torch.arange(tokens.shape[1], device=self._stream.device))
        flat = (rows * self.width + begins + 1)[:, None] + self._places[: tokens.shape[1]]
        self._tokens.put(flat, tokens)
        self._lengths.put(rows, lengths)

    def append(self, rows: Any, lengths: Any, tokens: Any) -> None:
        """Sets the computed `lengths` [D] of rows [D] and stores tokens [D] after them; tensors, or
        `DeviceStream.arrays`."""
        self._tokens.put(rows * self.width + lengths, tokens)
        self._lengths.put(rows, lengths)
