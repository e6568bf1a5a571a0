"""The gated delta net, and additive states, in C++: one call a layer, one step a token."""

from __future__ import annotations

import ctypes

import torch
from torch import Tensor

from moe_engine.kernels.cpu.library import load
from moe_engine.kernels.cpu.tensors import kind_of
from moe_engine.kernels.delta.protocol import DeltaInputs, DeltaShape, DeltaStates, DeltaWeights, StateRuns


class _Delta(ctypes.Structure):
    """`moe::Delta` of delta.cpp."""

    _fields_ = (
        *((name, ctypes.c_int64) for name in ("runs", "key_heads", "shared", "key", "value", "taps", "decays")),
        *(
            (name, ctypes.c_void_p)
            for name in ("starts", "reads", "stores", "conv", "a_log", "dt_bias", "norm", "memory")
        ),
        ("eps", ctypes.c_float),
        ("bound", ctypes.c_float),
        ("sigmoid", ctypes.c_int32),
        ("strides", ctypes.c_int64 * 8),
        ("additive", ctypes.c_int32),
        ("shortest", ctypes.c_float),
        ("longest", ctypes.c_float),
        ("conv_bias", ctypes.c_void_p),
        ("skip", ctypes.c_void_p),
    )


class CpuDelta:
    """`DeltaKernel` for bfloat16 and float32. A result does not depend on how a prompt is cut into chunks."""

    name = "cpu"

    def __init__(self) -> None:
        self._lib = load()

    def run(
        self, inputs: DeltaInputs, weights: DeltaWeights, states: DeltaStates, runs: StateRuns, shape: DeltaShape
    ) -> Tensor:
        dtype, (tail, memory) = inputs.mixed.dtype, states
        out = torch.empty(runs.num_tokens, shape.value_heads * shape.value, dtype=dtype)
        whole = memory.is_contiguous() and (not shape.taps or (tail.is_contiguous() and weights.conv.is_contiguous()))
        fits = all(x.dtype == dtype and x.stride(2) == 1 and len(x) == runs.num_tokens for x in inputs)
        if not whole or not fits or (shape.taps and tail.dtype != dtype):
            raise ValueError(
                f"projections {list(inputs.mixed.shape)} {dtype} of {runs.num_tokens} tokens do not fit states "
                f"{list(tail.shape)} {tail.dtype}, or a state is not contiguous"
            )
        struct = _Delta(
            len(runs.lens), shape.key_heads, shape.shared, shape.key, shape.value, shape.taps, shape.decays,
            runs.starts.data_ptr(), runs.reads.data_ptr(), runs.rows.data_ptr(), weights.conv.data_ptr(),
            weights.a_log.data_ptr(), weights.dt_bias.data_ptr(), weights.norm.data_ptr(), memory.data_ptr(),
            weights.eps, shape.bound, shape.sigmoid, tuple(x.stride(i) for x in inputs for i in range(2)),
            shape.additive, shape.shortest, shape.longest,
            *(None if x is None else x.data_ptr() for x in (weights.conv_bias, weights.skip)),
        )  # fmt: skip
        self._lib.moe_gated_delta(
            kind_of(dtype), ctypes.byref(struct), *(x.data_ptr() for x in inputs), tail.data_ptr(), out.data_ptr()
        )
        return out
