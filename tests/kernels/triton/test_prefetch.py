"""Requests of weights for the L2 cache: each byte once, and none outside. `test_aot.py` compiles them; in the
interpreter they have no effect, so these tests look at their arguments."""

from __future__ import annotations

import random
from typing import Any

import pytest
import torch
import triton
import triton.language as tl

from moe_engine.kernels.linear import triton_block_gemm, triton_fixed_gemm
from moe_engine.kernels.linear.tiles import FEW_BLOCK_FP8, FEW_PLAIN, FEW_ROWS, FIXED_PLAIN
from moe_engine.kernels.ops import router_kernels, triton_norm_route, triton_router
from moe_engine.kernels.ops.triton_ops import TritonOps
from moe_engine.kernels.ops.triton_router import V2_LITE
from moe_engine.kernels.quantization import reference
from moe_engine.kernels.quantization.protocol import UNQUANTIZED
from moe_engine.kernels.triton import prefetch
from tests.kernels.cpu.formulas import normal

BF16 = torch.bfloat16


@triton.jit
def shares_kernel(firsts, counts, count, begin, end, SIZE: tl.constexpr):
    place = tl.arange(0, SIZE)
    first, num_bytes = prefetch.share_of(place, count, begin, end)
    tl.store(firsts + place, first)
    tl.store(counts + place, num_bytes)


def joined(ranges: list[tuple[int, int]]) -> list[tuple[int, int]]:
    """Ranges of bytes in order, adjacent ones joined; they do not overlap."""
    found: list[tuple[int, int]] = []
    for begin, end in sorted(each for each in ranges if each[0] < each[1]):
        assert not found or found[-1][1] <= begin, f"byte {begin} is requested twice"
        if found and found[-1][1] == begin:
            found[-1] = found[-1][0], end
        else:
            found.append((begin, end))
    return found


def requests(monkeypatch: pytest.MonkeyPatch, module: Any) -> list[tuple[int, int]]:
    """Addresses that a module's product requests from here on, as on a GPU that has the instruction."""
    asked: list[tuple[int, int]] = []

    def request(start: Any, begin: Any, num_bytes: Any, of: Any) -> None:
        count, limit = (int(getattr(value, "value", value)) for value in (num_bytes, of))
        if count:
            first, place = int(start.handle.data.item()), int(begin.handle.data.item())
            asked.append((first + place, first + min(place + count, limit)))

    monkeypatch.setattr(module, "prefetch_own", request)
    monkeypatch.setattr(prefetch, "starts_early", lambda kind: True)
    return asked


@pytest.mark.parametrize("trial", range(8))
def test_shares_are_whole_lines_of_all_bytes(trial: int) -> None:
    size = 2 ** random.randint(0, 8)
    begin, length = 128 * random.randint(0, 9), 16 * random.randint(1, 3000)
    firsts, counts = (torch.zeros(size, dtype=torch.int32) for _ in range(2))
    shares_kernel[(1,)](firsts, counts, size, begin, begin + length, SIZE=size)
    ranges = [(first, first + count) for first, count in zip(firsts.tolist(), counts.tolist(), strict=True)]
    assert joined(ranges) == [(begin, begin + length)]
    assert all(first % 128 == 0 and count % 16 == 0 for first, count in zip(firsts.tolist(), counts.tolist()))


@pytest.mark.parametrize("heads", [1, 3])
def test_a_product_of_few_rows_requests_its_weight_once(heads: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Also with an incomplete last tile; a product of more rows, whose programs share tiles, requests nothing."""
    rows, n, k = random.randint(1, FEW_ROWS), random.randint(1, 90), 8 * random.randint(1, 60)
    shape = (n, k) if heads == 1 else (heads, n, k)
    weight, asked = normal(*shape, dtype=BF16), requests(monkeypatch, triton_fixed_gemm)
    x = normal(rows, *shape[:-2], k, dtype=BF16)
    plain = triton_fixed_gemm.fixed_gemm(x, weight, tiles=FIXED_PLAIN)
    assert not asked
    few = triton_fixed_gemm.fixed_gemm(x, weight, tiles=FEW_PLAIN)
    assert joined(asked) == [(weight.data_ptr(), weight.data_ptr() + weight.nbytes)]
    torch.testing.assert_close(few, plain, atol=0.5, rtol=0.05)


def test_a_product_in_fp8_requests_its_weight_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """As above."""
    rows, n, k = random.randint(1, FEW_ROWS), random.randint(1, 90), 16 * random.randint(1, 40)
    weight = reference.quantize_weight(normal(n, k, dtype=torch.float32))
    x, asked = reference.quantize_rows(normal(rows, k, dtype=torch.float32)), requests(monkeypatch, triton_block_gemm)
    triton_block_gemm.block_gemm(x, weight, BF16)
    assert not asked
    triton_block_gemm.block_gemm(x, weight, BF16, tiles=FEW_BLOCK_FP8)
    assert joined(asked) == [(weight.data.data_ptr(), weight.data.data_ptr() + n * k)]


def test_the_router_requests_the_given_weight(monkeypatch: pytest.MonkeyPatch) -> None:
    """At most `BESIDE_ROUTER` bytes of it, and nothing without one; its results are the same."""
    asked: list[tuple[int, int]] = []

    def request(start: Any, num_bytes: Any) -> None:
        count = int(getattr(num_bytes, "value", num_bytes))
        if count:
            asked.append((int(start.handle.data.item()), count))

    monkeypatch.setattr(triton_norm_route, "prefetch_shared", request)
    monkeypatch.setattr(prefetch, "starts_early", lambda kind: True)
    monkeypatch.setattr(triton_norm_route, "BESIDE_ROUTER", 4096)
    ops, hidden = TritonOps(), 256
    fused = ops.capabilities.add_norm_route
    assert fused is not None
    x, gate, norm = normal(3, hidden, dtype=BF16), normal(V2_LITE.num_experts, hidden, dtype=BF16), torch.ones(hidden)
    results = []
    for ahead in (None, normal(8, 100, dtype=BF16), normal(64, 64, dtype=BF16)):
        stream = torch.ones(3, hidden, dtype=BF16)
        results.append(fused(UNQUANTIZED, x, stream, norm, 1e-6, gate, None, V2_LITE, None, False, ahead))
        expected = 0 if ahead is None else min(ahead.nbytes, 4096)
        assert {count for _, count in asked} == ({expected} if expected else set())
        assert all(start == ahead.data_ptr() for start, _ in asked if ahead is not None)
        asked.clear()
    for found in results[1:]:
        assert all(torch.equal(a, b) for a, b in zip(found, results[0], strict=True))


def test_a_router_behind_a_sum_over_ranks_requests_the_shared_experts(monkeypatch: pytest.MonkeyPatch) -> None:
    """Its launch has no norm; more tokens than one launch takes request nothing."""
    asked: list[int] = []

    def request(start: Any, num_bytes: Any) -> None:
        count = int(getattr(num_bytes, "value", num_bytes))
        if count:
            asked.append(count)
            assert int(start.handle.data.item()) == ahead.data_ptr()

    monkeypatch.setattr(router_kernels, "prefetch_shared", request)
    monkeypatch.setattr(prefetch, "starts_early", lambda kind: True)
    ops, hidden = TritonOps(), 64
    route = ops.capabilities.route_ahead
    assert route is not None
    gate, ahead = normal(V2_LITE.num_experts, hidden, dtype=BF16), normal(8, 100, dtype=BF16)
    for tokens, expected in ((3, {ahead.nbytes}), (triton_router.ONE_LAUNCH_TOKENS + 1, set())):
        x = normal(tokens, hidden, dtype=BF16)
        found, plain = route(x, gate, None, V2_LITE, None, None, ahead), ops.route(x, gate, None, V2_LITE)
        assert set(asked) == expected and all(torch.equal(a, b) for a, b in zip(found, plain, strict=True))
        asked.clear()
