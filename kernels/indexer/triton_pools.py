"""Pools of adjacent tokens in Triton: keys and gates of tokens with the keys of the pools that they complete in one
launch, and the slots of selected pools in another.

Legend: as in `pools`.
"""

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.indexer.key_norm import KeyNorm
from moe_engine.kernels.indexer.pools import PooledTokens, PoolKernels, PoolTurns
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import UNALIGNED, stride_of, warps_for, with_contiguous_rows

_BLOCK = 1024
"""Most slots of a program."""
_TOKENS = 256
"""Tokens of a program that counts."""


@triton.jit
def _normed(x, inside, weight, bias, eps, WIDTH: tl.constexpr):
    """LayerNorm of x [P, I], in x's dtype; `inside` [1, I]: which channels there are."""
    wide = x.to(tl.float32)
    centred = tl.where(inside, wide - (tl.sum(wide, 1) / WIDTH)[:, None], 0.0)
    scale = tl.rsqrt(tl.sum(centred * centred, 1) / WIDTH + eps)
    return (centred * scale[:, None] * weight[None, :] + bias[None, :]).to(x.dtype)


@dependent_jit(do_not_specialize_on_alignment=[*UNALIGNED])
def pool_keys_kernel(
    keys, gates, norm_weight, norm_bias, bias, positions, slots, key_cache, gate_cache, eps, key_stride, gate_stride,
    key_cache_stride, gate_cache_stride,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr,
):  # fmt: skip
    """See `WritePools`. A token that completes a pool reads the pool's tokens of this step from its inputs, and others
    from the cache. Grid (T)."""
    wait_for_inputs()
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    slot, position = tl.load(slots + token).to(tl.int64), tl.load(positions + token)
    known = channel < WIDTH
    inside = known[None, :]
    stored: tl.constexpr = key_cache.dtype.element_ty
    weight, shift = tl.load(norm_weight + channel, known, 0.0), tl.load(norm_bias + channel, known, 0.0)
    gate = tl.load(gates + token * gate_stride + channel, known, 0.0).to(gate_cache.dtype.element_ty)
    tl.store(gate_cache + slot * gate_cache_stride + channel, gate, known)
    if (position + 1) % SIZE == 0:
        place = tl.arange(0, PLACES)
        back = SIZE - 1 - place
        row, member = token - back, place < SIZE
        # slots of a pool are adjacent: the row is of this pool if its slot is
        of_step = member & (row >= 0) & (tl.load(slots + row, member & (row >= 0), -1) == slot - back)
        before = (member & (of_step == 0))[:, None] & inside
        here = of_step[:, None] & inside
        own = tl.load(keys + row[:, None] * key_stride + channel[None, :], here, 0.0)
        own = _normed(own, inside, weight, shift, eps, WIDTH).to(stored)
        read = tl.load(key_cache + (slot - back)[:, None] * key_cache_stride + channel[None, :], before, 0.0)
        every = tl.where(here, own, read).to(tl.float32)
        new = tl.load(gates + row[:, None] * gate_stride + channel[None, :], here, 0.0).to(gate.dtype)
        old = tl.load(gate_cache + (slot - back)[:, None] * gate_cache_stride + channel[None, :], before, 0.0)
        logits = tl.where(here, new, old).to(tl.float32)
        logits += tl.load(bias + place[:, None] * WIDTH + channel[None, :], member[:, None] & inside, 0.0)
        logits = tl.where(member[:, None], logits, float("-inf"))
        powers = tl.exp(logits - tl.max(logits, 0)[None, :])
        shares = (powers / tl.sum(powers, 0)[None, :]).to(stored).to(tl.float32)
        pooled = tl.sum(shares * every, 0)
        tl.store(key_cache + slot * key_cache_stride + channel, pooled.to(stored), known)
    else:
        key = tl.load(keys + token * key_stride + channel, known, 0.0)[None, :]
        key = _normed(key, inside, weight, shift, eps, WIDTH).to(stored)
        tl.store(key_cache + slot * key_cache_stride + channel[None, :], key, inside)


@dependent_jit(do_not_specialize_on_alignment=[*UNALIGNED, "places", "rows"])
def mean_keys_kernel(
    keys, weight, places, rows, table, slots, cache, eps, key_stride, cache_stride,
    WIDTH: tl.constexpr, CHANNELS: tl.constexpr, SIZE: tl.constexpr, PLACES: tl.constexpr, ROTARY: tl.constexpr,
    INTERLEAVED: tl.constexpr,
):  # fmt: skip
    """See `WriteMeans`. As `pool_keys_kernel`; the partner of each channel in the rotation is computed with it.
    Grid (T)."""
    wait_for_inputs()
    token, channel = tl.program_id(0).to(tl.int64), tl.arange(0, CHANNELS)
    slot, known = tl.load(slots + token).to(tl.int64), channel < WIDTH
    stored: tl.constexpr = cache.dtype.element_ty
    if (tl.load(places + token) + 1) % SIZE == 0:
        half: tl.constexpr = ROTARY // 2
        turned = channel < ROTARY
        if INTERLEAVED:
            partner, pair, first = channel ^ 1, channel // 2, channel % 2 == 0
        else:
            first = channel < half
            partner, pair = tl.where(first, channel + half, channel - half), channel % half
        partner, pair = tl.where(turned, partner, channel), tl.where(turned, pair, 0)
        own = _mean(keys, slots, cache, token, slot, channel, known, key_stride, cache_stride, SIZE, PLACES)
        other = _mean(keys, slots, cache, token, slot, partner, known, key_stride, cache_stride, SIZE, PLACES)
        scale = tl.rsqrt(tl.sum(own * own, 0) / WIDTH + eps)
        own = _weighed(own * scale, weight, channel, known, stored)
        other = _weighed(other * scale, weight, partner, known, stored)
        line = table + tl.load(rows + token) * ROTARY + pair
        cos, sin = tl.load(line, turned, 1.0), tl.load(line + half, turned, 0.0)
        found = own * cos + tl.where(first, -other, other) * sin
        tl.store(cache + slot * cache_stride + channel, found.to(stored), known)
    else:
        key = tl.load(keys + token * key_stride + channel, known, 0.0)
        tl.store(cache + slot * cache_stride + channel, key.to(stored), known)


@triton.jit
def _mean(
    keys, slots, cache, token, slot, channel, known, key_stride, cache_stride, SIZE: tl.constexpr, PLACES: tl.constexpr
):  # fmt: skip
    """The mean of channels [I] of the pool that a token completes, rounded to the cache's dtype, in float32."""
    stored: tl.constexpr = cache.dtype.element_ty
    place = tl.arange(0, PLACES)
    back = SIZE - 1 - place
    row, member = token - back, place < SIZE
    of_step = member & (row >= 0) & (tl.load(slots + row, member & (row >= 0), -1) == slot - back)
    here, before = of_step[:, None] & known[None, :], (member & (of_step == 0))[:, None] & known[None, :]
    own = tl.load(keys + row[:, None] * key_stride + channel[None, :], here, 0.0).to(stored)
    read = tl.load(cache + (slot - back)[:, None] * cache_stride + channel[None, :], before, 0.0)
    return (tl.sum(tl.where(here, own, read).to(tl.float32), 0) / SIZE).to(stored).to(tl.float32)


@triton.jit
def _weighed(x, weight, channel, known, dtype: tl.constexpr):
    """x, rounded, times the weight of its channel, rounded, in float32."""
    weights = tl.load(weight + channel, known, 0.0)
    return (x.to(dtype).to(tl.float32) * weights.to(tl.float32)).to(dtype).to(tl.float32)


def write_means(keys: Tensor, weight: Tensor, eps: float, turns: PoolTurns, slots: Tensor, cache: Tensor) -> None:
    """`WriteMeans` in one launch."""
    if not len(keys):
        return
    keys, (places, rows, table, size) = with_contiguous_rows(keys), turns
    mean_keys_kernel[(len(keys),)](
        keys, weight, places, rows, table.cos_sin, slots, cache, eps, stride_of(keys, 0), cache.stride(0),
        **_constants(keys.shape[1], size), ROTARY=table.width, INTERLEAVED=table.interleaved, num_warps=4,
    )  # fmt: skip


def write(
    keys: Tensor, norm: KeyNorm, gates: Tensor, bias: Tensor, positions: Tensor, slots: Tensor,
    cache: tuple[Tensor, Tensor],
) -> None:  # fmt: skip
    """`WritePools` in one launch."""
    if not len(keys):
        return
    keys, gates, (stored, weights) = with_contiguous_rows(keys), with_contiguous_rows(gates), cache
    pool_keys_kernel[(len(keys),)](
        keys, gates, norm.weight, norm.bias, bias, positions, slots, stored, weights, norm.eps, stride_of(keys, 0),
        stride_of(gates, 0), stored.stride(0), weights.stride(0), **_constants(*reversed(bias.shape)), num_warps=4,
    )  # fmt: skip


def _constants(width: int, size: int) -> dict[str, object]:
    return {"WIDTH": width, "CHANNELS": next_power_of_2(width), "SIZE": size, "PLACES": next_power_of_2(size)}


@dependent_jit(do_not_specialize=["tokens"], do_not_specialize_on_alignment=[*UNALIGNED, "pools", "counts"])
def count_pools_kernel(positions, pools, counts, tokens, SIZE: tl.constexpr, MOST: tl.constexpr, TOKENS: tl.constexpr):
    """See `CountPools`. Grid (T / TOKENS)."""
    wait_for_inputs()
    token = tl.program_id(0) * TOKENS + tl.arange(0, TOKENS)
    live = token < tokens
    seen = (tl.load(positions + token, live, 0) + 1).to(tl.int32)
    whole = seen // SIZE
    tl.store(pools + token, tl.maximum(whole, 1), live)
    tl.store(counts + token, tl.minimum(whole, MOST) * SIZE + seen % SIZE, live)


def count(tokens: PooledTokens, pools: Tensor, counts: Tensor) -> None:
    """`CountPools` in one launch."""
    if len(pools):
        count_pools_kernel[(triton.cdiv(len(pools), _TOKENS),)](
            tokens.positions, pools, counts, len(pools), *tokens.rule, _TOKENS, num_warps=4
        )


@dependent_jit(do_not_specialize=["width"], do_not_specialize_on_alignment=[*UNALIGNED, "rows"])
def place_pools_kernel(
    chosen, positions, rows, table, out, chosen_stride, table_stride, out_stride, width,
    SIZE: tl.constexpr, MOST: tl.constexpr, BLOCK: tl.constexpr,
):  # fmt: skip
    """See `PlacePools`; `width` is W. Grid (T, blocks of W)."""
    wait_for_inputs()
    token = tl.program_id(0)
    column = tl.program_id(1) * BLOCK + tl.arange(0, BLOCK)
    seen = (tl.load(positions + token) + 1).to(tl.int32)
    whole = seen // SIZE
    pooled = tl.minimum(whole, MOST) * SIZE
    behind = column < pooled + seen % SIZE
    if chosen is not None:
        behind &= column >= pooled
    line = table + tl.load(rows + token).to(tl.int64) * table_stride
    found = tl.load(line + column + whole * SIZE - pooled, behind, -1)
    if chosen is not None:
        in_pool = column < pooled
        number = tl.load(chosen + token.to(tl.int64) * chosen_stride + column // SIZE, in_pool, 0)
        found = tl.where(in_pool, number * SIZE + column % SIZE, found)
    tl.store(out + token.to(tl.int64) * out_stride + column, found, column < width)


def place(chosen: Tensor | None, tokens: PooledTokens, out: Tensor) -> None:
    """`PlacePools` in one launch."""
    count, width = out.shape
    if not count or not width:
        return
    block = min(_BLOCK, next_power_of_2(width))
    place_pools_kernel[(count, triton.cdiv(width, block))](
        chosen, tokens.positions, tokens.rows, tokens.table, out, 0 if chosen is None else chosen.stride(0),
        tokens.table.stride(0), out.stride(0), width, *tokens.rule, block, num_warps=warps_for(block),
    )  # fmt: skip


TRITON = PoolKernels(write, count, place, write_means)


def aot_cases() -> list[AotCase]:
    """GLM-5.3-Flash: 512 of the pools of 4 tokens."""
    cases = []
    for kind in ("bf16", "fp32"):
        signature = dict.fromkeys(("keys", "gates", "key_cache", "gate_cache"), f"*{kind}")
        signature |= dict.fromkeys(("norm_weight", "norm_bias", "bias"), "*fp32")
        signature |= {"positions": "*i64:1", "slots": "*i64:1", "eps": "fp32"}
        strides = ("key_stride", "gate_stride", "key_cache_stride", "gate_cache_stride")
        signature |= dict.fromkeys(strides, "i32:16")
        cases.append(AotCase(f"keys of pools, {kind}", pool_keys_kernel, signature, _constants(128, 4), 4, 3, False))
        signature = {"keys": f"*{kind}", "cache": f"*{kind}", "weight": "*fp32", "table": "*fp32", "eps": "fp32"}
        signature |= dict.fromkeys(("places", "rows", "slots"), "*i64:1")
        signature |= {"key_stride": "i32:16", "cache_stride": "i32:16"}
        constants = _constants(128, 4) | {"ROTARY": 64, "INTERLEAVED": False}
        cases.append(AotCase(f"means of pools, {kind}", mean_keys_kernel, signature, constants, 4, 3, False))
    rule: dict[str, object] = {"SIZE": 4, "MOST": 512}
    signature = {"positions": "*i64:1", "pools": "*i32:1", "counts": "*i32:1", "tokens": "i32"}
    constants = rule | {"TOKENS": _TOKENS}
    cases.append(AotCase("counts of pools", count_pools_kernel, signature, constants, 4, 3, False))
    for label, selects in (("selected pools", True), ("all pools", False)):
        signature = {
            "positions": "*i64:1", "rows": "*i32:1", "table": "*i32", "out": "*i32", "chosen_stride": "i32:16",
            "table_stride": "i32:16", "out_stride": "i32", "width": "i32",
        }  # fmt: skip
        constants = rule | {"BLOCK": _BLOCK}
        if selects:
            signature["chosen"] = "*i32"
        else:
            constants["chosen"] = None
        name, warps = f"slots of {label}", warps_for(_BLOCK)
        cases.append(AotCase(name, place_pools_kernel, signature, constants, warps, 3, False))
    return cases
