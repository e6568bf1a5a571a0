"""The gated delta net in C++: one call a layer, one step a token."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import load
from moe_engine.kernels.cpu.tensors import kind_of, rows
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights, StateRuns


class _Delta(ctypes.Structure):
    """`moe::Delta` of delta.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("runs", "key_heads", "shared", "key", "value", "taps")),
        *(
            (name, ctypes.c_void_p)
            for name in ("starts", "reads", "stores", "conv", "a_log", "dt_bias", "norm", "memory")
        ),
        ("eps", ctypes.c_float),
    )


class CpuDelta:
    """`DeltaKernel` for bfloat16 and float32. A result does not depend on how a prompt is cut into chunks."""

    name = "cpu"

    def __init__(self) -> None:
        self._lib = load()

    def run(
        self, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape
    ) -> Tensor:
        qkvz, ba = rows(inputs.qkvz), rows(inputs.ba)
        tail, memory = states
        out = torch.empty(runs.num_tokens, shape.value_heads * shape.value, dtype=qkvz.dtype)
        whole = tail.is_contiguous() and memory.is_contiguous() and weights.conv.is_contiguous()
        if not whole or {qkvz.dtype, ba.dtype, tail.dtype} != {qkvz.dtype} or len(qkvz) != runs.num_tokens:
            raise ValueError(
                f"projections {list(qkvz.shape)} {qkvz.dtype} of {runs.num_tokens} tokens do not fit states "
                f"{list(tail.shape)} {tail.dtype}, or a state is not contiguous"
            )
        struct = _Delta(
            len(runs.lens), shape.key_heads, shape.shared, shape.key, shape.value, shape.taps,
            runs.starts.data_ptr(), runs.reads.data_ptr(), runs.rows.data_ptr(), weights.conv.data_ptr(),
            weights.a_log.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(), memory.data_ptr(),
            weights.eps,
        )  # fmt: skip
        self._lib.moe_gated_delta(
            kind_of(qkvz.dtype), ctypes.byref(struct), qkvz.data_ptr(), qkvz.stride(0), ba.data_ptr(), ba.stride(0),
            tail.data_ptr(), out.data_ptr(),
        )  # fmt: skip
        return out
