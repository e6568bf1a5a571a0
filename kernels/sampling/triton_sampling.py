"""`SamplingKernel` in Triton: filters without a sort, then inverse-CDF sampling in vocabulary order.

All rows take the same launches whatever their parameters, so the host reads none of them and never waits.

Legend: S sampled rows, V vocabulary, J queried tokens, P max programs of a row.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN, SamplingParameters
from moe_engine.kernels.sampling.row_programs import MAX_PROGRAMS, Tickets, arrives_last, programs_of_row
from moe_engine.kernels.sampling.triton_greedy import Greedy, greedy_case
from moe_engine.kernels.sampling.triton_limits import BLOCK, best_kernel, limits_kernel, tiles_of_part, weight_of
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import resident_programs
from moe_engine.kernels.triton.launch import stride_of, with_contiguous_rows

_WARPS = 16
_MOST = 2048
"""Candidate chunks if top_k is unlimited: half of 4096 chunks, about 2800 logits."""

_INVALID = tl.constexpr(INVALID_TOKEN)


class _Limits(NamedTuple):
    """Output of `best_kernel` and `limits_kernel`, per row."""

    best: Tensor  # [S] float32
    limit: Tensor  # [S] float32
    last: Tensor  # [S] int32
    total: Tensor  # [S] float64


@triton.jit
def _kept(x, token, best, limit, last, temperature, min_p):
    """float64 weights of logits x with ids `token`, 0 outside the limits."""
    weight = weight_of(x, best, tl.where(temperature > 0.0, temperature, 1.0))
    inside = (x > limit) | ((x == limit) & (token <= last))
    return tl.where(inside & (weight >= min_p), weight, 0.0).to(tl.float64)


@triton.jit
def _weight_of_tile(row, column, best, limit, last, temperature, min_p, VOCAB: tl.constexpr):
    """float64 weights of a tile of a row, 0 outside the limits."""
    x = tl.load(row + column, column < VOCAB, float("-inf"))
    return tl.where(column < VOCAB, _kept(x, column, best, limit, last, temperature, min_p), 0.0)


@triton.jit
def _start_of_draw(weight_of_parts, programs, target, PARTS: tl.constexpr):
    """(part with the drawn token, weight before it); of the last kept token if rounding leaves no part."""
    part = tl.arange(0, PARTS)
    weight = tl.load(weight_of_parts + part, part < programs, 0.0)
    after = tl.cumsum(weight, 0)
    passed = tl.min(tl.where((after > target) & (weight > 0.0), part, PARTS), 0)
    first = tl.minimum(passed, tl.max(tl.where(weight > 0.0, part, 0), 0))
    return first, tl.sum(tl.where(part < first, weight, 0.0), 0)


@dependent_jit(do_not_specialize=["programs"], do_not_specialize_on_alignment=["temperature", "min_p", "uniform"])
def draw_kernel(
    logits, temperature, min_p, uniform, weight_of_parts, tickets, best_in, limit_in, last_in, total_in, tokens,
    stride, programs, VOCAB: tl.constexpr, PARTS: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens [S] int64: the token where the row's running weight first exceeds uniform times the total.

    Grid (S, programs). Scratch: weight_of_parts [S, P]; tickets [S] count arrivals and are 0 before and after.
    """
    wait_for_inputs()
    index, part = tl.program_id(0).to(tl.int64), tl.program_id(1)
    row = logits + index * stride
    best, limit, last = tl.load(best_in + index), tl.load(limit_in + index), tl.load(last_in + index)
    heat, least = tl.load(temperature + index), tl.load(min_p + index)
    total = tl.load(total_in + index)
    valid = total > 0.0  # false for NaN
    if valid & (heat > 0.0):
        weight_of_parts += index * PARTS
        start, end = tiles_of_part(part, programs, VOCAB, BLOCK)
        if programs > 1:
            own = tl.zeros((1,), tl.float64)
            for begin in range(start, end, BLOCK):
                column = begin + tl.arange(0, BLOCK)
                own += tl.sum(_weight_of_tile(row, column, best, limit, last, heat, least, VOCAB), 0)
            tl.store(weight_of_parts + part, tl.sum(own, 0))
        if arrives_last(tickets + index, programs):
            target = tl.load(uniform + index).to(tl.float64) * total
            before = tl.zeros((), tl.float64)
            if programs > 1:
                first, before = _start_of_draw(weight_of_parts, programs, target, PARTS)
                start, end = tiles_of_part(first, programs, VOCAB, BLOCK)
            token = tl.full((), -1, tl.int64)
            fallback = tl.full((), -1, tl.int64)  # rounding may leave the running weight below the target
            begin = start
            while (begin < VOCAB) & (token < 0):
                column = begin + tl.arange(0, BLOCK)
                weight = _weight_of_tile(row, column, best, limit, last, heat, least, VOCAB)
                after = before + tl.sum(weight, 0)
                fallback = tl.maximum(fallback, tl.max(tl.where(weight > 0.0, column, -1), 0).to(tl.int64))
                if after > target:
                    passed = (before + tl.cumsum(weight, 0) > target) & (weight > 0.0)
                    place = tl.min(tl.where(passed, column, VOCAB), 0)
                    token = tl.where(place < VOCAB, place, -1).to(tl.int64)
                before = after
                begin += BLOCK
            tl.store(tokens + index, tl.where(token < 0, fallback, token))
    elif part == 0:  # a greedy row keeps one token: its place is known
        tl.store(tokens + index, tl.where(valid, last, _INVALID).to(tl.int64))


@dependent_jit(do_not_specialize_on_alignment=["temperature", "min_p"])
def look_up_kernel(
    logits, temperature, min_p, tokens, best_in, limit_in, last_in, total_in, found, stride,
    ASKED: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """found [S, J] float32: the probability of tokens [S, J] int64, 0 for negative ids and invalid rows."""
    wait_for_inputs()
    index = tl.program_id(0).to(tl.int64)
    column = tl.arange(0, BLOCK)
    token = tl.load(tokens + index * ASKED + column, column < ASKED, -1)
    x = tl.load(logits + index * stride + token, token >= 0, float("-inf"))
    best, limit, last = tl.load(best_in + index), tl.load(limit_in + index), tl.load(last_in + index)
    weight = _kept(x, token, best, limit, last, tl.load(temperature + index), tl.load(min_p + index))
    total = tl.load(total_in + index)
    share = tl.where(token >= 0, weight, 0.0) / tl.where(total > 0.0, total, float("inf"))  # NaN in an invalid row
    tl.store(found + index * ASKED + column, share.to(tl.float32), column < ASKED)


class TritonSampling:
    """`SamplingKernel` on a GPU: for launches on one stream."""

    name = "triton"
    reads_half = True

    def __init__(self) -> None:
        self._greedy = Greedy()
        self._tickets = Tickets()

    def greedy(self, logits: Tensor) -> Tensor:
        return self._greedy(logits)

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        logits = with_contiguous_rows(logits.float())  # 16 bits would spill
        count, vocab = logits.shape
        device = logits.device
        tokens = torch.empty(count, dtype=torch.int64, device=device)
        if count:
            limits = self._limits(logits, parameters)
            programs = programs_of_row(count, vocab, BLOCK, resident_programs(device))
            weights = torch.empty(count, MAX_PROGRAMS, dtype=torch.float64, device=device)
            draw_kernel[(count, programs)](
                logits, parameters.temperature, parameters.min_p, uniform, weights, self._tickets.on(device), *limits,
                tokens, stride_of(logits, 0), programs, **_row_constants(vocab), num_warps=_WARPS,
            )  # fmt: skip
        return tokens

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        logits = with_contiguous_rows(logits)
        found = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
        if found.numel():
            asked = tokens.shape[1]
            limits = self._limits(logits, parameters)
            look_up_kernel[(len(tokens),)](
                logits, parameters.temperature, parameters.min_p, tokens.contiguous(), *limits, found,
                stride_of(logits, 0), ASKED=asked, BLOCK=next_power_of_2(asked), num_warps=1,
            )  # fmt: skip
        return found

    def _limits(self, logits: Tensor, p: SamplingParameters) -> _Limits:
        """Runs `best_kernel` and `limits_kernel`; their scratch is 49 KiB per row and program."""
        count, vocab = logits.shape
        programs = programs_of_row(count, vocab, BLOCK, resident_programs(logits.device))
        tickets, stride = self._tickets.on(logits.device), stride_of(logits, 0)

        def column(dtype: torch.dtype, *width: int) -> Tensor:
            """A separate allocation, so aligned for any count."""
            return torch.empty((count, *width), dtype=dtype, device=logits.device)

        limits = _Limits(column(torch.float32), column(torch.float32), column(torch.int32), column(torch.float64))
        reach = column(torch.float32)
        best_of, number_of = column(torch.float32, MAX_PROGRAMS), column(torch.int32, MAX_PROGRAMS)
        best_kernel[(count, programs)](
            logits, p.temperature, p.top_p, p.top_k, column(torch.float32, BLOCK), best_of, number_of, tickets,
            *limits, reach, stride, programs, **_chunk_constants(vocab), num_warps=_WARPS,
        )  # fmt: skip
        values, tokens = column(torch.float32, programs, BLOCK), column(torch.int32, programs, BLOCK)
        limits_kernel[(count, programs)](
            logits, p.temperature, p.top_p, p.min_p, p.top_k, values, tokens, number_of,
            column(torch.float64, 3, MAX_PROGRAMS), tickets, limits.best, reach, *limits[1:], stride, programs,
            **_row_constants(vocab), num_warps=_WARPS,
        )  # fmt: skip
        return limits


def _row_constants(vocab: int) -> dict[str, int]:
    return {"VOCAB": vocab, "PARTS": MAX_PROGRAMS, "BLOCK": BLOCK}


def _chunk_constants(vocab: int) -> dict[str, int]:
    """Constants of `best_kernel`. A tile is whole chunks, and the chunks of a row fit one tile."""
    chunk = next_power_of_2(triton.cdiv(vocab, BLOCK))
    return _row_constants(vocab) | {"CHUNK": chunk, "MOST": min(_MOST, triton.cdiv(vocab, chunk))}


def vocabulary_cases(label: str, vocab: int) -> list[AotCase]:
    """The specializations for a vocabulary; `look_up` for one token per row, and for 16 drafts."""
    columns = dict.fromkeys(("temperature", "top_p", "min_p", "uniform"), "*fp32:1") | {"top_k": "*i64:1"}
    limits = {"best": "*fp32", "limit": "*fp32", "last": "*i32", "total": "*fp64"}
    shared = {"logits": "*fp32", "stride": "i32:16" if vocab % 16 == 0 else "i32"}
    read = {f"{name}_in": kind for name, kind in limits.items()}
    written = {f"{name}_out": kind for name, kind in limits.items()}
    parts = {"programs": "i32", "tickets": "*i32"}
    best = {"chunk_best": "*fp32", "best_of": "*fp32", "index_of": "*i32", "reach_out": "*fp32"} | parts | written
    collected = {"values": "*fp32", "tokens": "*i32", "number_of": "*i32", "weight_of_parts": "*fp64"} | parts
    collected |= {name: kind for name, kind in written.items() if name != "best_out"}
    row = _row_constants(vocab)

    def of(*names: str) -> dict[str, str]:
        return shared | {name: columns[name] for name in names}

    drawn = of("temperature", "min_p", "uniform") | read | parts | {"weight_of_parts": "*fp64", "tokens": "*i64"}
    cases = [
        greedy_case(label, vocab), greedy_case(f"{label}_bf16", vocab, "*bf16"),
        AotCase(
            f"sampling_best_{label}", best_kernel, of("temperature", "top_p", "top_k") | best, _chunk_constants(vocab),
            _WARPS, 3, False,
        ),
        AotCase(
            f"sampling_limits_{label}", limits_kernel,
            of("temperature", "top_p", "min_p", "top_k") | collected | {"best_in": "*fp32", "reach_in": "*fp32"}, row,
            _WARPS, 3, False,
        ),
        AotCase(f"sampling_draw_{label}", draw_kernel, drawn, row, _WARPS, 3, False),
    ]  # fmt: skip
    for asked in (1, 16):
        signature = of("temperature", "min_p") | read | {"tokens": "*i64", "found": "*fp32"}
        constants = {"ASKED": asked, "BLOCK": next_power_of_2(asked)}
        cases.append(AotCase(f"sampling_look_up_{asked}_{label}", look_up_kernel, signature, constants, 1, 3, False))
    return cases


def aot_cases() -> list[AotCase]:
    """The vocabularies of DeepSeek-V3, V2, Llama-3 and Qwen3."""
    vocabularies = (("v3", 129280), ("v2", 102400), ("llama", 128256), ("qwen3", 151936))
    return [case for label, vocab in vocabularies for case in vocabulary_cases(label, vocab)]
