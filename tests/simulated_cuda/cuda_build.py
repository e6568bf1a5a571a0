"""Simulated devices under a torch that is built for CUDA: operators are dispatched as in a build for CPUs.

In such a build an operator has no CUDA kernel: a composite kernel runs, which calls other operators, or the fallback.
This module registers the same in place of each CUDA kernel, so that no CUDA kernel is launched.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from tests.simulated_cuda import operators

COMPOSITE = ("CompositeExplicitAutogradNonFunctional", "CompositeExplicitAutograd")
NO_BACKEND = torch._C.DispatchKeySet(torch._C.DispatchKey.PrivateUse1)
"""A device kind without kernels: the dispatcher's table has composite kernels instead."""


def take_kernels_away() -> Any:
    """Replaces kernels for the rest of the process; returns the object that keeps the registration."""
    library = torch.library.Library("aten", "IMPL")
    for name in torch._C._dispatch_get_all_op_names():
        if name.startswith("aten::") and torch._C._dispatch_has_kernel_for_dispatch_key(name, "CUDA"):
            library.impl(name.removeprefix("aten::"), _instead(name), "CUDA", allow_override=True)
    return library


def _instead(name: str) -> Callable[..., Any]:
    packet, _, overload = name.removeprefix("aten::").partition(".")
    op = getattr(getattr(torch.ops.aten, packet), overload or "default")
    if not any(torch._C._dispatch_has_kernel_for_dispatch_key(name, key) for key in COMPOSITE):
        return lambda *args, **kwargs: operators.fallback(op, *args, **kwargs)

    def composite(*args: Any, **kwargs: Any) -> Any:
        return op.redispatch(NO_BACKEND, *operators.as_declared(op, args), **kwargs)

    return composite
