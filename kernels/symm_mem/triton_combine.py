"""Combine in Triton over symmetric memory: a rank sums its experts' results of a token and sends the sum.

    combine_send: the weighted sum of a token's results on this rank, in float32, in choice order, is written once to
                  the token's rank: [R, M, D]
    sum:          waits for all ranks, then the sum over the ranks, in float32, in rank order, alone or fused with the
                  addition of the shared experts' result, the residual stream, RMSNorm and quantization

Legend: T tokens, K experts per token, M max tokens of a rank, El experts of a rank, R ranks, C rows per expert,
D hidden. The sum's row is a tile [BLOCKS, 128].
"""

from __future__ import annotations

from typing import Any

import triton
import triton.language as tl

from moe_engine.kernels.quantization.protocol import BLOCK, UNQUANTIZED, ActivationFormat
from moe_engine.kernels.quantization.triton_rows import norm_blocks, store_norm
from moe_engine.kernels.symm_mem.tiles import SHAPES, TILES
from moe_engine.kernels.symm_mem.triton_flags import all_have_arrived, is_last, part_of, raise_flags, rank_constants
from moe_engine.kernels.triton.aot import AotCase
from moe_engine.kernels.triton.dependent import announce_next, dependent_jit, wait_for_inputs
from moe_engine.kernels.triton.grid_barrier import COOPERATIVE

_BLOCK = tl.constexpr(BLOCK)
_SIZES = ["rank", "max_tokens", "limit_ns", "num_tokens"]
_OFFSETS = ["sizes_at", "weights_at", "returned_at", "flags_at"]


@triton.jit(do_not_specialize=[*_SIZES, *_OFFSETS])
def combine_send_kernel(
    rows, positions, peers, state, failed, rank, max_tokens,
    sizes_at: tl.int64, weights_at: tl.int64, returned_at: tl.int64, flags_at: tl.int64,
    TOP_K: tl.constexpr, WIDTH: tl.constexpr, COLS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
):  # fmt: skip
    """Sums rows [El, C, WIDTH] of each arrived token with a choice here, by positions [R * M, K].

    Raises no flag after a timeout: peers must not take missing rows for sent ones. Any one-dimensional grid.
    """
    programs = tl.num_programs(0)
    complete = tl.load(failed, volatile=True) == 0
    sizes = part_of(peers, rank, sizes_at, tl.int32)
    weights = part_of(peers, rank, weights_at, tl.float32)
    lanes, cols = tl.arange(0, LANES), tl.arange(0, COLS)
    most = tl.max(tl.load(sizes + lanes, mask=lanes < tl.where(complete, RANKS, 0), other=0), axis=0)
    for index in range(tl.program_id(0), RANKS * most, programs):
        source, token = index // most, index % most
        line = tl.cast(source * max_tokens + token, tl.int64)
        real = token < tl.load(sizes + source)
        total = tl.zeros((COLS,), tl.float32)
        here = token - token  # choices on this rank
        for k in tl.static_range(TOP_K):
            row = tl.load(positions + line * TOP_K + k, mask=real, other=-1).to(tl.int64)
            weight = tl.load(weights + line * TOP_K + k, mask=row >= 0, other=0.0)
            width = tl.where(row >= 0, WIDTH, 0)
            total += weight * tl.load(rows + row * WIDTH + cols, mask=cols < width, other=0.0).to(tl.float32)
            here += (row != -1).to(tl.int32)
        returned = part_of(peers, source, returned_at, rows.dtype.element_ty)
        place = returned + (tl.cast(rank, tl.int64) * max_tokens + token) * WIDTH + cols
        tl.store(place, total.to(rows.dtype.element_ty), mask=cols < tl.where(here > 0, WIDTH, 0))
    if is_last(state + 2, programs) & (tl.load(failed, volatile=True) == 0):
        raise_flags(peers, rank, flags_at, tl.load(state), RANKS, LANES)


@dependent_jit(do_not_specialize=[*_SIZES, *_OFFSETS, "scale_stride"])
def sum_kernel(
    targets, other, residual, weight, out, quantized, scales, peers, state, failed, lost,
    num_tokens, scale_stride, rank, max_tokens, eps, limit_ns: tl.int64, returned_at: tl.int64, flags_at: tl.int64,
    WIDTH: tl.constexpr, BLOCKS: tl.constexpr, RANKS: tl.constexpr, LANES: tl.constexpr,
    PAIR: tl.constexpr, NORM: tl.constexpr, QUANTIZE: tl.constexpr, KEEP: tl.constexpr, POWER_OF_TWO: tl.constexpr,
):  # fmt: skip
    """out [T, WIDTH] = the sum of returned [R, M, WIDTH] over the token's ranks, targets [T, R]. The sum is 0 after a
    timeout.

    PAIR: plus other [T, WIDTH]. NORM: the result is added to residual [T, WIDTH]; KEEP: out = the norm of that;
    QUANTIZE: the norm as e4m3 in `quantized`, with scales. Each sum is rounded, as by separate launches.
    Cooperative, any one-dimensional grid: a rank without tokens waits too, since its next launches require that all
    other ranks have reached this point.
    """
    wait_for_inputs(announce=False)
    complete = all_have_arrived(
        part_of(peers, rank, flags_at, tl.int64), state, state + 4, failed, lost, limit_ns, RANKS, LANES
    )
    announce_next()
    kind = (residual if NORM else out).dtype.element_ty
    returned = part_of(peers, rank, returned_at, kind)
    cols = tl.arange(0, BLOCKS)[:, None] * _BLOCK + tl.arange(0, _BLOCK)[None, :]
    inside = cols < WIDTH
    for token in range(tl.program_id(0), num_tokens, tl.num_programs(0)):
        total = tl.zeros((BLOCKS, _BLOCK), tl.float32)
        for source in tl.static_range(RANKS):
            sent = tl.load(targets + token * RANKS + source) * complete.to(tl.int32)
            row = returned + (tl.cast(source * max_tokens + token, tl.int64)) * WIDTH
            total += tl.load(row + cols, mask=cols < sent * WIDTH, other=0.0).to(tl.float32)
        value = total.to(kind)
        line = tl.cast(token, tl.int64) * WIDTH
        if PAIR:
            added = tl.load(other + line + cols, mask=inside, other=0.0).to(tl.float32)
            value = (value.to(tl.float32) + added).to(kind)
        if NORM:
            stream = residual + line + cols
            wide = value.to(tl.float32) + tl.load(stream, mask=inside, other=0.0).to(tl.float32)
            value = wide.to(kind)
            tl.store(stream, value, mask=inside)
            store_norm(
                value.to(tl.float32), weight, out, quantized, scales, scale_stride, eps, tl.cast(token, tl.int64),
                WIDTH, BLOCKS, KEEP, QUANTIZE, POWER_OF_TWO, kind,
            )  # fmt: skip
        else:
            tl.store(out + line + cols, value, mask=inside)


def combine_send_constants(top_k: int, hidden: int, num_ranks: int) -> dict[str, Any]:
    return {"TOP_K": top_k, "WIDTH": hidden, "COLS": triton.next_power_of_2(hidden), **rank_constants(num_ranks)}


def sum_constants(
    hidden: int, num_ranks: int, pair: bool = False, format: ActivationFormat | None = None
) -> dict[str, Any]:
    """pair: of two addends. format: of the norm; None: the sum alone."""
    form = format or UNQUANTIZED
    return {
        "WIDTH": hidden, "BLOCKS": norm_blocks(hidden), **rank_constants(num_ranks),
        "PAIR": pair, "NORM": format is not None, "QUANTIZE": form.rows, "KEEP": form.unquantized,
        "POWER_OF_TWO": form.power_of_two,
    }  # fmt: skip


_FORMS: tuple[tuple[str, bool, ActivationFormat | None, tuple[str, ...]], ...] = (
    ("sum", False, None, ("other", "residual", "weight", "quantized", "scales")),
    ("sum_norm", False, UNQUANTIZED, ("other", "quantized", "scales")),
    ("sum_pair_norm", True, UNQUANTIZED, ("quantized", "scales")),
    ("sum_quantize", False, ActivationFormat.fp8(False), ("other", "out")),
    ("sum_pair_quantize", True, ActivationFormat.fp8(False), ("out",)),
    ("sum_pair_quantize_keep", True, ActivationFormat(True, True), ()),
)
"""Name, pair and format of each form of the sum that layers ask for, and its absent arguments."""


def aot_cases() -> list[AotCase]:
    """Cases of the shapes in `tiles.SHAPES`; combine is bf16 for any dispatch dtype."""
    own = {"peers": "*i64", "state": "*i64", "failed": "*i64", "lost": "*i32", "limit_ns": "i64", "eps": "fp32"}
    arguments = dict.fromkeys([*_SIZES, "scale_stride"], "i32") | dict.fromkeys(_OFFSETS, "i64") | own
    arguments |= dict.fromkeys(("rows", "other", "residual", "out"), "*bf16") | {"weight": "*fp32"}
    arguments |= {"positions": "*i32", "targets": "*i32", "quantized": "*fp8e4nv", "scales": "*fp32"}
    found = []
    for shape in (shape for shape in SHAPES if not shape.fp8):
        size = shape.hidden, shape.num_ranks
        fixed: dict[str, Any] = combine_send_constants(shape.top_k, *size)
        kernels: list[tuple[Any, ...]] = [(combine_send_kernel, "combine_send", fixed, (), {})]
        for form, pair, format, absent in _FORMS:
            kernels.append((sum_kernel, form, sum_constants(*size, pair, format), absent, COOPERATIVE))
        for kernel, name, fixed, absent, options in kernels:
            constants = fixed | dict.fromkeys(absent)
            names = [argument for argument in kernel.arg_names if argument not in constants]
            signature = {argument: arguments[argument] for argument in names}
            case = f"peer_{name}_{shape.name}"
            found.append(AotCase(case, kernel, signature, constants, TILES.row_warps, 3, False, options))
    return found
