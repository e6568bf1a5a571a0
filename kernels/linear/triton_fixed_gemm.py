"""Products with unquantized weights: batch-invariant, a row's bits do not depend on the other rows, or of few rows.

Libraries select algorithms by the number of rows. Here every sum runs over K in order, no two programs share a sum, and
in deterministic mode the tiling depends on the weight alone.

    out[m, h, n] = sum over k of x[m, h, k] * w[h, n, k] (+ bias[n])

Legend: M rows, H heads (one for a linear layer), N out-features, K in-features.
"""

from __future__ import annotations

from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor

from moe_engine.kernels.linear.products import add_product, empty_tile, grouped_order, load_step, weight_tile
from moe_engine.kernels.linear.tiles import FEW_PLAIN, FIXED_PLAIN, FIXED_WIDE, PlainTiles
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element, stride_of, with_contiguous_rows
from moe_engine.kernels.triton.prefetch import IN_GAP, UNIT, can_request, prefetch_own, prefetch_shared, requested

_STRIDES = ("x_stride", "x_head_stride", "out_stride", "out_head_stride")


@dependent_jit(do_not_specialize=["num_rows"])
def fixed_gemm_kernel(
    x, weight, bias, out, following, later, num_rows, x_stride, x_head_stride, out_stride, out_head_stride,
    N: tl.constexpr, K: tl.constexpr, BLOCK_M: tl.constexpr, BLOCK_N: tl.constexpr, BLOCK_K: tl.constexpr,
    GROUP: tl.constexpr, HAS_BIAS: tl.constexpr, AHEAD: tl.constexpr, FOLLOWING: tl.constexpr,
    LATER: tl.constexpr,
):  # fmt: skip
    """One tile of one head; weight [H, N, K] is contiguous. AHEAD: bytes of a tile of the weight that its program
    requests before it waits; more than 0 only with one tile of rows. FOLLOWING bytes of `following` are requested at
    the end, then LATER of `later`."""
    prefetch_own(
        weight + tl.program_id(1).to(tl.int64) * (N * K), tl.program_id(0) * AHEAD, AHEAD, AHEAD // BLOCK_N * N
    )
    wait_for_inputs()
    head = tl.program_id(1).to(tl.int64)
    NUM_N: tl.constexpr = (N + BLOCK_N - 1) // BLOCK_N
    STEPS: tl.constexpr = (K + BLOCK_K - 1) // BLOCK_K
    tile_m, tile_n = grouped_order(tl.program_id(0), tl.cdiv(num_rows, BLOCK_M), NUM_N, GROUP)
    rows = tile_m * BLOCK_M + tl.arange(0, BLOCK_M)
    cols = tile_n * BLOCK_N + tl.arange(0, BLOCK_N)
    lane = tl.arange(0, BLOCK_K)
    live = rows < num_rows  # repeated rows would be read again: a part of a program's time if rows are few
    w_rows = tl.minimum(cols, N - 1)
    x_tile = x + head * x_head_stride + rows.to(tl.int64)[:, None] * x_stride + lane[None, :]
    w_tile = weight_tile(weight + head * (N * K), w_rows, lane, K, False)
    total = empty_tile(BLOCK_M, BLOCK_N, False)
    for step in range(STEPS):
        a = load_step(x_tile, 0, step, lane, K, BLOCK_K, False, live)
        b = load_step(w_tile, 0, step, lane, K, BLOCK_K, False)
        total = add_product(total, a, b, 1.0, 1.0, False, False)
    if HAS_BIAS:
        total += tl.load(bias + w_rows).to(tl.float32)[None, :]
    prefetch_shared(following, FOLLOWING)
    prefetch_shared(later, LATER)
    place = out + head * out_head_stride + rows.to(tl.int64)[:, None] * out_stride + cols[None, :]
    tl.store(place, total.to(out.dtype.element_ty), mask=live[:, None] & (cols < N)[None, :])


def fixed_gemm(
    x: Tensor, weight: Tensor, bias: Tensor | None = None, out: Tensor | None = None, tiles: PlainTiles | None = None,
    following: tuple[Tensor, ...] = (),
) -> Tensor:  # fmt: skip
    """x [M, K] x weight [N, K] (+ bias [N]) -> [M, N]; or heads, x [M, H, K] x weight [H, N, K] -> [M, H, N].

    Args:
        x: contiguous in its last dimension, or it is copied.
        out: output tensor; its last dimension is contiguous.
        tiles: default: the same for any number of rows.
        following: as in `PreparedLinear`.

    Raises:
        ValueError: if the widths or dtypes differ.
    """
    heads, (n, k) = 1 if weight.dim() == 2 else weight.shape[0], weight.shape[-2:]
    if x.shape[1:] != (*weight.shape[:-2], k) or x.dtype != weight.dtype:
        raise ValueError(f"rows {list(x.shape)} {x.dtype} do not fit a weight {list(weight.shape)} {weight.dtype}")
    if out is None:
        out = torch.empty(*x.shape[:-1], n, dtype=x.dtype, device=x.device)
    m, x, cut = x.shape[0], with_contiguous_rows(x), tiles or fixed_tiles(x.dtype)
    if m:
        per_head = stride_of(x, 1) if heads > 1 else 0, stride_of(out, 1) if heads > 1 else 0
        grid = (triton.cdiv(m, cut.block_m) * triton.cdiv(n, cut.block_n), heads)
        wanted, counts = zip(*(requested(each, IN_GAP) for each in (*following, None, None)[:2]))
        fixed_gemm_kernel[grid](
            x, weight.contiguous(), bias, out, *wanted, m, stride_of(x, 0), per_head[0], stride_of(out, 0),
            per_head[1], **_constants(n, k, cut, bias is not None, weight), FOLLOWING=counts[0], LATER=counts[1],
            num_warps=cut.num_warps, num_stages=cut.num_stages,
        )  # fmt: skip
    return out


def fixed_tiles(dtype: torch.dtype) -> PlainTiles:
    """Tiles for weights in `dtype`, independent of anything that changes between steps."""
    return FIXED_WIDE if dtype == torch.float32 else FIXED_PLAIN


def _constants(n: int, k: int, cut: PlainTiles, has_bias: bool, weight: Tensor) -> dict[str, Any]:
    requests = cut == FEW_PLAIN and k * weight.element_size() % UNIT == 0 and can_request(weight)
    return {
        "N": n, "K": k, "BLOCK_M": cut.block_m, "BLOCK_N": cut.block_n, "BLOCK_K": cut.block_k, "GROUP": cut.group,
        "HAS_BIAS": has_bias,
        "AHEAD": cut.block_n * k * weight.element_size() if requests else 0,
    }  # fmt: skip


def fixed_case(
    label: str, n: int, k: int, dtype: torch.dtype, tiles: PlainTiles | None = None, requests: bool = False
) -> AotCase:
    """AOT case of a weight without a bias, for any number of rows."""
    cut, kind = tiles or fixed_tiles(dtype), f"*{element(dtype)}"
    signature = dict.fromkeys(("x", "weight", "out"), kind) | {"num_rows": "i32"} | dict.fromkeys(_STRIDES, "i32:16")
    weight = torch.empty(n, k, dtype=dtype, device="meta")
    constants = _constants(n, k, cut, False, weight) | {"bias": None}
    absent = dict.fromkeys(("following", "later"))
    constants |= dict.fromkeys(("FOLLOWING", "LATER"), IN_GAP) if requests else {"FOLLOWING": 0, "LATER": 0} | absent
    signature |= dict.fromkeys(absent, kind) if requests else {}
    name = f"fixed_gemm_{label}_{n}x{k}_{element(dtype)}{'_requests' * requests}"
    return AotCase(name, fixed_gemm_kernel, signature, constants, cut.num_warps, cut.num_stages, cut.block_k >= 64)


def aot_cases() -> list[AotCase]:
    """V2-Lite's projections, V3's absorbed products and head."""
    bf16 = torch.bfloat16
    cases = [fixed_case("v2_lite_q", 16 * 192, 2048, bf16), fixed_case("v2_lite_kv_a", 576, 2048, bf16)]
    few = (("v2_lite_q_kv_a", 16 * 192 + 576, 2048), ("v2_lite_o", 2048, 2048), ("values", 128, 512))
    cases += [fixed_case(f"few_rows_{label}", n, k, bf16, FEW_PLAIN) for label, n, k in few]
    cases += [fixed_case("keys", 512, 128, bf16), fixed_case("values", 128, 512, bf16)]
    cases.append(fixed_case("values", 128, 512, bf16, requests=True))
    return [*cases, fixed_case("v3_head", 129280, 7168, bf16), fixed_case("keys", 512, 128, torch.float32)]
