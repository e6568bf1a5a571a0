"""Queries of a step whose image tokens attend to all tokens of their image: an image token is a request of its own,
whose context ends with the image; the text between images stays causal. No kernel knows of images.

With a window the context of an image token is a list of slots, which begins with the first position that it sees.

Legend: T query tokens of the step, n image tokens, L positions that one of them sees at most.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import replace
from itertools import pairwise
from typing import NamedTuple

import numpy as np
import torch
from torch import Tensor
from torch.nn.functional import pad

from moe_engine.kernels.attention.protocol import GQABackend
from moe_engine.kernels.attention_windows import first_seen
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from moe_engine.kernels.uploads import upload
from moe_engine.models.batch import ForwardBatch
from moe_engine.models.config import CacheGroup
from moe_engine.models.layers.attention.gqa import GroupInputs, Groups, QueryPart, group_inputs


class _Run(NamedTuple):
    """Adjacent query tokens of a request, in text or in one image: the numbers of the request and of the first token
    in the group of queries, their number, the position of the first; `stop`: the end of their image, 0 in text."""

    request: int
    first: int
    size: int
    position: int
    stop: int


def span_inputs(batch: ForwardBatch, groups: Sequence[CacheGroup], backend: GQABackend) -> Groups:
    """`group_inputs`, with parts of the queries in steps with images."""
    plain = group_inputs(batch, groups, backend)
    if batch.images is None or not batch.images.spans:
        return plain
    stops = np.zeros(sum(queries.num_tokens for _, queries in plain[0].queries), dtype=np.int64)
    for tokens, stop in batch.images.spans:
        stops[list(tokens)] = stop
    return [replace(inputs, parts=_parts(inputs, stops, backend)) for inputs in plain]


def _parts(inputs: GroupInputs, stops: np.ndarray, backend: GQABackend) -> list[QueryPart]:
    parts: list[QueryPart] = []
    for tokens, queries in inputs.queries:
        own = stops[tokens]
        if not own.any():
            parts.append((tokens, queries, inputs.plan))
            continue
        runs = list(_runs(queries, own))
        text, images = [run for run in runs if not run.stop], [run for run in runs if run.stop]
        for found, made in ((text, _text_queries(queries, text)), (images, _image_queries(queries, images))):
            if made is not None:
                numbers = np.concatenate([np.arange(run.first, run.first + run.size) for run in found]) + tokens.start
                index = upload(numbers, queries.slot_table.device)
                parts.append((index, made, backend.plan(AttentionBatch(None, made))))
    return parts


def _runs(queries: PagedQueries, stops: np.ndarray) -> Iterator[_Run]:
    first = 0
    for request, (count, context) in enumerate(zip(queries.query_lens, queries.context_lens)):
        own = stops[first : first + count]
        edges = [0, *(np.flatnonzero(np.diff(own)) + 1).tolist(), count]
        for begin, end in pairwise(edges):
            yield _Run(request, first + begin, end - begin, context - count + begin, int(own[begin]))
        first += count


def _text_queries(queries: PagedQueries, runs: Sequence[_Run]) -> PagedQueries | None:
    """A causal request for each run."""
    if not runs:
        return None
    contexts = [run.position + run.size for run in runs]
    return _queries(queries, [run.size for run in runs], contexts, [run.request for run in runs])


def _image_queries(queries: PagedQueries, runs: Sequence[_Run]) -> PagedQueries | None:
    """A request for each token."""
    if not runs:
        return None
    positions = np.concatenate([np.arange(run.position, run.position + run.size) for run in runs])
    stops, requests = (
        np.repeat(values, [run.size for run in runs]) for values in zip(*((r.stop, r.request) for r in runs))
    )
    firsts = np.array([first_seen(position, queries.window) for position in positions.tolist()])
    found = _queries(queries, [1] * len(positions), (stops - firsts).tolist(), requests.tolist())
    if not firsts.any():
        return replace(found, window=None)
    rows = torch.arange(len(positions), dtype=torch.int32, device=queries.slot_table.device)
    table = _slots(queries, runs, firsts, int((stops - firsts).max()))
    return replace(found, window=None, slot_table=table, rows=rows, page_size=1)


def _slots(queries: PagedQueries, runs: Sequence[_Run], firsts: np.ndarray, width: int) -> Tensor:
    """The slots that each image token sees, [n, L] int32; the last ones of shorter contexts are not read."""
    device, parts, done = queries.slot_table.device, [], 0
    for run in runs:
        own = firsts[done : done + run.size]
        begin, done = int(own[0]), done + run.size
        row = queries.slot_table.index_select(0, queries.rows[run.request : run.request + 1])[0, begin : run.stop]
        row = pad(row, (0, max(0, int(own[-1]) - begin + width - len(row))))
        index = upload(own - begin, device).unsqueeze(1) + torch.arange(width, device=device)
        parts.append(row[index])
    return torch.cat(parts)


def _queries(
    queries: PagedQueries, query_lens: list[int], context_lens: list[int], requests: list[int]
) -> PagedQueries:
    device = queries.slot_table.device
    starts = upload(np.concatenate(([0], np.cumsum(query_lens))).astype(np.int32), device)
    return replace(
        queries,
        query_lens=query_lens,
        context_lens=context_lens,
        rows=queries.rows[upload(np.array(requests), device)],
        query_starts=starts,
        context_lens_device=upload(np.array(context_lens, dtype=np.int32), device),
        shared=(),
    )
