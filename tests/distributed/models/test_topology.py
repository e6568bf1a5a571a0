"""Rank maps against the usual formulas, groups that partition the world, and errors with flags and fixes."""

from __future__ import annotations

import subprocess
import sys
from functools import partial

import pytest
from hypothesis import given
from hypothesis import strategies as st

from moe_engine.errors import ConfigError
from moe_engine.parallel.topology import ModelWidths, Topology

V3 = ModelWidths(128, (), dense_width=18432, num_experts=256, expert_width=2048, shared_width=2048)


@st.composite
def topologies(draw: st.DrawFn) -> Topology:
    tp = draw(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 16, 32]))
    divisors = st.sampled_from([n for n in range(1, tp + 1) if tp % n == 0])
    return Topology(tp, draw(divisors), draw(divisors), num_nodes=draw(divisors))


def moe_tp_rank(topology: Topology, rank: int) -> int:
    """Index of a rank among the ranks that shard the same experts."""
    return rank % topology.moe_tp_size


@given(topology=topologies())
def test_every_rank_has_one_place(topology: Topology) -> None:
    t, ranks = topology, list(range(topology.tp_size))
    assert t.attn_tp_size * t.attn_dp_size == t.moe_tp_size * t.ep_size == t.tp_size
    assert [t.attn_dp_rank(r) * t.attn_tp_size + t.attn_tp_rank(r) for r in ranks] == ranks
    assert [t.ep_rank(r) * t.moe_tp_size + moe_tp_rank(t, r) for r in ranks] == ranks
    for groups in (t.attn_tp_groups(), t.moe_tp_groups(), t.ep_groups(), t.node_groups(), t.rail_groups()):
        assert sorted(rank for group in groups for rank in group) == ranks
    for groups, rank_in, size in (
        (t.attn_tp_groups(), t.attn_tp_rank, t.attn_tp_size),
        (t.moe_tp_groups(), partial(moe_tp_rank, t), t.moe_tp_size),
        (t.ep_groups(), t.ep_rank, t.ep_size),
    ):
        assert all([rank_in(rank) for rank in group] == list(range(size)) for group in groups)
    assert all(len({t.attn_dp_rank(rank) for rank in group}) == 1 for group in t.attn_tp_groups())
    assert all(len({t.ep_rank(rank) for rank in group}) == 1 for group in t.moe_tp_groups())


def test_the_example_of_the_field() -> None:
    """tp 16, dp 2: two attention groups of 8; ep 4: experts in 4 parts, each sharded over 4 adjacent ranks."""
    t = Topology(16, attn_dp_size=2, ep_size=4)
    assert t.attn_tp_groups() == [list(range(8)), list(range(8, 16))]
    assert (t.attn_dp_rank(9), t.attn_tp_rank(9), t.ep_rank(9), moe_tp_rank(t, 9)) == (1, 1, 2, 1)
    assert t.ep_groups()[1] == [1, 5, 9, 13] and t.moe_tp_groups()[2] == [8, 9, 10, 11]


@pytest.mark.parametrize(
    ("sizes", "words"),
    [
        ({"tp_size": 8, "attn_dp_size": 3}, ("--attn-dp-size 3", "--tp-size 8", "2 or 4")),
        ({"tp_size": 6, "ep_size": 4}, ("--ep-size 4", "--tp-size 6", "3 or 6")),
        ({"tp_size": 4, "attn_dp_size": 8}, ("--attn-dp-size 8", "4 would")),
        ({"tp_size": 0}, ("--tp-size 0",)),
        ({"tp_size": 8, "moe_dense_tp_size": 4}, ("--moe-dense-tp-size 4", "8", "(1)")),
        (
            {"tp_size": 8, "ep_size": 4, "moe_a2a_backend": "deepep"},
            ("--moe-a2a-backend deepep", "--ep-size", "8, not 4"),
        ),
        ({"tp_size": 8, "enable_dp_lm_head": True}, ("--enable-dp-lm-head", "--attn-dp-size")),
    ],
)
def test_sizes_that_do_not_fit(sizes: dict[str, int], words: tuple[str, ...]) -> None:
    with pytest.raises(ConfigError) as error:
        Topology(**sizes)
    assert all(word in str(error.value) for word in words), error.value


@pytest.mark.parametrize(
    ("topology", "widths", "words"),
    [
        (Topology(16), ModelWidths(40, (8,)), ("40 attention heads", "16 ranks", "10 or 20")),
        (Topology(6), ModelWidths(12, (4,)), ("4 KV heads", "6 ranks", "4 divide")),
        (Topology(8), ModelWidths(24, (8, 12)), ("12 KV heads", "8 ranks", "6 or 12 divide")),
        (Topology(16, ep_size=16), ModelWidths(16, (), num_experts=40), ("40 experts", "--ep-size", "10 or 20")),
        (Topology(32), V3, ("dense layers of width 18432", "32 ranks", "blocks of 128", "--moe-dense-tp-size 1")),
        (Topology(2), ModelWidths(16, (), 0, 64, 1408, 2816, 128), ("1408", "blocks of 128", "1 or 11 can")),
        (Topology(3), ModelWidths(15, (), 0, 3, 9, 32), ("shared experts of width 32", "--moe-a2a-backend")),
        (Topology(4), ModelWidths(12, (), output_groups=3), ("3 groups", "o_groups", "4 ranks", "3 divide them")),
    ],
)
def test_models_that_cannot_be_cut_so(topology: Topology, widths: ModelWidths, words: tuple[str, ...]) -> None:
    if widths is V3:
        widths = ModelWidths(128, (), 18432, 256, 2048, 2048, block=128)
    with pytest.raises(ConfigError) as error:
        topology.check(widths)
    assert all(word in str(error.value) for word in words), error.value


def test_models_that_can() -> None:
    for topology in (Topology(16), Topology(16, 16, 16, moe_a2a_backend="deepep"), Topology(32, 8, 8, 1)):
        topology.check(V3)
    Topology(16).check(ModelWidths(128, (), 18432, 256, 2048, 2048, block=128))
    Topology(8).check(ModelWidths(32, (2,), 11008))  # 2 KV heads, each on 4 ranks
    for groups in (2, 8):
        Topology(4).check(ModelWidths(16, (), output_groups=groups))


def test_needs_no_torch() -> None:
    code = "import sys, moe_engine.parallel.topology, moe_engine.parallel.share; assert 'torch' not in sys.modules"
    subprocess.run([sys.executable, "-c", code], check=True, timeout=240)
