"""Triton's interpreter with the number formats of the GPU: torch computes the formats that numpy lacks.

The interpreter of Triton 3.6 to 3.9 keeps bf16 and FP8 as bare integers. Casts to bf16 truncate, casts to e4m3 lose a
carry out of the mantissa, and sums and products of bf16 are those of the integers. GPUs round to nearest even and
multiply numbers, and so must kernels that are compared with float64 here. GPUs also have a clock and can pause, which
is the only assembly in the kernels. The interpreter of 3.6 also uses arrays of one element as indices, which numpy no
longer accepts.

Integer sums are checked for overflow only by `make test-exhaustive`. `program_order.py` runs programs in random order,
`bookkeeping.py` has the patches for speed.
"""

from __future__ import annotations

import dataclasses
import os
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import numpy as np
import torch
import triton.language as tl
from triton.runtime import interpreter

from tests.examples import FACTOR
from tests.kernels.triton import bookkeeping, program_order

_TORCH = {
    tl.float8e4nv: torch.float8_e4m3fn,
    tl.float8e5: torch.float8_e5m2,
    tl.bfloat16: torch.bfloat16,
    tl.float16: torch.float16,
    tl.float32: torch.float32,
    tl.float64: torch.float64,
}
_convert = interpreter._convert_float
_dot = interpreter.InterpreterBuilder.create_dot
_ARITHMETIC = {
    name: getattr(interpreter.InterpreterBuilder, name) for name in ("create_fadd", "create_fsub", "create_fmul")
}
_patch_tensor = interpreter._patch_lang_tensor
_set_attr = interpreter.TensorHandle.set_attr
_masked_load = interpreter.InterpreterBuilder.create_masked_load


def convert_float(values: np.ndarray, source: Any, target: Any, rounding: Any) -> np.ndarray:
    """Bits of `source` numbers -> bits of `target` numbers, rounded to nearest even; e4m3 saturates, as PTX's does."""
    if source not in _TORCH or target not in _TORCH:
        return _convert(values, source, target, rounding)
    numbers = torch.from_numpy(np.ascontiguousarray(values).view(np.uint8).reshape(-1)).view(_TORCH[source])
    if target is tl.float8e4nv:
        numbers = torch.where(numbers.isnan(), numbers, numbers.clamp(-448, 448))
    converted = numbers.to(_TORCH[target]).view(torch.uint8).numpy()
    return converted.view(getattr(np, f"uint{target.primitive_bitwidth}")).reshape(values.shape)


def dot(builder: Any, a: Any, b: Any, d: Any, input_precision: Any, max_num_imprecise_acc: Any) -> Any:
    """bf16 and FP8 operands widened first; every product of these operands is exact in float32."""
    wide = [x if x.dtype.primitive_bitwidth > 16 else _widen(x) for x in (a, b)]
    return _dot(builder, *wide, d, input_precision, max_num_imprecise_acc)


def _widen(x: Any) -> Any:
    if x.dtype.scalar is tl.float16:
        return interpreter.TensorHandle(x.data.astype(np.float32), tl.float32)
    bits = convert_float(x.data, x.dtype.scalar, tl.float32, None)
    return interpreter.TensorHandle(bits.view(np.float32), tl.float32)


def rounded(operation: Callable[[Any, Any, Any], Any]) -> Callable[[Any, Any, Any], Any]:
    """A sum or product of float32 numbers, also of bf16 numbers: rounded once, as instructions of GPUs round it."""

    def run(builder: Any, a: Any, b: Any) -> Any:
        if a.dtype.scalar is not tl.bfloat16:
            return operation(builder, a, b)
        wide = operation(builder, _widen(a), _widen(b)).data
        return interpreter.TensorHandle(convert_float(wide, tl.float32, tl.bfloat16, None), tl.bfloat16)

    return run


def inline_asm(builder: Any, text: str, *rest: Any) -> Any:
    """The clock in nanoseconds, or a pause. Callers wait for another process, which needs the core."""
    if "%globaltimer" in text:
        found = interpreter.TensorHandle(np.array([time.monotonic_ns()], dtype=np.int64), tl.int64)
    elif "nanosleep" in text:
        found = interpreter.TensorHandle(np.zeros(1, dtype=np.int32), tl.int32)
    else:
        raise NotImplementedError(f"assembly that the interpreter does not know: {text}")
    os.sched_yield()
    return SimpleNamespace(get_result=lambda place: found)


def patch_tensor(tensor: Any, scope: Any) -> None:
    """The interpreter's patches of tensors while a kernel runs, with scalars that are valid indices in every numpy."""
    _patch_tensor(tensor, scope)
    scope.set_attr(tensor, "__index__", lambda self: int(self.handle.data.item()))


def masked_load(builder: Any, pointers: Any, mask: Any, other: Any, *rest: Any, **options: Any) -> Any:
    """A load. Without `other` the elements that are not read are undefined, as on a device: NaN or a large integer."""
    if other is None and pointers.data.size > 1:  # of one element the interpreter takes 0 for None
        kind = pointers.get_element_ty()
        of, byte = interpreter._get_np_dtype(kind), 0xFF if kind.is_floating() else 0x7F
        values = np.full((*pointers.data.shape, of.itemsize), byte, np.uint8).view(of)[..., 0]
        other = interpreter.TensorHandle(values, kind)
    return _masked_load(builder, pointers, mask, other, *rest, **options)


def set_attr(handle: Any, key: str, values: Any) -> None:
    """A hint, as of `tl.multiple_of`: the compiler believes it, and a device faults if it is wrong."""
    if key == "tt.divisibility" and any((handle.data % value).any() for value in values):
        raise ValueError(f"not a multiple of {values}: {handle.data}")
    _set_attr(handle, key, values)


def install() -> None:
    """Installs the patches for the whole process; idempotent."""
    interpreter.TensorHandle.set_attr = set_attr
    bookkeeping.install()
    program_order.install()
    interpreter.interpreter_builder.options = dataclasses.replace(
        interpreter.interpreter_builder.options, sanitize_overflow=FACTOR > 1
    )
    interpreter.InterpreterBuilder.create_inline_asm = inline_asm
    interpreter._patch_lang_tensor = patch_tensor
    interpreter._convert_float = convert_float
    interpreter.InterpreterBuilder.create_dot = dot
    interpreter.InterpreterBuilder.create_masked_load = masked_load
    for name, operation in _ARITHMETIC.items():
        setattr(interpreter.InterpreterBuilder, name, rounded(operation))
