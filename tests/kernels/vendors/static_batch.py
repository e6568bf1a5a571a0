"""The inputs of a captured decode step on a CUDA device: static buffers whose contents change before each replay."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor

from moe_engine.kernels.attention.renewable import RenewablePlan
from moe_engine.kernels.queries import AttentionBatch, PagedQueries

CONTEXT = 200
SIZE = 4


class Static:
    """Queries over static buffers, as in `worker.step_graphs`.

    Args:
        count: query tokens of each request. size: requests.
    """

    def __init__(self, count: int, page_size: int, size: int = SIZE) -> None:
        self.size, self.count, self.page_size = size, count, page_size
        pages = -(-CONTEXT // page_size)
        slots = (torch.randperm((size + 1) * pages).view(size + 1, pages, 1) + 1) * page_size + torch.arange(page_size)
        self.table = slots.flatten(1).int().cuda()  # page 0 belongs to no request
        self.num_slots = ((size + 1) * pages + 1) * page_size
        self.lens = torch.full((size,), count, dtype=torch.int32, device="cuda")
        self.rows = torch.zeros(size, dtype=torch.int32, device="cuda")
        starts = torch.arange(0, size * count + 1, count, dtype=torch.int32).cuda()
        self.queries = PagedQueries(
            [count] * size, [count] * size, self.rows, starts, self.lens, self.table, page_size
        )  # fmt: skip

    @property
    def batch(self) -> AttentionBatch:
        return AttentionBatch(self.queries, None)

    def step(self, live: int) -> None:
        """Other requests: `live` random ones, then padding."""
        contexts = torch.randint(self.count, CONTEXT + 1, (live,)).tolist() + [self.count] * (self.size - live)
        rows = torch.randperm(self.size + 1)[:live].tolist() + [0] * (self.size - live)
        self.queries.context_lens[:] = contexts
        self.lens.copy_(torch.tensor(contexts, dtype=torch.int32))
        self.rows.copy_(torch.tensor(rows, dtype=torch.int32))

    def slots(self, request: int) -> Tensor:
        """KV slots of a request's context, on the CPU."""
        return self.table.cpu()[int(self.rows[request]), : self.queries.context_lens[request]].long()


def planned(backend: Any, static: Static) -> RenewablePlan:
    plan = backend.capabilities.plan_in_place(static.batch)
    assert plan is not None
    return plan


def replays(
    backend: Any, graphs: Any, static: Static, q: Tensor, layers: Callable[[Any], None], steps: Sequence[int]
) -> Iterator[None]:
    """Captures `layers(plan)` once, and replays it with other requests and other values in q before each yield.

    Args:
        graphs: as `worker.device_stream.make_graphs` returns.
        steps: requests of each replay; the others of the batch are padding.
    """
    layers(backend.plan(static.batch))
    layers(planned(backend, static))
    plan = planned(backend, static)
    graph = graphs.capture(lambda: layers(plan))
    for live in steps:
        static.step(live)
        q.copy_(torch.randn(q.shape).to(q.dtype))
        plan.renew()
        graph.replay()
        yield
