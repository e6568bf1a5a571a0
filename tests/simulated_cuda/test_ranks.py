"""Ranks on simulated GPUs: their operations are launches with NCCL's conditions, and an engine of two ranks gives the
tokens of one rank on the CPU."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.distributed.dispatch.ranks import Ranks
from tests.examples import FACTOR
from tests.fork_server import ForkServer
from tests.models.checkpoints import make_checkpoint
from tests.simulated_cuda import rank_calls
from tests.simulated_cuda.install import COUNT
from tests.speculation.agreeing import agreeing_checkpoint

SECONDS = 240.0
RARE = ("four ranks", "eight ranks", "two ranks, NCCL", "two ranks, dispatch, weights in host memory, drafts")
"""Engines that the exhaustive run has."""


@pytest.fixture(scope="module")
def ranks() -> Iterator[Ranks]:
    with Ranks(2, environment={COUNT: "2"}) as made:
        yield made


def test_operations(ranks: Ranks) -> None:
    seed = random.randrange(1 << 20)
    found = ranks.call(rank_calls.collectives, seed, timeout_s=SECONDS)
    brought = torch.stack([rank_calls.drawn(rank, seed, 2, rank_calls.ROWS, rank_calls.WIDTH) for rank in range(2)])
    for rank, (results, waits) in enumerate(found):
        assert waits == []
        expected = {
            "all_gather": brought,
            "reduce_scatter": brought.sum(0)[rank],
            "all_reduce": brought.sum(0),
            "broadcast": brought[1],
            "all_to_all": brought[:, rank].to(torch.float8_e4m3fn).float(),
            "uneven": torch.cat([brought[0, 0, 2:], brought[1, 0]]) if rank else brought[0, 0, :2],
        }
        assert expected.keys() == results.keys()
        for name, value in expected.items():
            torch.testing.assert_close(results[name].float(), value, msg=lambda text, name=name: f"{name}: {text}")


def test_refusals(ranks: Ranks) -> None:
    wanted = ["communicator", "device type cpu", "contiguous", "not supported", "Float8"]
    for errors in ranks.call(rank_calls.refusals, timeout_s=SECONDS):
        assert len(errors) == len(wanted)
        for text, part in zip(errors, wanted):
            assert part in text


def test_graphs_of_two_streams_repeat_what_ranks_exchange(ranks: Ranks) -> None:
    seeds = random.sample(range(1 << 20), 3)
    found = ranks.call(rank_calls.replayed, seeds, timeout_s=SECONDS)
    for at, seed in enumerate(seeds):
        brought = torch.stack([rank_calls.drawn(rank, seed, 2, rank_calls.WIDTH) for rank in range(2)])
        for rank in range(2):
            torch.testing.assert_close(found[rank][at], 2 * brought.sum(0) + brought[:, rank])


@pytest.mark.drawn(1)
def test_exchanges_through_symmetric_memory() -> None:
    with Ranks(2) as ranks:
        kinds = (False, True) if FACTOR > 1 else (True,)
        for found in ranks.call(rank_calls.exchanged, kinds, timeout_s=SECONDS):
            for fp8, errors in zip(kinds, found, strict=True):
                assert max(errors) < (0.06 if fp8 else 0.02)


@pytest.mark.drawn(1)
def test_sums_through_symmetric_memory() -> None:
    with Ranks(2) as ranks:
        for two_shot in (False, True):
            for errors in ranks.call(rank_calls.summed, two_shot, timeout_s=SECONDS):
                assert len(errors) == 4 and max(errors) < 0.02


def test_streams_must_be_waited_for(ranks: Ranks) -> None:
    for early, waited, forked in ranks.call(rank_calls.not_waited_for, timeout_s=SECONDS):
        assert early.startswith("HazardError") and waited == "nothing" and "unjoined" in forked


def test_a_lane_keeps_what_it_reads(ranks: Ranks) -> None:
    for carelessly, in_lane in ranks.call(rank_calls.given_back, timeout_s=SECONDS):
        assert "given back" in carelessly and in_lane == "nothing"


def test_a_prompt_that_travels_waits_three_times(ranks: Ranks) -> None:
    """Three waits: for the check, for the sizes of the messages, and for the number of rows."""
    for found, expected, waits in ranks.call(rank_calls.dispatched, timeout_s=SECONDS):
        torch.testing.assert_close(found, expected)
        assert len(waits) == 3, waits


def make_model(folder: Path, num_layers: int, drafts: bool) -> None:
    """Creates the checkpoint of an engine in this process, which has imported transformers."""
    seed, sizes = random.randrange(1 << 20), {"num_attention_heads": 8, "num_hidden_layers": num_layers}
    if drafts:
        agreeing_checkpoint("deepseek_v3", folder / "model", seed, num_mtp_layers=1, **sizes)
    else:
        make_checkpoint("deepseek_v3", folder / "model", seed, **sizes)


def run_program(
    server: ForkServer, name: str, folder: Path, *arguments: str, num_layers: int = 2, drafts: bool = False
) -> Any:
    """The JSON output of a program of this folder, with a checkpoint in `folder` and a seed."""
    make_model(folder, num_layers, drafts)
    command = [f"tests.simulated_cuda.{name}", str(folder), str(random.randrange(2**32)), *arguments]
    code, out, errors = server.run(command, folder, 250.0)
    assert code == 0, errors[-3000:]
    return json.loads(out.splitlines()[-1])


@pytest.mark.drawn(1)
def test_an_engine_of_two(device_server: ForkServer, tmp_path: Path) -> None:
    """Attention groups, dispatch concurrent with computation, experts that move; then one of the two ranks is
    killed."""
    found = run_program(device_server, "engine_of_two", tmp_path)
    assert found["differences"] == {}
    assert found["problems"] == []
    assert found["rebalances"] > 0
    assert "TP1" in found["fate"]


def test_a_rank_starts_on_its_own_device_and_connects_before_a_library_looks(ranks: Ranks) -> None:
    for rank, (current, found) in enumerate(ranks.call(rank_calls.started, timeout_s=SECONDS)):
        assert current == rank
        assert found[:2] == ["null", "live"] and "communicator of the current device" in found[2]


@pytest.mark.drawn(1)
@pytest.mark.parametrize(
    "case",
    [
        "two ranks, graphs",
        "two ranks, weights in host memory",
        "two ranks, dispatch",
        "two ranks, drafts",
        "two ranks, dispatch, drafts",
        *(pytest.param(x, marks=pytest.mark.exhaustive) for x in RARE),
    ],
)
def test_a_tensor_parallel_engine(case: str, device_server: ForkServer, tmp_path: Path) -> None:
    """Sums by the custom all-reduce, replayed and eager, or by NCCL if it is disabled; layers whose weights wait in
    host memory (--cpu-offload-gb); attention groups whose tokens travel through symmetric memory; captured drafts."""
    layers = 4 if "host memory" in case else 2
    drafts = "drafts" in case
    found = run_program(device_server, "tensor_parallel_engine", tmp_path, case, num_layers=layers, drafts=drafts)
    assert found["differences"] == {} and found["offloaded"] == (layers if layers > 2 else 0)
    waiting = {"receive_kernel", "sum_kernel"} if "dispatch" in case else {"one_shot_kernel"}
    launched = set(found["launched"])
    by_nccl = "NCCL" in case or "eight ranks" in case
    assert launched.isdisjoint(waiting) if by_nccl else launched >= waiting, launched
