"""The LoRA kernel of a launch with --enable-lora; chosen beside the `KernelPlan`, so that other launches have none."""

from __future__ import annotations

import logging
from typing import TYPE_CHECKING

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Choice, select

if TYPE_CHECKING:  # the protocol imports torch; selection does not need it
    from moe_engine.kernels.lora.protocol import LoraKernel

logger = logging.getLogger(__name__)


def choose_lora(device: Device, dtype: str, asked: str) -> Choice:
    """The requested row, or with ``auto`` the most preferred one. Raises ValueError if it cannot run here."""
    return select("lora", tables.LORA, asked, device, Need(dtype))


def build_lora(device: Device, dtype: str, asked: str) -> LoraKernel:
    """The kernel; with ``auto`` torch's if the chosen row fails to load."""
    choice = choose_lora(device, dtype, asked)
    try:
        kernel: LoraKernel = choice.build()
    except Exception as error:
        if asked != "auto":
            raise ValueError(f"lora backend {asked!r} failed to load: {error}") from error
        logger.warning("lora: using torch kernels, because %s failed to load: %s", choice.row.name, error)
        kernel = choose_lora(device, dtype, "torch").build()
    return kernel
