"""An exchange with peers and an all-reduce launched outside the interpreter on an absent device, in a separate process:
``python -m tests.kernels.triton.outside_symm_mem CACHE`` prints [cases, requested kernels, requested kernels in the
cache].
"""

from __future__ import annotations

import json
import sys

import torch
from triton import knobs

from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat
from moe_engine.kernels.symm_mem import triton_all_reduce, triton_combine, triton_dispatch
from moe_engine.kernels.symm_mem.all_reduce import SymmMemAllReduce
from moe_engine.kernels.symm_mem.all_reduce_layout import Arenas
from moe_engine.kernels.symm_mem.exchange import SymmMemExchange
from moe_engine.kernels.symm_mem.regions import Regions
from moe_engine.kernels.symm_mem.tiles import SHAPES
from moe_engine.kernels.triton.absent_device import absent_device
from moe_engine.kernels.triton.aot import compile_case

ARCH = 90
ROWS, BOTH = ActivationFormat.fp8(False), ActivationFormat(True, True)
SHAPE = next(shape for shape in SHAPES if shape.name == "v2_lite_ep2")


def launch(max_tokens: int, sizes: tuple[int, ...]) -> None:
    """Both directions through both slots, in buffers for `max_tokens` tokens of a rank."""
    regions = Regions(SHAPE.num_ranks, SHAPE.num_local, max_tokens, SHAPE.top_k, SHAPE.hidden, 2, SHAPE.fp8)
    memory = torch.empty(regions.num_bytes(2), dtype=torch.uint8, device="meta")
    exchange = SymmMemExchange(regions, 2, 1, memory, [0, 0], torch.zeros(2, dtype=torch.int32), 0.5, torch.bfloat16)
    for number, tokens in enumerate(sizes):
        x = torch.empty(tokens, SHAPE.hidden, dtype=torch.bfloat16, device="meta")
        ids = torch.empty(tokens, SHAPE.top_k, dtype=torch.int32, device="meta")
        arrival = exchange.dispatch(x, ids, ids.float(), number % 2)
        exchange.combine(torch.empty_like(arrival.rows), tokens, number % 2)
        weight = torch.empty(SHAPE.hidden, device="meta")
        for format, other in ((UNQUANTIZED, None), (UNQUANTIZED, x), (ROWS, None), (ROWS, x), (BOTH, x)):
            exchange.sum_rms_norm(format, other, x, weight, 1e-6, number % 2)


def launch_sums(sizes: tuple[int, ...]) -> None:
    """Every form of the all-reduce's result, for each number of rows."""
    arenas = Arenas(SHAPE.num_ranks, SHAPE.hidden, 2)
    memory = torch.empty(arenas.num_bytes, dtype=torch.uint8, device="meta")
    ranks = SymmMemAllReduce(arenas, 1, memory, [0, 0], torch.zeros(2, dtype=torch.int32), 0.5)
    weight = torch.empty(SHAPE.hidden, device="meta")
    for rows in sizes:
        x = torch.empty(rows, SHAPE.hidden, dtype=torch.bfloat16, device="meta")
        ranks.sum(x)
        positions = torch.empty(rows, 8, dtype=torch.int32, device="meta")
        of_experts = ExpertRows(x, positions, positions.float())
        for format in (UNQUANTIZED, ROWS, BOTH):
            ranks.add_rms_norm(format, x, x, weight, 1e-6)
            ranks.add_rms_norm(format, of_experts, x, weight, 1e-6)


def main() -> None:
    cache = sys.argv[1]
    cases = [*triton_dispatch.aot_cases(), *triton_combine.aot_cases()]
    cases = [case for case in cases if case.name.endswith(SHAPE.name)]
    cases += [case for case in triton_all_reduce.aot_cases() if case.name.endswith("v2_lite_tp2")]
    with knobs.cache.scope():
        knobs.cache.dir = cache
        for case in cases:
            compile_case(case, ARCH)
    with absent_device(ARCH, cache) as compilations:
        launch(7, (1, 5, 0, 7))  # offsets of few bytes, odd counts
        launch(16384, (16, 16384))  # offsets beyond 32 bits
        launch_sums((1, 3, 0, 16, 2048))
    print(json.dumps([len(cases), [report.name for report in compilations.reports], compilations.num_cached]))


if __name__ == "__main__":
    main()
