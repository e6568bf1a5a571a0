"""Actual memory of a loaded model: all reachable tensors and prepared weights, each memory counted once."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import fields, is_dataclass
from typing import Any

from torch import Tensor

from moe_engine.kernels.compression.protocol import CompressorWeights
from moe_engine.kernels.delta.protocol import DeltaWeights
from moe_engine.kernels.experts.protocol import ExpertWeights
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RotaryTable
from moe_engine.kernels.ops.residual_blocks import BlockWeights
from moe_engine.kernels.ops.streams import StreamWeights

_OURS = ("moe_engine.models", "moe_engine.parallel")
_GROUPS = (BlockWeights, CompressorWeights, DeltaWeights, StreamWeights)
"""Dataclasses of kernels whose tensors are unprepared weights."""


def held_bytes(model: Any, shared: Any = None) -> int:
    """Bytes of weights and tables reachable through the model's attributes, lists, tuples and dicts.

    Prepared weights count as their kernel's `num_bytes`; a weight that aliases a counted tensor (a head tied to the
    embedding) counts 0, and so does everything reachable from `shared`.
    """
    modules, seen = (*_OURS, type(model).__module__), set[int]()
    _walk(shared, seen, (*modules, type(shared).__module__))
    return _walk(model, seen, modules)


def weights_of(module: Any) -> Iterator[Tensor]:
    """The tensors of a module of `models`, in the kernels' layouts: the same order for modules of the same shapes.

    Modules of other packages (recorders, dispatchers, tables) are not entered.

    Raises:
        TypeError: a kernel keeps its weights in another form.
    """
    return _weights(module, set(), False)


def _weights(value: Any, seen: set[int], inside: bool) -> Iterator[Tensor]:
    """`inside`: within a prepared weight, whose dataclasses are the kernel's own."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, PreparedLinear | ExpertWeights):
        found = list(_weights(value.data, seen, True)) + list(_weights(getattr(value, "bias", None), seen, True))
        if sum(tensor.nbytes for tensor in found) < value.num_bytes:
            raise TypeError(f"the weights of {type(value.data).__name__} cannot be replaced while serving")
        yield from found
    elif isinstance(value, list | tuple):
        for item in value:
            yield from _weights(item, seen, inside)
    elif isinstance(value, dict):
        for item in value.values():
            yield from _weights(item, seen, inside)
    elif isinstance(value, _GROUPS) or (inside and is_dataclass(value)):
        for field in fields(value):
            yield from _weights(getattr(value, field.name), seen, inside)
    elif (
        type(value).__module__.startswith("moe_engine.models") and hasattr(value, "__dict__") and id(value) not in seen
    ):
        seen.add(id(value))
        for item in vars(value).values():
            yield from _weights(item, seen, inside)


def _walk(value: Any, seen: set[int], modules: tuple[str, ...]) -> int:
    if isinstance(value, Tensor):
        return _once(value.untyped_storage().data_ptr(), value.untyped_storage().nbytes(), seen)
    if isinstance(value, PreparedLinear):
        key = value.data.untyped_storage().data_ptr() if isinstance(value.data, Tensor) else id(value)
        return _once(key, value.num_bytes, seen)
    if isinstance(value, ExpertWeights):
        return _once(id(value), value.num_bytes, seen)
    if isinstance(value, RotaryTable):
        return _walk(value.cos_sin, seen, modules)
    if isinstance(value, _GROUPS):
        return sum(_walk(getattr(value, field.name), seen, modules) for field in fields(value))
    if isinstance(value, list | tuple):
        return sum(_walk(item, seen, modules) for item in value)
    if isinstance(value, dict):
        return sum(_walk(item, seen, modules) for item in value.values())
    if getattr(type(value), "__module__", "").startswith(modules) and hasattr(value, "__dict__"):
        return 0 if _once(id(value), 1, seen) == 0 else sum(_walk(item, seen, modules) for item in vars(value).values())
    return 0


def _once(key: int, size: int, seen: set[int]) -> int:
    if key in seen:
        return 0
    seen.add(key)
    return size
