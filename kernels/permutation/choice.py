"""The row of `TOKEN_ROWS` that serves on this machine. Nobody asks for one: all give the same."""

from __future__ import annotations

import logging
from functools import lru_cache

import torch

from moe_engine.kernels import tables
from moe_engine.kernels.cpu.library import LibraryError
from moe_engine.kernels.device import Need, cpu_device
from moe_engine.kernels.permutation.protocol import TokenRows
from moe_engine.kernels.registry import select

logger = logging.getLogger(__name__)


@lru_cache
def permutation(dtype: torch.dtype) -> TokenRows:
    """C++ where it can be compiled and knows the dtype, else torch."""
    need = Need(str(dtype).removeprefix("torch."))
    choice = select("permutation", tables.PERMUTATION, "auto", cpu_device(), need)
    try:
        return choice.build()
    except LibraryError as error:
        logger.warning("permutation: using torch kernels, because %s failed to load: %s", choice.row.name, error)
        return select("permutation", tables.PERMUTATION, "torch", cpu_device(), need).build()
