"""Work partitioning of split (flash-decoding) attention kernels: host code, in numpy.

A query token has `rows_per_token` rows (query heads that share a key). A block is `block_m` adjacent rows of one
request; it reads the request's context in tiles of `block_n` tokens. A segment is a block and a range of tiles: one
program of the grid. Contexts are cut into segments so that all programs end at about the same time; segments of one
block write partial results, merged by their log-sum-exp.

Blocks of a request that read the same tiles (more heads than a block holds, several draft tokens) are adjacent in the
grid and cut at the same places, so that a tile is read once from memory and then from the L2 cache.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from moe_engine.kernels.attention_windows import lowest_seen
from moe_engine.kernels.uploads import pinned, upload

RECORD = 8
LANES = (4, 2, 1)
"""Max blocks of a request that are cut at the same places, limited by the waste on requests with fewer blocks."""

MAX_WASTE = 1.125
MIN_TILES = 2
"""Min tiles of a segment: below this its partial result costs more than the split saves."""

WHOLE_TILES = 4
"""Windows that touch at most this many tiles are not cut: a launch that merges costs more than the cuts save."""


@dataclass(frozen=True)
class Split:
    """The partitioning of work. `num_programs`: concurrent programs; ignored with `fixed_tiles`.

    With `fixed_tiles` a context is cut every `fixed_tiles` tiles whatever the batch: a request's results are then
    batch-invariant, bit for bit.
    """

    block_m: int
    block_n: int
    num_programs: int
    fixed_tiles: int | None = None

    def keeps_whole(self, query_len: int, window: int | None) -> bool:
        """True if no block of requests of up to `query_len` query tokens is cut, because its window touches few
        tiles."""
        if window is None or self.fixed_tiles is not None:
            return False
        return _touched(window + query_len - 1, self.block_n) <= WHOLE_TILES


@dataclass(frozen=True)
class Schedule:
    """Records on the device, ready for the kernels.

    segments [N, 8]: request, first query token (of the group), rows from the block's first to the request's last,
    the block's first row in the request, tokens visible to the request's first query token, first and end context token
    (half open) to read, partial result to write or -1 for the output. Longest first.
    merges [M, 8]: first query token, rows, first row, first partial result, number of partial results.
    Records after the last are zero: no rows.

    `query_len`: contexts may be shorter than the schedule's, for requests of this many query tokens each; the kernels
    read the lengths on the device. With a window the tokens to read then count from the first tile that the block's
    window touches. None: the schedule has the exact lengths.
    """

    segments: Tensor
    merges: Tensor
    num_partials: int
    block_m: int
    query_len: int | None = None


class ScheduleBuffers:
    """Fixed-address memory for one schedule at a time, for CUDA graphs: captured kernels read the current plan.

    Grids then have the size of the buffers; programs without a record exit immediately.
    """

    def __init__(
        self, max_segments: int, max_merges: int, max_partials: int, device: torch.device, query_len: int | None = None
    ) -> None:
        self._limits = (max_segments, max_merges, max_partials)
        self.query_len = query_len
        """As `Schedule.query_len`."""
        self._records = torch.zeros(max_segments + max_merges, RECORD, dtype=torch.int32, device=device)

    @classmethod
    def for_decodes(
        cls, num_requests: int, query_len: int, rows_per_token: int, split: Split, device: torch.device,
        window: int | None = None,
    ) -> ScheduleBuffers:  # fmt: skip
        """Buffers large enough for any schedule of `num_requests` requests of `query_len` query tokens each, whose
        context lengths may be upper bounds. window: as in `schedule`.

        A cut inside a block adds one segment; each cut of the `num_programs` programs adds at most two partial
        results.
        """
        blocks = -(-query_len * rows_per_token // split.block_m)
        if split.keeps_whole(query_len, window):
            return cls(num_requests * blocks, 0, 0, device, query_len)
        programs = max(1, split.num_programs)
        return cls(num_requests * blocks + programs, programs, 2 * programs, device, query_len)

    def fill(self, segments: np.ndarray, merges: np.ndarray, num_partials: int, block_m: int) -> Schedule:
        """Copies a schedule in, in stream order.

        Raises:
            ValueError: if it does not fit.
        """
        max_segments, max_merges, max_partials = self._limits
        sizes = (len(segments), len(merges), num_partials)
        if any(size > limit for size, limit in zip(sizes, self._limits)):
            raise ValueError(f"a schedule of {sizes} segments, merges and partial results exceeds {self._limits}")
        host = np.zeros((max_segments + max_merges, RECORD), dtype=np.int32)
        host[: len(segments)] = segments
        host[max_segments : max_segments + len(merges)] = merges
        self._records.copy_(pinned(host, self._records.device), non_blocking=True)
        records, more = self._records[:max_segments], self._records[max_segments:]
        return Schedule(records, more, max_partials, block_m, self.query_len)


def schedule(
    query_lens: Sequence[int],
    context_lens: Sequence[int],
    rows_per_token: int,
    split: Split,
    device: torch.device,
    *,
    tree: bool = False,
    window: int | None = None,
    buffers: ScheduleBuffers | None = None,
) -> Schedule:
    """The schedule of some requests, on the device; one upload.

    Args:
        context_lens: including the query tokens.
        tree: query tokens may see later query tokens of their request, so every block reads the whole context.
        window: positions that a query token sees; None: all.
    """
    bounds = buffers is not None and buffers.query_len is not None
    segments, merges, num_partials = cut(query_lens, context_lens, rows_per_token, split, tree, window, bounds)
    if buffers is not None:
        return buffers.fill(segments, merges, num_partials, split.block_m)
    records = upload(np.concatenate((segments, merges)), device)
    return Schedule(records[: len(segments)], records[len(segments) :], num_partials, split.block_m)


def cut(
    query_lens: Sequence[int], context_lens: Sequence[int], rows_per_token: int, split: Split, tree: bool = False,
    window: int | None = None, bounds: bool = False,
) -> tuple[np.ndarray, np.ndarray, int]:  # fmt: skip
    """(segments, merges, number of partial results), as in `Schedule`, on the host.

    With a window, tiles that a band does not see are left out; with `fixed_tiles` in whole segments, so that the other
    cuts do not move. `bounds`: the lengths are upper bounds; with a window a band gets as many tiles as its window may
    touch.
    """
    queries = np.asarray(query_lens, dtype=np.int64)
    contexts = np.asarray(context_lens, dtype=np.int64)
    first_token = np.cumsum(queries) - queries
    rows = queries * rows_per_token
    blocks = -(-rows // split.block_m)  # [R]
    lanes = _lanes(blocks, contexts)
    bands = -(-blocks // lanes)  # [R]: a band is `lanes` blocks cut at the same places

    request = np.repeat(np.arange(len(queries)), bands)  # [bands], and so below
    first_block = (np.arange(len(request)) - np.repeat(np.cumsum(bands) - bands, bands)) * lanes
    last_row = np.minimum((first_block + lanes) * split.block_m, rows[request]) - 1
    unseen = 0 if tree else queries[request] - 1 - last_row // rows_per_token
    end = contexts[request] - unseen  # context tokens that the band reads
    skipped = np.zeros_like(end)  # tiles before the window of the band's first row
    first_row = first_block * split.block_m // rows_per_token
    if window is not None and bounds:
        seen = window + last_row // rows_per_token - first_row  # positions that the band sees, at any offset in a tile
        end = np.minimum(end, _touched(seen, split.block_n) * split.block_n)
    elif window is not None:
        seen = np.maximum(0, lowest_seen((contexts - queries)[request] + first_row, window))
        unit = split.fixed_tiles or 1
        skipped = seen // (split.block_n * unit) * unit
    tiles = -(-end // split.block_n) - skipped

    whole = split.keeps_whole(max(query_lens, default=0), window)
    band, begin, stop = _cut_bands(tiles, split, lanes, whole)
    order = np.argsort(begin - stop, kind="stable")
    pieces = np.bincount(band, minlength=len(tiles))  # segments of a band
    nth = np.arange(len(band)) - (np.cumsum(pieces) - pieces)[band]
    split_bands = np.where(pieces > 1, pieces * lanes, 0)
    first_partial = np.cumsum(split_bands) - split_bands

    lane = np.tile(np.arange(lanes), len(order))
    at = np.repeat(order, lanes)  # the segment's index in band, begin, stop
    of = band[at]
    block = first_block[of] + lane
    row = block * split.block_m
    partial = np.where(pieces[of] > 1, first_partial[of] + lane * pieces[of] + nth[at], -1)
    segments = np.stack(
        (
            request[of],
            first_token[request[of]],
            rows[request[of]] - row,
            row,
            (contexts - queries + 1)[request[of]],
            (begin[at] + skipped[of]) * split.block_n,
            np.minimum((stop[at] + skipped[of]) * split.block_n, end[of]),
            partial,
        ),
        1,
    )
    exists = block < blocks[request[of]]
    merged = exists & (partial >= 0) & (nth[at] == 0)
    merges = np.zeros((int(merged.sum()), RECORD), dtype=np.int64)
    merges[:, :3] = segments[merged, 1:4]
    merges[:, 3] = partial[merged]
    merges[:, 4] = pieces[of][merged]
    return segments[exists].astype(np.int32), merges.astype(np.int32), int(split_bands.sum())


def _lanes(blocks: np.ndarray, contexts: np.ndarray) -> int:
    """The widest band whose empty lanes add at most `MAX_WASTE` to the work."""
    work = int((blocks * contexts).sum())
    for lanes in LANES:
        if int((-(-blocks // lanes) * lanes * contexts).sum()) <= MAX_WASTE * work:
            return lanes
    return 1


def _touched(positions: Any, block_n: int) -> Any:
    """Most tiles that adjacent positions touch, at any offset in a tile."""
    return (positions + block_n - 2) // block_n + 1


def _cut_bands(
    tiles: np.ndarray, split: Split, lanes: int, whole: bool
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:  # fmt: skip
    """Cuts bands of `tiles` each: (band, first tile, end tile) of every segment, ordered by band. whole: no cuts."""
    ends = np.cumsum(tiles)
    starts = ends - tiles
    total = int(ends[-1]) if len(ends) else 0
    if total == 0:
        empty = np.zeros(0, dtype=np.int64)
        return empty, empty, empty
    if whole:
        cuts = starts
    elif split.fixed_tiles is not None:
        inside = -(-tiles // split.fixed_tiles)
        nth = np.arange(int(inside.sum())) - np.repeat(np.cumsum(inside) - inside, inside)
        cuts = np.repeat(starts, inside) + nth * split.fixed_tiles
    else:
        parts = max(1, min(split.num_programs // lanes, total // MIN_TILES))
        cuts = np.arange(parts) * total // parts
        band = np.searchsorted(ends, cuts, side="right")
        cuts = np.where(cuts - starts[band] < MIN_TILES, starts[band], cuts)
        cuts = np.where(ends[band] - cuts < MIN_TILES, ends[band], cuts)
    edges = np.unique(np.concatenate((starts[tiles > 0], cuts, ends[-1:])))
    begin, stop = edges[:-1], edges[1:]
    band = np.searchsorted(ends, begin, side="right")
    return band, begin - starts[band], stop - starts[band]
