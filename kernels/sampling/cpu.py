"""Sampling in C++: a row is read once from memory, no sorting, rows are distributed over threads."""

from __future__ import annotations

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import Library, load
from moe_engine.kernels.cpu.tensors import rows
from moe_engine.kernels.sampling.protocol import SamplingParameters


class CpuSampling:
    """`SamplingKernel` for logits in host memory."""

    name = "cpu"
    reads_half = False

    def __init__(self, library: Library | None = None) -> None:
        self._lib = library or load()

    def greedy(self, logits: Tensor) -> Tensor:
        logits = rows(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._lib.moe_greedy(logits.data_ptr(), logits.stride(0), *logits.shape, tokens.data_ptr())
        return tokens

    def sample(self, logits: Tensor, parameters: SamplingParameters, uniform: Tensor) -> Tensor:
        logits = rows(logits)
        tokens = torch.empty(len(logits), dtype=torch.int64)
        self._lib.moe_sample(
            logits.data_ptr(), logits.stride(0), *logits.shape, *_columns(parameters), uniform.data_ptr(),
            tokens.data_ptr(),
        )  # fmt: skip
        return tokens

    def probabilities(self, logits: Tensor, parameters: SamplingParameters, tokens: Tensor) -> Tensor:
        logits, tokens = rows(logits), tokens.contiguous()
        found = torch.empty(tokens.shape, dtype=torch.float32)
        self._lib.moe_probabilities(
            logits.data_ptr(), logits.stride(0), *logits.shape, *_columns(parameters), tokens.data_ptr(),
            tokens.shape[1], found.data_ptr(),
        )  # fmt: skip
        return found


def _columns(parameters: SamplingParameters) -> tuple[int, int, int, int]:
    p = parameters
    return p.temperature.data_ptr(), p.top_k.data_ptr(), p.top_p.data_ptr(), p.min_p.data_ptr()
