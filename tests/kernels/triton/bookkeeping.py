"""Less bookkeeping in Triton's interpreter, which spends most of its time on it: types, shapes and patches of the
language are cached, and operands that need no conversion are not converted. Results are the same.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import numpy as np
import triton.language as tl
from triton.runtime import interpreter

_core = tl.core
_semantic = interpreter.interpreter_semantic
_unwrap = _core._unwrap_if_constexpr
_patch_lang = interpreter._patch_lang
_get_np_dtype = interpreter._get_np_dtype
_broadcast = _semantic.broadcast_impl_value
_operands = _semantic.binary_op_type_checking_impl
_computation_type = _semantic.computation_type_impl
_cast = _semantic.cast
_PLAIN = frozenset((int, float, bool, str, type(None), tl.dtype, tl.tensor, tl.pointer_type, tl.block_type, slice))
"""Types of values that are not unwrapped."""
_NUMBERS = frozenset((int, float, bool))
_MISSING = object()
_WHOLE = slice(None)


def unwrap(value: Any) -> Any:
    """`_unwrap_if_constexpr`."""
    kind = type(value)
    if kind is tl.constexpr:
        return value.value
    return value if kind in _PLAIN else _unwrap(value)


# -- types and shapes

_scalar_type = functools.cache(_get_np_dtype)


def numpy_type(kind: Any) -> np.dtype[Any]:
    """Types of blocks and of pointers are not hashable."""
    scalar = kind.scalar
    return _get_np_dtype(scalar) if isinstance(scalar, tl.pointer_type) else _scalar_type(scalar)


def is_narrow(array: Any, kind: Any) -> bool:
    """`_validate_np_data_size`: whether the elements of an array have no more bits than the type."""
    return isinstance(kind, tl.pointer_type) or array.itemsize * 8 <= max(8, kind.primitive_bitwidth)


def make_handle(self: Any, data: Any, dtype: Any, attr: dict[str, Any] | None = None) -> None:
    """`TensorHandle.__init__`, which compares the type's width with the array's."""
    self.data, self.dtype, self.attr = data, dtype, {} if attr is None else attr


@functools.cache
def _shape(shape: tuple[int, ...]) -> tuple[Any, Any]:
    """Shape and size of a tensor, in the form used by kernels. Kernels do not change them."""
    return _core.tuple([tl.constexpr(size) for size in shape]), tl.constexpr(math.prod(shape))


def make_tensor(self: Any, handle: Any, kind: Any) -> None:
    """`tl.tensor.__init__` with cached shapes."""
    self.handle = handle
    self.type = kind
    self.dtype = kind.scalar
    self.shape, self.numel = _shape(kind.sizes if kind.is_block() else ())


@functools.cache
def _block(sizes: tuple[int, ...]) -> tuple[Any, int]:
    if not sizes:
        raise TypeError("a block has at least one dimension")
    shape = _core.tuple(sizes)
    return shape, _core.validate_block_shape(shape)


def make_block_type(self: Any, element: Any, shape: Any) -> None:
    """`tl.block_type.__init__` with cached shapes. `sizes`: the shape as Python's tuple."""
    self.element_ty = element
    found = getattr(shape, "value", shape)
    self.sizes = tuple([getattr(size, "value", size) for size in getattr(found, "values", found)])
    self.shape, self.numel = _block(self.sizes)


def _of_sizes(element: Any, sizes: tuple[int, ...]) -> Any:
    kind = object.__new__(tl.block_type)
    kind.element_ty, kind.sizes = element, sizes
    kind.shape, kind.numel = _block(sizes)
    return kind


def with_element_type(self: Any, element: Any) -> Any:
    """`tl.block_type.with_element_ty`."""
    return _of_sizes(element, self.sizes)


# -- operands


@functools.cache
def _type_of_both(*of: Any) -> Any:
    return _computation_type(*of)


def broadcast(lhs: Any, rhs: Any) -> tuple[Any, Any]:
    """`broadcast_impl_value`."""
    left, right = lhs.type, rhs.type
    if left.is_block():
        if not right.is_block():
            return lhs, _splat(rhs, left.sizes)
        if left.sizes == right.sizes:
            return lhs, rhs
        if len(left.sizes) == len(right.sizes):
            sizes = tuple(map(max, left.sizes, right.sizes))
            if all(size in (1, most) for kind in (left, right) for size, most in zip(kind.sizes, sizes)):
                return _widened(lhs, sizes), _widened(rhs, sizes)
    elif right.is_block():
        return _splat(lhs, right.sizes), rhs
    else:
        return lhs, rhs
    return _broadcast(lhs, rhs)  # type: ignore[no-any-return]


def _splat(scalar: Any, sizes: tuple[int, ...]) -> Any:
    data = np.empty(sizes, scalar.handle.data.dtype)
    data[...] = scalar.handle.data
    element = scalar.type.scalar
    return tl.tensor(interpreter.TensorHandle(data, element), _of_sizes(element, sizes))


def _widened(block: Any, sizes: tuple[int, ...]) -> Any:
    if block.type.sizes == sizes:
        return block
    data, element = np.broadcast_to(block.handle.data, sizes), block.type.scalar
    return tl.tensor(interpreter.TensorHandle(data, element), _of_sizes(element, sizes))


def operands(
    lhs: Any, rhs: Any, allow_lhs_ptr: bool = False, allow_rhs_ptr: bool = False, arithmetic_check: bool = True,
    div_or_mod: bool = False,
) -> tuple[Any, Any]:  # fmt: skip
    """`binary_op_type_checking_impl`. Quick: numbers of one type, a pointer and a number, a number and a constant."""
    of_left, of_right = type(lhs) is tl.tensor, type(rhs) is tl.tensor
    if of_left and of_right:
        left, right = lhs.dtype, rhs.dtype
        if left.is_ptr():
            if allow_lhs_ptr and not right.is_ptr() and right.is_int():
                return broadcast(lhs, rhs)
        elif not div_or_mod and left.name == right.name:
            return broadcast(lhs, rhs)
    elif arithmetic_check and not div_or_mod:
        if of_left and type(rhs) in _NUMBERS and not lhs.dtype.is_ptr():
            return _with_constant(lhs, rhs)
        if of_right and type(lhs) in _NUMBERS and not rhs.dtype.is_ptr():
            block, constant = _with_constant(rhs, lhs)
            return constant, block
    return _operands(lhs, rhs, allow_lhs_ptr, allow_rhs_ptr, arithmetic_check, div_or_mod)  # type: ignore[no-any-return]


def _with_constant(block: Any, number: Any) -> tuple[Any, Any]:
    kind = _type_of_both(block.dtype, False, _semantic.to_tensor_type(number), True, False)
    block = block if block.dtype.name == kind.name else _semantic.cast(block, kind)
    sizes = block.type.sizes if block.type.is_block() else ()
    return block, _constant(type(number), number, math.copysign(1, number), kind, sizes)


@functools.lru_cache(4096)
def _constant(of: type, number: Any, sign: float, kind: Any, sizes: tuple[int, ...]) -> Any:
    """A number as a tensor, whose elements no operation changes. `of` and `sign` tell 1 from True and 0.0 from -0.0."""
    scalar = _semantic._cast_to_computation_type(number, kind)
    return _splat(scalar, sizes) if sizes else scalar


_ARITHMETIC = {"add": np.add, "sub": np.subtract, "mul": np.multiply}
_FLOATS, _INTEGERS = frozenset(("fp32", "fp64")), frozenset(("int32", "int64"))
"""Names of types of which numpy computes sums and products as the interpreter does."""
_OPERATORS = {f"__{side}{name}__": (name, bool(side)) for name in _ARITHMETIC for side in ("", "r")}
"""Name of the operation, and whether its operands change their places."""


def arithmetic(name: str, own: Callable[..., Any]) -> Callable[..., Any]:
    """`_semantic.add`, `sub` or `mul`. Quick: blocks of one type and shape, a block and a constant, a pointer and
    integers."""
    operation = _ARITHMETIC[name]

    def run(lhs: Any, rhs: Any, sanitize_overflow: Any) -> Any:
        block = lhs if type(lhs) is tl.tensor else rhs
        if type(block) is tl.tensor:
            kind = block.dtype.name
            if kind in _FLOATS or (kind in _INTEGERS and not _semantic.builder.options.sanitize_overflow):
                if type(lhs) in _NUMBERS or type(rhs) in _NUMBERS:
                    lhs, rhs = operands(lhs, rhs)
                if type(lhs) is type(rhs) and lhs.dtype.name == kind == rhs.dtype.name and _match(lhs, rhs):
                    data = operation(lhs.handle.data, rhs.handle.data)
                    if data.itemsize * 8 == block.dtype.primitive_bitwidth:
                        return _made(lhs, rhs, data)
            elif name == "add" and block is lhs and block.dtype.is_ptr() and _is_offset(rhs) and _match(lhs, rhs):
                return _made(lhs, rhs, _semantic.builder.create_addptr(lhs.handle, rhs.handle).data)
        return own(lhs, rhs, sanitize_overflow)

    return run


def _is_offset(value: Any) -> bool:
    """Whether pointers take it as it is."""
    return type(value) is tl.tensor and value.dtype.name in ("int32", "int64", "uint64")


def _match(lhs: Any, rhs: Any) -> bool:
    """Whether numpy broadcasts the operands as Triton does."""
    left, right = lhs.type, rhs.type
    if not (left.is_block() and right.is_block()):
        return True
    if left.sizes == right.sizes:
        return True
    pairs = zip(left.sizes, right.sizes)
    return len(left.sizes) == len(right.sizes) and all(a == b or a == 1 or b == 1 for a, b in pairs)


def _made(lhs: Any, rhs: Any, data: Any) -> Any:
    """A tensor with the element type of `lhs` and the shape of both."""
    handle, made, element = object.__new__(interpreter.TensorHandle), object.__new__(tl.tensor), lhs.dtype
    handle.data, handle.dtype, handle.attr = data, element, {}
    shaped = lhs if lhs.type.is_block() else rhs
    kind = shaped.type
    if kind.is_block() and kind.sizes != data.shape:
        tl.tensor.__init__(made, handle, _of_sizes(element, data.shape))
        return made
    made.handle, made.dtype, made.shape, made.numel = handle, element, shaped.shape, shaped.numel
    made.type = kind if shaped is lhs else _of_sizes(element, kind.sizes) if kind.is_block() else element
    return made


_NUMBER_TYPES = ("int1", "int32", "int64", "bf16", "fp32", "fp64")
_CASTS = {(a, b) for a in _NUMBER_TYPES for b in ("int32", "int64", "fp32") if not (a[0] in "bf" and b[0] == "i")}
"""Conversions that are one call of `cast_impl`."""
_CASTS |= {("fp32", "bf16"), ("fp32", "fp64")}


def cast(value: Any, target: Any, fp_downcast_rounding: Any = None) -> Any:
    """`_semantic.cast`. Quick: the same type, and conversions between common types."""
    of, wanted = value.dtype, target.scalar
    if not of.is_ptr() and fp_downcast_rounding is None:
        if of.name == wanted.name:
            return value
        if (of.name, wanted.name) in _CASTS:
            handle, kind = _semantic.builder.cast_impl(value.handle, wanted), value.type
            return tl.tensor(handle, _of_sizes(wanted, kind.sizes) if kind.is_block() else wanted)
    return _cast(value, target, fp_downcast_rounding)


def item(own: Callable[..., Any]) -> Callable[..., Any]:
    """`tl.tensor.__getitem__`. Quick: whole and new dimensions of a block."""

    def run(self: Any, index: Any, _semantic: Any = _semantic) -> Any:
        quick = type(index) is tuple and self.type.is_block() and index.count(_WHOLE) <= len(self.type.sizes)
        if quick and all(part is None or (type(part) is slice and part == _WHOLE) for part in index):
            handle = interpreter.TensorHandle(self.handle.data[index], self.handle.dtype)
            return tl.tensor(handle, _of_sizes(self.dtype, handle.data.shape))
        return own(self, index, _semantic=_semantic)

    return run


def expand_dims(builder: Any, arg: Any, axis: int) -> Any:
    """`create_expand_dims`."""
    return interpreter.TensorHandle(arg.data[(slice(None),) * axis + (None,)], arg.dtype.scalar)


# -- patches of the language while a kernel runs

_patched: set[Any] = set()
"""Modules of the language that are patched now."""
_changes: dict[frozenset[Any], list[tuple[Any, str, Any, Any]]] = {}
"""By modules: object, attribute, its value outside of kernels and its value in kernels."""


def patch_member(holder: Any, name: str, member: Callable[..., Any], builder: Any, scope: Any) -> None:
    """`_patch_attr`: without the check that `member` has got `_semantic`."""
    function = getattr(member, "__wrapped__", member)
    if holder is tl.tensor and (name in _OPERATORS or name == "__getitem__"):
        scope.set_attr(holder, name, _operator(*_OPERATORS[name]) if name in _OPERATORS else item(function))
        return

    def call(*args: Any, **kwargs: Any) -> Any:
        kwargs["_semantic"] = _semantic
        return function(*args, **kwargs)

    scope.set_attr(holder, name, call)


def _operator(name: str, reverse: bool) -> Callable[..., Any]:
    """An operator of tensors, without the calls between it and the operation."""
    operation = getattr(_semantic, name)
    if reverse:
        return lambda self, other, _semantic=None: operation(unwrap(other), self, True)
    return lambda self, other, _semantic=None: operation(self, unwrap(other), True)


class _Patches:
    """The patches of a kernel, until it ends."""

    def __init__(self, changes: list[tuple[Any, str, Any, Any]]) -> None:
        self._changes = changes

    def restore(self) -> None:
        for holder, name, before, _ in reversed(self._changes):
            if before is _MISSING:
                delattr(holder, name)
            else:
                setattr(holder, name, before)
        _patched.clear()


class _NoPatches:
    def restore(self) -> None:
        """No effect: the running kernel restores them."""


_NONE = _NoPatches()


@functools.cache
def _modules(function: Any) -> frozenset[Any]:
    return frozenset(value for value in function.__globals__.values() if value is tl or value is _core)


def patch_lang(function: Any) -> Any:
    """Patches once per kernel, with the changes of the first kernel. The interpreter finds and makes them for every
    function that a kernel calls."""
    modules = _modules(function)
    if modules and modules <= _patched:
        return _NONE
    if _patched:
        scope = _patch_lang(function)
        _patched.update(modules)
        return _NONE
    if modules in _changes:
        for holder, name, _, inside in _changes[modules]:
            setattr(holder, name, inside)
    else:
        scope = _patch_lang(function)
        _changes[modules] = [
            (holder, name, _MISSING if before is interpreter._MISSING else before, vars(holder)[name])
            for holder, name, before in scope._changes
        ]
    _patched.update(modules)
    return _Patches(_changes[modules])


def install() -> None:
    """Installs the patches for the whole process; idempotent."""
    _core._unwrap_if_constexpr = unwrap
    interpreter._get_np_dtype = numpy_type
    interpreter._validate_np_data_size = is_narrow
    interpreter.TensorHandle.__init__ = make_handle
    interpreter.InterpreterBuilder.create_expand_dims = expand_dims
    tl.tensor.__init__ = make_tensor
    tl.block_type.__init__ = make_block_type
    tl.block_type.name = property(lambda self: f"<{self.shape}, {self.element_ty}>")
    tl.block_type.with_element_ty = with_element_type
    _semantic.broadcast_impl_value = broadcast
    _semantic.binary_op_type_checking_impl = operands
    _semantic.computation_type_impl = _type_of_both
    _semantic.cast = cast
    for name in _ARITHMETIC:
        setattr(_semantic, name, arithmetic(name, getattr(_semantic, name)))
    interpreter._patch_attr = patch_member
    interpreter._patch_lang = patch_lang
