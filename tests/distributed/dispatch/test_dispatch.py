"""combine(dispatch(x)) through toy experts equals the dense formula in float64, for every backend, mode and dtype."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from moe_engine.parallel.dispatch.deepep.generation import LOW_LATENCY_TOP_K
from moe_engine.parallel.dispatch.tables import MODES
from tests.distributed.dispatch.ranks import World
from tests.distributed.dispatch.routings import Routing, expected, routing_of, routings
from tests.distributed.dispatch.worlds import DTYPES, Outcome, Setup, run_interleaved, run_phases, run_routing
from tests.distributed.world_fixture import world_of
from tests.examples import examples

LOCAL_AND_TOP_K = [(1, 1), (2, 3), (4, 8), (3, 2)]
OURS = ("all_to_all", "allgather", "shared_memory")
EXAMPLES = settings(max_examples=examples(4), suppress_health_check=list(HealthCheck), database=None)


def setups_of(backends: tuple[str, ...], num_nodes: int = 1, as_device: bool = False) -> list[Setup]:
    kinds = (("float32", False), ("bfloat16", False), ("bfloat16", True), ("float32", True))
    return [
        Setup(b, m, dtype, fp8, num_nodes=num_nodes, as_device=as_device)
        for b in backends
        for m in MODES
        for dtype, fp8 in kinds
    ]


def small_rooms() -> list[Setup]:
    """Buffers that are too small for most routings, and buffers that are too small for some."""
    return [Setup("all_to_all", "normal", "bfloat16", fp8, room_tokens=n) for n in (1, 3) for fp8 in (False, True)]


def uncompiled() -> list[Setup]:
    """A machine without a compiler."""
    made = [
        Setup(b, m, "bfloat16", m == "normal", compiled=False) for b in ("all_to_all", "shared_memory") for m in MODES
    ]
    made += [Setup("all_to_all", m, "bfloat16", m == "normal", as_device=True, compiled=False) for m in MODES]
    return [*made, Setup("all_to_all", "normal", "float32", room_tokens=1, compiled=False)]


def deepep_setups() -> list[Setup]:
    """The first generation's low latency mode supports few hidden sizes."""
    return [
        Setup("deepep", mode, "bfloat16", fp8, 2048, library=library)
        for library in ("Buffer", "ElasticBuffer")
        for mode in MODES
        for fp8 in (False, True)
    ]


def read_as_rows(setups: list[Setup]) -> list[Setup]:
    """Setups whose tokens are sent in FP8, for experts that read FP8."""
    return [replace(setup, rows=True, as_device=True) for setup in setups if setup.fp8]


world = world_of(2, 3, pytest.param(4, marks=pytest.mark.exhaustive), 8)
four, two = world_of(4), world_of(2)


def check(setup: Setup, routing: Routing, outcomes: list[Outcome]) -> None:
    """Rows are conserved, and every value is within its dtype's rounding of the dense sum."""
    rows = [count for outcome in outcomes for count in outcome.rows_of_experts]
    assert rows == routing.rows_of_experts(), setup
    for rank, outcome in enumerate(outcomes):
        dtype = DTYPES[setup.dtype]
        total, magnitude, fp8_error = expected(routing, rank, setup.hidden, dtype)
        assert outcome.out.shape == total.shape and outcome.out.dtype == dtype, setup
        # bfloat16: an expert's row, a partial sum and the result are rounded, by 1/256 of themselves at most; the
        # collective of allgather rounds the sum after each further rank
        roundings = 1 + len(outcomes) if setup.backend == "allgather" else 3
        share = 1e-5 if setup.dtype == "float32" else roundings / 256
        allowed = magnitude * share + (fp8_error * 1.01 if setup.fp8 else 0)
        error = (outcome.out.double() - total).abs()
        assert bool((error <= allowed + 1e-30).all()), (setup, rank, float((error - allowed).max()))


def check_all(world: World, setups: list[Setup], routing: Routing) -> None:
    of_ranks = world.ranks.call(run_routing, setups, routing)
    for number, setup in enumerate(setups):
        check(setup, routing, [outcomes[number] for outcomes in of_ranks])


@pytest.mark.drawn(4)
def test_any_routing(world: World) -> None:
    @settings(EXAMPLES, max_examples=examples(4 if world.n < 8 else 2))
    @given(routing=routings(world.n, LOCAL_AND_TOP_K))
    def run(routing: Routing) -> None:
        check_all(world, setups_of(OURS), routing)

    run()


@pytest.mark.drawn(4)
def test_any_routing_as_on_devices_and_beyond_rooms(world: World) -> None:
    """GPU forms over CPU ranks; messages larger than their buffers; machines without a compiler."""

    @settings(EXAMPLES, max_examples=examples(3 if world.n < 8 else 2))
    @given(routing=routings(world.n, LOCAL_AND_TOP_K))
    def run(routing: Routing) -> None:
        setups = setups_of(("all_to_all", "allgather"), as_device=True)
        check_all(world, [*setups, *read_as_rows(setups[:8]), *small_rooms(), *uncompiled()], routing)

    run()


@EXAMPLES
@given(routing=routings(4, LOCAL_AND_TOP_K))
def test_any_routing_through_nodes(four: World, routing: Routing) -> None:
    check_all(four, setups_of(("two_hop",), num_nodes=2), routing)
    check_all(four, setups_of(("two_hop",), num_nodes=2, as_device=True)[::3], routing)


@EXAMPLES
@given(routing=routings(2, LOCAL_AND_TOP_K))
def test_any_routing_through_deepep(two: World, routing: Routing) -> None:
    setups = deepep_setups() + read_as_rows(deepep_setups())
    groups = [setup for setup in setups if setup.library != "Buffer" or setup.mode == "normal"]
    check_all(two, setups + [replace(setup, aligned=True) for setup in groups], routing)


@EXAMPLES
@given(routing=routings(2, [(8, LOW_LATENCY_TOP_K), (8, LOW_LATENCY_TOP_K + 1)]))
@example(routing_of("half_dropped", (6, 5), 16, LOW_LATENCY_TOP_K + 1))
def test_many_choices(two: World, routing: Routing) -> None:
    """LongCat's top-12, with -1 for zero experts; the first DeepEP's low latency does not take them."""
    library = deepep_setups() + read_as_rows(deepep_setups())
    if routing.top_k > LOW_LATENCY_TOP_K:
        library = [setup for setup in library if (setup.library, setup.mode) != ("Buffer", "low_latency")]
    check_all(two, library + setups_of(OURS) + setups_of(("all_to_all",), as_device=True), routing)


@EXAMPLES
@given(
    first=routings(2, [(2, 3)]),
    second=routings(2, [(2, 3)]),
    emulated=st.lists(st.sampled_from(deepep_setups()), min_size=2, max_size=2, unique=True),
)
def test_two_results_may_be_alive(two: World, first: Routing, second: Routing, emulated: list[Setup]) -> None:
    as_device = setups_of(("all_to_all",), as_device=True)
    setups = [*setups_of(OURS)[::2], *as_device[::3], *small_rooms()[:1], *uncompiled()[::2], *emulated]
    of_ranks = two.ranks.call(run_interleaved, setups, first, second)
    for number, setup in enumerate(setups):
        check(setup, first, [outcomes[number][0] for outcomes in of_ranks])
        check(setup, second, [outcomes[number][1] for outcomes in of_ranks])


@EXAMPLES
@given(routing=routings(2, [(2, 3)]))
def test_phases_take_turns(two: World, routing: Routing) -> None:
    """The modes of a backend disturb neither each other nor shared memory (DeepEP's first buffer)."""
    for setup in [*setups_of(OURS)[::8], *deepep_setups()[::4]]:
        of_ranks = two.ranks.call(run_phases, setup, routing)
        for turn in zip(*of_ranks):
            check(setup, routing, list(turn))


def test_no_token_anywhere(world: World) -> None:
    routing = Routing(1, 2 * world.n, 3 if world.n > 1 else 1, ((),) * world.n)
    for outcomes in world.ranks.call(run_routing, setups_of(OURS), routing):
        assert all(outcome.out.shape == torch.Size((0, 128)) for outcome in outcomes)
