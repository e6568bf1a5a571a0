"""The LoRA kernel of a launch with --enable-lora; outside of the `KernelPlan`: other launches have none."""

from __future__ import annotations

from typing import TYPE_CHECKING

from moe_engine.kernels import tables
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Choice, build, select

if TYPE_CHECKING:  # the protocol imports torch; selection does not need it
    from moe_engine.kernels.lora.protocol import LoraKernel


def choose_lora(device: Device, dtype: str, asked: str) -> Choice:
    """The requested row, or with ``auto`` the most preferred one. Raises ValueError if it cannot run here."""
    return select("lora", tables.LORA, asked, device, Need(dtype))


def build_lora(device: Device, dtype: str, asked: str) -> LoraKernel:
    """The kernel; with ``auto`` the next best one if the chosen row fails to load. Raises: as `registry.build`."""
    kernel: LoraKernel = build("lora", tables.LORA, asked, device, Need(dtype))
    return kernel
