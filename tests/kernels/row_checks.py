"""Checks that every row of the small operations, of the indexer and of sparse attention must pass, on a CPU and in
Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager, nullcontext
from dataclasses import replace
from itertools import product

import torch

from moe_engine.kernels.attention.protocol import MLABackend
from moe_engine.kernels.attention.selected import Selected
from moe_engine.kernels.gate_form import GELU, GELU_LIMIT, SILU, SQUARED, GatedActivation
from moe_engine.kernels.indexer.protocol import IndexerKernel
from moe_engine.kernels.indexer.reference import TorchIndexer
from moe_engine.kernels.ops.layer_norm import add_layer_norm
from moe_engine.kernels.ops.protocol import Ops, RouterSpec
from moe_engine.kernels.ops.zero_experts import add_input
from tests.kernels.clear_choices import draw_clear
from tests.kernels.cpu.formulas import (
    NAN,
    activated,
    attend,
    bounded_silu,
    close,
    filled_cache,
    normal,
    only,
    paged_queries,
    rms_norm,
    rotary_table,
    rotated,
    routed_weights,
    router_scores,
    silu,
    slots_of,
)
from tests.kernels.cpu.index_formulas import TOP_K, select

EPS = 1e-6
ROUTERS = {
    "v3": RouterSpec(32, 6, "sigmoid", True, 8, 4, "top2", True, 2.5),
    "v3 groups of five": RouterSpec(30, 4, "sigmoid", True, 6, 2, "top2", True, 2.5),
    "v3 one group": RouterSpec(30, 4, "sigmoid", True, 1, 1, "top2", True, 2.5),
    "v2": RouterSpec(40, 6, "softmax", False, 8, 3, "max", False, 16.0),
    "v2 lite": RouterSpec(64, 6, "softmax"),
    "mixtral": RouterSpec(8, 2, "softmax", renormalize=True),
    "gpt-oss": RouterSpec(32, 4, "softmax", True, renormalize=True, bias_on_logits=True),
    "v4": RouterSpec(32, 6, "sqrtsoftplus", True, renormalize=True, scale=1.5),
    "phi moe": RouterSpec(16, 2, "sparsemixer", jitter=0.3),
    "all experts": RouterSpec(5, 5, "sigmoid", renormalize=True),
    "added to sums": RouterSpec(16, 3, "sigmoid", True, renormalize=True, sum_eps=0.5),
}


def check_norms(ops: Ops, dtype: torch.dtype, weight_dtype: torch.dtype, width: int) -> None:
    weight = (torch.randn(width) + 1).to(weight_dtype)
    whole = normal(5, 3, width + 9, dtype=dtype, scale=3.0)
    x, before = whole[:, 1:, 2 : 2 + width], whole.clone()  # two strides, rows that are not contiguous together
    got = ops.rms_norm(x, weight, EPS)
    assert got.dtype == dtype
    close(got, rms_norm(x, weight, EPS), 2)
    x, residual = whole[:, 0, 2 : 2 + width], normal(5, width + 4, dtype=dtype)[:, :width]
    want = residual + x
    got = ops.add_rms_norm(x, residual, weight, EPS)
    assert torch.equal(residual, want)
    close(got, rms_norm(want, weight, EPS), 2)
    assert torch.equal(whole, before)


def check_silu_and_mul(ops: Ops, dtype: torch.dtype, width: int) -> None:
    whole = normal(33, 2 * width + 3, dtype=dtype, scale=4.0)
    gate_up = whole[:, 1 : 1 + 2 * width]
    gate, up = gate_up.double().chunk(2, -1)
    close(ops.silu_and_mul(gate_up), silu(gate) * up, 2)


def check_rotate(ops: Ops, dtype: torch.dtype, heads: int, width: int, interleaved: bool) -> None:
    table = rotary_table(300, width, interleaved)
    positions = torch.randint(300, (9,))
    whole = normal(9, heads + 1, width + 40, dtype=dtype)
    x, before = whole[:, 1:], whole.clone()
    ops.rotate(x, positions, table)
    close(x[..., 40:], rotated(before[:, 1:, 40:], positions, table))
    assert torch.equal(whole[:, 0], before[:, 0])
    assert torch.equal(x[..., :40], before[:, 1:, :40])
    ops.rotate(x, positions, table, inverse=True)
    close(x[..., 40:] / table.cos_sin[0, 0] ** 2, before[:, 1:, 40:].double(), 2)  # the table has a factor
    x = before.clone()
    ops.rotate_leading(x, positions.int(), table)
    close(x[..., :width], rotated(before[..., :width], positions, table))
    assert torch.equal(x[..., width:], before[..., width:])


def check_write_latent(ops: Ops, dtype: torch.dtype, slot_dtype: torch.dtype, padding: int) -> None:
    """`padding`: numbers between the cache's rows."""
    for latent, rotary, interleaved in ((512, 64, True), (40, 12, False)):
        table = rotary_table(90, rotary, interleaved)
        positions, slots = torch.randint(90, (14,)), torch.randperm(50)[:14].to(slot_dtype)
        whole = normal(14, latent + rotary + 5, dtype=dtype)
        kv_a, before = whole[:, 2 : 2 + latent + rotary], whole.clone()
        weight = torch.randn(latent) + 1
        cache = torch.full((50, latent + rotary + padding), NAN, dtype=dtype)[:, : latent + rotary]
        ops.write_latent(kv_a, weight, EPS, positions, table, slots, cache)
        close(cache[slots.long(), :latent], rms_norm(kv_a[:, :latent], weight, EPS), 2)
        close(cache[slots.long(), latent:], rotated(kv_a[:, None, latent:], positions, table)[:, 0])
        assert torch.equal(whole, before)
        assert cache.isnan().all(-1).sum() == 36


def check_write_kv(ops: Ops, dtype: torch.dtype, width: int) -> None:
    qkv = normal(6, 10, width, dtype=dtype)
    k, v, slots = qkv[:, 1:8], qkv[:, 3:10], torch.randperm(20)[:6].int()
    caches = torch.full((20, 2, 7, width), NAN, dtype=dtype)
    ops.write_kv(k, v, slots, caches[:, 0], caches[:, 1])
    assert torch.equal(caches[slots.long(), 0], k)
    assert torch.equal(caches[slots.long(), 1], v)
    assert caches.isnan().flatten(1).all(-1).sum() == 14


def check_route(ops: Ops, dtype: torch.dtype, spec: RouterSpec, tokens: int, width: int) -> None:
    x, gate = normal(tokens, width + 3, dtype=dtype)[:, :width], torch.randn(spec.num_experts, width) / width**0.5
    bias = torch.randn(spec.num_experts) - 1.0 if spec.has_bias else None  # mostly negative: 0 would win as a mask
    weights, ids = ops.route(draw_clear(x, gate, bias, spec), gate, bias, spec)
    assert weights.dtype == torch.float32 and ids.dtype == torch.int32
    got = torch.zeros(tokens, spec.num_experts).scatter_(-1, ids.long(), weights)
    close(got, routed_weights(x, gate, bias, spec), 2)
    assert all(len(set(row)) == spec.top_k for row in ids.tolist())


def check_silu_of_extreme_values(ops: Ops) -> None:
    x = torch.tensor([[-1e4, -88.0, 0.0, 88.0, 200.0, 1.0, 1.0, 1.0, 1.0, 1.0]])
    for form in (SILU, GELU):
        close(ops.silu_and_mul(x, form), torch.tensor([[0.0, 0.0, 0.0, 88.0, 200.0]]).double())


def check_clamped_silu(ops: Ops, dtype: torch.dtype) -> None:
    """gate is at most the limit, or silu(gate) is, up within both; or GELU; NaN stays."""
    x = normal(5, 90, dtype=dtype, scale=4.0)
    x[1, 0] = x[2, 45] = NAN
    gate, up = x.double().chunk(2, -1)
    for limit in (1.5, -1.5, GELU_LIMIT):
        want = bounded_silu(gate, up, limit)
        got = ops.silu_and_mul(x, GatedActivation(limit))
        assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 2
        close(got.nan_to_num(), want.nan_to_num(), 2)


def check_shifted_silu(ops: Ops, dtype: torch.dtype) -> None:
    """gate * sigmoid(alpha * gate) * (up + 1), with and without a clamp."""
    x = normal(5, 90, dtype=dtype, scale=4.0)
    for limit in (0.0, 1.5):
        gate, up = x.double().chunk(2, -1)
        gate, up = (gate.clamp(max=limit), up.clamp(-limit, limit)) if limit else (gate, up)
        close(ops.silu_and_mul(x, GatedActivation(limit, 1.702)), (up + 1) * gate / (1 + torch.exp(-1.702 * gate)), 3)


def check_situ(ops: Ops, dtype: torch.dtype) -> None:
    """SiTU with and without a bound of up, of values far beyond both bounds too; NaN stays."""
    x = normal(5, 90, dtype=dtype, scale=4.0)
    x[0] *= 30
    x[1, 0] = x[2, 45] = NAN
    for limit in (0.0, 5.0):
        form = GatedActivation(limit, beta=3.0)
        got, want = ops.silu_and_mul(x, form), activated(*x.double().chunk(2, -1), form)
        assert torch.equal(got.isnan(), want.isnan()) and want.isnan().sum() == 2
        close(got.nan_to_num(), want.nan_to_num(), 2)


def check_squared_relu(ops: Ops, dtype: torch.dtype) -> None:
    """Of all columns, in rows of a wider matrix too; NaN stays."""
    x = normal(5, 90, dtype=dtype, scale=4.0)[:, 8:85]
    x[1, 0] = NAN
    got, want = ops.silu_and_mul(x, SQUARED), x.double().clamp(min=0) ** 2
    assert torch.equal(got.isnan(), x.isnan())
    close(got.nan_to_num(), want.nan_to_num(), 2)


def check_given_experts(ops: Ops, dtype: torch.dtype) -> None:
    """Experts are not chosen, and have the router's weights; logits from -60 to 60 keep their relative accuracy."""
    spec = RouterSpec(48, 5, "sqrtsoftplus", True, scale=1.5)
    x = torch.linspace(-1, 1, 7).unsqueeze(1).repeat(1, 16).to(dtype)
    gate = torch.randn(48, 1).repeat(1, 16) * 1.2
    experts = torch.rand(7, 48).argsort(-1)[:, :5].int()
    real = torch.tensor([1, 1, 0, 1, 1, 1, 1], dtype=torch.int32)
    scores = router_scores(x.double() @ gate.double().T, spec.score).gather(-1, experts.long())
    for renormalize in (False, True):
        router = replace(spec, renormalize=renormalize)
        weights, ids = ops.route(x, ops.prepare_gate(gate), torch.randn(48), router, real, experts)
        assert torch.equal(ids, torch.where(real.bool()[:, None], experts, -1)) and ids.dtype == torch.int32
        want = scores / scores.sum(-1, keepdim=True) if renormalize else scores
        torch.testing.assert_close(weights, (want * spec.scale).float(), rtol=2e-5, atol=0)


def check_zero_experts(ops: Ops, dtype: torch.dtype, tokens: int, width: int) -> None:
    """Choices of zero experts are -1 and keep their weights, by which the input is added to a strided addend."""
    spec = RouterSpec(30, 6, "softmax", True, scale=2.5)
    x, gate = normal(tokens, width + 8, dtype=dtype)[:, :width], torch.randn(30, width) / width**0.5
    bias, real = torch.randn(30) / 30, torch.randint(2, (tokens,), dtype=torch.int32)
    gate = ops.prepare_gate(gate)
    for mask in (None, real):
        want_weights, chosen = ops.route(x, gate, bias, spec, mask)
        weights, ids = ops.route(x, gate, bias, replace(spec, held=19), mask)
        assert torch.equal(ids, torch.where(chosen < 19, chosen, -1)) and torch.equal(weights, want_weights)
        if mask is None:
            assert tokens < 9 or ((ids < 0).any() and (ids >= 0).any())  # one token has no zero expert in 5 % of draws
    own = torch.where(ids < 0, weights, 0.0).double().sum(1, keepdim=True)
    add = ops.capabilities.add_input or add_input
    for addend in (None, normal(tokens, width + 24, dtype=dtype)[:, :width]):
        want = x.double() * own + (0 if addend is None else addend.double())
        got = add(x, weights, ids, addend)
        assert got.dtype == dtype and got.is_contiguous()
        close(got, want)


def check_layer_norm(ops: Ops, dtype: torch.dtype, tokens: int, width: int) -> None:
    """With an addend in rows of a wider matrix, and of the residual as it is; with and without a bias; a mean far from
    0."""
    run = ops.capabilities.layer_norm or add_layer_norm
    x, weight = normal(tokens, width + 8, dtype=dtype)[:, :width], torch.randn(width) + 1
    for addend, bias in product((x, None), (torch.randn(width), None)):
        residual = (normal(tokens, width, dtype=torch.float32, scale=2.0) + 3).to(dtype)
        summed = residual.clone() if addend is None else residual + addend
        got, wide = run(addend, residual, weight, bias, EPS), summed.double()
        assert torch.equal(residual, summed) and got.dtype == dtype and got.is_contiguous()
        centered = wide - wide.mean(-1, keepdim=True)
        scale = (centered.square().mean(-1, keepdim=True) + EPS).rsqrt()
        close(got, centered * scale * weight.double() + (0 if bias is None else bias.double()), 2)


def check_no_tokens(ops: Ops, dtype: torch.dtype) -> None:
    weight, none = torch.ones(8), torch.empty(0, 8, dtype=dtype)
    assert ops.rms_norm(none, weight, EPS).shape == (0, 8)
    assert ops.add_rms_norm(none, none.clone(), weight, EPS).shape == (0, 8)
    assert ops.silu_and_mul(none).shape == (0, 4)
    table, positions = rotary_table(4, 4, True), torch.empty(0, dtype=torch.int64)
    ops.rotate(none.view(0, 1, 8), positions, table)
    cache = torch.empty(3, 8, dtype=dtype)
    ops.write_latent(none, torch.ones(4), EPS, positions, table, positions, cache)
    ops.write_kv(none.view(0, 1, 8), none.view(0, 1, 8), positions, cache.view(3, 1, 8), cache.view(3, 1, 8))
    weights, ids = ops.route(none, torch.randn(6, 8), None, RouterSpec(6, 2, "softmax"))
    assert weights.shape == ids.shape == (0, 2)


def check_ties(kernel: IndexerKernel) -> None:
    """The lower position wins: exact products, with many equal scores of both signs and both zeros."""
    queries, size = paged_queries([(4, 90), (1, 200)])
    cache = torch.randint(-1, 2, (size, 1, 16)).float()
    q, weights = torch.randint(-1, 2, (5, 4, 16)).float(), torch.randint(-1, 2, (5, 4)).float()
    for row in (kernel, TorchIndexer()):
        assert torch.equal(select(row, q, weights, cache, queries), select(TorchIndexer(), q, weights, cache, queries))
        first = select(row, q, torch.zeros_like(weights), cache, queries)
        assert torch.equal(first[4], slots_of(queries, 1)[:TOP_K].int())


def check_choices_alone(
    kernel: IndexerKernel,
    dtype: torch.dtype,
    lens: Sequence[tuple[int, int]],
    around: Callable[[], AbstractContextManager[None]] = nullcontext,
) -> None:
    """The selection of a part of a request's tokens is the same as in the batch. `around`: settings of the parts."""
    queries, size = paged_queries(list(lens), 16)
    cache = filled_cache(queries, size, 1, 32, dtype=dtype)
    q, weights = normal(queries.num_tokens, 8, 32, dtype=dtype), torch.randn(queries.num_tokens, 8)
    together, start = select(kernel, q, weights, cache, queries), 0
    for request, (count, _) in enumerate(lens):
        for at in {0, count // 2}:
            part, alone = slice(start + at, start + count), only(queries, request, slice(at, count))
            with around():
                slots = select(kernel, q[part], weights[part], cache, alone)
            assert torch.equal(slots, together[part, : slots.shape[1]])
        start += count


def check_sinks_over_whole_rows(
    backend: MLABackend, dtype: torch.dtype, heads: int, width: int, counts: Sequence[int]
) -> None:
    """Rows are keys and values as a whole, in a cache with strided rows; the sinks range from none to all of the
    weight. Lists are set after the plan and changed between layers; all other rows are NaN."""
    sparse = backend.capabilities.sparse
    assert sparse is not None and sparse.sinks
    size, scale = max(counts) + 20, width**-0.5
    lens = torch.tensor(counts, dtype=torch.int32)
    selected = Selected(torch.empty(len(counts), max(counts), dtype=torch.int32), list(counts), lens)
    plan = sparse.plan(selected)
    for sinks in (torch.linspace(-50, 20, heads), torch.randn(heads), None):
        cache = torch.full((size, width + 16), NAN, dtype=dtype)[:, :width]
        selected.slots.fill_(-1)
        for row, count in zip(selected.slots, counts):
            row[:count] = torch.randperm(size)[:count].int()
            cache[row[:count].long()] = normal(count, width, dtype=dtype)
        q = normal(len(counts), heads, width, dtype=dtype)
        got = sparse.run(q, cache, selected, scale, plan, width, sinks)
        for token, count in enumerate(counts):
            keys = cache[selected.slots[token, :count].long()].unsqueeze(1)
            wanted = attend(q[token : token + 1], keys, keys, scale, sinks=sinks)
            close(got[token : token + 1], wanted, 3)
