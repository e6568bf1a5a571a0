"""Shared experts in slots after the routed ones: the same sums as with a separate MLP."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from moe_engine.models.batch import RoutedTokens
from moe_engine.models.config_file import load_model_config
from moe_engine.models.layers.feed_forward.moe import MoE, router_spec
from moe_engine.models.weights import WeightReader
from moe_engine.parallel.context import ParallelContext
from moe_engine.parallel.share import WHOLE, Share
from moe_engine.parallel.topology import Topology
from tests.models.checkpoints import make_checkpoint
from tests.models.stepper import make_backends


class Counted:
    """A recorder of choices."""

    counting = True

    def on_select(self, layer_index: int, topk_ids: Tensor) -> None:
        self.ids = topk_ids.clone()


class Member:
    """A rank of a group that only shards weights."""

    def __init__(self, rank: int, size: int) -> None:
        self.rank, self.size = rank, size


def make_layer(folder: Path, fused: bool = True, part: Share = WHOLE, ep: Share = WHOLE) -> MoE:
    """The last layer on a rank with part `part` of the widths of the experts of `ep`."""
    config = load_model_config(folder)
    backends = replace(make_backends(config), fuse_shared_experts=fused)
    rank, size = ep.rank * part.size + part.rank, ep.size * part.size
    world, moe_tp, others = (Member(*place) for place in ((rank, size), (part.rank, part.size), (ep.rank, ep.size)))
    groups: dict[str, Any] = {"world": world, "moe_tp": moe_tp, "ep": others}
    parallel = ParallelContext(Topology(tp_size=size, ep_size=ep.size), rank, **groups)
    layer = config.num_layers - 1
    reader = WeightReader(folder, torch.float32)
    return MoE(config, layer, backends, reader, parallel)


@pytest.fixture(scope="module", params=[1, 2, 3, "gated"])
def folder(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("shared")
    if request.param == "gated":
        return make_checkpoint("qwen3_next", path, shared_expert_intermediate_size=64, moe_intermediate_size=32)
    return make_checkpoint("deepseek_v3", path, n_shared_experts=request.param)


@pytest.fixture(params=[False, True], ids=["shared", "gated"])
def many(request: pytest.FixtureRequest, tmp_path: Path) -> Path:
    """A layer with 32 choices."""
    if request.param:
        sizes = {"shared_expert_intermediate_size": 64, "moe_intermediate_size": 64}
        return make_checkpoint("qwen3_next", tmp_path, num_experts=64, num_experts_per_tok=32, **sizes)
    sizes = {"n_routed_experts": 64, "num_experts_per_tok": 32, "topk_group": 2}
    return make_checkpoint("deepseek_v3", tmp_path, n_shared_experts=1, n_group=2, **sizes)


def check_sums(found: Tensor, want: Tensor) -> None:
    """In another order, in float32: 300 draws differ by up to 5e-7 of the largest sum."""
    torch.testing.assert_close(found, want, rtol=0, atol=2e-6 * float(want.abs().max()))


def test_the_sum_is_that_of_a_layer_with_an_mlp(folder: Path) -> None:
    config = load_model_config(folder)
    x = torch.randn(7, config.hidden_size)
    real = torch.tensor([1, 0, 1, 1, 1, 0, 1], dtype=torch.int32)
    fused, apart = make_layer(folder), make_layer(folder, fused=False)
    assert config.moe is not None
    count = config.moe.shared_width // config.moe.width
    assert fused.weights.num_experts == apart.weights.num_experts + count == config.moe.num_experts + count
    check_sums(fused.forward(x), apart.forward(x))
    live = real.bool()
    tokens = RoutedTokens(torch.zeros(7, dtype=torch.int64), real)
    padded = fused.forward(x, tokens=tokens)
    check_sums(padded[live], apart.forward(x, tokens=tokens)[live])
    assert (padded[~live] == 0).all(), "padding reads no expert, including shared experts"


def test_what_is_read_for_every_token(folder: Path) -> None:
    """The slots of the shared experts, if the experts' kernel names their memory."""
    fused, apart = make_layer(folder), make_layer(folder, fused=False)
    assert fused.read_first is None and apart.read_first is None
    fused._read_first = lambda weights, slot: weights.data[slot:]  # type: ignore[assignment]
    fused.weights = replace(fused.weights, data=torch.arange(fused.weights.num_experts))
    assert fused._spec.num_shared and fused.read_first is not None
    assert fused.read_first.tolist() == [*range(fused._spec.num_experts, fused.weights.num_experts)]


def test_ranks_that_split_widths_add_up(folder: Path) -> None:
    config = load_model_config(folder)
    x = torch.randn(5, config.hidden_size)
    whole = make_layer(folder, fused=False).forward(x)
    for size in (2, 4):
        parts = [make_layer(folder, part=Share(rank, size)) for rank in range(size)]
        assert config.moe is not None and all(part.weights.width * size == config.moe.width for part in parts)
        check_sums(sum(part.forward(x) for part in parts), whole)


@pytest.mark.parametrize(("ep", "tp"), [(2, 1), (2, 2), (4, 1)])
def test_ranks_with_different_experts_add_up(many: Path, ep: int, tp: int) -> None:
    """Each holds its routed experts and the shared ones, whose weights add up to one."""
    config = load_model_config(many)
    x, real = torch.randn(5, config.hidden_size), torch.tensor([1, 0, 1, 1, 1], dtype=torch.int32)
    apart = make_layer(many, fused=False)
    assert config.moe is not None
    count = config.moe.shared_width // config.moe.width
    for padding in (None, RoutedTokens(torch.zeros(5, dtype=torch.int64), real)):
        found = torch.zeros_like(x)
        for rank in range(ep):
            for part in range(tp):
                layer = make_layer(many, part=Share(part, tp), ep=Share(rank, ep))
                assert layer.shared is None
                assert layer.weights.num_experts == config.moe.num_experts // ep + count
                found += layer.forward(x, tokens=padding)
        live = slice(None) if padding is None else real.bool()
        check_sums(found[live], apart.forward(x, tokens=padding)[live])


def test_recorders_see_routed_choices_only(many: Path) -> None:
    config = load_model_config(many)
    x = torch.randn(4, config.hidden_size)
    seen = []
    for layer in make_layer(many), make_layer(many, fused=False), make_layer(many, ep=Share(1, 2)):
        alone = layer.forward(x)
        recorder = Counted()
        layer.count(recorder)  # type: ignore[arg-type]
        assert torch.equal(layer.forward(x), alone)
        seen.append(recorder.ids)
    assert torch.equal(seen[0], seen[1]) and torch.equal(seen[0], seen[2])


def test_ranks_split_shared_experts_that_would_cost_more_in_slots(folder: Path) -> None:
    """In slots each of two ranks would compute them for all tokens, beside one of the two choices."""
    layer = make_layer(folder, ep=Share(0, 2))
    config = load_model_config(folder)
    assert config.moe is not None and layer.shared is not None
    assert layer.weights.num_experts == config.moe.num_experts // 2


def test_ranks_with_unequal_numbers_of_experts_choose_like_one(folder: Path) -> None:
    """Three ranks hold 16 experts by redundant slots (`--ep-num-redundant-experts`); none of these is a shared one."""
    moe = load_model_config(folder).moe
    assert moe is not None and moe.num_experts % 3
    assert router_spec(moe, 0, Share(2, 3)) == router_spec(moe)
