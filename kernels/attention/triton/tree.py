"""Attention among the query tokens of a draft tree, merged with the attention over the context before them.

One program per request, block of rows and KV head. Rows are (query token, head of the group) pairs. A tree has at most
64 tokens, so all its keys are one tile; channels are read in parts.

Legend: T query tokens, R requests, H heads, G KV heads, W key width, V value width; M, N rows and keys of a tile.
"""

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor
from triton import next_power_of_2

from moe_engine.kernels.attention.triton.tiles import LOG2_E, columns
from moe_engine.kernels.queries import PagedQueries
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.launch import element

_PART = 64
"""Channels of a part."""
_STRIDES = [f"{x}_{y}" for x in ("q", "key", "value", "out") for y in ("stride", "head_stride")]


@dependent_jit(
    do_not_specialize=["lse_stride", "lse_head_stride"],
    do_not_specialize_on_alignment=["rows", "starts", "lens", "visible", "lse"],
)
def tree_kernel(
    q, keys, values, out, lse, rows, starts, lens, table, visible,
    q_stride, q_head_stride, key_stride, key_head_stride, value_stride, value_head_stride, out_stride, out_head_stride,
    lse_stride, lse_head_stride, table_stride, scale, lse_scale,
    PER_GROUP: tl.constexpr, WIDTH: tl.constexpr, VALUE: tl.constexpr, PART: tl.constexpr, BLOCK_M: tl.constexpr,
    BLOCK_N: tl.constexpr, PRECISION: tl.constexpr,
):  # fmt: skip
    """q [T, H, W], keys [slots, G, W], values [slots, G, V]; out [T, H, V], in place, and lse [T, H] of the context.

    `scale` is the score scale times log2(e), `lse_scale` converts `lse` to base 2. Without context before the query
    tokens `out` and `lse` are not used.
    """
    wait_for_inputs()
    request, group = tl.program_id(0), tl.program_id(2)
    start = tl.load(starts + request)
    count = tl.load(starts + request + 1) - start
    first_row = tl.program_id(1) * BLOCK_M
    if first_row < count * PER_GROUP:
        dtype: tl.constexpr = out.dtype.element_ty  # queries and keys may be unscaled e4m3
        before = tl.load(lens + request) - count
        inner = first_row + tl.arange(0, BLOCK_M)
        live = (inner < count * PER_GROUP)[:, None]
        inner = tl.minimum(inner, count * PER_GROUP - 1)
        token = (start + inner // PER_GROUP).to(tl.int64)
        head = group * PER_GROUP + inner % PER_GROUP
        inside = tl.arange(0, BLOCK_N)
        table_row = table + tl.load(rows + request).to(tl.int64) * table_stride + before
        slot = tl.load(table_row + tl.minimum(inside, count - 1)).to(tl.int64)

        scores = tl.zeros([BLOCK_M, BLOCK_N], tl.float32)
        q_rows, key_rows = token * q_stride + head * q_head_stride, slot * key_stride
        own_keys, own_values = keys + group * key_head_stride, values + group * value_head_stride
        for first in range(0, WIDTH, PART):
            query = columns(q, q_rows, first, WIDTH, PART, WIDTH % PART != 0).to(dtype)
            key = columns(own_keys, key_rows, first, WIDTH, PART, WIDTH % PART != 0).to(dtype)
            scores = tl.dot(query, tl.trans(key), scores, input_precision=PRECISION)
        word = tl.load(visible + token)
        seen = ((word[:, None] >> inside.to(tl.int64)[None, :]) & 1) != 0
        scores = tl.where(seen & (inside < count)[None, :], scores * scale, float("-inf"))

        own = tl.load(lse + token * lse_stride + head * lse_head_stride) * lse_scale
        own = tl.where(before > 0, own, float("-inf"))
        best = tl.maximum(tl.max(scores, 1), own)
        weights, share = tl.exp2(scores - best[:, None]), tl.exp2(own - best)
        norm = 1.0 / (tl.sum(weights, 1) + share)
        weights, share = (weights * norm[:, None]).to(dtype), share * norm
        value_rows, out_rows = slot * value_stride, token * out_stride + head * out_head_stride
        for first in range(0, VALUE, PART):
            value = columns(own_values, value_rows, first, VALUE, PART, VALUE % PART != 0).to(dtype)
            mixed = tl.dot(weights, value, input_precision=PRECISION)
            column = first + tl.arange(0, PART)
            place = out + out_rows[:, None] + column[None, :]
            whole = live & (column < VALUE)[None, :]
            context = tl.where(before > 0, tl.load(place, whole, 0.0).to(tl.float32), 0.0)
            tl.store(place, (context * share[:, None] + mixed).to(out.dtype.element_ty), whole)


def add_tree(
    out: Tensor, lse: Tensor, q: Tensor, keys: Tensor, values: Tensor, queries: PagedQueries, scale: float,
    *, base_2: bool = False,
) -> None:  # fmt: skip
    """Merges the attention among the query tokens, by `queries.visible`, into `out`, in place. No host synchronization.

    Args:
        out: [T, H, V], attention over the context before the query tokens; the last dimension is contiguous.
        lse: [T, H] float32, its log-sum-exp; natural, or with `base_2` to base 2.
        q: [T, H, W]. keys, values: [slots, G, W] and [slots, G, V]; their last dimension is contiguous.
    """
    num_tokens, heads, width = q.shape
    if not num_tokens:
        return
    per_group, most = heads // keys.shape[1], max(queries.query_lens)
    constants = _constants(per_group, width, values.shape[2], most, out.dtype)
    grid = (queries.num_requests, triton.cdiv(most * per_group, constants["BLOCK_M"]), keys.shape[1])
    q = q if q.stride(2) == 1 else q.contiguous()
    tree_kernel[grid](
        q, keys, values, out, lse, queries.rows, queries.query_starts, queries.context_lens_device, queries.slot_table,
        queries.visible, q.stride(0), q.stride(1), keys.stride(0), keys.stride(1), values.stride(0), values.stride(1),
        out.stride(0), out.stride(1), lse.stride(0), lse.stride(1), queries.slot_table.stride(0), scale * LOG2_E,
        1.0 if base_2 else LOG2_E, **constants, num_warps=4, num_stages=3,
    )  # fmt: skip


def _constants(per_group: int, width: int, value: int, most: int, dtype: torch.dtype) -> dict[str, int | str]:
    """For requests of at most `most` query tokens."""
    return {
        "PER_GROUP": per_group, "WIDTH": width, "VALUE": value, "PART": _PART,
        "BLOCK_M": 16 if most * per_group <= 16 or dtype == torch.float32 else 64,
        "BLOCK_N": max(16, next_power_of_2(most)), "PRECISION": "tf32x3" if dtype == torch.float32 else "ieee",
    }  # fmt: skip


def aot_cases() -> list[AotCase]:
    """DeepSeek V3 (128 heads, and 16 of 8 ranks), and GQA with 8 and 4 heads a group."""
    cases = []
    for heads, width, value, tokens in (
        (128, 576, 512, 8), (16, 576, 512, 8), (16, 576, 512, 64), (8, 128, 128, 8), (4, 128, 128, 4),
    ):  # fmt: skip
        kind = f"*{element(torch.bfloat16)}"
        signature = {
            "q": kind, "keys": kind, "values": kind, "out": kind, "lse": "*fp32:1", "rows": "*i32:1",
            "starts": "*i32:1", "lens": "*i32:1", "table": "*i32", "visible": "*i64:1",
            **dict.fromkeys(_STRIDES, "i32:16"),
            "lse_stride": "i32", "lse_head_stride": "i32", "table_stride": "i32:16", "scale": "fp32",
            "lse_scale": "fp32",
        }  # fmt: skip
        constants = _constants(heads, width, value, tokens, torch.bfloat16)
        name = f"attention inside trees, {heads} heads of {width}, {tokens} tokens"
        cases.append(AotCase(name, tree_kernel, signature, constants, 4, 3, True))
    return cases
