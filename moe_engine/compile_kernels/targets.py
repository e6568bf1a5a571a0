"""The GPUs that kernels are compiled for. Imports no torch."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.config.machine import Machine, usable_cores
from moe_engine.kernels.device import Device

GIB = 1 << 30


@dataclass(frozen=True)
class Target:
    """A GPU by name: what Triton compiles for, and the memory that sizes of steps follow from."""

    name: str
    capability: tuple[int, int]
    memory_bytes: int

    @property
    def arch(self) -> int:
        """As Triton numbers architectures."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def device(self) -> Device:
        """As kernel rows see it."""
        return Device("cuda", self.name, self.capability)

    @property
    def machine(self) -> Machine:
        """As `resolve` sees it, with nothing in use yet."""
        cores = usable_cores()
        sizes = self.memory_bytes, self.memory_bytes
        return Machine("cuda", self.name, *sizes, cores, "its data sheet", "asked for", capability=self.capability)


TARGETS = {
    "h100": Target("NVIDIA H100", (9, 0), 80 * GIB),
    "h200": Target("NVIDIA H200", (9, 0), 141 * 10**9),
    "b200": Target("NVIDIA B200", (10, 0), 180 * 10**9),
}
