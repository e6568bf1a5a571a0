"""Selects the `PERMUTATION` backend. There is no flag: all rows give identical results."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from moe_engine.kernels import tables
from moe_engine.kernels.cpu.library import LibraryError
from moe_engine.kernels.device import Need, probe_or_absent
from moe_engine.kernels.permutation.protocol import Permutation
from moe_engine.kernels.registry import select

logger = logging.getLogger(__name__)


@lru_cache
def permutation(dtype: torch.dtype, kind: str = "cpu") -> Permutation:
    """The most preferred backend for a device of that kind: Triton, or C++ if it compiles and supports the dtype, else
    torch."""
    need = Need(str(dtype).removeprefix("torch."))
    device = probe_or_absent(kind)
    choice = select("permutation", tables.PERMUTATION, "auto", device, need)
    try:
        return choice.build()
    except LibraryError as error:
        logger.warning("permutation: using torch kernels, because %s failed to load: %s", choice.row.name, error)
        return select("permutation", tables.PERMUTATION, "torch", device, need).build()
