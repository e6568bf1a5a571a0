"""Whole layers in one call: the bits of the separate calls, which have their own oracles; and the cases that are
declined."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch
from torch import Tensor

from moe_engine.kernels.attention.cpu import CpuMLA
from moe_engine.kernels.cpu.library import Library
from moe_engine.kernels.decoder.calls import DecoderCalls
from moe_engine.kernels.decoder.counting import CountCell, CountPlace
from moe_engine.kernels.decoder.layers import MLALayer, MoELayer, fuse_moe
from moe_engine.kernels.experts.batch import ExpertWeights
from moe_engine.kernels.experts.cpu import CpuExperts
from moe_engine.kernels.experts.reference import TorchExperts
from moe_engine.kernels.gate_form import GatedActivation
from moe_engine.kernels.linear.cpu import CpuLinear
from moe_engine.kernels.linear.protocol import PreparedLinear
from moe_engine.kernels.linear.reference import TorchLinear
from moe_engine.kernels.ops.cpu import CpuOps
from moe_engine.kernels.ops.protocol import RouterSpec
from moe_engine.kernels.quantization.codes import GroupCodes, PlainWeight
from moe_engine.kernels.queries import AttentionBatch, PagedQueries
from tests.kernels.cpu.formulas import (
    drawn_scale,
    filled_cache,
    normal,
    paged_queries,
    random_trees,
    rotary_table,
    slots_of,
)

HIDDEN, HEADS, NOPE, ROTARY, VALUE, LATENT, EPS = 80, 5, 24, 16, 40, 48, 1e-6


def _mla_layer(linear: CpuLinear | TorchLinear, dtype: torch.dtype, rank: int, bias: bool) -> MLALayer:
    def weight(*shape: int) -> Tensor:
        return normal(*shape, dtype=dtype, scale=shape[-1] ** -0.5)

    def biased(rows: int, columns: int) -> tuple[Tensor, Tensor | None]:
        return weight(rows, columns), normal(rows, dtype=dtype, scale=0.1) if bias else None

    return MLALayer(
        down=linear.prepare(*biased(rank + LATENT + ROTARY, HIDDEN)),
        q_norm=1 + torch.rand(rank) if rank else None,
        q=linear.prepare(weight(HEADS * (NOPE + ROTARY), rank or HIDDEN)),
        kv_norm=1 + torch.rand(LATENT),
        keys=linear.prepare_heads(weight(HEADS, LATENT, NOPE)),
        values=linear.prepare_heads(weight(HEADS, VALUE, LATENT)),
        o=linear.prepare(*biased(HIDDEN, HEADS * VALUE)),
        rotary=rotary_table(2000, ROTARY, interleaved=True),
        eps=EPS,
        scale=0.2,
        latent_scale=drawn_scale(),
    )


def _coded(linear: CpuLinear, layer: MLALayer) -> MLALayer:
    """The layer with weights of 8 bits in every product."""

    def drawn(rows: int, columns: int, heads: int = 0) -> PreparedLinear:
        weight = PlainWeight(
            normal(rows, columns, dtype=torch.float32, scale=columns**-0.5), GroupCodes(8, 0, scales="float32")
        )
        return linear.prepare_coded_heads(weight, heads) if heads else linear.prepare_coded(weight, None)

    shapes = {name: getattr(layer, name) for name in ("down", "q", "o")}
    made = {name: drawn(weight.out_features, weight.in_features) for name, weight in shapes.items()}
    heads = {"keys": (LATENT, NOPE), "values": (VALUE, LATENT)}
    made |= {name: drawn(HEADS * rows, columns, HEADS) for name, (rows, columns) in heads.items()}
    return replace(layer, **made)


def _own_positions(queries: PagedQueries) -> tuple[Tensor, Tensor]:
    """Positions and slots of the query tokens."""
    ends = zip(queries.query_lens, queries.context_lens)
    positions = torch.cat([torch.arange(context - count, context) for count, context in ends])
    slots = [slots_of(queries, r)[-count:] for r, count in enumerate(queries.query_lens)]
    return positions, torch.cat(slots)


def _separate(library: Library, layer: MLALayer, hidden: Tensor, cache: Tensor, queries: PagedQueries) -> Tensor:
    """The layer by separate calls."""
    linear, ops, mla = CpuLinear(library), CpuOps(library), CpuMLA(library)
    positions, slots = _own_positions(queries)
    down = linear.run(hidden, layer.down)
    q_in, kv_a = hidden, down
    if layer.q_norm is not None:
        rank = layer.q_norm.numel()
        q_in, kv_a = ops.rms_norm(down[:, :rank], layer.q_norm, EPS), down[:, rank:]
    q = linear.run(q_in, layer.q).view(-1, HEADS, NOPE + ROTARY)
    ops.rotate(q, positions, layer.rotary)
    ops.write_latent(kv_a, layer.kv_norm, EPS, positions, layer.rotary, slots, cache, layer.latent_scale)
    absorbed = torch.cat((linear.run_heads(q[..., :NOPE], layer.keys), q[..., NOPE:]), -1)
    mixed = mla.absorbed(absorbed, cache, queries, layer.scale, None, LATENT)
    return linear.run(linear.run_heads(mixed, layer.values).flatten(1), layer.o)


@pytest.mark.parametrize(
    ("rank", "bias", "trees", "coded"),
    [(32, False, False, False), (0, True, False, False), (50, True, True, False), (32, False, False, True)],
)
def test_mla_layer(any_library: Library, dtype: torch.dtype, rank: int, bias: bool, trees: bool, coded: bool) -> None:
    mla, linear = CpuMLA(any_library), CpuLinear(any_library)
    layer = _mla_layer(linear, dtype, rank, bias)
    if coded:
        layer = _coded(linear, layer)
    decoder = mla.capabilities.decoder
    fused = None if decoder is None else decoder.fuse_mla(layer)
    assert fused is not None
    queries, size = paged_queries([(1, 1), (3, 70), (1, 600), (4, 4)], 4)
    if trees:
        queries, _ = random_trees(queries)
    hidden = normal(queries.num_tokens, HIDDEN + 8, dtype=dtype)[:, :HIDDEN]
    stored = dtype if rank else torch.float8_e4m3fn
    caches = [filled_cache(queries, size, LATENT + ROTARY, dtype=dtype).to(stored)]
    caches.append(caches[0].clone())
    want = _separate(any_library, layer, hidden, caches[0], queries)
    positions, slots = _own_positions(queries)
    plan = mla.plan(AttentionBatch(queries, None))
    got = fused.run(hidden, positions, slots, caches[1], queries, plan)
    assert torch.isfinite(got).all() and torch.equal(got, want)
    assert torch.equal(*(cache.float().nan_to_num(7.0) for cache in caches))


def test_mla_layer_declines_weights_of_other_rows(library: Library) -> None:
    decoder, ours = DecoderCalls(library), _mla_layer(CpuLinear(library), torch.bfloat16, 32, False)
    assert decoder.fuse_mla(_mla_layer(TorchLinear(), torch.bfloat16, 32, False)) is None  # type: ignore[arg-type]
    wide = _mla_layer(CpuLinear(library), torch.float32, 32, False)
    assert decoder.fuse_mla(replace(ours, o=wide.o)) is None
    assert decoder.fuse_mla(replace(ours, kv_norm=ours.kv_norm.bfloat16())) is None
    fused, (queries, size) = decoder.fuse_mla(ours), paged_queries([(1, 3)])
    assert fused is not None
    hidden, cache = torch.zeros(1, HIDDEN), torch.zeros(size, LATENT + ROTARY)
    with pytest.raises(ValueError, match="float32"):
        fused.run(hidden, *_own_positions(queries), cache, queries, None)


ROUTERS = [
    RouterSpec(6, 3, "softmax"),
    RouterSpec(8, 2, "sigmoid", True, num_groups=4, topk_groups=2, group_score="top2", renormalize=True, scale=2.5),
    RouterSpec(6, 3, "sqrtsoftplus", True, renormalize=True, scale=1.5),
]
LIMIT = 0.8
"""Of the activation of experts whose router is the last one."""


def _experts(kernel: CpuExperts | TorchExperts, count: int, width: int, dtype: torch.dtype) -> ExpertWeights:
    weights = kernel.allocate(count, HIDDEN, width, dtype, "cpu")
    for expert in range(count):
        gate, up = (normal(width, HIDDEN, dtype=dtype, scale=0.2) for _ in range(2))
        kernel.load_expert(weights, expert, gate, up, normal(HIDDEN, width, dtype=dtype, scale=0.2))
    return weights


def _moe_layer(library: Library, router: RouterSpec, dtype: torch.dtype, shared_width: int) -> MoELayer:
    linear, shared = CpuLinear(library), None
    if shared_width:
        gate_up = normal(2 * shared_width, HIDDEN, dtype=dtype, scale=0.2)
        down = normal(HIDDEN, shared_width, dtype=dtype, scale=0.2)
        shared = linear.prepare(gate_up), linear.prepare(down)
    gate = torch.randn(router.num_experts, HIDDEN)
    weights = _experts(CpuExperts(library), router.num_experts, 24, dtype)
    weights.activation = GatedActivation(LIMIT if router == ROUTERS[-1] else 0.0)
    return MoELayer(gate, torch.randn(router.num_experts) * 0.1, router, weights, shared)


@pytest.mark.parametrize("router", ROUTERS, ids=["softmax", "groups", "v4"])
@pytest.mark.parametrize("shared_width", [0, 32])
@pytest.mark.parametrize("tokens", [0, 1, 9, 150])
def test_moe_layer(
    any_library: Library, dtype: torch.dtype, router: RouterSpec, shared_width: int, tokens: int
) -> None:
    kernel, layer = CpuExperts(any_library), _moe_layer(any_library, router, dtype, shared_width)
    fuse = kernel.capabilities.fuse_layer
    assert fuse is not None
    x = normal(tokens, HIDDEN, dtype=dtype)
    shared = (
        None
        if layer.shared is None
        else CpuLinear(any_library).run_mlp(x, *layer.shared, layer.experts.activation.limit)
    )
    for gate in (layer.gate, layer.gate.bfloat16()):
        fused = fuse(replace(layer, gate=gate))
        assert fused is not None
        topk, ids = CpuOps(any_library).route(x, gate, layer.bias, router)
        want = kernel.run_routed(x, topk, ids, layer.experts, shared)
        assert torch.equal(fused.run(x), want)
        chosen = torch.empty_like(ids)
        assert torch.equal(fused.run(x, chosen), want) and torch.equal(chosen, ids)


@pytest.mark.parametrize("tokens", [0, 1, 70])
def test_moe_layers_count_what_they_choose(library: Library, tokens: int) -> None:
    """Two layers with one pointer cell: counts are written at the pointer, from the first index of each layer, only
    while it is set."""
    cell, router = CountCell(), ROUTERS[1]
    layers = [_moe_layer(library, router, torch.float32, 32) for _ in range(2)]
    fused = [made for made in (fuse_moe(library, layer) for layer in layers) if made is not None]
    assert len(fused) == 2
    x = normal(tokens, HIDDEN, dtype=torch.float32)
    want = [each.run(x) for each in fused]
    counts = torch.ones(3, router.num_experts, dtype=torch.int32)
    for number, each in enumerate(fused):
        each.count_choices(CountPlace(cell, (number + 1) * router.num_experts))
    assert all(torch.equal(each.run(x), out) for each, out in zip(fused, want))
    assert bool((counts == 1).all()), "it points nowhere"
    cell.point(counts.data_ptr(), 0)
    for _ in range(2):
        assert all(torch.equal(each.run(x), out) for each, out in zip(fused, want))
    fused[0].count_choices(None)
    fused[0].run(x)
    for number, layer in enumerate(layers):
        ids = CpuOps(library).route(x, layer.gate, layer.bias, router)[1]
        chosen = torch.bincount(ids.flatten().long(), minlength=router.num_experts)
        assert counts[number + 1].tolist() == (1 + 2 * chosen).tolist()
    assert bool((counts[0] == 1).all())
    fused[0].count_choices(CountPlace(cell, 0))
    cell.point(counts.data_ptr(), counts[:2].nbytes)
    before = counts[2].tolist()
    fused[0].run(x)
    assert cell.hide() and not bool(counts[1].any()) and int(counts[0].sum()) == tokens * router.top_k, "cleared first"
    fused[0].run(x)
    assert counts[2].tolist() == before and int(counts[0].sum()) == tokens * router.top_k, "hidden"
    cell.point(counts.data_ptr(), counts.nbytes)
    assert not cell.hide(), "no step was counted"


def test_moe_layer_declines_weights_of_other_rows(library: Library) -> None:
    layer = _moe_layer(library, ROUTERS[0], torch.bfloat16, 32)
    assert layer.shared is not None
    theirs = TorchLinear().prepare(torch.zeros(64, HIDDEN, dtype=torch.bfloat16))
    assert fuse_moe(library, replace(layer, shared=(theirs, layer.shared[1]))) is None
    assert fuse_moe(library, replace(layer, experts=_experts(TorchExperts(), 6, 24, torch.bfloat16))) is None
    assert fuse_moe(library, replace(layer, shared=_moe_layer(library, ROUTERS[0], torch.bfloat16, 24).shared)) is None
    fused = fuse_moe(library, layer)
    assert fused is not None
    with pytest.raises(ValueError, match="hidden size"):
        fused.run(torch.zeros(2, HIDDEN + 1, dtype=torch.bfloat16))
