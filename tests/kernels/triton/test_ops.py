"""The small operations in Triton, under the interpreter, against float64."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from moe_engine.kernels.kv_format import latent_records
from moe_engine.kernels.kv_format.formats import E4M3, E4M3_TENSOR, E5M2, STORED, head_width, latent_width
from moe_engine.kernels.kv_format.latent_records import LARGEST_E4M3
from moe_engine.kernels.linear.cublas import is_few
from moe_engine.kernels.linear.tiles import FEW_ROWS
from moe_engine.kernels.ops.head_factors import scale_heads
from moe_engine.kernels.ops.protocol import HeadNorms, RotaryTable, RouterSpec
from moe_engine.kernels.ops.reference import TorchOps
from moe_engine.kernels.permutation.protocol import ExpertRows
from moe_engine.kernels.permutation.reference import TorchPermutation
from moe_engine.kernels.quantization.protocol import UNQUANTIZED, ActivationFormat, unquantized
from tests.kernels import row_checks
from tests.kernels.choices import Routed
from tests.kernels.clear_choices import draw_clear
from tests.kernels.cpu.formulas import NAN, close, drawn_scale, normal, rms_norm, rotary_table, rotated, routed_weights
from tests.kernels.row_checks import ROUTERS

triton_ops = pytest.importorskip("moe_engine.kernels.ops.triton_ops", reason="needs triton")
TritonPermutation = pytest.importorskip(
    "moe_engine.kernels.permutation.triton_permute", reason="needs triton"
).TritonPermutation
triton_router = pytest.importorskip("moe_engine.kernels.ops.triton_router", reason="needs triton")
norm_route = pytest.importorskip("moe_engine.kernels.ops.triton_norm_route", reason="needs triton")
router_kernels = pytest.importorskip("moe_engine.kernels.ops.router_kernels", reason="needs triton")
beside = pytest.importorskip("tests.kernels.triton.beside", reason="needs triton")
launches = pytest.importorskip("tests.kernels.triton.launches", reason="needs triton").launches
EPS = 1e-6
DTYPES = (torch.bfloat16, torch.float32)


@pytest.fixture(params=DTYPES, ids=["bf16", "fp32"])
def dtype(request: pytest.FixtureRequest) -> torch.dtype:
    return request.param


@pytest.fixture
def ops() -> triton_ops.TritonOps:
    return triton_ops.TritonOps()


@pytest.mark.parametrize(("width", "weight_dtype"), [(7, torch.float32), (96, None), (1500, torch.float32)])
def test_norms(ops, dtype, width, weight_dtype):
    row_checks.check_norms(ops, dtype, weight_dtype or dtype, width)


@pytest.mark.parametrize("width", [7, 1500])
def test_a_norm_sums_two_addends_as_torch_does(ops, dtype, width):
    """Bit for bit the sum in the activation dtype, then `add_rms_norm`; in one launch, quantized or unquantized."""
    x, other = normal(5, width + 4, dtype=dtype)[:, :width], normal(5, width, dtype=dtype)
    weight, residual = torch.randn(width) + 1, normal(5, width, dtype=dtype)
    streams = residual.clone(), residual.clone(), residual.clone()
    want = ops.add_rms_norm(x + other, streams[0], weight, EPS)
    with launches() as names:
        got = ops.capabilities.add_pair_rms_norm(x, other, streams[1], weight, EPS)
    assert names == ["rms_norm_kernel"] and torch.equal(got, want)
    norms, format = ops.capabilities.quantized_norms, ActivationFormat(True, True)
    quantized = norms.add_pair_rms_norm(format, x, other, streams[2], weight, EPS)
    apart = norms.add_rms_norm(format, x + other, residual, weight, EPS)
    assert torch.equal(quantized.unquantized, apart.unquantized)
    assert torch.equal(quantized.rows.data.view(torch.uint8), apart.rows.data.view(torch.uint8))
    assert torch.equal(quantized.rows.scales, apart.rows.scales)
    for stream in streams:
        assert torch.equal(stream, residual)


@pytest.mark.each_value
@pytest.mark.parametrize(("tokens", "width", "top_k"), [(0, 128, 2), (1, 200, 1), (5, 1500, 3)])
@pytest.mark.parametrize("adds", [True, False])
def test_a_norm_sums_the_rows_of_experts(ops, dtype, tokens, width, top_k, adds):
    """Bit for bit `combine`, then `add_rms_norm`; pairs without a row add nothing, and rows without a pair are not
    read. In one launch, quantized or unquantized."""
    rows = normal(tokens * top_k + 2, width, dtype=dtype)
    positions = torch.randperm(tokens * top_k).int().view(tokens, top_k)
    positions[torch.rand(tokens, top_k) < 0.3] = -1
    rows[-2:] = NAN
    add = normal(tokens, width + 3, dtype=dtype)[:, 3:] if adds else None
    chosen = ExpertRows(rows, positions, torch.rand(tokens, top_k + 2)[:, :top_k], add)
    weight, residual = torch.randn(width) + 1, normal(tokens, width, dtype=dtype)
    streams = residual.clone(), residual.clone()
    summed = TritonPermutation().combine(chosen.rows, chosen.positions, chosen.weights, chosen.add)
    with launches() as names:
        got = ops.capabilities.add_rows_rms_norm(chosen, streams[0], weight, EPS)
    assert names == ["combine_norm_kernel"] * (tokens > 0)
    norms, format = ops.capabilities.quantized_norms, ActivationFormat(True, True)
    quantized = norms.add_rows_rms_norm(format, chosen, streams[1], weight, EPS)
    want = norms.add_rms_norm(format, summed, residual, weight, EPS)
    close(got, want.unquantized.double(), 1e-3)  # the mean's order of summation
    close(quantized.unquantized, want.unquantized.double(), 1e-3)
    assert torch.equal(got, quantized.unquantized) and all(torch.equal(stream, residual) for stream in streams)
    assert torch.equal(quantized.rows.data.view(torch.uint8), want.rows.data.view(torch.uint8))
    assert torch.equal(quantized.rows.scales, want.rows.scales)
    with pytest.raises(ValueError, match="contiguous residual"):
        ops.capabilities.add_rows_rms_norm(chosen, residual.double(), weight, EPS)


def test_norm_of_a_row_depends_on_itself_alone(ops, dtype):
    x, weight = normal(9, 200, dtype=dtype), torch.randn(200)
    x[4], x[5] = NAN, torch.inf
    got = ops.rms_norm(x, weight, EPS)
    for row in (0, 3, 6, 8):
        assert torch.equal(got[row], ops.rms_norm(x[row : row + 1], weight, EPS)[0])


@pytest.mark.parametrize("width", [1, 70, 1100])
def test_silu_and_mul(ops, dtype, width):
    row_checks.check_silu_and_mul(ops, dtype, width)
    gate_up = normal(3, 2 * width, dtype=dtype, scale=4.0)
    assert torch.equal(ops.silu_and_mul(gate_up.T.contiguous().T), ops.silu_and_mul(gate_up))


def test_silu_of_extreme_values(ops):
    row_checks.check_silu_of_extreme_values(ops)


def test_clamped_silu(ops, dtype):
    row_checks.check_clamped_silu(ops, dtype)
    row_checks.check_shifted_silu(ops, dtype)
    row_checks.check_situ(ops, dtype)
    row_checks.check_squared_relu(ops, dtype)


@pytest.mark.parametrize("most", [256, 0], ids=["one launch", "two"])
def test_given_experts(ops, dtype, monkeypatch, most):
    monkeypatch.setattr(triton_router, "ONE_LAUNCH_TOKENS", most)
    row_checks.check_given_experts(ops, dtype)


@pytest.mark.each_value
@pytest.mark.parametrize("interleaved", [True, False])
@pytest.mark.parametrize(("heads", "width"), [(1, 64), (5, 12), (70, 96)])
def test_rotate(ops, dtype, heads, width, interleaved):
    row_checks.check_rotate(ops, dtype, heads, width, interleaved)
    table, positions = rotary_table(300, width, interleaved), torch.randint(300, (4,))
    before = normal(4, heads, width + 40, dtype=dtype)
    x = before.transpose(0, 2).contiguous().transpose(0, 2)  # channels apart
    ops.rotate(x, positions, table)
    close(x[..., 40:], rotated(before[..., 40:], positions, table))


@pytest.mark.parametrize("slot_dtype", [torch.int32, torch.int64])
def test_write_latent(ops, dtype, slot_dtype):
    row_checks.check_write_latent(ops, dtype, slot_dtype, padding=3)


@pytest.mark.each_value
@pytest.mark.parametrize(("latent", "rotary", "interleaved"), [(512, 64, True), (128, 8, False), (40, 12, False)])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2, E4M3_TENSOR])
def test_fp8_latents_are_packed_as_torch_packs_them(ops, dtype, kv_dtype, latent, rotary, interleaved):
    """Bit for bit, compared with the rows that the same operations write to a cache in the activation dtype."""
    table, slots = rotary_table(90, rotary, interleaved), torch.randperm(50)[:7]
    positions, weight = torch.randint(90, (7,)), torch.randn(latent) + 1
    kv_a = normal(7, latent + rotary + 3, dtype=dtype, scale=3.0)[:, 3:]
    kv_a[0] *= 1e6  # a rotary part beyond the range of every format
    kv_a[1] = 0
    plain = torch.zeros(50, latent + rotary, dtype=dtype)
    ops.write_latent(kv_a, weight, EPS, positions, table, slots, plain)
    stored = getattr(torch, STORED[kv_dtype][0])
    cache = torch.zeros(50, latent_width(kv_dtype, latent, rotary), dtype=stored)
    scale = drawn_scale()
    ops.write_latent(kv_a, weight, EPS, positions, table, slots, cache, scale)
    form = latent_records.form_of(cache, latent, rotary)
    want = latent_records.pack(plain[slots], latent, form, scale)
    assert torch.equal(cache.view(torch.uint8)[slots], want.view(torch.uint8))
    assert cache.view(torch.uint8).any(-1).sum() in (6, 7) and want.view(torch.uint8).any()


@pytest.mark.each_value
@pytest.mark.parametrize(("heads", "width"), [(3, 40), (20, 128), (1, 6)])
@pytest.mark.parametrize("kv_dtype", [E4M3, E5M2])
def test_fp8_heads_are_packed_as_torch_packs_them(ops, dtype, kv_dtype, heads, width):
    qkv = normal(7, 2 * heads + 1, width, dtype=dtype, scale=3.0)
    qkv[0] *= 1e6
    k, v, slots = qkv[:, :heads], qkv[:, heads + 1 :], torch.randperm(50)[:7].int()
    stored = getattr(torch, STORED[kv_dtype][0])
    written = []
    for row in (ops, TorchOps()):
        caches = torch.zeros(2, 50, heads, head_width(kv_dtype, width), dtype=stored)
        row.write_kv(k, v, slots, caches[0], caches[1])
        written.append(caches.view(torch.uint8))
    assert torch.equal(*written) and written[0].any()
    with pytest.raises(ValueError, match="key cache is"):
        ops.write_kv(k, v, slots, caches[0], torch.zeros(50, heads, width, dtype=dtype))


@pytest.mark.parametrize("kv_dtype", ["plain", E4M3, E5M2])
@pytest.mark.parametrize(("width", "value"), [(24, 16), (192, 128), (12, 40)])
def test_values_of_another_width(ops, dtype, kv_dtype, width, value):
    """The rows that torch writes, bit for bit."""
    k, v, slots = normal(6, 3, width, dtype=dtype), normal(6, 3, value, dtype=dtype), torch.randperm(20)[:6].int()
    stored = dtype if kv_dtype == "plain" else getattr(torch, STORED[kv_dtype][0])
    written = []
    for row in (ops, TorchOps()):
        shapes = ((20, 3, head_width(kv_dtype, channels)) for channels in (width, value))
        caches = [torch.zeros(shape, dtype=stored) for shape in shapes]
        row.write_kv(k, v, slots, *caches)
        written.append(caches)
    for mine, theirs in zip(*written):
        assert torch.equal(mine.view(torch.uint8), theirs.view(torch.uint8)) and mine.view(torch.uint8).any()


@pytest.mark.parametrize("width", [24, 300])
def test_write_kv(ops, dtype, width):
    row_checks.check_write_kv(ops, dtype, width)
    with pytest.raises(ValueError, match="contiguously"):
        apart = torch.zeros(20, width, 7, dtype=dtype).transpose(1, 2)
        ops.write_kv(*normal(2, 6, 7, width, dtype=dtype), torch.arange(6), apart, apart)


@pytest.mark.each_value
@pytest.mark.parametrize("kv_dtype", ["plain", E4M3, E5M2, E4M3_TENSOR])
@pytest.mark.parametrize(
    ("tokens", "heads", "nope", "latent", "rotary", "interleaved"),
    [(1, 3, 32, 128, 8, True), (5, 2, 128, 512, 64, True), (70, 3, 24, 40, 12, False)],
)
def test_absorb(ops, dtype, tokens, heads, nope, latent, rotary, interleaved, kv_dtype):
    """One launch gives the query of the two operations and the product, and the cache rows of `write_latent`, bit for
    bit."""
    table, slots = rotary_table(90, rotary, interleaved), torch.randperm(tokens + 9)[:tokens].int()
    positions, weight = torch.randint(90, (tokens,)), torch.randn(latent) + 1
    whole = normal(tokens, heads + 1, nope + rotary, dtype=dtype)
    q, before = whole[:, 1:], whole.clone()
    keys = normal(heads, latent, nope, dtype=dtype)
    kv_a = normal(tokens, latent + rotary + 3, dtype=dtype)[:, 3:]
    stored, width = dtype, latent + rotary
    if kv_dtype != "plain":
        stored, width = getattr(torch, STORED[kv_dtype][0]), latent_width(kv_dtype, latent, rotary)
    cache, other = torch.zeros(2, tokens + 9, width, dtype=stored).unbind()
    scale = drawn_scale()
    with launches() as names:
        got = ops.capabilities.absorb(q, keys, kv_a, weight, EPS, positions, table, slots, cache, scale=scale)
    assert names == ["absorb_kernel"]
    ops.write_latent(kv_a, weight, EPS, positions, table, slots, other, scale)
    assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8)) and cache.view(torch.uint8).any()
    close(got[..., :latent], torch.einsum("thn,hcn->thc", q[..., :nope].double(), keys.double()), nope**0.5)
    close(got[..., latent:], rotated(before[:, 1:, nope:], positions, table))
    assert torch.equal(whole, before)
    if kv_dtype == E4M3_TENSOR:  # queries of the cache's type, rounded once
        keys[0, 0] *= 1e4
        args = q, keys, kv_a, weight, EPS, positions, table, slots, other
        exact, small = (ops.capabilities.absorb(*args, dtype, scale) for dtype in (None, torch.float8_e4m3fn))
        want = exact.float().clamp(-LARGEST_E4M3, LARGEST_E4M3)
        assert small.dtype == torch.float8_e4m3fn and (small.float().abs() == LARGEST_E4M3).any()
        assert ((small.float() - want).abs() <= want.abs() / 15 + 2.0**-10).all()
        assert torch.equal(cache.view(torch.uint8), other.view(torch.uint8))
    with pytest.raises(ValueError, match="do not fit keys"):
        ops.capabilities.absorb(q[..., 1:], keys, kv_a, weight, EPS, positions, table, slots, cache)


@pytest.mark.each_value
@pytest.mark.parametrize("spec", ROUTERS.values(), ids=ROUTERS.keys())
@pytest.mark.parametrize(("tokens", "width"), [(1, 64), (19, 700)])
def test_route(ops, dtype, spec, tokens, width):
    row_checks.check_route(ops, dtype, spec, tokens, width)
    x, gate = normal(tokens, width + 3, dtype=dtype)[:, :width], torch.randn(spec.num_experts, width) / width**0.5
    bias = torch.randn(spec.num_experts) - 1.0 if spec.has_bias else None
    weights, ids = ops.route(x, gate, bias, spec)
    if spec.top_k < spec.num_experts:  # best first, as in the reference
        assert torch.equal(ids, TorchOps().route(x, gate, bias, spec)[1])
    wide = ops.capabilities.route_int64(x, gate, bias, spec, None)
    assert wide[1].dtype == torch.int64 and torch.equal(wide[1], ids) and torch.equal(wide[0], weights)


@pytest.mark.parametrize("name", ["v3", "v2", "all experts"])
@pytest.mark.parametrize("num_shared", [1, 3])
def test_shared_experts_are_choices_of_every_token(ops, name, num_shared):
    """Shared choices follow the unchanged routed choices; padding has neither."""
    spec = ROUTERS[name]
    x, gate = normal(6, 64, dtype=torch.float32), torch.randn(spec.num_experts, 64) / 8
    bias = torch.randn(spec.num_experts) if spec.has_bias else None
    real = torch.tensor([1, 1, 0, 1, 1, 0], dtype=torch.int32)
    routed, ids = ops.route(x, gate, bias, spec, real)
    shared = torch.arange(spec.num_experts, spec.num_experts + num_shared, dtype=torch.int32)
    for backend in (ops, TorchOps()):
        assert backend.capabilities.routes_shared
        weights, found = backend.route(x, gate, bias, replace(spec, num_shared=num_shared), real)
        assert torch.equal(found[:, : spec.top_k].sort().values, ids.sort().values)
        close(weights[:, : spec.top_k].sort().values, routed.sort().values)
        assert (weights[:, spec.top_k :] == 1.0).all()
        assert torch.equal(found[:, spec.top_k :], torch.where(real.bool()[:, None], shared, -1))


@pytest.mark.parametrize("name", ["v3", "mixtral", "gpt-oss"])
@pytest.mark.parametrize("tokens", [5, 257])
@pytest.mark.each_value
def test_shared_experts_with_a_gate(ops, dtype, name, tokens):
    """The gate's last row gives the weight of all shared experts, and changes no other choice."""
    spec = ROUTERS[name]
    x, gate = normal(tokens, 96, dtype=dtype), torch.randn(spec.num_experts + 1, 96) / 8
    bias = torch.randn(spec.num_experts) if spec.has_bias else None
    routed, ids = ops.route(x, gate[:-1].contiguous(), bias, spec)
    gated = replace(spec, num_shared=2, shared_gate=True, shared_weight=0.5)
    want = 0.5 * (x.double() @ gate[-1].double()).sigmoid()
    for backend in (ops, TorchOps()):
        weights, found = backend.route(x, gate, bias, gated)
        assert torch.equal(found[:, : spec.top_k].sort().values, ids.sort().values)
        close(weights[:, : spec.top_k].sort().values, routed.sort().values)
        close(weights[:, spec.top_k :], want[:, None].expand(-1, 2))


@pytest.mark.parametrize("name", ["v3", "mixtral"])
@pytest.mark.parametrize("tokens", [5, 257])
@pytest.mark.each_value
def test_choices_are_slots_of_a_rank(ops, name, tokens):
    """Each choice is a slot of the rank that holds the expert; all ranks hold the shared ones."""
    spec, num_shared = ROUTERS[name], 1
    x, gate = normal(tokens, 64, dtype=torch.float32), torch.randn(spec.num_experts, 64) / 8
    bias = torch.randn(spec.num_experts) if spec.has_bias else None
    real = (torch.arange(tokens) % 3 != 2).int()
    weights, ids = ops.route(x, gate, bias, replace(spec, num_shared=num_shared), real)
    held = spec.num_experts // 2
    for backend in (ops, TorchOps()):
        found = torch.full_like(ids[:, : spec.top_k], -1)
        for first in (0, held):
            rank = replace(spec, num_shared=num_shared, first=first, held=held, shared_weight=0.5)
            part, slots = backend.route(x, gate, bias, rank, real)
            routed, shared = slots[:, : spec.top_k], slots[:, spec.top_k :]
            assert (routed < held).all() and ((routed < 0) | (found < 0)).all()
            found = torch.where(routed >= 0, routed + first, found)
            close(part[:, : spec.top_k].sort().values, weights[:, : spec.top_k].sort().values)
            assert (
                torch.equal(shared, torch.where(real.bool()[:, None], held, -1))
                and (part[:, spec.top_k :] == 0.5).all()
            )
        assert torch.equal(found.sort().values, ids[:, : spec.top_k].sort().values)


@pytest.mark.parametrize("programs", [2, 5])
def test_programs_of_the_router_wait_for_each_other(ops, monkeypatch, programs):
    """Some tokens are one launch whose programs run in any order, with the bits of two launches."""
    spec = ROUTERS["v3"]
    x, gate, bias = normal(21, 1100, dtype=torch.bfloat16), torch.randn(32, 1100) / 33, torch.randn(32)
    monkeypatch.setattr(triton_router, "_PARTS", ((64, 512),))
    with launches() as names, monkeypatch.context() as patch:
        patch.setattr(triton_router, "resident_programs", lambda device: programs)
        found = [
            beside.run_ranks([lambda: ops.route(x, gate, bias, spec)], [router_kernels.route_kernel], seed)[0]
            for seed in range(3)  # the barrier's state is kept
        ]
    assert names == ["route_kernel"] * 3
    with launches() as names, monkeypatch.context() as patch:
        patch.setattr(triton_router, "ONE_LAUNCH_TOKENS", 0)
        weights, ids = ops.route(x, gate, bias, spec)
    assert names == ["router_logits_kernel", "router_select_kernel"]
    assert all(torch.equal(own, weights) and torch.equal(chosen, ids) for own, chosen in found)


@pytest.mark.parametrize("tokens", [1, FEW_ROWS, FEW_ROWS + 1])
def test_router_of_few_tokens_is_two_launches(ops, dtype, monkeypatch, tokens):
    """Both start early; the bits of one launch."""
    spec, gate, bias = ROUTERS["v3"], torch.randn(32, 600) / 24, torch.randn(32)
    x, found = normal(tokens, 600, dtype=dtype), []
    for most, names_of_few in ((FEW_ROWS, ["router_logits_kernel", "router_select_kernel"]), (0, ["route_kernel"])):
        monkeypatch.setattr(triton_router, "FEW_ROWS", most)
        with launches() as names:
            found.append(ops.route(x, gate, bias, spec))
        assert names == (names_of_few if tokens <= FEW_ROWS else ["route_kernel"])
    assert all(torch.equal(a, b) for a, b in zip(*found, strict=True))


FORMATS = {
    "unquantized": UNQUANTIZED, "fp8": ActivationFormat(True, True),
    "fp8, powers of two": ActivationFormat(True, True, True),
}  # fmt: skip


@pytest.mark.each_value
@pytest.mark.parametrize("name", [name for name in ROUTERS if name != "phi moe"])
@pytest.mark.parametrize("format", FORMATS.values(), ids=FORMATS.keys())
@pytest.mark.parametrize(("tokens", "width"), [(1, 200), (19, 700)])
def test_norm_and_router_in_one_launch(ops, dtype, name, format, tokens, width):
    """Residual, norm and its quantized form as of the norm's own kernels; the choice is that of the norm in float64."""
    spec = ROUTERS[name]
    x, gate = normal(tokens, width + 3, dtype=dtype)[:, :width], torch.randn(spec.num_experts, width) / width**0.5
    bias = torch.randn(spec.num_experts) - 1.0 if spec.has_bias else None
    weight, residual = torch.randn(width) + 1, normal(tokens, width, dtype=dtype, scale=3.0)
    real = (torch.rand(tokens) < 0.7).int()
    streams = residual.clone(), residual.clone()
    norms, fused = ops.capabilities.quantized_norms, ops.capabilities.add_norm_route
    with launches() as names:
        found, weights, ids = fused(format, x, streams[0], weight, EPS, gate, bias, spec, real, False)
    assert names == ["sum_logits_kernel"] * (tokens == 1) + ["norm_route_kernel"]
    if format.rows:
        apart = norms.add_rms_norm(format, x, streams[1], weight, EPS)
        assert torch.equal(found.unquantized, apart.unquantized) and torch.equal(found.rows.scales, apart.rows.scales)
        assert torch.equal(found.rows.data.view(torch.uint8), apart.rows.data.view(torch.uint8))
    else:
        close(found, ops.add_rms_norm(x, streams[1], weight, EPS).double(), 2)
    assert torch.equal(streams[0], streams[1])
    exact = rms_norm(streams[0].double(), weight.double(), EPS)
    whole = fused(format, x, residual.clone(), weight, EPS, gate, bias, spec, None, True)
    assert torch.equal(ids, torch.where(real.bool()[:, None], whole[2], -1)) and torch.equal(weights, whole[1])
    assert ids.dtype == torch.int32 and whole[2].dtype == torch.int64
    Routed(whole[1], whole[2], exact, gate, bias, spec, roundings=int(dtype == torch.bfloat16)).relative_weights()


def test_logits_of_norm_and_router_are_those_of_the_norm(ops):
    """All experts are chosen, so that weights show the logits: closer to float64 than the logits of rounded norms."""
    spec, errors = RouterSpec(8, 8, "sigmoid"), [0.0, 0.0]
    for _ in range(5):  # of one draw a few large errors count most
        x, gate, weight = normal(24, 300, dtype=torch.bfloat16), torch.randn(8, 300) / 4, torch.randn(300) * 3
        residual = normal(24, 300, dtype=torch.bfloat16, scale=50.0)
        stream = residual.clone()
        args = (weight, EPS, gate, None, spec, None, False)
        _, weights, ids = ops.capabilities.add_norm_route(UNQUANTIZED, x, stream, *args)
        rounded = ops.route(ops.add_rms_norm(x, residual, weight, EPS), gate, None, spec)
        exact = torch.sigmoid(rms_norm(stream.double(), weight.double(), EPS) @ gate.double().T)
        for place, (own, chosen) in enumerate(((weights, ids), rounded)):
            found = torch.zeros(24, 8).scatter_(-1, chosen.long(), own).double()
            errors[place] += float((found - exact).square().mean())
    assert errors[0] < errors[1] and errors[0] > 0


@pytest.mark.parametrize("programs", [2, 5])
def test_programs_of_norm_and_router_wait_for_each_other(ops, monkeypatch, programs):
    """No program changes the residual while another reads it: the bits of one program."""
    spec, format = ROUTERS["v3"], ActivationFormat(True, True)
    x, gate, bias = normal(21, 1100, dtype=torch.bfloat16), torch.randn(32, 1100) / 33, torch.randn(32)
    weight, residual = torch.randn(1100) + 1, normal(21, 1100, dtype=torch.bfloat16)
    monkeypatch.setattr(triton_router, "_PARTS", ((64, 512),))
    kernel = [norm_route.norm_route_kernel]

    def run() -> tuple[torch.Tensor, ...]:
        stream = residual.clone()
        found, weights, ids = ops.capabilities.add_norm_route(
            format, x, stream, weight, EPS, gate, bias, spec, None, False
        )
        return stream, found.unquantized, found.rows.data.view(torch.uint8), found.rows.scales, weights, ids

    want = run()
    with monkeypatch.context() as patch:
        patch.setattr(norm_route, "resident_programs", lambda device: programs)
        for seed in range(3):  # the barrier's state is kept
            found = beside.run_ranks([run], kernel, seed)[0]
            assert all(torch.equal(a, b) for a, b in zip(found, want))


@pytest.mark.parametrize(("hidden", "tokens", "num_launches"), [(4096, 16, 2), (4096, 17, 1), (4224, 16, 1)])
def test_norm_and_router_are_two_launches_behind_a_product_that_announces(hidden, tokens, num_launches):
    """A square weight of 32 MiB is the largest of such a product."""
    assert len(norm_route.norm_route_cases("any", hidden, triton_router.V3, tokens)) == num_launches
    square = torch.empty(hidden, hidden, dtype=torch.bfloat16, device="meta")
    assert is_few(tokens, square) is (num_launches == 2)


def test_norm_and_router_of_many_tokens_are_launches_of_their_own(ops, dtype, monkeypatch):
    """Many tokens fill the device in each; no tokens need none; deterministic norms do not depend on the count."""
    monkeypatch.setattr(norm_route, "ONE_LAUNCH_TOKENS", 16)
    spec, weight, gate = ROUTERS["mixtral"], torch.randn(64) + 1, torch.randn(8, 64)
    for format, first in ((UNQUANTIZED, "rms_norm_kernel"), (ActivationFormat(True, True), "rms_norm_quantize_kernel")):
        x, stream = normal(17, 64, dtype=dtype), normal(17, 64, dtype=dtype)
        with launches() as names:
            found = ops.capabilities.add_norm_route(format, x, stream, weight, EPS, gate, None, spec, None, False)
        assert names == [first, "route_kernel"]
        want = ops.route(unquantized(found[0]), gate, None, spec)
        assert torch.equal(found[1], want[0]) and torch.equal(found[2], want[1])
    none, router = torch.empty(0, 64, dtype=dtype), (weight, EPS, gate, None, spec, None, True)
    assert ops.capabilities.add_norm_route(UNQUANTIZED, none, none, *router)[2].shape == (0, 2)
    with pytest.raises(ValueError, match="contiguous residual"):
        ops.capabilities.add_norm_route(UNQUANTIZED, x, stream.repeat(1, 2)[:, ::2], *router)
    assert triton_ops.TritonOps(deterministic=True).capabilities.add_norm_route is None


def test_route_of_many_tokens_does_not_split_the_sum(ops, monkeypatch):
    """The other plan of the logits kernel, for token counts that are slow in the interpreter."""
    monkeypatch.setattr(triton_router, "_SPLIT_TOKENS", 16)
    monkeypatch.setattr(triton_router, "_PARTS", ((16, 512),))
    spec = ROUTERS["v3"]
    x, gate, bias = normal(20, 1100, dtype=torch.bfloat16), torch.randn(32, 1100) / 33, torch.randn(32)
    assert triton_router.logits_plan(20, 1100, 32, x.dtype)[1][2] == 1
    weights, ids = ops.route(draw_clear(x, gate, bias, spec), gate, bias, spec)
    got = torch.zeros(20, 32).scatter_(-1, ids.long(), weights)
    close(got, routed_weights(x, gate, bias, spec), 2)


def test_the_gate_of_a_checkpoint_is_one_product(ops):
    """Products per tile: 1 instead of 3; bytes of the gate: half. A gate with more mantissa bits keeps its three
    terms."""
    spec, x, bias = ROUTERS["v3"], normal(9, 200, dtype=torch.bfloat16), torch.randn(32)
    wide = torch.randn(32, 200) / 14
    stored = wide.to(torch.bfloat16).float()
    gate = ops.prepare_gate(stored)
    assert gate.dtype == torch.bfloat16 and ops.prepare_gate(wide) is wide
    weights, ids = ops.route(draw_clear(x, gate, bias, spec), gate, bias, spec)
    close(torch.zeros(9, 32).scatter_(-1, ids.long(), weights), routed_weights(x, stored, bias, spec), 2)
    for other in ops.route(x, stored, bias, spec), ops.route(x.float(), gate, bias, spec):
        assert torch.equal(other[1], ids) and torch.allclose(other[0], weights, atol=1e-5)


def test_padding_of_a_captured_step_chooses_no_expert(ops, dtype):
    """Pairs that are sent and multiplied: those of 3 real tokens instead of all 8."""
    spec, x, gate = ROUTERS["mixtral"], normal(8, 64, dtype=dtype), torch.randn(8, 64)
    ids = ops.route(x, gate, None, spec)[1]
    real = torch.tensor([1, 1, 0, 1, 0, 0, 0, 0, 0], dtype=torch.int32)[:8]
    for backend in (ops, TorchOps()):
        masked = backend.route(x, gate, None, spec, real)[1]
        assert torch.equal(masked[real == 1], ids[real == 1]) and (masked[real == 0] == -1).all()
    assert int((masked >= 0).sum()) == 3 * spec.top_k
    order = TorchPermutation().sort_by_expert(masked, 8)
    assert int(order.offsets[-1]) == 3 * spec.top_k


def test_no_number_of_tokens_leaves_the_device_idle():
    """Programs of the V3 router's logits: 12 for 257 tokens, 32 for 1,024, 128 for 4,096 before D was split there."""
    found = {}
    for count in (257, 512, 1024, 2048, 4096, 8192):
        grid = triton_router.logits_plan(count, 7168, 256, torch.bfloat16, exact=True)[1]
        found[count] = grid[0] * grid[1] * grid[2]
    assert found == {257: 84, 512: 112, 1024: 224, 2048: 256, 4096: 512, 8192: 256}


def test_equal_scores_go_to_the_lower_expert(ops):
    x, gate = torch.ones(3, 16), torch.zeros(32, 16)
    weights, ids = ops.route(x, gate, torch.zeros(32), ROUTERS["v3"])
    assert ids.tolist() == [[0, 1, 2, 3, 4, 5]] * 3
    close(weights, torch.full((3, 6), 2.5 / 6).double())


def test_a_broken_token_routes_within_the_experts_and_alone(ops, dtype):
    spec = ROUTERS["v3 groups of five"]
    x, gate, bias = normal(4, 64, dtype=dtype), torch.randn(30, 64), torch.randn(30)
    whole = ops.route(x, gate, bias, spec)
    x[1] = NAN
    weights, ids = ops.route(x, gate, bias, spec)
    assert ((ids >= 0) & (ids < 30)).all()
    for row in (0, 2, 3):
        assert torch.equal(weights[row], whole[0][row])
        assert torch.equal(ids[row], whole[1][row])


@pytest.mark.parametrize(
    "spec", [RouterSpec(30, 4, "tanh"), RouterSpec(30, 31, "softmax"), RouterSpec(30, 8, "sigmoid", True, 6, 1, "top2")]
)
def test_impossible_routers(ops, spec):
    with pytest.raises(ValueError, match="router"):
        ops.route(torch.ones(1, 8), torch.ones(30, 8), torch.ones(30), spec)


def test_no_tokens(ops, dtype):
    row_checks.check_no_tokens(ops, dtype)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(
    ("heads", "kv_heads", "width", "turned", "norm", "value"),
    [(8, 2, 64, 64, False, 64), (3, 3, 96, 48, True, 96), (20, 1, 128, 32, True, 128), (16, 2, 192, 64, False, 128)],
)
def test_grouped_rows_equal_the_separate_kernels(
    heads: int, kv_heads: int, width: int, turned: int, norm: bool, value: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """Bit for bit; every second head of the projection is a gate, as in Qwen3-Next."""
    ops, tokens, slots = triton_ops.TritonOps(), 5, torch.tensor([7, 2, 9, 0, 4])
    table = RotaryTable(torch.randn(50, turned), interleaved)
    qkv = torch.randn(tokens, 2 * (heads + kv_heads), width).to(dtype)
    q, k, v = qkv[:, 0 : 2 * heads : 2], qkv[:, 2 * heads : 2 * heads + kv_heads], qkv[:, 2 * heads + kv_heads :]
    v = v[..., :value]
    norms = HeadNorms(torch.rand(width) + 0.5, torch.rand(width) + 0.5, 1e-5) if norm else None
    positions = torch.randint(0, 50, (tokens,))
    parts = [(heads, width), (kv_heads, width), (kv_heads, value)]
    bias = torch.randn(sum(count * channels for count, channels in parts)).to(dtype) if heads > 3 else None
    caches = [torch.randn(10, kv_heads, channels).to(dtype) for channels in (width, value)]
    want = [cache.clone() for cache in caches]
    given = qkv.clone()
    with launches() as found:
        got = ops.capabilities.grouped_rows(q, k, v, norms, positions, table, slots, *caches, bias)
    assert found == ["grouped_rows_kernel"] and torch.equal(qkv, given)
    if bias is not None:
        own = bias.split([count * channels for count, channels in parts])
        q, k, v = (part + added.view(shape) for part, added, shape in zip((q, k, v), own, parts))
    q, k = (q.clone(), k.clone()) if norms is None else (ops.rms_norm(q, norms.q, 1e-5), ops.rms_norm(k, norms.k, 1e-5))
    ops.rotate_leading(q, positions, table)
    ops.rotate_leading(k, positions, table)
    ops.write_kv(k, v, slots, *want)
    assert torch.equal(got, q)
    for cache, expected in zip(caches, want):
        assert torch.equal(cache, expected)


def test_grouped_rows_of_keys_only(dtype: torch.dtype) -> None:
    """Index queries and keys, which have no values: bit for bit as the separate kernels."""
    ops, slots, positions = triton_ops.TritonOps(), torch.tensor([7, 2, 9]), torch.randint(0, 50, (3,))
    table = RotaryTable(torch.randn(50, 16), False)
    rows = torch.randn(3, 5 * 40).to(dtype)
    q, k = rows[:, : 4 * 40].unflatten(1, (4, 40)), rows[:, 4 * 40 :].unsqueeze(1)
    norms = HeadNorms(torch.rand(40) + 0.5, torch.rand(40) + 0.5, 1e-5)
    cache = torch.randn(10, 1, 40).to(dtype)
    want = cache.clone()
    with launches() as found:
        got = ops.capabilities.grouped_rows(q, k, None, norms, positions, table, slots, cache, None)
    assert found == ["grouped_rows_kernel"]
    q, k = ops.rms_norm(q, norms.q, 1e-5), ops.rms_norm(k, norms.k, 1e-5)
    ops.rotate_leading(q, positions, table)
    ops.rotate_leading(k, positions, table)
    want[slots] = k
    assert torch.equal(got, q) and torch.equal(cache, want)


@pytest.mark.parametrize("interleaved", [False, True])
@pytest.mark.parametrize(("heads", "width", "turned"), [(8, 128, 32), (3, 96, 96), (0, 64, 16)])
def test_grouped_rows_of_keys_that_are_values(
    heads: int, width: int, turned: int, interleaved: bool, dtype: torch.dtype
) -> None:
    """The last channels are rotated, as in DeepSeek V4: bit for bit as the separate kernels, and by float64. Keys are
    views of wider rows; two tokens are padding with the same slot."""
    ops, tokens, slots = triton_ops.TritonOps(), 5, torch.tensor([7, 2, 9, 0, 0])
    table = RotaryTable(torch.randn(50, turned), interleaved)
    norms = HeadNorms(torch.rand(width) + 0.5, torch.rand(width) + 0.5, 1e-5)
    positions, down = torch.randint(0, 50, (tokens,)), torch.randn(tokens, 24 + width).to(dtype)
    down[4], positions[4] = down[3], positions[3]
    q, k = torch.randn(tokens, heads, width).to(dtype), down[:, None, 24:]
    cache = torch.randn(10, 1, width).to(dtype)
    want, given = cache.clone(), (q.clone(), down.clone())
    with launches() as found:
        got = ops.capabilities.grouped_rows(
            q, k, None, norms, positions, table, slots, cache, None, trailing=True
        )  # fmt: skip
    assert found == ["grouped_rows_kernel"] and torch.equal(q, given[0]) and torch.equal(down, given[1])
    exact = []
    for rows, weight in ((q, norms.q), (k, norms.k)):
        wide = rows.double()
        wide = wide * torch.rsqrt(wide.square().mean(-1, keepdim=True) + 1e-5) * weight.double()
        TorchOps().rotate(wide, positions, RotaryTable(table.cos_sin.double(), interleaved))
        exact.append(wide)
    close(got, exact[0], 4)
    close(cache[slots], exact[1], 4)
    k = ops.rms_norm(k, norms.k, 1e-5)
    ops.rotate(k, positions, table)
    want.index_copy_(0, slots, k)
    assert torch.equal(cache, want)
    if heads:
        q = ops.rms_norm(q, norms.q, 1e-5)
        ops.rotate(q, positions, table)
    assert torch.equal(got, q)


def test_grouped_rows_refuse_other_caches() -> None:
    rows = torch.randn(2, 4, 16)
    table, slots = RotaryTable(torch.randn(4, 16), False), torch.tensor([0, 1])
    with pytest.raises(ValueError, match=r"\[4, 16\] contiguously, not \[4, 20\]"):
        triton_ops.TritonOps().capabilities.grouped_rows(
            rows, rows, rows, None, slots, table, slots, *[torch.zeros(3, 4, 20)] * 2
        )


@pytest.mark.parametrize("kind", [torch.int32, torch.int64])
@pytest.mark.parametrize(("tokens", "width"), [(1, 1500), (9, 40), (0, 8)])
def test_ids_of_other_ranks_have_no_row(ops, dtype, tokens: int, width: int, kind: torch.dtype) -> None:
    """The parts of three ranks sum up to the embedding."""
    weight = normal(24, width, dtype=dtype)
    ids = torch.randint(24, (tokens + 1,), dtype=kind)[1:]
    parts = [ops.capabilities.lookup(ids, part, 8 * rank) for rank, part in enumerate(weight.split(8))]
    assert torch.equal(sum(parts), torch.nn.functional.embedding(ids, weight))
    for rank, part in enumerate(parts):
        assert not part[ids // 8 != rank].any()


@pytest.mark.parametrize(("tokens", "width"), [(1, 1500), (9, 40), (30, 24)])
def test_zero_experts(ops, dtype, tokens: int, width: int) -> None:
    row_checks.check_zero_experts(ops, dtype, tokens, width)
    x, weights, ids = normal(tokens, width, dtype=dtype), torch.rand(tokens, 3), torch.randint(-1, 2, (tokens, 3))
    narrow = ops.capabilities.add_input(x, weights, ids.int(), None)
    assert torch.equal(ops.capabilities.add_input(x, weights, ids, None), narrow)
    assert ops.capabilities.add_input(x[:0], weights[:0], ids[:0], None).shape == (0, width)


@pytest.mark.parametrize(("tokens", "width"), [(1, 1500), (9, 40), (0, 8)])
def test_layer_norm(ops, dtype, tokens: int, width: int) -> None:
    row_checks.check_layer_norm(ops, dtype, tokens, width)


def test_sparse_mixer_of_padding(ops) -> None:
    """Tokens that are not real choose no expert; others choose as without a mask."""
    spec, x, gate = ROUTERS["phi moe"], normal(9, 64, dtype=torch.float32), torch.randn(16, 64) / 8
    real = torch.tensor([1, 1, 0, 1, 1, 0, 1, 1, 1], dtype=torch.int32)
    weights, ids = ops.route(x, ops.prepare_gate(gate), None, spec, real)
    whole = ops.route(x, ops.prepare_gate(gate), None, spec)
    assert torch.equal(ids, torch.where(real.bool()[:, None], whole[1], -1)) and torch.equal(weights, whole[0])


@pytest.mark.parametrize(("tokens", "heads", "width", "zeros"), [(1, 4, 256, 0), (7, 3, 40, 24), (0, 2, 8, 8)])
def test_factors_of_heads(ops, dtype, tokens: int, heads: int, width: int, zeros: int) -> None:
    """Queries lie in a wider product; positions far from each other."""
    q = normal(tokens, heads * width + 16, dtype=dtype)[:, 16:].unflatten(1, (heads, width))
    positions = torch.randint(0, 1 << 20, (tokens,))
    scale, bias = torch.randn(heads), torch.randn(heads)
    factors = (positions + 1).double().log()[:, None] * scale.double() + bias.double()
    want = torch.nn.functional.pad(q.double() * factors[:, :, None], (0, zeros))
    for run in (ops.capabilities.scale_heads, scale_heads):
        close(run(q, positions, scale, bias, zeros), want)


@pytest.mark.parametrize(("tokens", "heads", "width"), [(1, 4, 256), (7, 3, 40), (0, 2, 8)])
def test_gates_equal_the_separate_operations(ops, dtype, tokens: int, heads: int, width: int) -> None:
    """Gates of heads lie beside the queries; rows are gated by the product of a strided input."""
    gates = ops.capabilities.gates
    assert gates is not None
    both = normal(tokens, 2 * heads, width, dtype=dtype)
    x, gate = normal(tokens, heads, width, dtype=dtype), both[:, 1::2]
    want = x.double() * gate.sigmoid().double()
    assert gates.heads(x, gate) is x
    close(x, want)
    number = normal(tokens, heads, dtype=dtype).unsqueeze(2)  # of a head
    want = x.double() * number.sigmoid().double()
    close(gates.heads(x, number), want)
    number = torch.cat((number, 12 * number, -30 * number))[: 3 * tokens]  # far from zero on both sides
    x = normal(3 * tokens, heads, width, dtype=dtype)
    want = x.double() * torch.nn.functional.softplus(number.double())
    close(gates.heads(x, number, True), want)
    hidden = normal(tokens, 2 * width, dtype=dtype)[:, width:]
    rows, weight = normal(tokens, width, dtype=dtype), normal(1, width, dtype=dtype, scale=width**-0.5)
    want = rows.double() * (hidden.double() @ weight.double().T).sigmoid()
    assert gates.rows(rows, hidden, weight) is rows
    close(rows, want, scale=2)
