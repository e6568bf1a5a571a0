"""Every row of every kernel family. Adding a backend is one adapter file and one row here."""

from __future__ import annotations

from collections.abc import Callable

from moe_engine.kernels.cpu.availability import why_not as cpu_why_not
from moe_engine.kernels.device import Device, Need
from moe_engine.kernels.registry import Row

WhyNot = Callable[[Device, Need], str | None]


def _always(device: Device, need: Need) -> str | None:
    return None


def _cpu(device: Device, need: Need) -> str | None:
    return cpu_why_not(device, need.dtype)


def _cpu_float32(device: Device, need: Need) -> str | None:
    """Logits are float32 in every model."""
    return cpu_why_not(device, "float32")


def _rows(family: str, torch_class: str, cpu_class: str, why_not: WhyNot = _cpu) -> list[Row]:
    package = f"moe_engine.kernels.{family}"
    return [
        Row("torch", f"{package}.reference:{torch_class}", 0, _always),
        Row("cpu", f"{package}.cpu:{cpu_class}", 10, why_not),
    ]


OPS = _rows("ops", "TorchOps", "CpuOps")
LINEAR = _rows("linear", "TorchLinear", "CpuLinear")
EXPERTS = _rows("experts", "TorchExperts", "CpuExperts")
MLA = _rows("attention", "TorchMLA", "CpuMLA")
GQA = _rows("attention", "TorchGQA", "CpuGQA")
SAMPLING = _rows("sampling", "TorchSampling", "CpuSampling", _cpu_float32)
