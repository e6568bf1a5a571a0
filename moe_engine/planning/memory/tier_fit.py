"""Host memory of machines with GPUs: the host-RAM tier of all ranks of a machine must fit into it.

A tier of the default ratio is reduced to a share of the available memory (`--hicache-host-memory-fraction`); a size
that was asked for is refused with the sum.
"""

from __future__ import annotations

import dataclasses
import math

from moe_engine.errors import ConfigError
from moe_engine.planning.memory.ledger import gb
from moe_engine.planning.memory.sizing_input import SizingInput
from moe_engine.planning.memory.tier import tier_host_rows, tier_size

RATIO_STEPS = 1000
"""A reduced ratio is rounded down to these parts."""


def fit_tier(given: SizingInput, num_slots: int) -> tuple[SizingInput, str]:
    """The launch with a tier that fits into host memory, and the reason if it was reduced.

    Raises:
        ConfigError: the tier that was asked for does not fit, or no useful one does.
    """
    needed = sum(row.num_bytes for row in tier_host_rows(given, tier_size(given, num_slots)))
    available, ranks = given.machine.host_bytes, given.parallel.ranks_per_node
    if not needed or available is None:
        return given, ""
    free = available // ranks - given.offload.host_bytes
    of_each = f"{gb(available)} of host memory are available" + (f" for {ranks} ranks" if ranks > 1 else "")
    if given.tier_fraction is None:
        if needed <= free:
            return given, ""
        flag = "--hicache-size" if given.tier_bytes else "--hicache-ratio"
        raise ConfigError(
            f"{flag}: the host-RAM tier needs {gb(needed)} on each rank, {gb(needed * ranks)} together, and {of_each}; "
            "use a smaller value, or leave it out"
        )
    budget = int(given.tier_fraction * free)
    if needed <= budget:
        return given, ""
    ratio = math.floor(given.tier_ratio * max(budget, 0) / needed * RATIO_STEPS) / RATIO_STEPS
    reduced = dataclasses.replace(given, tier_ratio=ratio)
    if not tier_size(reduced, num_slots).tokens:
        raise ConfigError(
            f"--enable-hierarchical-cache: {of_each}, which is too little for a host-RAM tier; leave the flag out"
        )
    return reduced, f"{given.tier_fraction:g} of the available host memory: {of_each}"
