"""The all-reduce of a launch: custom kernels over symmetric memory, or NCCL. Imports neither torch nor Triton."""

from __future__ import annotations

from dataclasses import dataclass

from moe_engine.kernels.device import Device
from moe_engine.kernels.symm_mem import all_reduce_layout
from moe_engine.parallel.dispatch import symm_mem
from moe_engine.parallel.topology import Topology

CUSTOM = "symm_mem"
NCCL = "nccl"


@dataclass(frozen=True)
class AllReduceChoice:
    """`name`: CUSTOM or NCCL; all ranks use the same. `disabled`: CUSTOM could run but was disabled by the flag."""

    name: str
    reason: str
    disabled: bool = False

    @property
    def is_custom(self) -> bool:
        return self.name == CUSTOM


NONE = AllReduceChoice(NCCL, "a model on one rank has no all-reduce")


def why_not(device: Device, topology: Topology, hidden: int, unlinked: str | None) -> str | None:
    """The reason why the custom all-reduce cannot serve these ranks, or None.

    Args:
        unlinked: of `dispatch.tables.Place`.
    """
    if topology.tp_size == 1:
        return NONE.reason
    if topology.attn_dp_size > 1:
        return "layers with DP attention gather and scatter"
    return (
        symm_mem.why_not(device, topology.num_nodes)
        or unlinked
        or all_reduce_layout.why_not(topology.tp_size, hidden, 2)
    )


def choose(
    device: Device, topology: Topology, hidden: int, unlinked: str | None = None, disabled: bool = False
) -> AllReduceChoice:
    """The most preferred all-reduce that can run. `disabled`: --disable-custom-all-reduce."""
    reason = why_not(device, topology, hidden, unlinked)
    if reason is not None:
        return AllReduceChoice(NCCL, reason)
    if disabled:
        return AllReduceChoice(NCCL, "--disable-custom-all-reduce", disabled=True)
    limit = all_reduce_layout.MAX_BYTES >> 20
    return AllReduceChoice(CUSTOM, f"the GPUs reach each other's memory; NCCL above {limit} MiB")
