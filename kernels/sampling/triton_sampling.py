"""`SamplingKernel` in Triton: filters without a sort, then inverse-CDF sampling in vocabulary order.

All rows take the same path whatever their parameters, so the host reads none of them and never waits.

Legend: S sampled rows, V vocabulary, J queried tokens.
"""

from __future__ import annotations

from typing import NamedTuple

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.sampling.protocol import INVALID_TOKEN, SamplingParameters
from moe_engine.kernels.sampling.triton_greedy import Greedy, greedy_case
from moe_engine.kernels.sampling.triton_limits import BLOCK, limits_kernel, weight_of
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import stride_of, with_contiguous_rows

_WARPS = 16
_MOST = 2048
"""Candidate chunks if top_k is unlimited: half of 4096 chunks, about 2800 logits."""

_INVALID = tl.constexpr(INVALID_TOKEN)


class _Limits(NamedTuple):
    """Output of `limits_kernel`, per row."""

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


@dependent_jit(do_not_specialize_on_alignment=["temperature", "min_p", "uniform"])
def draw_kernel(
    logits, temperature, min_p, uniform, best_in, limit_in, last_in, total_in, tokens, stride,
    VOCAB: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """tokens [S] int64: the token where the row's running weight first exceeds uniform times the total."""
    wait_for_inputs()
    index = tl.program_id(0).to(tl.int64)
    row = logits + index * stride
    best, limit, last = tl.load(best_in + index), tl.load(limit_in + index), tl.load(last_in + index)
    heat, least = tl.load(temperature + index), tl.load(min_p + index)
    total = tl.load(total_in + index)
    valid = total > 0.0  # false for NaN
    target = tl.load(uniform + index).to(tl.float64) * total
    # a greedy row keeps one token: its place is known
    token = tl.where(heat > 0.0, -1, last).to(tl.int64)
    fallback = tl.full((), -1, tl.int64)  # rounding may leave the running weight below the target
    before = tl.zeros((), tl.float64)
    begin = 0
    while (begin < VOCAB) & (token < 0) & valid:
        column = begin + tl.arange(0, BLOCK)
        x = tl.load(row + column, column < VOCAB, float("-inf"))
        weight = tl.where(column < VOCAB, _kept(x, column, best, limit, last, heat, least), 0.0)
        after = before + tl.sum(weight, 0)
        fallback = tl.maximum(fallback, tl.max(tl.where(weight > 0.0, column, -1), 0).to(tl.int64))
        if after > target:
            passed = (before + tl.cumsum(weight, 0) > target) & (weight > 0.0)
            first = tl.min(tl.where(passed, column, VOCAB), 0)
            token = tl.where(first < VOCAB, first, -1).to(tl.int64)
        before = after
        begin += BLOCK
    token = tl.where(token < 0, fallback, token)
    tl.store(tokens + index, tl.where(valid, token, _INVALID))


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
    """`SamplingKernel` on a GPU."""

    name = "triton"

    def __init__(self) -> None:
        self._greedy = Greedy()

    def greedy(self, logits: Tensor) -> Tensor:
        return self._greedy(logits)

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        logits = with_contiguous_rows(logits)
        count, vocab = logits.shape
        tokens = torch.empty(count, dtype=torch.int64, device=logits.device)
        if count:
            draw_kernel[(count,)](
                logits, parameters.temperature, parameters.min_p, uniform, *_limits(logits, parameters), tokens,
                stride_of(logits, 0), VOCAB=vocab, BLOCK=BLOCK, num_warps=_WARPS,
            )  # fmt: skip
        return tokens

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        logits = with_contiguous_rows(logits)
        found = torch.empty(tokens.shape, dtype=torch.float32, device=logits.device)
        if found.numel():
            asked = tokens.shape[1]
            look_up_kernel[(len(tokens),)](
                logits, parameters.temperature, parameters.min_p, tokens.contiguous(), *_limits(logits, parameters),
                found, stride_of(logits, 0), ASKED=asked, BLOCK=next_power_of_2(asked), num_warps=1,
            )  # fmt: skip
        return found


def _limits(logits: Tensor, p: SamplingParameters) -> _Limits:
    """Runs `limits_kernel`; its scratch is 32 KiB per row."""
    count, vocab = logits.shape

    def column(dtype: torch.dtype, *width: int) -> Tensor:
        """A separate allocation, so aligned for any count."""
        return torch.empty((count, *width), dtype=dtype, device=logits.device)

    limits = _Limits(column(torch.float32), column(torch.float32), column(torch.int32), column(torch.float64))
    scratch = column(torch.float32, BLOCK), column(torch.float32, BLOCK)
    limits_kernel[(count,)](
        logits, p.temperature, p.top_p, p.min_p, p.top_k, *scratch, *limits, stride_of(logits, 0),
        **_constants(vocab), num_warps=_WARPS,
    )  # fmt: skip
    return limits


def _constants(vocab: int) -> dict[str, int]:
    """Constants of the limits kernel. A tile is whole chunks, and the chunks of a row fit one tile."""
    chunk = next_power_of_2(triton.cdiv(vocab, BLOCK))
    return {"VOCAB": vocab, "CHUNK": chunk, "MOST": min(_MOST, triton.cdiv(vocab, chunk)), "BLOCK": BLOCK}


def vocabulary_cases(label: str, vocab: int) -> list[AotCase]:
    """The specializations for a vocabulary; `look_up` for one token per row, and for 16 drafts."""
    columns = dict.fromkeys(("temperature", "top_p", "min_p", "uniform"), "*fp32:1") | {"top_k": "*i64:1"}
    limits = {"best": "*fp32", "limit": "*fp32", "last": "*i32", "total": "*fp64"}
    shared = {"logits": "*fp32", "stride": "i32:16" if vocab % 16 == 0 else "i32"}
    read = {f"{name}_in": kind for name, kind in limits.items()}
    written = {f"{name}_out": kind for name, kind in limits.items()}
    scratch = {"chunk_best": "*fp32", "candidates": "*fp32"}
    row = {"VOCAB": vocab, "BLOCK": BLOCK}

    def of(*names: str) -> dict[str, str]:
        return shared | {name: columns[name] for name in names}

    cases = [
        greedy_case(label, vocab),
        AotCase(
            f"sampling_limits_{label}", limits_kernel, of("temperature", "top_p", "min_p", "top_k") | scratch | written,
            _constants(vocab), _WARPS, 3, False,
        ),
        AotCase(
            f"sampling_draw_{label}", draw_kernel, of("temperature", "min_p", "uniform") | read | {"tokens": "*i64"},
            row, _WARPS, 3, False,
        ),
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
