"""Memory of captured steps with chains of drafts: one allocation of each kind; each size uses its beginning.

Legend: R requests, S drafts of each, K = S + 1; maxima over all sizes unless stated otherwise.
"""

from __future__ import annotations

from dataclasses import fields

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.sampling.protocol import Draw, SamplingParameters
from moe_engine.kernels.speculation.protocol import ChainBuffers
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampling_state import SamplingState

_INT32 = ("draft_lens", "draft_real", "lens", "real")
_FLOAT32 = ("draft_uniform", "uniform")
_OF_ROWS = 3
"""int64 columns that the host writes in one copy: rows, seeds, top_k; then three of float32, and the rows as int32."""


class ChainMemory:
    """The buffers of all captured sizes.

    Args:
        max_requests, max_drafts: R and S.
    """

    def __init__(self, max_requests: int, max_drafts: int, state: SamplingState, stream: DeviceStream) -> None:
        self._requests = max_requests
        self._state = state
        self._stream = stream
        columns = _OF_ROWS * max_requests + 2 * max_requests
        self._columns = torch.zeros(columns, dtype=torch.int64, device=stream.device)
        self._rows, self._seeds, self._top_k = self._columns[: _OF_ROWS * max_requests].split(max_requests)
        narrow = self._columns[_OF_ROWS * max_requests :]
        self._temperature, self._top_p, self._min_p, _ = narrow.view(torch.float32).split(max_requests)
        self._query_rows = narrow.view(torch.int32)[3 * max_requests :]
        self._memory: dict[str, Tensor] = {}
        shapes = self._shapes(max_requests, max_drafts)
        for name, shape in shapes.items():
            self._memory[name] = torch.zeros(shape, dtype=_dtype(name), device=stream.device).view(-1)
        self._filled: tuple[object, int] | None = None
        self.fill(None)

    def _shapes(self, requests: int, drafts: int) -> dict[str, tuple[int, ...]]:
        count = drafts + 1
        known: dict[str, tuple[int, ...]] = {
            "draft_ids": (count, requests),
            "result": (requests, count + 1),
            **dict.fromkeys(("starts", "draft_real", "lens", "last"), (requests,)),
            **dict.fromkeys(("draft_positions", "draft_slots", "draft_lens", "draft_uniform"), (drafts, requests)),
        }
        names = [field.name for field in fields(ChainBuffers) if field.name not in ("rows", "query_rows", "seeds")]
        return {name: known.get(name, (requests, count)) for name in names}

    def of(self, requests: int, drafts: int) -> ChainBuffers:
        """The buffers of a size: R and S of that size."""
        views = {}
        for name, shape in self._shapes(requests, drafts).items():
            count = 1
            for length in shape:
                count *= length
            views[name] = self._memory[name][:count].view(shape)
        rows, query_rows = self._rows[:requests], self._query_rows[:requests]
        return ChainBuffers(rows=rows, query_rows=query_rows, seeds=self._seeds[:requests], **views)

    def parameters(self, requests: int) -> SamplingParameters:
        """Sampling parameters of the rows passed to `fill`; every row may have any kind of sampling."""
        draws = torch.full((requests,), int(Draw.NUCLEUS), dtype=torch.uint8).numpy()
        columns = (self._temperature, self._top_p, self._min_p, self._top_k)
        temperature, top_p, min_p, top_k = (column[:requests] for column in columns)
        return SamplingParameters(draws, temperature, top_p, min_p, top_k, self._stream.asynchronous)

    def fill(self, rows: np.ndarray | None) -> None:
        """Writes rows [D] int64 (an array that is never modified; None: none), seeds and sampling parameters, in one
        copy; does nothing if they equal those of the last call."""
        if self._filled is not None and self._filled[0] is rows and self._filled[1] == self._state.version:
            return
        self._filled = (rows, self._state.version)
        most, state = self._requests, self._state
        staging = self._stream.staging(len(self._columns))
        host = staging.numpy()
        host[:] = 0
        host[:most] = -1
        host[2 * most : 3 * most] = 1
        if rows is not None:
            count = len(rows)
            host[:count] = rows
            host[most : most + count] = state.mixed_seed[rows].view("int64")
            host[2 * most : 2 * most + count] = state.top_k[rows]
            host[_OF_ROWS * most :].view("int32")[3 * most : 3 * most + count] = rows
            floats = host[_OF_ROWS * most :].view("float32")
            for column, values in enumerate((state.temperature, state.top_p, state.min_p)):
                floats[column * most : column * most + count] = values[rows]
        self._columns.copy_(staging, non_blocking=True)


def _dtype(name: str) -> torch.dtype:
    if name in _INT32:
        return torch.int32
    return torch.float32 if name in _FLOAT32 else torch.int64
