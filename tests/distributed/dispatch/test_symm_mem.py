"""Dispatch through peers' memory: the kernels, interpreted, over real processes, against the dense formula in float64;
refusals, and the end of a step within its time limit if a peer has died."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from dataclasses import replace
from importlib.util import find_spec
from pathlib import Path

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from moe_engine.kernels.device import Device, cpu_device
from moe_engine.kernels.symm_mem.regions import ALIGNMENT, Regions
from moe_engine.parallel.dispatch import symm_mem
from moe_engine.parallel.dispatch.protocol import DispatchShape
from moe_engine.parallel.dispatch.tables import Place, choose
from tests.distributed.dispatch import symm_worlds as worlds
from tests.distributed.dispatch.host_symm_mem import INTERPRETED
from tests.distributed.dispatch.ranks import Ranks
from tests.distributed.dispatch.routings import MAX_TOKENS, Routing, routing_of, routings
from tests.distributed.dispatch.test_dispatch import EXAMPLES, check
from tests.distributed.dispatch.worlds import Outcome, Setup
from tests.examples import examples
from tests.waiting import until

pytestmark = [pytest.mark.skipif(find_spec("triton") is None, reason="needs triton"), pytest.mark.drawn(15)]

GPU = Device("cuda", "an H200", (9, 0))

# more than a tile of numbers, not a power of two; FP8 in whole blocks
PLAIN = Setup("symm_mem", "low_latency", "float32", hidden=1040)
SETUPS = (
    PLAIN,
    replace(PLAIN, dtype="bfloat16"),
    replace(PLAIN, dtype="bfloat16", fp8=True, hidden=1152),
    replace(PLAIN, dtype="float32", fp8=True, hidden=128),
    replace(PLAIN, dtype="bfloat16", fp8=True, hidden=1152, rows=True),
    replace(PLAIN, dtype="bfloat16", fp8=True, hidden=1152, rows=True, aligned=True),
)


@pytest.fixture(scope="module")
def two() -> Iterator[Ranks]:
    with Ranks(2, environment=INTERPRETED) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def three() -> Iterator[Ranks]:
    with Ranks(3, environment=INTERPRETED) as ranks:
        yield ranks


@pytest.fixture(scope="module")
def four() -> Iterator[Ranks]:
    with Ranks(4, environment=INTERPRETED) as ranks:
        yield ranks


def check_all(setup: Setup, routings: list[Routing], of_ranks: list[list[Outcome]]) -> None:
    for number, routing in enumerate(routings):
        check(setup, routing, [outcomes[number] for outcomes in of_ranks])


def drawn(seed: int, kind: str = "uniform", sizes: tuple[int, ...] = (3, 2)) -> Routing:
    return routing_of(kind, sizes, 4, 2, seed)


TOP_12 = routing_of("half_dropped", (6, 5), 16, 12)
"""LongCat's choices, with -1 for zero experts."""


@settings(EXAMPLES, max_examples=examples(3))
@given(routing=routings(2, [(1, 1), (2, 3), (3, 2)]), setup=st.sampled_from(SETUPS))
@example(drawn(5), SETUPS[-1])
@example(TOP_12, SETUPS[2])
def test_any_routing_on_two_ranks(two: Ranks, routing: Routing, setup: Setup) -> None:
    check_all(setup, [routing], two.call(worlds.run_routings, setup, [routing], timeout_s=60))


@settings(EXAMPLES, max_examples=examples(2))
@given(routing=routings(3, [(2, 3), (3, 2)]), setup=st.sampled_from(SETUPS[1:3]))
def test_any_routing_on_three_ranks(three: Ranks, routing: Routing, setup: Setup) -> None:
    """An odd number of ranks: unused lanes, and tables of odd width."""
    check_all(setup, [routing], three.call(worlds.run_routings, setup, [routing], timeout_s=60))


@settings(EXAMPLES, max_examples=examples(2))
@given(routing=routings(4, [(1, 1), (2, 3)]), setup=st.sampled_from(SETUPS[1:3]))
def test_any_routing_on_four_ranks(four: Ranks, routing: Routing, setup: Setup) -> None:
    check_all(setup, [routing], four.call(worlds.run_routings, setup, [routing], timeout_s=60))


SHUFFLED = (
    replace(PLAIN, backend="nvshmem", hidden=128),
    replace(PLAIN, backend="nvshmem", hidden=128, dtype="bfloat16"),
    replace(PLAIN, backend="nvshmem", hidden=256, dtype="bfloat16", fp8=True),
    replace(PLAIN, backend="nvshmem", hidden=256, dtype="bfloat16", fp8=True, rows=True),
)


@settings(EXAMPLES, max_examples=examples(3))
@given(routing=routings(2, [(1, 1), (2, 3), (3, 2)]), setup=st.sampled_from(SHUFFLED))
@example(drawn(6), SHUFFLED[-1])
@example(TOP_12, SHUFFLED[2])
def test_any_routing_through_nvshmem(two: Ranks, routing: Routing, setup: Setup) -> None:
    check_all(setup, [routing], two.call(worlds.run_routings, setup, [routing], timeout_s=60))


@settings(EXAMPLES, max_examples=4)
@given(routing=routings(2, [(1, 1), (2, 3), (3, 2)]), setup=st.sampled_from(SHUFFLED))
@example(drawn(6), SHUFFLED[-1])
@example(TOP_12, SHUFFLED[2])
def test_any_routing_through_the_python_package(two: Ranks, routing: Routing, setup: Setup) -> None:
    setup = replace(setup, library="nvshmem4py", as_device=True)
    check_all(setup, [routing], two.call(worlds.run_routings, setup, [routing], timeout_s=60))


@pytest.mark.parametrize(
    "setup", [SETUPS[1], SHUFFLED[2], replace(SHUFFLED[1], library="nvshmem4py")], ids=lambda s: s.library or s.backend
)
@pytest.mark.parametrize("newest_first", [False, True])
def test_two_results_may_be_alive(two: Ranks, setup: Setup, newest_first: bool) -> None:
    first, second = drawn(1), drawn(2, sizes=(0, 4))
    of_ranks = two.call(worlds.run_live, setup, first, second, newest_first, timeout_s=60)
    check_all(setup, [first, second], [list(outcomes) for outcomes in of_ranks])


def test_modes_take_turns(two: Ranks) -> None:
    """Prefill uses all_to_all and does not touch peers' memory."""
    routing = drawn(3)
    for phase in ("prefill", "decode", "prefill"):
        check_all(PLAIN, [routing], two.call(worlds.run_routings, PLAIN, [routing], phase, timeout_s=60))


def test_a_slot_is_used_again_and_again(two: Ranks) -> None:
    """Epochs instead of resets: replays of one graph, with new choices and sometimes an idle rank."""
    setup = replace(PLAIN, hidden=16)
    steps = [drawn(seed, sizes=((seed * 5) % 4, (seed * 3) % 4)) for seed in range(10)]
    of_ranks = two.call(worlds.replay, setup, steps, timeout_s=60)
    for number, routing in enumerate(steps):
        for rank in range(2):
            x, _, weights = routing.of(rank, 16, torch.float32)
            outcome = of_ranks[rank][number]
            torch.testing.assert_close(outcome.out, x * weights.sum(1, keepdim=True), rtol=1e-5, atol=1e-6)
        assert [n for outcomes in of_ranks for n in outcomes[number].rows_of_experts] == routing.rows_of_experts()


def test_what_does_not_fit_is_left_out(two: Ranks) -> None:
    """Low latency does not check ids: an expert named several times gets at most its capacity, and no byte beyond is
    written."""
    room = 2 * MAX_TOKENS
    found = two.call(worlds.overflow, replace(PLAIN, hidden=16), timeout_s=60)
    assert [counts for counts, _, _ in found] == [[0, room], [0, 0]]
    choices_sent = torch.cat([(out / x).round() for _, x, out in found])  # of every token, for each of its numbers
    assert choices_sent.sum(0).tolist() == [room] * 16


def test_a_peer_that_died_is_an_error_within_the_bound(tmp_path: Path) -> None:
    going = tmp_path / "going"
    with Ranks(2, environment=INTERPRETED) as ranks:
        ranks.start(worlds.run_until_lost, 3.0, str(going))
        until(going.exists)
        os.kill(ranks.pid(1), signal.SIGKILL)
        text = ranks.finish(60, expect_dead=(1,))[0]  # raises if a rank hangs
    assert "ranks [1] did not arrive within 3 s" in text


@pytest.mark.parametrize("fp8", [False, True])
@pytest.mark.parametrize("num_ranks", [2, 3, 8])
def test_regions_are_aligned_and_apart(num_ranks: int, fp8: bool) -> None:
    regions = Regions(num_ranks, 3, 5, 2, 384, 2, fp8)
    one, two = regions.slot(0), regions.slot(1)
    begins = [*one.flags, one.sizes, one.ids, one.weights, one.rows, one.scales, one.returned, one.end]
    assert begins == sorted(begins) and all(begin % ALIGNMENT == 0 for begin in begins)
    elements, choices = 5 * num_ranks * 384, 5 * num_ranks * 2
    sizes = [8 * num_ranks] * 2 + [4 * num_ranks, 4 * choices, 4 * choices]
    sizes += [elements * (1 if fp8 else 2), elements // 128 * 4 * fp8, elements * 2]
    assert all(end - begin >= size for begin, end, size in zip(begins[:-1], begins[1:], sizes, strict=True))
    assert two.flags[0] == one.end and regions.num_bytes(2) == two.end == 2 * one.end


def test_why_not_on_other_devices_and_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    assert "the device is cpu" in (symm_mem.why_not(cpu_device(), 1) or "")
    assert "2 nodes (use nvshmem)" in (symm_mem.why_not(GPU, 2) or "")
    assert symm_mem.why_not(GPU, 1) is None
    with pytest.raises(ValueError, match="there is only one rank"):
        choose(Place(GPU, 1), "symm_mem")
    with pytest.raises(ValueError, match="GPUs 0 and 1 are not linked"):
        choose(Place(GPU, 8, unlinked="GPUs 0 and 1 are not linked"), "symm_mem")
    assert choose(Place(GPU, 8)).row.name == choose(Place(GPU, 8), "symm_mem").row.name == "symm_mem"
    assert choose(Place(GPU, 8, unlinked="they are not")).row.name == "all_to_all"
    monkeypatch.setattr(symm_mem.availability, "_torch_folder", Path)
    assert "no symmetric memory" in (symm_mem.why_not(GPU, 1) or "")


def test_why_not_nvshmem(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    assert "the device is cpu" in (symm_mem.why_not_nvshmem("cpu", 4) or "")
    monkeypatch.setattr(symm_mem.availability, "find_spec", lambda name: None)
    assert "at most 16 ranks; there are 17" in (symm_mem.why_not_nvshmem("cuda", 17) or "")
    few, many = Place(GPU, 16, 2, num_experts=256), Place(GPU, 16, 2, num_experts=512)  # LongCat-Flash: 512
    monkeypatch.setattr(symm_mem.availability, "_torch_folder", lambda: tmp_path)
    assert "built without NVSHMEM" in choose(few).refused["nvshmem"]
    assert "at most 16 experts per rank; there are 512 on 16 ranks" in choose(many).refused["nvshmem"]
    assert "built without NVSHMEM" in (symm_mem.why_not_nvshmem("cuda", 16) or "")
    (tmp_path / "lib").mkdir()
    (tmp_path / "lib" / "libtorch_nvshmem.so").touch()
    monkeypatch.setattr(symm_mem.availability, "find_library", lambda name: None)
    assert "NVSHMEM is not installed" in (symm_mem.why_not_nvshmem("cuda", 16) or "")
    monkeypatch.setattr(symm_mem.availability, "find_library", lambda name: "libnvshmem_host.so.3")
    assert symm_mem.why_not_nvshmem("cuda", 16) is None
    monkeypatch.setattr(symm_mem.availability, "find_spec", lambda name: name)
    assert symm_mem.why_not_nvshmem("cuda", 64, 2048) is None  # the Python package has no such limits


GOOD = DispatchShape(128, 8, 8, 7168, 128, torch.bfloat16, fp8=True)


@pytest.mark.parametrize(
    ("module", "changed", "reason"),
    [
        ("dispatcher", {"dtype": torch.float64}, "not torch.float64"),
        ("dispatcher", {"hidden": 1028, "fp8": False}, "multiple of 16 bytes"),
        ("dispatcher", {"max_tokens": 1 << 25}, "32-bit"),
        ("nvshmem", {"num_ranks": 32}, "32 ranks; at most 16"),
        ("nvshmem", {"num_ranks": 4}, "32 experts per rank; at most 16"),
        ("nvshmem", {"hidden": 1028, "fp8": False}, "multiple of 16 bytes"),
    ],
)
def test_dispatchers_say_what_they_cannot_serve(two: Ranks, module: str, changed: dict, reason: str) -> None:
    shapes = [GOOD, replace(GOOD, **changed)]  # type: ignore[arg-type]
    for found in two.call(worlds.refusals, module, shapes):  # on the ranks, because these modules import Triton
        assert found[0] is None and reason in found[1]
