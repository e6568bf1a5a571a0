"""Actual memory of a loaded model: all reachable tensors and prepared weights, each memory counted once."""

from __future__ import annotations

from typing import Any

from torch import Tensor

from moe_engine.kernels.experts.protocol import ExpertWeights
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.ops.protocol import RotaryTable

_OURS = ("moe_engine.models", "moe_engine.parallel")


def held_bytes(model: Any, shared: Any = None) -> int:
    """Bytes of weights and tables reachable through the model's attributes, lists, tuples and dicts.

    Prepared weights count as their kernel's `num_bytes`; a weight that aliases a counted tensor (a head tied to the
    embedding) counts 0, and so does everything reachable from `shared`.
    """
    modules, seen = (*_OURS, type(model).__module__), set[int]()
    _walk(shared, seen, (*modules, type(shared).__module__))
    return _walk(model, seen, modules)


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
