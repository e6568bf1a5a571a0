"""The best token of each row, in one launch of several programs a row.

Legend: S rows, V vocabulary.
"""

from __future__ import annotations

import torch
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN
from moe_engine.kernels.sampling.row_programs import MAX_PROGRAMS, Tickets, arrives_last, programs_of_row
from moe_engine.kernels.sampling.triton_limits import BLOCK, best_of_part, best_of_parts
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import resident_programs
from moe_engine.kernels.triton.launch import stride_of, with_contiguous_rows

_WARPS = 16

_INVALID, _INFINITY = tl.constexpr(INVALID_TOKEN), tl.constexpr(float("inf"))


@dependent_jit(do_not_specialize=["programs"])
def greedy_kernel(
    logits, tokens, best_of, index_of, tickets, stride, programs,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, PARTS: tl.constexpr,
):  # fmt: skip
    """tokens [S] int64: the best token of each row. Grid (S, programs); best_of and index_of [S, PARTS] are scratch;
    tickets [S] count arrivals and are 0 before and after."""
    wait_for_inputs()
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + index * stride
    best, at = best_of_part(row, part * BLOCK, programs * BLOCK, VOCAB, BLOCK)
    tl.store(best_of + index * PARTS + part, best)
    tl.store(index_of + index * PARTS + part, at)
    if arrives_last(tickets + index, programs):
        best, at = best_of_parts(best_of + index * PARTS, index_of + index * PARTS, programs, VOCAB, PARTS)
        valid = (best < _INFINITY) & (best > -_INFINITY)
        tl.store(tokens + index, tl.where(valid, at, _INVALID).to(tl.int64))


class Greedy:
    """Rows of logits -> best tokens: for launches on one stream."""

    def __init__(self) -> None:
        self._tickets = Tickets()

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [S, V], in 16 bits too -> tokens [S] int64, `INVALID_TOKEN` for a row with NaN or without a finite
        maximum."""
        logits = with_contiguous_rows(logits)
        count, vocab = logits.shape
        device = logits.device
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        if count:
            programs = programs_of_row(count, vocab, BLOCK, resident_programs(device))
            best_of = torch.empty(count, MAX_PROGRAMS, dtype=torch.float32, device=device)
            index_of = torch.empty(count, MAX_PROGRAMS, dtype=torch.int32, device=device)
            greedy_kernel[(count, programs)](
                logits, tokens, best_of, index_of, self._tickets.on(device), stride_of(logits, 0), programs,
                **_constants(vocab), num_warps=_WARPS,
            )  # fmt: skip
        return tokens


def _constants(vocab: int) -> dict[str, int]:
    return {"VOCAB": vocab, "BLOCK": BLOCK, "PARTS": MAX_PROGRAMS}


def greedy_case(label: str, vocab: int, kind: str = "*fp32") -> AotCase:
    """The specialization for a vocabulary and a type of logits."""
    signature = {
        "logits": kind, "tokens": "*i64", "best_of": "*fp32", "index_of": "*i32", "tickets": "*i32",
        "stride": "i32:16" if vocab % 16 == 0 else "i32", "programs": "i32",
    }  # fmt: skip
    return AotCase(f"greedy_{label}", greedy_kernel, signature, _constants(vocab), _WARPS, 3, False)
