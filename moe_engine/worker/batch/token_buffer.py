"""What the worker itself must know of its rows when it drafts: their tokens, and how many of them are computed.

How many drafts a step confirms is not known on the host when the next step is planned, so the count lives here.

Legend: T tokens, D decodes, K tokens that a decode may bring.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.types import NewRow
from moe_engine.worker.batch.device_int_table import DeviceIntTable
from moe_engine.worker.batch.finish_tracker import FinishTracker
from moe_engine.worker.device_stream import DeviceStream


class TokenBuffer:
    """`tokens[row, p]` is the token at position p, for p <= lengths[row]: the last of them is not computed yet.

    Behind that stand tokens that were tried and given up, or zeros; always ids of the vocabulary.
    """

    def __init__(self, max_rows: int, width: int, stream: DeviceStream) -> None:
        self._stream = stream
        self.width = width
        self.tokens: Tensor = stream.lazy_zeros((max_rows, width), torch.int32)  # [max_rows, width]
        self.lengths: Tensor = torch.zeros(max_rows, dtype=torch.int64, device=stream.device)  # [max_rows]
        self._tokens, self._lengths = DeviceIntTable(self.tokens, stream), DeviceIntTable(self.lengths, stream)
        self._places: Any = None  # 0, 1, ... as many as a step has brought a row
        self.ends = FinishTracker(max_rows)

    def enter(self, new: NewRow) -> None:
        ids = self._stream.upload(torch.from_numpy(np.array(new.token_ids, dtype=np.int32)))
        self.tokens[new.row, : len(ids)].copy_(ids)
        self.set_lengths([new.row], [len(new.slots)])
        self.ends.enter(new)

    def set_lengths(self, rows: Sequence[int], lengths: Sequence[int]) -> None:
        """Rows have computed so many tokens. To set an item of a tensor would wait for an accelerator."""
        if rows:
            self._lengths.put_from_host(np.array(rows), np.array(lengths))

    def read_lengths(self, rows: np.ndarray) -> np.ndarray:
        """Computed tokens of rows [D], on the host: where a decode begins. Waits for an accelerator."""
        return self._lengths.read(rows)

    def at(self, flat: Tensor) -> Tensor:
        """tokens.flat[flat[t]], flat [T] int64 -> [T] int64."""
        return self._tokens.take(flat)

    def advance(self, rows: Any, begins: Any, lengths: Any, tokens: Any) -> None:
        """Rows [D] have computed `lengths` [D] tokens; tokens [D, K] are those behind the begins [D] that they had, the
        last of which stands at position `lengths`. What follows it in a row of `tokens` is of no meaning. All four as
        tensors or as `DeviceStream.arrays`."""
        if self._places is None or len(self._places) < tokens.shape[1]:
            (self._places,) = self._stream.arrays(torch.arange(tokens.shape[1], device=self._stream.device))
        flat = (rows * self.width + begins + 1)[:, None] + self._places[: tokens.shape[1]]
        self._tokens.put(flat, tokens)
        self._lengths.put(rows, lengths)

    def append(self, rows: Any, lengths: Any, tokens: Any) -> None:
        """Rows [D] have computed `lengths` [D] tokens, and tokens [D] stand behind them; tensors, or
        `DeviceStream.arrays`."""
        self._tokens.put(rows * self.width + lengths, tokens)
        self._lengths.put(rows, lengths)
