"""Selects the `PERMUTATION` backend. There is no flag: all rows give identical results."""

from __future__ import annotations

from functools import lru_cache

import torch

from moe_engine.kernels import tables
from moe_engine.kernels.device import Need, probe_or_absent
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.registry import build


@lru_cache
def permutation(dtype: torch.dtype, kind: str = "cpu") -> Permutation:
    """The most preferred backend for a device of that kind that loads: Triton, C++ if it supports the dtype, torch."""
    need = Need(str(dtype).removeprefix("torch."))
    kernel: Permutation = build("permutation", tables.PERMUTATION, "auto", probe_or_absent(kind), need)
    return kernel
