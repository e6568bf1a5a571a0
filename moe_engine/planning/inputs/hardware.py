"""GPUs by name (``--hardware``), to resolve a launch on a machine without them. Imports no torch."""

from __future__ import annotations

import re
from dataclasses import dataclass

from moe_engine.errors import ConfigError
from moe_engine.kernels.device import Device
from moe_engine.planning.inputs.machine import Machine, usable_cores

GIB = 1 << 30


@dataclass(frozen=True)
class GPU:
    """A GPU by its data sheet.

    Attributes:
        memory_bytes: the total that torch reports. nvlink: the GPUs of a host access each other's memory over NVLink.
    """

    name: str
    capability: tuple[int, int]
    memory_bytes: int
    nvlink: bool = True

    @property
    def arch(self) -> int:
        """The architecture number that Triton uses."""
        return 10 * self.capability[0] + self.capability[1]

    @property
    def device(self) -> Device:
        """The device for kernel rows."""
        return Device("cuda", self.name, self.capability)

    def machine(self, count: int | None = None) -> Machine:
        """A host for `resolve` with `count` of these GPUs (None: as many as the flags need), with free memory."""
        return Machine(
            "cuda",
            self.name,
            self.memory_bytes,
            self.memory_bytes,
            usable_cores(),
            "its data sheet",
            "that of the given GPU",
            unlinked=None if self.nvlink else f"{self.name} has no NVLink",
            capability=self.capability,
            num_devices=count,
            elsewhere=True,
        )


GPUS = {
    "h100": GPU("NVIDIA H100", (9, 0), 84_933_000_000),
    "h100-pcie": GPU("NVIDIA H100 PCIe", (9, 0), 84_933_000_000, nvlink=False),
    "h200": GPU("NVIDIA H200", (9, 0), 150_109_000_000),
    "b200": GPU("NVIDIA B200", (10, 0), 191_448_000_000),
}


def parse_hardware(text: str) -> Machine:
    """``h200`` or ``8xH200``: a host with that number of GPUs.

    Raises:
        ConfigError: no such GPU.
    """
    found = re.fullmatch(r"(?:(\d+)\s*x\s*)?([a-z][\w-]*)", text.strip().lower())
    if found is None or found[2] not in GPUS or found[1] == "0":
        raise ConfigError(f"--hardware {text}: must be one of {', '.join(GPUS)}, or a number of them, as in 8xH200")
    return GPUS[found[2]].machine(int(found[1]) if found[1] else None)
