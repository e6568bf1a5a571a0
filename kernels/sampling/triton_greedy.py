"""The best token of each row, by several programs a row: one program would read a row of a large vocabulary at the rate
of one multiprocessor.

Programs write the best of their part; the last one of a row to arrive compares the parts. So it is one launch, and no
program waits for another.

Legend: S rows, V vocabulary, P programs of a row.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN
from moe_engine.kernels.sampling.triton_limits import BLOCK, best_of_part
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import resident_programs
from moe_engine.kernels.triton.launch import stride_of, with_contiguous_rows

MAX_SHARED_ROWS = 128
"""Rows up to which a row is shared by programs; more occupy the multiprocessors alone."""

_MOST = 64
"""Most programs of a row."""
_WARPS = 16

_INVALID, _INFINITY = tl.constexpr(INVALID_TOKEN), tl.constexpr(float("inf"))


@dependent_jit(do_not_specialize=["programs"])
def greedy_kernel(
    logits, tokens, best_of, index_of, tickets, stride, programs,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr, MOST: tl.constexpr,
):  # fmt: skip
    """tokens [S] int64: the best token of each row. Grid (S, programs); best_of and index_of [S, MOST] are scratch;
    tickets [S] count arrivals and are 0 before and after."""
    wait_for_inputs()
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + index * stride
    best, at, intact = best_of_part(row, part * BLOCK, programs * BLOCK, VOCAB, BLOCK)
    best = tl.where(intact, best, _INFINITY)  # as an infinite logit: the row is invalid
    last = programs == 1
    if programs > 1:
        tl.store(best_of + index * MOST + part, best)
        tl.store(index_of + index * MOST + part, at)
        tl.debug_barrier()
        last = tl.atomic_add(tickets + index, 1, sem="acq_rel", scope="gpu") == programs - 1
        if last:
            lane = tl.arange(0, MOST)
            there = lane < programs
            each = tl.load(best_of + index * MOST + lane, there, float("-inf"))
            place = tl.load(index_of + index * MOST + lane, there, VOCAB)
            best = tl.max(each, 0)
            at = tl.min(tl.where(each == best, place, VOCAB), 0)
            tl.store(tickets + index, 0)
    if last:
        valid = (best < _INFINITY) & (best > -_INFINITY)
        tl.store(tokens + index, tl.where(valid, at, _INVALID).to(tl.int64))


class Greedy:
    """Rows of logits -> best tokens, with its scratch memory: for launches on one stream."""

    def __init__(self) -> None:
        self._scratch: dict[torch.device, tuple[Tensor, Tensor, Tensor]] = {}

    def __call__(self, logits: Tensor) -> Tensor:
        """logits [S, V] float32 -> tokens [S] int64, `INVALID_TOKEN` for a row with NaN or without a finite maximum."""
        logits = with_contiguous_rows(logits)
        count, vocab = logits.shape
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        if count:
            programs = programs_of_row(count, vocab, resident_programs(logits.device))
            greedy_kernel[(count, programs)](
                logits, tokens, *self._memory(logits.device), stride_of(logits, 0), programs, **_constants(vocab),
                num_warps=_WARPS,
            )  # fmt: skip
        return tokens

    def _memory(self, device: torch.device) -> tuple[Tensor, Tensor, Tensor]:
        if device not in self._scratch:  # made by the eager run before a capture
            best = torch.empty(MAX_SHARED_ROWS, _MOST, dtype=torch.float32, device=device)
            index = torch.empty(MAX_SHARED_ROWS, _MOST, dtype=torch.int32, device=device)
            self._scratch[device] = best, index, torch.zeros(MAX_SHARED_ROWS, dtype=torch.int32, device=device)
        return self._scratch[device]


def programs_of_row(count: int, vocab: int, multiprocessors: int) -> int:
    """Programs for each of `count` rows."""
    if count > MAX_SHARED_ROWS:
        return 1
    return max(1, min(triton.cdiv(vocab, BLOCK), _MOST, 2 * multiprocessors // count))


def _constants(vocab: int) -> dict[str, int]:
    return {"VOCAB": vocab, "BLOCK": BLOCK, "MOST": _MOST}


def greedy_case(label: str, vocab: int) -> AotCase:
    """The specialization for a vocabulary."""
    signature = {
        "logits": "*fp32", "tokens": "*i64", "best_of": "*fp32", "index_of": "*i32", "tickets": "*i32",
        "stride": "i32:16" if vocab % 16 == 0 else "i32", "programs": "i32",
    }  # fmt: skip
    return AotCase(f"greedy_{label}", greedy_kernel, signature, _constants(vocab), _WARPS, 3, False)
