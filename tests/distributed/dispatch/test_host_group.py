"""Sums and gathers through memory that CPU ranks of one host share."""

from __future__ import annotations

import os
import random
from pathlib import Path
from types import SimpleNamespace

import pytest
import torch

from moe_engine.parallel import host_support, shared_segment
from moe_engine.parallel.context import join
from moe_engine.parallel.topology import Topology
from tests.distributed.dispatch.host_worlds import fall_back, refusal, run_at_random, sum_until_alone
from tests.distributed.dispatch.ranks import Ranks, run_ranks


@pytest.mark.parametrize("size", [2, 3, 4])
def test_operations_of_any_size_equal_the_formula(size: int) -> None:
    """Regions are small, so that tensors need several turns; a sum has the same bits on every rank."""
    seed = random.randrange(2**31)
    results = run_ranks(size, run_at_random, seed, 150, 4096)
    for result in results:
        assert result == results[0] and len(result) == 1, (seed, result)


def test_without_memory_to_share_ranks_use_the_plain_group() -> None:
    assert run_ranks(3, fall_back) == [("DistributedGroup", 3.0)] * 3


def test_without_memory_to_share_a_dispatcher_refuses_the_launch_on_every_rank() -> None:
    """A ConfigError: exit code 2 and one line."""
    ((name, text),) = set(run_ranks(3, refusal))
    assert name == "ConfigError"
    assert text.endswith(f" bytes in {host_support.FOLDER} unavailable: 0 are free; enlarge it")


def test_a_folder_without_room_is_refused_with_the_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Else a rank would be killed when it first touches a page that has no memory."""
    monkeypatch.setattr(host_support, "FOLDER", str(tmp_path))
    killed = tmp_path / f"{host_support.PREFIX}killed"
    killed.touch()  # no process locks it
    monkeypatch.setattr(shared_segment.os, "fstatvfs", lambda file: SimpleNamespace(f_bavail=512, f_frsize=4096))
    file, path = shared_segment._new_file(2**21, False)
    assert not killed.exists() and os.listdir(tmp_path) == [os.path.basename(path)]
    host_support.remove_abandoned()
    assert os.fstat(file).st_size == 2**21
    os.close(file)
    os.unlink(path)
    for reserve in (False, True):
        with pytest.raises(OSError, match=r"2097152 are free; enlarge it by at least 3 MiB \(containers: --shm-size"):
            shared_segment._new_file(2**21 + 1, reserve)
    assert not list(tmp_path.iterdir())


def test_a_dead_peer_is_named_at_once() -> None:
    with Ranks(3) as ranks:
        ranks.start(sum_until_alone, 1)
        results = ranks.finish(timeout_s=50.0, expect_dead=(1,))
    for rank in (0, 2):
        assert "all_reduce through shared memory" in results[rank] and "ranks [1] have died" in results[rank]


@pytest.mark.parametrize(("num_nodes", "share_memory", "kinds"), [
    (1, True, {"world": "HostGroup", "attn_tp": "HostGroup", "ep": "DistributedGroup"}),
    (2, True, {"world": "DistributedGroup", "attn_tp": "HostGroup", "ep": "DistributedGroup"}),
    (1, False, {"world": "DistributedGroup", "attn_tp": "DistributedGroup", "ep": "DistributedGroup"}),
])  # fmt: skip
def test_groups_inside_a_host_share_memory(num_nodes: int, share_memory: bool, kinds: dict[str, str]) -> None:
    """Groups of dispatchers stay torch's: backends have their own transport."""
    topology = Topology(tp_size=4, attn_dp_size=2, ep_size=4, num_nodes=num_nodes)
    for found in run_ranks(4, kinds_of_groups, topology, share_memory):
        assert found == kinds


def kinds_of_groups(rank: int, topology: Topology, share_memory: bool) -> dict[str, str]:
    context = join(topology, rank, 60.0, share_memory=share_memory)
    assert float(context.world.all_reduce(torch.ones(1))[0]) == topology.tp_size
    return {name: type(getattr(context, name)).__name__ for name in ("world", "attn_tp", "ep")}
