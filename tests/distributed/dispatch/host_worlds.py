"""Functions that ranks run in the tests of `HostGroup`."""

from __future__ import annotations

import os
import random
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from moe_engine.parallel import host_group, shared_segment
from moe_engine.parallel.collectives import DistributedGroup, PeerLost
from moe_engine.parallel.host_group import HostGroup, through_shared_memory

TIMEOUT_S = 60.0
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.int64)


def drawn(seed: int, rank: int, shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """The random input of a rank; every rank can generate the inputs of the others."""
    generator = torch.Generator().manual_seed(seed * 64 + rank)
    if dtype.is_floating_point:
        return torch.randn(shape, generator=generator, dtype=torch.float64).to(dtype)
    return torch.randint(-1000, 1000, shape, generator=generator).to(dtype)


def run_at_random(rank: int, seed: int, count: int, region: int) -> list[tuple[str, str]]:
    """`count` operations of random sizes against the formula; returns those that failed, and (`bits`, sum) of all."""
    host_group.REGION = region
    group = HostGroup(DistributedGroup(dist.group.WORLD, TIMEOUT_S))
    rng, bits = random.Random(seed), 0
    found: list[tuple[str, str]] = []
    for number in range(count):
        dtype = rng.choice(DTYPES)
        length = rng.choice((0, 1, rng.randrange(1, 200), rng.randrange(1, 4000)))
        operation = rng.choice((_all_reduce, _all_gather, _reduce_scatter, _all_to_all))
        made, want = operation(group, rng, seed + number, length, dtype)
        close = made.shape == want.shape and torch.allclose(made.double(), want.double(), rtol=1e-2, atol=2e-2)
        exact = not dtype.is_floating_point or operation in (_all_gather, _all_to_all)
        if not (torch.equal(made, want.to(dtype)) if exact else close):
            found.append((operation.__name__, f"{dtype} {length}"))
        if operation is _all_reduce:
            bits += int(made.contiguous().view(torch.uint8).long().sum()) * (number + 1)
    group.barrier()
    return [*found, ("bits", str(bits))]


def _all_reduce(group: HostGroup, rng: random.Random, seed: int, length: int, dtype: torch.dtype) -> Any:
    brought = [drawn(seed, rank, (length, 3), dtype) for rank in range(group.size)]
    want = sum(x.double() for x in brought)
    return group.all_reduce(brought[group.rank].clone()), want


def _all_gather(group: HostGroup, rng: random.Random, seed: int, length: int, dtype: torch.dtype) -> Any:
    brought = [drawn(seed, rank, (length, 2), dtype) for rank in range(group.size)]
    mine = brought[group.rank]
    return group.all_gather(mine.T.contiguous().T if rng.random() < 0.5 else mine), torch.stack(brought)


def _reduce_scatter(group: HostGroup, rng: random.Random, seed: int, length: int, dtype: torch.dtype) -> Any:
    brought = [drawn(seed, rank, (group.size, length, 2), dtype) for rank in range(group.size)]
    return group.reduce_scatter(brought[group.rank]), sum(x.double() for x in brought)[group.rank]  # type: ignore[index]


def _all_to_all(group: HostGroup, rng: random.Random, seed: int, length: int, dtype: torch.dtype) -> Any:
    size, rank = group.size, group.rank
    rows = [[rng.randrange(length + 1) for _ in range(size)] for _ in range(size)]  # sender, receiver
    brought = [drawn(seed, source, (sum(rows[source]), 2), dtype) for source in range(size)]
    received = [rows[source][rank] for source in range(size)]
    out = torch.empty(sum(received), 2, dtype=dtype)
    group.all_to_all(out, brought[rank], received, rows[rank])
    return out, torch.cat([x.split(rows[source])[rank] for source, x in enumerate(brought)])


def fall_back(rank: int) -> tuple[str, float]:
    """The group that ranks use if one of them has no shared memory, and a sum through this group."""
    _refuse_memory(rank)
    group = through_shared_memory(DistributedGroup(dist.group.WORLD, TIMEOUT_S))
    return type(group).__name__, float(group.all_reduce(torch.ones(1))[0])


def refusal(rank: int) -> tuple[str, str]:
    """The error of a segment that a dispatcher needs, if there is no shared memory."""
    _refuse_memory(rank)
    try:
        shared_segment.SharedSegment(DistributedGroup(dist.group.WORLD, TIMEOUT_S), 4096, num_flags=1)
    except Exception as error:
        return type(error).__name__, str(error)
    return "", "no error"


def _refuse_memory(rank: int) -> None:
    def refuse(num_bytes: int, reserve: bool) -> tuple[int, str]:
        raise OSError(28, "0 are free; enlarge it")

    if rank == 0:  # the rank that creates the file
        shared_segment._new_file = refuse


def sum_until_alone(rank: int, victim: int) -> str:
    """Endless sums; the victim exits after some. Returns the error of the other ranks."""
    group = HostGroup(DistributedGroup(dist.group.WORLD, TIMEOUT_S))
    x = torch.ones(64)
    try:
        for number in range(10**9):
            if rank == victim and number == 20:
                os._exit(1)
            group.all_reduce(x)
    except PeerLost as error:
        return str(error)
    raise AssertionError
