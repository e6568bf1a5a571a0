"""LoRA products in C++: one call for all adapters of a step."""

from __future__ import annotations

from functools import lru_cache

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import kind_of, rows
from moe_engine.kernels.lora.protocol import AdapterTokens, LoraWeights


class CpuLora:
    """`LoraKernel` for bfloat16 and float32. Sums are float32, in an order that does not depend on the batch."""

    name = "cpu"

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()

    def add(self, y: Tensor, x: Tensor, weights: LoraWeights, tokens: AdapterTokens) -> None:
        a, b = weights.a.unsqueeze(1), weights.b.unsqueeze(1)
        self._run(y.unsqueeze(1), x.unsqueeze(1), a, b, weights.columns, tokens)

    def add_heads(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, tokens: AdapterTokens) -> None:
        self._run(y, x, a, b, (0, b.shape[3]), tokens)

    def _run(self, y: Tensor, x: Tensor, a: Tensor, b: Tensor, columns: tuple[int, ...], tokens: AdapterTokens) -> None:
        """y [T, H, N], x [T, H, K], a [S, H or 1, P * R, K], b [S, H or 1, R, N]."""
        x = rows(x)
        heads, rank, parts = y.shape[1], b.shape[2], len(columns) - 1
        fits = y.shape[0] == x.shape[0] == tokens.num_tokens and x.shape[1] == heads
        fits &= a.shape[2:] == (parts * rank, x.shape[2]) and b.shape[3] == y.shape[2] == columns[-1]
        if not fits or {x.dtype, y.dtype, a.dtype, b.dtype} != {x.dtype} or y.stride(2) != 1:
            raise ValueError(
                f"rows {list(x.shape)} {x.dtype} and results {list(y.shape)} {y.dtype} of {tokens.num_tokens} tokens "
                f"do not fit adapters {list(a.shape)} and {list(b.shape)} {a.dtype}"
            )
        a_head, b_head = (w.stride(1) if w.shape[1] > 1 else 0 for w in (a, b))
        strides = _numbers(
            (x.stride(0), x.stride(1), y.stride(0), y.stride(1), a.stride(0), a_head, b.stride(0), b_head)
        )
        self._lib.moe_lora(
            kind_of(x.dtype), x.data_ptr(), tokens.order.data_ptr(), tokens.runs_host.data_ptr(), len(tokens.runs),
            heads, x.shape[2], a.data_ptr(), b.data_ptr(), rank, _numbers(columns).data_ptr(), parts, y.data_ptr(),
            strides.data_ptr(),
        )  # fmt: skip


@lru_cache(maxsize=4096)
def _numbers(values: tuple[int, ...]) -> Tensor:
    return torch.tensor(values, dtype=torch.int64)
