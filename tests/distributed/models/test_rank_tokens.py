"""Token ids of the tokens that a rank routes, for layers that choose experts by them: exchanged once a step."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from moe_engine.models.batch import ForwardBatch
from moe_engine.models.layers.sharded_layer import with_sizes
from moe_engine.parallel.context import join
from moe_engine.parallel.step_sizes import StepSizes
from moe_engine.parallel.topology import Topology
from tests.distributed.dispatch.ranks import World
from tests.distributed.world_fixture import world_of

world = world_of(4)
IDS = {1: [[7, 3, 5, 9, 1, 0, 2]], 2: [[7, 3, 5], [4, 8, 6, 2]], 4: [[1, 2], [], [3, 4, 5, 6, 7], [8]]}
"""Token ids of each attention group by their number."""


def rank_ids(rank: int, topology: Topology, travels: bool) -> tuple[list[int], list[int]]:
    """Ids of the tokens that a rank routes, and which are real; a group's last token is padding."""
    parallel = join(topology, rank, 20.0)
    ids = torch.tensor(IDS[topology.attn_dp_size][parallel.attn_dp_rank], dtype=torch.int64)
    real = torch.ones(len(ids), dtype=torch.int32)
    real[-1:] = 0
    if travels:
        dispatcher: Any = object()
        parallel = replace(parallel, dispatcher=dispatcher)
    sizes = StepSizes.exchange(parallel, parallel.world, len(ids), 0, True)
    batch = replace(ForwardBatch.nothing([], sizes, torch.device("cpu")), input_ids=ids, positions=ids, real=real)
    found = with_sizes(batch, parallel, hashes=True).routed
    return found.ids.tolist(), [] if found.real is None else found.real.tolist()


@pytest.mark.parametrize("groups", IDS)
def test_ids_of_all_groups(world: World, groups: int) -> None:
    """Without a dispatcher each rank routes the tokens of all groups."""
    every = [token for ids in IDS[groups] for token in ids]
    for ids, real in world.ranks.call(rank_ids, Topology(4, attn_dp_size=groups), False):
        assert ids == every and real == ([1] * (len(every) - 1) + [0] if groups == 1 else [])


@pytest.mark.parametrize("groups", IDS)
def test_ids_of_the_ranks_share(world: World, groups: int) -> None:
    """With a dispatcher a rank routes its share of its group's tokens."""
    shares = world.ranks.call(rank_ids, Topology(4, attn_dp_size=groups, ep_size=4), True)
    size = 4 // groups
    for group, every in enumerate(IDS[groups]):
        own = shares[group * size : (group + 1) * size]
        assert [token for ids, _ in own for token in ids] == every
        assert [each for _, real in own for each in real] == ([1] * (len(every) - 1) + [0])[: len(every)]
        assert max(len(ids) for ids, _ in own) - min(len(ids) for ids, _ in own) <= 1
