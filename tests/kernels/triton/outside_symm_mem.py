"""An exchange with peers launched outside the interpreter on a device that is absent, in a process of its own:
``python -m tests.kernels.triton.outside_symm_mem CACHE`` prints [cases, kernels asked for, those of them in the cache].
"""

from __future__ import annotations

import json
import sys

import torch
from triton import knobs

from moe_engine.kernels.symm_mem import triton_combine, triton_dispatch
from moe_engine.kernels.symm_mem.exchange import SymmMemExchange
from moe_engine.kernels.symm_mem.regions import Regions
from moe_engine.kernels.symm_mem.tiles import SHAPES
from moe_engine.kernels.triton.absent_device import absent_device
from moe_engine.kernels.triton.aot import compile_case

ARCH = 90
SHAPE = next(shape for shape in SHAPES if shape.name == "v2_lite_ep2")


def launch(max_tokens: int, sizes: tuple[int, ...]) -> None:
    """Both directions through both slots, in buffers for `max_tokens` tokens of a rank."""
    capacity = SHAPE.num_ranks * max_tokens
    pairs = max_tokens * SHAPE.top_k
    regions = Regions(SHAPE.num_ranks, SHAPE.num_local, pairs, capacity, SHAPE.hidden, 2, SHAPE.fp8)
    memory = torch.empty(regions.num_bytes(2), dtype=torch.uint8, device="meta")
    exchange = SymmMemExchange(regions, 2, 1, memory, [0, 0], torch.zeros(2, dtype=torch.int32), 0.5, torch.bfloat16)
    for number, tokens in enumerate(sizes):
        x = torch.empty(tokens, SHAPE.hidden, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(tokens, SHAPE.top_k, dtype=torch.int32, device="meta")
        arrival = exchange.dispatch(x, ids, number % 2)
        exchange.combine(torch.empty_like(arrival.rows), ids.float(), number % 2)


def main(cache: str) -> None:
    cases = [*triton_dispatch.aot_cases(), *triton_combine.aot_cases()]
    cases = [case for case in cases if case.name.endswith(SHAPE.name)]
    with knobs.cache.scope():
        knobs.cache.dir = cache
        for case in cases:
            compile_case(case, ARCH)
    with absent_device(ARCH, cache) as compilations:
        launch(7, (1, 5, 0, 7))  # offsets of few bytes, odd counts
        launch(16384, (16, 16384))  # offsets beyond 32 bits
    print(json.dumps([len(cases), [report.name for report in compilations.reports], compilations.num_cached]))


if __name__ == "__main__":
    main(sys.argv[1])
