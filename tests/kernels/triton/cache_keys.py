"""Kernels of launches and cases, by the keys of Triton's cache, without compilation."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any
from unittest.mock import patch

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import make_backend

from moe_engine.kernels.triton.absent_device import absent_device
from moe_engine.kernels.triton.aot import AotCase, compiler_input

Key = tuple[str, str]


def there(*shape: int, dtype: torch.dtype = torch.bfloat16) -> torch.Tensor:
    """A tensor of the absent device."""
    return torch.empty(*shape, dtype=dtype, device="meta")


def key_of(src: Any, target: GPUTarget, options: dict[str, Any]) -> Key:
    """The part of the compiler's input that distinguishes kernels within one Triton installation."""
    return src.hash(), make_backend(target).parse_options({**options, **src.parse_options()}).hash()


def difference(cases: Iterable[AotCase], launches: Callable[[], None], arch: int) -> dict[str, list[str]]:
    """Names of the cases without a launch, names of the launched kernels without a case, and of all launched kernels.

    Needs a process without earlier launches: kernels remember the compiler of their first launch.
    """
    of_cases = {key_of(**compiler_input(case, arch)): case.name for case in cases}
    launched: dict[Key, str] = {}

    def note(src: Any, target: GPUTarget, options: dict[str, Any], **rest: Any) -> None:
        launched[key_of(src, target, options)] = src.name

    with absent_device(arch), patch.object(triton.compiler, "compile", note):
        launches()
    return {
        "not launched": sorted(of_cases[key] for key in of_cases.keys() - launched.keys()),
        "no case": sorted(launched[key] for key in launched.keys() - of_cases.keys()),
        "launched": sorted(launched.values()),
    }
