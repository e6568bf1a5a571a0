"""Memory of captured steps with chains of drafts: one allocation of each kind; each size uses its beginning.

Legend: R requests, S drafts of each, K = S + 1; maxima over all sizes unless stated otherwise.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, fields
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.sampling.protocol import Draw, SamplingParameters
from moe_engine.kernels.speculation.protocol import ChainBuffers, RunBuffers
from moe_engine.worker.device_stream import DeviceStream
from moe_engine.worker.sampling.sampling_state import SamplingState

_INT32 = ("draft_lens", "draft_real", "lens", "real", "run_lens", "run_real")
_NO_MEMORY = ("rows", "query_rows", "seeds", "first_draft", "lookback", "pool")
_FLOAT32 = ("draft_uniform", "uniform", "chances")
_OF_ROWS = 4
"""int64 columns that the host writes in one copy: rows, seeds, top_k, cached tokens; then three of float32, and the
rows as int32."""


@dataclass(frozen=True)
class ChainForm:
    """What a drafter needs of the memory: `first_draft` and `lookback` as in `ChainBuffers`; `back`, `shift` as in
    `RunBuffers`, with `num_ids` token ids of each token; no run if that is 0. `windows`: windowed layers have slots
    of their own. `cached`: by row, `RunBuffers.cached`. `pool`: as in `ChainBuffers`."""

    first_draft: int = -1
    lookback: int = 0
    back: int = 0
    shift: int = 1
    num_ids: int = 0
    windows: bool = False
    cached: np.ndarray | None = None
    pool: int = 1

    def run_tokens(self, drafts: int) -> int:
        """N of a run in a step with `drafts`: up to the last verified token, or up to the root."""
        return self.back + (drafts + 1 if self.shift else 1)


class ChainMemory:
    """The buffers of all captured sizes.

    Args:
        max_requests, max_drafts: R and S.
    """

    def __init__(
        self, max_requests: int, max_drafts: int, state: SamplingState, stream: DeviceStream,
        form: ChainForm = ChainForm(),
    ) -> None:  # fmt: skip
        self._requests = max_requests
        self._form = form
        self._state = state
        self._stream = stream
        columns = _OF_ROWS * max_requests + 2 * max_requests
        self._columns = torch.zeros(columns, dtype=torch.int64, device=stream.device)
        wide = self._columns[: _OF_ROWS * max_requests]
        self._rows, self._seeds, self._top_k, self._cached = wide.split(max_requests)
        narrow = self._columns[_OF_ROWS * max_requests :]
        self._temperature, self._top_p, self._min_p, _ = narrow.view(torch.float32).split(max_requests)
        self._query_rows = narrow.view(torch.int32)[3 * max_requests :]
        self._memory: dict[str, Tensor] = {}
        shapes = self._shapes(max_requests, max_drafts) | self._run_shapes(max_requests, max_drafts)
        for name, shape in shapes.items():
            self._memory[name] = torch.zeros(shape, dtype=_dtype(name), device=stream.device).view(-1)
        self._filled: tuple[object, int] | None = None
        self.fill(None)

    def _shapes(self, requests: int, drafts: int) -> dict[str, tuple[int, ...]]:
        count = drafts + 1
        known: dict[str, tuple[int, ...]] = {
            "draft_ids": (count, requests),
            "result": (requests, count + 1),
            "window_slots": (requests, count if self._form.windows else 0),
            "draft_window_slots": (drafts, requests if self._form.windows else 0),
            "places": (requests, count if self._form.pool > 1 else 0),
            "pool_axes": (requests, count if self._form.pool > 1 else 0, 3),
            "draft_places": (drafts, requests if self._form.pool > 1 else 0),
            "draft_axes": (drafts, requests if self._form.pool > 1 else 0, 3),
            **dict.fromkeys(("starts", "draft_real", "lens", "last", "shifts"), (requests,)),
            **dict.fromkeys(("draft_positions", "draft_slots", "draft_lens", "draft_uniform"), (drafts, requests)),
        }
        names = [field.name for field in fields(ChainBuffers) if field.name not in _NO_MEMORY]
        return {name: known.get(name, (requests, count)) for name in names}

    def _run_shapes(self, requests: int, drafts: int) -> dict[str, tuple[int, ...]]:
        form = self._form
        each = (requests, form.run_tokens(drafts) if form.num_ids else 0)
        return {
            **{f"run_{name}": each for name in ("positions", "slots", "real", "sources")},
            "run_window_slots": each if form.windows else (requests, 0),
            "run_lens": (requests,), "run_ids": (form.num_ids, *each), "run_kept": (requests, form.back),
        }  # fmt: skip

    def _views(self, shapes: dict[str, tuple[int, ...]]) -> dict[str, Any]:
        return {name: self._memory[name][: math.prod(shape)].view(shape) for name, shape in shapes.items()}

    def of(self, requests: int, drafts: int) -> ChainBuffers:
        """The buffers of a size: R and S of that size."""
        views, form = self._views(self._shapes(requests, drafts)), self._form
        rows, query_rows = self._rows[:requests], self._query_rows[:requests]
        return ChainBuffers(
            rows=rows, query_rows=query_rows, seeds=self._seeds[:requests], **views,
            first_draft=form.first_draft, lookback=form.lookback, pool=form.pool,
        )  # fmt: skip

    def runs_of(self, requests: int, drafts: int) -> RunBuffers:
        """The run of a size."""
        views = self._views(self._run_shapes(requests, drafts))
        own = {name.removeprefix("run_"): view for name, view in views.items()}
        return RunBuffers(self._form.back, self._form.shift, self._cached[:requests], **own)

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
            if self._form.cached is not None:
                host[3 * most : 3 * most + count] = self._form.cached[rows]
            host[_OF_ROWS * most :].view("int32")[3 * most : 3 * most + count] = rows
            floats = host[_OF_ROWS * most :].view("float32")
            for column, values in enumerate((state.temperature, state.top_p, state.min_p)):
                floats[column * most : column * most + count] = values[rows]
        self._columns.copy_(staging, non_blocking=True)


def _dtype(name: str) -> torch.dtype:
    if name in _INT32:
        return torch.int32
    return torch.float32 if name in _FLOAT32 else torch.int64
