"""Costs of dispatch and combine through symmetric memory, by their arguments.

Rates and latencies of messages are measurements of DeepEP, because this project's kernels have not run. A token takes
one row to each rank that has some of its experts; `Routing.target_ranks` are the ranks it may choose.

Legend: a argument namespace, s setting, R ranks, K experts per token.
"""

from __future__ import annotations

from typing import Any

from torch import Tensor

from benchmarks.step_costs.cost import Cost
from benchmarks.step_costs.costs import Setting, cost_of, size
from benchmarks.step_costs.libraries import targets_of

CHOICE_BYTES = 8
"""An expert id and its weight."""


def _rows_a_token(s: Setting) -> float:
    return targets_of(s.routing.top_k, s.routing.target_ranks)


def _rate(s: Setting, key: str) -> float:
    assert s.hardware is not None
    return float(s.hardware["deepep"]["low_latency"]["node"][key])


def _row_bytes(a: Any, x: Tensor) -> int:
    """Bytes of a row as sent."""
    return a.WIDTH + a.WIDTH // 128 * 4 if a.FP8 else a.WIDTH * x.element_size()


@cost_of("send_kernel")
def send(a: Any, s: Setting) -> Cost:
    """The same number of rows arrives from other ranks."""
    rows = a.num_tokens * _rows_a_token(s) * _row_bytes(a, a.x)
    moved = rows + a.num_tokens * a.RANKS * a.TOP_K * CHOICE_BYTES
    sent = moved * (a.RANKS - 1) / a.RANKS
    scales = a.x_scales if isinstance(a.x_scales, Tensor) else None
    link_us, travel_us = sent / _rate(s, "dispatch_bytes_per_s") * 1e6, _rate(s, "dispatch_us")
    return Cost(size(a.x, scales, a.ids, a.weights), moved, nvlink=sent, link_us=link_us, travel_us=travel_us)


@cost_of("receive_kernel")
def receive(a: Any, s: Setting) -> Cost:
    """Waits, then copies."""
    arrived = s.routing.tokens / a.RANKS * _rows_a_token(s)
    width = a.WIDTH * a.out.element_size() + (a.WIDTH // 128 * 4 if a.FP8 and not a.WIDEN else 0)
    read = arrived * _row_bytes(a, a.out) + 2 * s.routing.tokens * a.TOP_K * 4
    written = s.routing.rows * width + s.routing.tokens * a.TOP_K * 4
    return Cost(read, written, awaits=True)


@cost_of("combine_send_kernel")
def combine_send(a: Any, s: Setting) -> Cost:
    row = a.WIDTH * a.rows.element_size()
    returned = s.routing.tokens / a.RANKS * _rows_a_token(s) * row
    sent = returned * (a.RANKS - 1) / a.RANKS
    read = s.routing.rows * row + s.routing.tokens * a.TOP_K * CHOICE_BYTES
    link_us, travel_us = sent / _rate(s, "combine_bytes_per_s") * 1e6, _rate(s, "combine_us")
    return Cost(read, returned, nvlink=sent, link_us=link_us, travel_us=travel_us)


@cost_of("sum_kernel")
def sums(a: Any, s: Setting) -> Cost:
    """Waits, then sums; with a norm the residual stream is read and written too."""
    kind = a.residual if a.NORM else a.out
    rows = a.num_tokens * _rows_a_token(s) * a.WIDTH * kind.element_size()
    stream = size(a.residual)
    read = rows + stream + size(a.other, a.weight)
    return Cost(read, stream + size(a.out, a.quantized, a.scales), awaits=True)


@cost_of("copy_rows_kernel")
def copy_rows(a: Any, s: Setting) -> Cost:
    """Rows up to a number on the device: all of them."""
    return Cost(size(a.rows), size(a.out))
