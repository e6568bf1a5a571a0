"""A node of a drill that spans two: ``python -m tests.distributed.ranks.node CHECKPOINT HOST:PORT FLAG PHASE``."""

from __future__ import annotations

import sys
from functools import partial
from pathlib import Path

from moe_engine import logs
from moe_engine.cluster.node import run_node
from moe_engine.executor.options import RankGroupOptions
from tests.distributed.ranks.drill import config_of, options
from tests.distributed.ranks.held import Hold, meeting_worker


def two_nodes(address: str, node_rank: int, flag: Path, phase: str) -> RankGroupOptions:
    """One rank on each of two nodes; the second blocks in a phase."""
    make_worker = partial(meeting_worker, hold=Hold(1, phase, flag, 3 if phase == "decode" else 1))
    same = {"dtype": "same"}
    return options(2, make_worker, num_nodes=2, node_rank=node_rank, leader_address=address, fingerprint=same)


if __name__ == "__main__":
    logs.setup_logging("info")
    checkpoint, address, flag, phase = sys.argv[1:]
    sys.exit(run_node(config_of(Path(checkpoint)), two_nodes(address, 1, Path(flag), phase)))
